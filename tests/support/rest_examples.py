"""Writes the examples of the OpenAPI document: real answers of the REST application over the dispatcher in memory.

``python -m tests.support.rest_examples`` prints them, ``make docs`` stores them. Each path has one answer or more, by
the situation that it shows; clients find them in the OpenAPI document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.configuration.configuration import ChangeNote, OwnConfiguration
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster import gateway_values as g
from ckpt_runtime.jobmaster.event_log import JobAnnouncer
from ckpt_runtime.rest.openapi import EVENT_STREAM
from ckpt_runtime.scheduler.job_effects import StatusChanged
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.savepoint_entry import Mark, SavepointEntry
from tests.unit.runtime.rest.conftest import send_to
from tests.unit.runtime.rest.fake_gateway import START_MS, VERTICES, FakeGateway, Operation

RUNNING = "fa461ac280c9aa36bde4a060aa97618c"
NEW = "3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c3c"
FINISHED = "0d9e2c5c8f0f1b2a0d9e2c5c8f0f1b2a"
FAILED = "7e1d2c3b4a5968778695a4b3c2d1e0f9"
DONE, PENDING, BROKEN = "a" * 32, "b" * 32, "c" * 32
NOW_MS = START_MS + 60_000
PIPELINE = "5bfa03f3a0324da19bf4d4cb96cbace4_p"
SNAPSHOT = "file:/data/savepoints/savepoint-fa461a-5dcf0ae7b2f1"
DRILLED = {"savepoint-path": SNAPSHOT, "kind": "DRILL", "passed": True}
VERIFIED = {"savepoint-path": f"{SNAPSHOT}-old", "kind": "VERIFICATION", "passed": False, "detail": "a file is missing"}
KNOWN = {"by": "airflow: drills/restore", "detail": "2 checkpoints after 9.8 s", "duration": 9_800}
REFUSED = f"{SNAPSHOT}-refused"
CAUSE = FailureCause("ckpt_runtime.storage.StorageError", "no space left", "StorageError: no space left")


@dataclass(frozen=True)
class Call:
    """One request. ``template`` is the path as the document spells it; ``values`` fill it in, ``query`` follows."""

    method: str
    template: str
    situation: str = "an answer"
    values: Mapping[str, str] = field(default_factory=dict)
    query: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        given = {
            "applicationid": RUNNING,
            "jobid": RUNNING,
            "vertexid": VERTICES[1],
            "jarid": PIPELINE,
            "subtaskindex": "0",
            "attempt": "0",
            "taskmanagerid": "0-0",
            "checkpointid": "2",
            "triggerid": DONE,
        }
        return self.template.format(**given | dict(self.values)) + self.query


def dispatcher() -> FakeGateway:
    """Three jobs: one runs and has had checkpoints of all kinds, one has finished, one has failed."""
    fake = FakeGateway()
    fake.pipelines[PIPELINE] = g.StoredPipeline(PIPELINE, "flights.py", fake.now, ("flights:pipeline",))
    for job_id in (FINISHED, FAILED, NEW, RUNNING):
        fake.add_job(job_id, "flights")
    job = fake.jobs[RUNNING]
    job.tracker.report_restored(1, fake.now, True, "file:/data/savepoints/savepoint-0d9e2c-1a2b3c4d5e6f")
    fake.complete_checkpoint(job)
    fake.complete_checkpoint(job)
    fake.complete_checkpoint(job, CheckpointType.SAVEPOINT, "NATIVE")
    job.tracker.report_failed(fake.start_checkpoint(job), fake.now + 5, "Checkpoint expired before completing.")
    fake.start_checkpoint(job)
    job.exceptions = [g.ExceptionEntry(CAUSE, fake.now, "count (1/2)", "localhost:37401", "agent-0")]
    fake.jobs[FAILED].exceptions = [g.ExceptionEntry(CAUSE, fake.now)]
    job.request = g.RunRequest(PIPELINE, configuration={"execution.checkpointing.interval": "2s"})
    fake.allow_list = ("*",)
    fake.jobs[NEW].overrides = CheckpointOverrides(interval_ms=1_000)
    note = ChangeNote(2, fake.now, "127.0.0.1 (ckpt-client)", ("execution.checkpointing.interval",))
    fake.jobs[FINISHED].changed = OwnConfiguration().changed(job.own.given, note)
    fake.move(FINISHED, JobStatus.FINISHED)
    fake.move(FAILED, JobStatus.FAILED)
    add_operations(fake)
    announcer = JobAnnouncer(RUNNING, fake.events.publish)
    with patch("ckpt_runtime.jobmaster.event_log.wall_clock_ms", lambda: NOW_MS):
        announcer.announce(StatusChanged(JobStatus.RUNNING, NOW_MS))
        announcer.checkpoint(job.tracker.snapshot().history[-1])
    fake.catalogue = catalogue(fake.now)
    return fake


def catalogue(now: int) -> list[CataloguedSavepoint]:
    """One of each kind: proven, failed, taken before there was a catalogue, unreadable."""
    entry = SavepointEntry(
        job_id=RUNNING,
        savepoint_id=3,
        triggered_at_ms=now - 800,
        completed_at_ms=now,
        format="NATIVE",
        state_backend="hashmap",
        bytes=48_213,
        files=2,
        written_by="0.1.0",
        job_name="flights",
        program=PIPELINE,
        configuration_version=1,
        cluster="file:///data/ha/cluster",
        taken_by="airflow: nightly/savepoint",
        verifications=(Mark(now + 5_000, True, "ana", "complete and intact", 912),),
        drills=(Mark(now + 60_000, True, "airflow: drills/restore", "RUNNING after 4.1 s", 9_800),),
    )
    old = SavepointEntry(RUNNING, 2, now - 90_800, now - 90_000, "CANONICAL", "any", 47_100, 2)
    failed = "the file is missing"
    return [
        CataloguedSavepoint(SNAPSHOT, entry),
        CataloguedSavepoint(
            f"{SNAPSHOT}-failed",
            replace(entry, verifications=(Mark(now, False, None, failed),), drills=()),
            f"its newest verification failed: {failed}",
        ),
        CataloguedSavepoint(f"{SNAPSHOT}-old", old),
        CataloguedSavepoint(f"{SNAPSHOT}-damaged", None, "_metadata is damaged or foreign: it is too short"),
    ]


def add_operations(fake: FakeGateway) -> None:
    fake.polls_until_done = 10**9
    outcomes = {
        g.OperationKind.CHECKPOINT: g.OperationStatus(True, checkpoint_id=2),
        g.OperationKind.SAVEPOINT: g.OperationStatus(
            True, location="file:/data/savepoints/savepoint-fa461a-5dcf0ae7b2f1"
        ),
        g.OperationKind.SAVEPOINT_DISPOSAL: g.OperationStatus(True),
    }
    for number, (kind, done) in enumerate(outcomes.items()):
        job_id = None if kind is g.OperationKind.SAVEPOINT_DISPOSAL else RUNNING
        broken = g.OperationStatus(True, failure=CAUSE)
        for trigger, status in ((DONE, done), (PENDING, g.OperationStatus(False)), (BROKEN, broken)):
            key = trigger_id(trigger, number)
            fake.operations[key] = Operation(kind, job_id, 10**9, None, status)


def trigger_id(trigger: str, kind: int) -> str:
    """One id for each kind of operation and each outcome."""
    return trigger[:-1] + str(kind)


def polls(template: str, kind: int) -> list[Call]:
    situations = {"completed": DONE, "in progress": PENDING, "failed": BROKEN}
    return [
        Call("GET", template, situation, {"triggerid": trigger_id(trigger, kind)})
        for situation, trigger in situations.items()
    ]


def bounds(parallelism: int) -> dict[str, Any]:
    """The same for every vertex."""
    return {vertex: {"parallelism": {"lowerBound": parallelism, "upperBound": parallelism}} for vertex in VERTICES}


INTERVAL, BUFFER = "execution.checkpointing.interval", "execution.buffer-timeout.interval"


def config_changes(method: str, situation: str, job_id: str, options: dict[str, str | None]) -> list[Call]:
    """One change of a job's configuration, and a dry run of it."""
    body = {"configuration": options} | ({"version": 1} if method == "PUT" else {})
    path, given = JOB + "/config", {"json": body}
    return [
        Call(method, path, situation, {"jobid": job_id}, "?changes=true" if method == "PUT" else "", given),
        Call(method, path, f"{situation}, a dry run", {"jobid": job_id}, "?dry-run=true", given),
    ]


