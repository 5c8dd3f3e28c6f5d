"""Shapes whose numbers need care, the Java stream, and the OpenAPI document."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import fields

import pytest
from msgspec import to_builtins
from prometheus_client.parser import text_string_to_metric_families

from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, SubtaskStats
from ckpt_runtime.jobmaster.flame_graphs import StackSamples
from ckpt_runtime.jobmaster.gateway_values import ExecutionState, SubtaskDetails
from ckpt_runtime.jobmaster.metric_table import text_of
from ckpt_runtime.jobmaster.slots import EndedWorkerLog
from ckpt_runtime.network.control_messages import SampledStack, SubtaskMeasures
from ckpt_runtime.rest import job_answers as answers
from ckpt_runtime.rest import parameters
from ckpt_runtime.rest.exchange import FlinkResponse
from ckpt_runtime.rest.handlers import jobs as handlers
from ckpt_runtime.rest.job_answers import serialized_throwable
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.runtime.rest.conftest import JOB, Send
from tests.unit.runtime.rest.fake_gateway import VERTICES, FakeGateway

QUANTILES = ("min", "max", "avg", "sum", "median", "p25", "p75", "p95")


def test_job_lines_have_all_states_that_flinks_command_line_reads(send: Send) -> None:
    (job,) = send("GET", "/jobs/overview").json()["jobs"]
    assert set(job["tasks"]) == {state.value.lower() for state in ExecutionState} | {"total"}
    assert job["tasks"]["total"] == 6
    assert job["schedulerType"] == "Default"


def test_statistics_without_any_checkpoint(send: Send) -> None:
    document = send("GET", f"/jobs/{JOB}/checkpoints").json()
    assert document["summary"]["state_size"]["p50"] == "NaN"
    assert document["latest"] == {"completed": None, "savepoint": None, "failed": None, "restored": None}
    assert document["history"] == []


def test_metrics_are_what_prometheus_reads(send: Send, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "now_ms", lambda: gateway.now)
    gateway.complete_checkpoint(gateway.jobs[JOB])
    answer = send("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    values = {
        (sample.name, sample.labels.get("verdict")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.get("job_id") in (JOB, None)
    }
    assert values["flink_jobmanager_job_numberOfCompletedCheckpoints", None] == 1
    assert values["flink_jobmanager_taskSlotsTotal", None] == 8
    assert values["ckpt_job_checkpointSuccessRate", None] == 1
    assert values["ckpt_job_backpressure", None] == 0.7
    assert [values["ckpt_job_health", verdict] for verdict in ("HEALTHY", "DEGRADED", "UNHEALTHY")] == [0, 1, 0]
    assert not any("lastCheckpointExternalPath" in name for name, _ in values)
    assert values["flink_taskmanager_job_task_buffers_inPoolUsage", None] == 0.5
    assert values["flink_taskmanager_job_task_operator_numRecordsIn", None] == 7
    assert values["flink_taskmanager_Status_JVM_Memory_Heap_Max", None] == 1000
    assert values["ckpt_metrics_series_left_out", None] == 3


def test_metrics_of_the_selected_task_managers_are_aggregated(send: Send) -> None:
    path = "/taskmanagers/metrics?get=Status.JVM.Memory.Heap.Used&agg=sum&taskmanagers="
    assert send("GET", f"{path}0-1,0-2").json() == [{"id": "Status.JVM.Memory.Heap.Used", "sum": 600}]
    assert send("GET", f"{path}0-0").json() == []
    assert {"id": "Status.JVM.Memory.Heap.Max"} in send("GET", "/taskmanagers/0-1/metrics").json()
    assert send("GET", "/taskmanagers/0-0/metrics").json() == []
    assert send("GET", "/taskmanagers/9-9/metrics").status_code == 404


@pytest.mark.parametrize("end", [JobStatus.FINISHED, JobStatus.CANCELED, JobStatus.FAILED])
def test_the_series_of_a_job_end_with_it_and_its_end_is_counted(
    send: Send, gateway: FakeGateway, end: JobStatus
) -> None:
    gateway.add_job("1" * 32, "ended")
    gateway.move("1" * 32, end)
    samples = [
        sample for family in text_string_to_metric_families(send("GET", "/metrics").text) for sample in family.samples
    ]
    assert {sample.labels["job_id"] for sample in samples if "job_id" in sample.labels} == {JOB}
    [count] = [sample for sample in samples if sample.name == "ckpt_jobs" and sample.labels["state"] == end.value]
    assert count.value == 1


def test_every_measure_of_a_subtask_is_shown(send: Send, gateway: FakeGateway) -> None:
    """The mapping from the engine's one definition to Flink's fields, and the summary beside it."""
    measures = [item.name for item in fields(CheckpointMetrics) if item.name != "unaligned"]
    values = dict(zip(measures, range(101, 200), strict=False))
    job = gateway.jobs[JOB]
    checkpoint_id = gateway.start_checkpoint(job)
    for index in range(2):
        stats = SubtaskStats(index, gateway.now + 7, 900, CheckpointMetrics(**values, unaligned=True))
        job.tracker.report_subtask(checkpoint_id, VERTICES[0], stats)
    vertex = send("GET", f"/jobs/{JOB}/checkpoints/details/{checkpoint_id}/subtasks/{VERTICES[0]}").json()
    shown = {
        "checkpointed_size": values["checkpointed_size"],
        "state_size": 900,
        "end_to_end_duration": 7,
        "checkpoint": {"sync": values["sync_duration"], "async": values["async_duration"]},
        "alignment": {
            "buffered": values["alignment_buffered"],
            "processed": values["processed_data"],
            "persisted": values["persisted_data"],
            "duration": values["alignment_duration"],
        },
        "start_delay": values["start_delay"],
        "unaligned_checkpoint": True,
    }
    assert vertex["subtasks"][1].items() >= shown.items()
    summary = vertex["summary"]
    assert {name: summary[name]["max"] for name in summary if "max" in summary[name]} == {
        name: value for name, value in shown.items() if isinstance(value, int) and value is not True
    }
    assert {name: part["max"] for name, part in summary["alignment"].items()} == shown["alignment"]
    assert {name: part["max"] for name, part in summary["checkpoint_duration"].items()} == shown["checkpoint"]


def test_each_entered_state_lasts_until_the_next_one() -> None:
    times = {ExecutionState.CREATED: 10, ExecutionState.RUNNING: 25, ExecutionState.DEPLOYING: 15}
    subtask = SubtaskDetails(0, 0, ExecutionState.RUNNING, "h:1", "a", 15, -1, times)
    lasted = {"CREATED": 5, "DEPLOYING": 10, "RUNNING": 75}
    assert answers.status_durations(subtask, 100) == {"SCHEDULED": -1, "INITIALIZING": -1, **lasted}


def test_a_vertex_has_the_durations_of_all_states(send: Send) -> None:
    """The dashboard hangs without one."""
    vertex = f"/jobs/{JOB}/vertices/{VERTICES[0]}"
    (agent,) = send("GET", f"{vertex}/taskmanagers").json()["taskmanagers"]
    for aggregated in (send("GET", vertex).json()["aggregated"], agent["aggregated"]):
        assert set(aggregated["status-duration"]) == {state.value for state in ExecutionState}
        assert aggregated["status-duration"]["FAILED"] == dict.fromkeys(QUANTILES, 0)
    assert agent["status-counts"]["RUNNING"] == 2
    assert (agent["taskmanager-id"], agent["endpoint"], agent["status"]) == ("agent-0", "localhost:37401", "RUNNING")


def test_watermarks_and_accumulators_of_a_vertex_are_empty(send: Send) -> None:
    vertex = f"/jobs/{JOB}/vertices/{VERTICES[0]}"
    assert send("GET", f"{vertex}/watermarks").json() == []
    assert send("GET", f"{vertex}/accumulators").json() == {"id": VERTICES[0], "user-accumulators": []}
    for page in ("watermarks", "accumulators", "taskmanagers"):
        assert send("GET", f"/jobs/{JOB}/vertices/{'0' * 32}/{page}").status_code == 404


def test_each_job_is_an_application(send: Send, gateway: FakeGateway) -> None:
    (line,) = send("GET", "/applications/overview").json()["applications"]
    assert (line["id"], line["status"], line["jobs"], line["end-time"]) == (JOB, "RUNNING", {"RUNNING": 1}, -1)
    gateway.move(JOB, JobStatus.RESTARTING)
    (line,) = send("GET", "/applications/overview").json()["applications"]
    assert (line["status"], line["jobs"]) == ("RUNNING", {"RESTARTING": 1})
    gateway.move(JOB, JobStatus.FINISHED)
    shown = send("GET", f"/applications/{JOB}").json()
    assert shown["status"] == "FINISHED"
    assert set(shown["timestamps"]) == {
        "CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED",
    }  # fmt: skip
    assert shown["timestamps"]["FINISHED"] == shown["end-time"] == gateway.now
    assert [job["jid"] for job in shown["jobs"]] == [JOB]
    assert send("GET", f"/applications/{'0' * 32}").status_code == 404


def test_log_of_an_ended_worker_is_listed_and_begins_with_the_cause(send: Send, gateway: FakeGateway) -> None:
    reason = "its process ended with exit code -9"
    gateway.ended_logs = [EndedWorkerLog("0-w3", "0", gateway.now, reason, "the last line\n")]
    own, ended = send("GET", "/jobmanager/logs").json()["logs"]
    assert own["name"] == "driver.log"
    assert ended == {"name": "worker-0-w3.log", "size": len("the last line\n"), "mtime": gateway.now}
    text = send("GET", "/jobmanager/logs/worker-0-w3.log").text
    assert text == f"worker 0-w3 of slot 0: {reason}\n\nthe last line\n"
    assert send("GET", "/jobmanager/logs/worker-0-w4.log").status_code == 404


def test_the_dashboard_gets_no_button_that_would_cancel_by_a_read(send: Send) -> None:
    assert send("GET", "/config").json()["features"]["web-cancel"] is False
    assert send("GET", f"/jobs/{JOB}/yarn-cancel").status_code == 404


def test_metrics_without_all_measurements_are_not_complete() -> None:
    measures = SubtaskMeasures("v", 0, 0, 0, 0, 7, 0, 1.5, 2.5, 3.5)
    partly, wholly = answers.io_metrics([measures, None]), answers.io_metrics([measures, measures])
    assert (partly.write_bytes, partly.write_bytes_complete) == (7, False)
    assert (wholly.write_bytes, wholly.write_bytes_complete) == (14, True)
    assert (wholly.busy_ms, wholly.idle_ms, wholly.backpressured_ms) == (3.0, 4, 6)
    assert answers.io_metrics([]).read_bytes_complete is False


def test_distributions_have_nearest_rank_quantiles() -> None:
    assert to_builtins(answers.distribution([])) == dict.fromkeys(QUANTILES, 0)
    assert to_builtins(answers.distribution([4, 1, 3, 2])) == {
        "min": 1, "max": 4, "avg": 2, "sum": 10, "median": 2, "p25": 1, "p75": 3, "p95": 4,
    }  # fmt: skip


def test_metrics_are_aggregated_over_those_that_have_them() -> None:
    (found,) = parameters.aggregated([{"a": 1}, {"a": 3}, {"b": 9}], ["a", "x", "a"], parameters.AGGREGATIONS)
    assert to_builtins(found) == {"id": "a", "min": 1.0, "max": 3.0, "avg": 2.0, "sum": 4.0, "skew": 50.0}
    assert text_of(3.0) == "3"
    assert text_of(0.5) == "0.5"


def test_the_java_stream_is_the_one_that_java_has_read() -> None:
    stream = b64decode(serialized_throwable("ckpt.X", "bö\0om", "ckpt.X: boom\n"))
    assert stream.startswith(b"\xac\xed\x00\x05sr\x00\x29org.apache.flink.util.SerializedThrowable")
    assert stream.endswith(b"t\x00\x06ckpt.Xt\x00\rckpt.X: boom\np")
    assert b"t\x00\x07b\xc3\xb6\xc0\x80om" in stream
    long = b64decode(serialized_throwable("X", "m", "é" * 200_000))
    assert b"|" + (2 * 65536).to_bytes(8, "big") in long


class TestFlameGraphs:
    STACKS = (
        SampledStack(0, ("run", "poll"), 0, 3),
        SampledStack(0, ("run", "work", "hash"), 4, 1),
        SampledStack(1, ("run", "work"), 2, 0),
    )
    SAMPLES = StackSamples(1_700_000_000_000, STACKS)

    def test_each_function_counts_below_those_that_called_it_the_most_frequent_first(self) -> None:
        assert json.loads(FlinkResponse(answers.flame_graph(self.SAMPLES, "full", None)).body) == {
            "endTimestamp": 1_700_000_000_000,
            "data": {
                "name": "root",
                "value": 10,
                "children": [
                    {
                        "name": "run",
                        "value": 10,
                        "children": [
                            {"name": "work", "value": 7, "children": [{"name": "hash", "value": 5, "children": []}]},
                            {"name": "poll", "value": 3, "children": []},
                        ],
                    }
                ],
            },
        }

    @pytest.mark.parametrize(("kind", "subtask", "value"), [("on_cpu", None, 6), ("off_cpu", None, 4), ("full", 1, 2)])
    def test_a_type_and_a_subtask_choose_what_counts(self, kind: str, subtask: int | None, value: int) -> None:
        data = answers.flame_graph(self.SAMPLES, kind, subtask).data
        assert data is not None
        assert data.value == value

    def test_a_vertex_that_has_ended_has_flinks_mark(self) -> None:
        found = answers.flame_graph(StackSamples(None), "full", None)
        assert to_builtins(found) == {"endTimestamp": -1, "data": None}