JOB, CHECKPOINTS, VERTEX = "/jobs/{jobid}", "/jobs/{jobid}/checkpoints", "/jobs/{jobid}/vertices/{vertexid}"
SUBTASK = VERTEX + "/subtasks/{subtaskindex}"
DETAILS = CHECKPOINTS + "/details/{checkpointid}"
CALLS = [
    Call("GET", "/overview"),
    Call("GET", "/config"),
    Call("GET", "/jobmanager/config"),
    Call("GET", "/applications/overview"),
    Call("GET", "/applications/{applicationid}"),
    Call("GET", "/taskmanagers"),
    Call("GET", "/taskmanagers/{taskmanagerid}"),
    Call("GET", "/taskmanagers/metrics", query="?get=Status.JVM.Memory.Heap.Used&agg=min,max,avg"),
    Call("GET", "/taskmanagers/{taskmanagerid}/metrics", values={"taskmanagerid": "0-1"}),
    Call("GET", "/jobmanager/thread-dump"),
    Call("GET", "/taskmanagers/{taskmanagerid}/thread-dump"),
    Call("GET", "/jobmanager/logs"),
    Call("GET", "/jobmanager/logs/{filename}", values={"filename": "driver.log"}),
    Call("GET", "/jobmanager/log"),
    Call("GET", "/taskmanagers/{taskmanagerid}/logs"),
    Call("GET", "/taskmanagers/{taskmanagerid}/logs/{filename}", values={"filename": "worker.log"}),
    Call("GET", "/taskmanagers/{taskmanagerid}/log"),
    Call("GET", "/jobmanager/metrics", "names"),
    Call("GET", "/jobmanager/metrics", "values", query="?get=taskSlotsTotal,taskSlotsAvailable"),
    Call("DELETE", "/cluster"),
    Call("POST", "/jars/upload", arguments={"files": {"jarfile": ("flights.py", b"x = 1")}}),
    Call("GET", "/jars"),
    Call("PUT", "/jars/{jarid}/holds/{owner}", values={"owner": "upgrade-flights"}),
    Call("DELETE", "/jars/{jarid}/holds/{owner}", values={"owner": "upgrade-flights"}),
    Call("PUT", "/retired-job-ids/{jobid}", values={"jobid": "54c685fb3b425ccf81c55b3e8da1aa68"}),
    Call("GET", "/retired-job-ids"),
    Call("POST", "/jars/{jarid}/plan", "fresh", arguments={"json": {}}),
    Call("POST", "/jars/{jarid}/plan", "a snapshot that fits", arguments={"json": {"savepointPath": SNAPSHOT}}),
    Call("POST", "/jars/{jarid}/plan", "one that is refused", arguments={"json": {"savepointPath": REFUSED}}),
    Call("POST", "/jars/{jarid}/run", arguments={"json": {"jobId": "1" * 32}}),
    Call("POST", "/jars/{jarid}/drill", arguments={"json": {"jobId": "6" * 32, "savepointPath": SNAPSHOT}}),
    Call("DELETE", "/jars/{jarid}"),
    Call("GET", "/jobs"),
    Call("GET", "/jobs/overview"),
    Call("GET", "/events", "from now on"),
    Call("GET", "/events", "what was missed", arguments={"headers": {"Last-Event-ID": "5e551017a2b3c4d5-0"}}),
    Call("GET", "/events", "another session", arguments={"headers": {"Last-Event-ID": "01d5e5510a2b3c4d-7"}}),
    Call("GET", JOB + "/events", "a checkpoint", arguments={"headers": {"Last-Event-ID": "5e551017a2b3c4d5-0"}}),
    Call("GET", "/jobs/metrics", "names"),
    Call("GET", "/jobs/metrics", "values", query="?get=uptime"),
    Call("GET", "/jobs/metrics", "one aggregation", query="?get=uptime&agg=max"),
    Call("GET", "/jobs/metrics", "of one job", query=f"?get=uptime&jobs={RUNNING}"),
    Call("GET", JOB, "running"),
    Call("GET", JOB, "finished", {"jobid": FINISHED}),
    Call("PATCH", JOB, "without retaining", {"jobid": NEW}, "?mode=cancel"),
    Call("PATCH", JOB, "retaining checkpoints", {"jobid": RUNNING}, "?mode=cancel&retain=true"),
    Call("GET", JOB + "/status"),
    Call("GET", JOB + "/health", "running"),
    Call("GET", JOB + "/health", "failed", {"jobid": FAILED}),
    Call("GET", JOB + "/health", "without checkpoints", {"jobid": NEW}),
    Call("GET", JOB + "/plan"),
    Call("GET", JOB + "/config", "submitted with an option"),
    Call("GET", JOB + "/config", "submitted without", {"jobid": NEW}),
    Call("GET", JOB + "/config", "changed while it ran", {"jobid": FINISHED}),
    Call(
        "PUT",
        JOB + "/config",
        "as in FLIP-530",
        {"jobid": RUNNING},
        arguments={"json": {"configuration": {}, "version": 1}},
    ),
    *config_changes("PUT", "nothing has changed", RUNNING, {INTERVAL: "2000 ms"}),
    *config_changes("PUT", "applied at once", RUNNING, {INTERVAL: "5 s"}),
    *config_changes("PUT", "removed", RUNNING, {}),
    *config_changes("PUT", "one under an override, one for a restart", NEW, {INTERVAL: "5 s", BUFFER: "10 ms"}),
    *config_changes("PATCH", "nothing has changed", RUNNING, {INTERVAL: "2000 ms"}),
    *config_changes("PATCH", "applied at once", RUNNING, {INTERVAL: "5 s"}),
    *config_changes("PATCH", "removed", RUNNING, {INTERVAL: None}),
    *config_changes("PATCH", "one under an override, one for a restart", NEW, {INTERVAL: "5 s", BUFFER: "10 ms"}),
    Call(
        "PUT",
        JOB + "/upgrade",
        arguments={"json": {"owner": "upgrade-54c685fb3b425ccf81c55b3e8da1aa68", "duration": 3_600_000}},
    ),
    Call("DELETE", JOB + "/upgrade"),
    Call("GET", JOB + "/resource-requirements"),
    Call("PUT", JOB + "/resource-requirements", arguments={"json": bounds(2)}),
    Call("GET", JOB + "/jobmanager/config"),
    Call("GET", JOB + "/metrics", "names"),
    Call("GET", JOB + "/metrics", "values", query="?get=uptime,numberOfCompletedCheckpoints"),
    Call("GET", JOB + "/accumulators"),
    Call("GET", JOB + "/exceptions", "a failure of a task"),
    Call("GET", JOB + "/exceptions", "a failure of the job", {"jobid": FAILED}),
    Call("GET", JOB + "/exceptions", "none", {"jobid": FINISHED}),
    Call("GET", JOB + "/execution-result", "running"),
    Call("GET", JOB + "/execution-result", "finished", {"jobid": FINISHED}),
    Call("GET", JOB + "/execution-result", "failed", {"jobid": FAILED}),
    Call("GET", VERTEX),
    Call("GET", VERTEX + "/subtasktimes"),
    Call("GET", VERTEX + "/taskmanagers"),
    Call("GET", VERTEX + "/watermarks"),
    Call("GET", VERTEX + "/accumulators"),
    Call("GET", VERTEX + "/backpressure", "measured"),
    Call("GET", VERTEX + "/backpressure", "not measured yet", {"vertexid": VERTICES[2]}),
    Call("GET", VERTEX + "/flamegraph", "all samples"),
    Call("GET", VERTEX + "/flamegraph", "waiting", query="?type=off_cpu"),
    Call("GET", VERTEX + "/flamegraph", "nothing runs", {"jobid": FINISHED}),
    Call("GET", VERTEX + "/metrics", "names"),
    Call("GET", VERTEX + "/metrics", "values", query="?get=0.numRecordsIn"),
    Call("GET", VERTEX + "/subtasks/metrics", "names"),
    Call("GET", VERTEX + "/subtasks/metrics", "values", query="?get=numRecordsIn"),
    Call("GET", VERTEX + "/subtasks/metrics", "one aggregation", query="?get=numRecordsIn&agg=sum"),
    Call("GET", VERTEX + "/subtasks/metrics", "of some subtasks", query="?get=numRecordsIn&subtasks=0"),
    Call("GET", VERTEX + "/subtasks/accumulators"),
    Call("GET", SUBTASK),
    Call("GET", SUBTASK + "/attempts/{attempt}"),
    Call("GET", SUBTASK + "/metrics", "names"),
    Call("GET", SUBTASK + "/metrics", "values", query="?get=numRecordsIn"),
    Call("GET", VERTEX + "/jm-operator-metrics"),
    Call("GET", CHECKPOINTS, "some"),
    Call("GET", CHECKPOINTS, "none", {"jobid": NEW}),
    Call("GET", DETAILS, "completed"),
    Call("GET", DETAILS, "failed", {"checkpointid": "4"}),
    Call("GET", DETAILS, "in progress", {"checkpointid": "5"}),
    Call("GET", DETAILS + "/subtasks/{vertexid}", "completed"),
    Call("GET", DETAILS + "/subtasks/{vertexid}", "in progress", {"checkpointid": "5"}),
    Call("GET", CHECKPOINTS + "/config"),
    Call("GET", CHECKPOINTS + "/configuration"),
    Call("PATCH", CHECKPOINTS + "/configuration", arguments={"json": {"checkpointTimeout": 900_000}}),
    Call("DELETE", CHECKPOINTS + "/configuration"),
    Call("POST", CHECKPOINTS, arguments={"json": {"triggerId": "2" * 32}}),
    *polls(CHECKPOINTS + "/{triggerid}", 0),
    Call("POST", JOB + "/savepoints", arguments={"json": {"target-directory": "/s", "triggerId": "3" * 32}}),
    Call("POST", JOB + "/stop", arguments={"json": {"targetDirectory": "/s", "triggerId": "4" * 32}}),
    *polls(JOB + "/savepoints/{triggerid}", 1),
    Call("POST", "/savepoint-disposal", arguments={"json": {"savepoint-path": "/s/1", "triggerId": "5" * 32}}),
    *polls("/savepoint-disposal/{triggerid}", 2),
    Call("GET", "/savepoints"),
    Call("GET", "/savepoints/known"),
    Call("GET", "/savepoints/latest"),
    Call("GET", "/savepoints/latest", "of a job, by its name", query="?directory=/s&job=flights"),
    Call("POST", "/savepoints/marks", "a drill", arguments={"json": DRILLED}),
    Call("POST", "/savepoints/marks", "a drill, with what is known of it", arguments={"json": DRILLED | KNOWN}),
    Call("POST", "/savepoints/marks", "a verification that failed", arguments={"json": VERIFIED}),
]


def answers() -> dict[str, dict[str, Any]]:
    """``"GET /jobs"`` and so on, to the answers by situation."""
    found: dict[str, dict[str, Any]] = {}
    handlers = "ckpt_runtime.rest.handlers"
    with ExitStack() as clocks:
        for room in ("jobs", "cluster"):
            clocks.enter_context(patch(f"{handlers}.{room}.now_ms", lambda: NOW_MS))
        for call in CALLS:
            response = send_to(dispatcher())(call.method, call.path, **call.arguments)
            if response.status_code not in (200, 202):
                raise AssertionError(f"{call.method} {call.path}: {response.text}")
            is_text = response.headers["content-type"].startswith((EVENT_STREAM, "text/plain"))
            answer = response.text if is_text else response.json()
            found.setdefault(f"{call.method} {call.template}", {})[call.situation] = answer
    return found


def text() -> str:
    """The file's content: one line for each answer."""
    paths = []
    for path, situations in answers().items():
        lines = [f"  {json.dumps(name)}: {json.dumps(answer)}" for name, answer in situations.items()]
        paths.append(f"{json.dumps(path)}: {{\n" + ",\n".join(lines) + "\n}")
    return "{\n" + ",\n".join(paths) + "\n}\n"


if __name__ == "__main__":
    print(text(), end="")
