"""A dispatcher in memory for REST, client and CLI tests: real states, real statistics, a clock that tests move.

Operations finish after a number of polls, so that tests see them in progress without waiting.
"""

from __future__ import annotations

import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_runtime.checkpoint.configuration import (
    CheckpointConfiguration,
    CheckpointConfigurationError,
    CheckpointOverrides,
    CheckpointRetention,
)
from ckpt_runtime.checkpoint.properties import CheckpointType, SavepointFormat
from ckpt_runtime.checkpoint.statistics import (
    CheckpointMetrics,
    CheckpointStats,
    CheckpointStatsSnapshot,
    CheckpointStatsTracker,
    SubtaskStats,
)
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration, OwnConfiguration, effective_options
from ckpt_runtime.contract.cluster import DashboardConfig, Features, Hardware, Resource, TaskManager
from ckpt_runtime.contract.configuration import ConfigChange, JobConfig
from ckpt_runtime.contract.jobs import Backpressure, OperatorPreview, RestorePreview, StatePreview
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning, vertex_id_of
from ckpt_runtime.jobmaster import gateway_values as g
from ckpt_runtime.jobmaster.configuration_updates import config_change, differences, judge, wanted_configuration
from ckpt_runtime.jobmaster.ended_job import shown_configuration
from ckpt_runtime.jobmaster.event_log import EventLog
from ckpt_runtime.jobmaster.executions import subtask_pressure, vertex_pressure
from ckpt_runtime.jobmaster.flame_graphs import StackSamples
from ckpt_runtime.jobmaster.gateway_values import (
    ConfigurationRequest,
    EffectiveCheckpointConfig,
    ExecutionState,
    SavepointList,
    VersionConflict,
)
from ckpt_runtime.jobmaster.job_settings import overridden_options
from ckpt_runtime.jobmaster.planning import PlanPreview
from ckpt_runtime.jobmaster.slots import EndedWorkerLog
from ckpt_runtime.jobmaster.submission import JobStillRunning
from ckpt_runtime.network.control_messages import SampledStack, SubtaskMeasures
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.processes.thread_dump import ThreadInfo
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import (
    ParallelismBounds,
    ReplacementRefusedError,
    check_bounds,
    declared_bounds,
    rescaled,
)
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.ha_store import HeldUpgrade
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind
from ckpt_runtime.version import VERSION

START_MS = 1_795_197_699_641
VERTICES = tuple(vertex_id_of(uid) for uid in ("src", "count", "sink"))
PARALLELISM = 2
STOPS = (g.AfterSavepoint.STOP, g.AfterSavepoint.DRAIN)
PROCESS = ProcessFigures(memory=300, memory_limit=1000, cpu_ns=5, cpu_load=0.25, threads=9)
CLUSTER = Configuration({"execution.checkpointing.num-retained": "2"})


def graph_of(name: str) -> JobGraph:
    kinds = (("src", "Source: src", "source"), ("count", "count", "aggregate"), ("sink", "sink: Writer", "sink"))
    vertices = tuple(
        JobVertex(vertex_id_of(uid), (OperatorNode(uid, label, kind),), PARALLELISM) for uid, label, kind in kinds
    )
    edges = (
        JobEdge(vertices[0].id, vertices[1].id, Partitioning.HASH, ("word",)),
        JobEdge(vertices[1].id, vertices[2].id, Partitioning.REBALANCE),
    )
    return JobGraph(name, vertices, edges)


@dataclass
class Operation:
    kind: g.OperationKind
    job_id: str | None
    polls_left: int
    run: object
    status: g.OperationStatus = g.OperationStatus(completed=False)


@dataclass
class FakeJob:
    job_id: str
    request: g.RunRequest
    graph: JobGraph
    status: JobStatus
    timestamps: dict[JobStatus, int]
    submitted: EffectiveCheckpointConfig
    overrides: CheckpointOverrides = field(default_factory=CheckpointOverrides)
    tracker: CheckpointStatsTracker = field(default_factory=CheckpointStatsTracker)
    exceptions: list[g.ExceptionEntry] = field(default_factory=list)
    next_checkpoint: int = 1
    savepoint_directory: str | None = None
    update_in_progress: bool = False
    end: JobStatus | None = None
    polls_before_end: int = 3
    changed: OwnConfiguration | None = None

    @property
    def own(self) -> OwnConfiguration:
        return self.changed or OwnConfiguration(Configuration(self.request.configuration))

    @property
    def configuration(self) -> Configuration:
        values = (
            {}
            if self.savepoint_directory is None
            else {CheckpointingOptions.SAVEPOINT_DIRECTORY.key: self.savepoint_directory}
        )
        return Configuration(values)

    def living(self) -> FakeJob:
        """The job, for a change: none may be in progress."""
        if self.status.is_terminal:
            raise g.JobTerminated(self.job_id, self.status)
        if self.update_in_progress:
            raise g.UpdateInProgress(self.job_id)
        return self

    def config_info(self) -> JobConfig:
        own = self.own
        return shown_configuration(
            self.job_id,
            self.graph.name,
            own,
            restart_strategy="fixed-delay",
            parallelism=PARALLELISM,
            running_version=own.version,
            pipeline_id=None,
            effective=effective_options(own, own.given.keys(), CLUSTER, overridden_options(self.overrides)),
        )

    def metrics(self) -> dict[str, str]:
        return {
            "numberOfCompletedCheckpoints": str(self.tracker.snapshot().counts.completed),
            "uptime": "18652",
            "lastCheckpointExternalPath": "file:/data/chk-1",
        }

    def exception_history(self, limit: int) -> g.ExceptionHistory:
        return g.ExceptionHistory(tuple(self.exceptions[:limit]), len(self.exceptions) > limit)

    async def progress(self) -> list[dict[str, Any]]:
        rates = {"inputRowsPerSecond": 60.0, "processedRowsPerSecond": 60.0}
        offsets = {"startOffset": None, "endOffset": None, "latestOffset": None}
        source = {"description": "orders", **offsets, "numInputRows": 600, **rates, "metrics": {"pendingRecords": "0"}}
        report = {"id": str(uuid.UUID(self.job_id)), "name": "totals", "batchId": 3, "numInputRows": 600, **rates}
        report |= {"stateOperators": [], "sources": [source], "sink": {"description": "totals", "numOutputRows": 12}}
        return [{**report, "observedMetrics": {"orders": {"rows": 600}}}]

    def result(self) -> g.ExecutionResult:
        ended = self.status.is_terminal
        end = self.timestamps[self.status] if ended else g.NOT_YET
        failure = self.exceptions[0].failure if self.status is JobStatus.FAILED else None
        return g.ExecutionResult(self.job_id, self.graph.name, self.status if ended else None, START_MS, end, failure)

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return self.tracker.snapshot()

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        settings = self.overrides.applied_to(self.submitted.settings)
        return replace(self.submitted, settings=settings, overrides=tuple(self.overrides.given))

    async def patch_checkpoint_config(self, patch: CheckpointOverrides | None) -> EffectiveCheckpointConfig:
        changed = CheckpointOverrides() if patch is None else self.overrides.merged_with(patch)
        try:
            changed.applied_to(self.submitted.settings)
        except CheckpointConfigurationError as error:
            raise g.InvalidRequest(
                "checkpoint configuration", str(error), "values that are consistent with each other"
            ) from error
        self.overrides = changed
        return self.checkpoint_config()

    def resource_requirements(self) -> Mapping[str, ParallelismBounds]:
        return declared_bounds(self.graph)


class FakeJobs(dict[str, FakeJob]):
    """Jobs by id; none is known while ``ready`` is false."""

    ready = True

    def check_leads(self) -> None:
        if not self.ready:
            raise g.NotReady("this driver is starting")

    def __getitem__(self, job_id: str) -> FakeJob:
        self.check_leads()
        if job_id not in self:
            raise g.JobNotFound(job_id)
        return super().__getitem__(job_id)


def submitted_config(configuration: Mapping[str, str]) -> EffectiveCheckpointConfig:
    settings = CheckpointConfiguration(interval_ms=2000, retention=CheckpointRetention.RETAIN_ON_CANCELLATION)
    return EffectiveCheckpointConfig(
        settings, exactly_once=True, state_backend="hashmap", checkpoint_storage="filesystem"
    )


def task_manager(slot_id: str, *, is_free: bool, heard_ms: int) -> TaskManager:
    return TaskManager(
        id=slot_id,
        path="localhost:37401",
        data_port=37401,
        time_since_last_heartbeat=heard_ms,
        free_slots=int(is_free),
        assigned_tasks=int(not is_free),
        free_resource=Resource(cpu_cores=float(is_free)),
        hardware=Hardware(cpu_cores=2),
    )


class FakeGateway:
    """Implements the protocol in memory. ``polls_until_done`` answers are IN_PROGRESS before each operation ends."""

    def __init__(self, *, polls_until_done: int = 1) -> None:
        self.now = START_MS
        self.polls_until_done = polls_until_done
        self.jobs = FakeJobs()
        self.connect_port: int | None = None
        self.pipelines: dict[str, g.StoredPipeline] = {}
        self.contents: dict[str, bytes] = {}
        self.planned: list[g.RunRequest] = []
        self.operations: dict[str, Operation] = {}
        self.disposed: list[str] = []
        self.requesters: list[str | None] = []
        self.conditions: list[g.Precondition] = []
        self.held: dict[str, HeldUpgrade] = {}
        self.retired: dict[str, int] = {}
        self.catalogue: list[CataloguedSavepoint] = []
        self.shut_down = False
        self.ended_logs: list[EndedWorkerLog] = []
        self.savepoint_failure: FailureCause | None = None
        self.slots_for_rescale = 100
        self.rescale_failure: str | None = None
        self.triggered: Counter[str] = Counter()
        self.allow_list: tuple[str, ...] = JobManagerOptions.DYNAMIC_CONFIGURATION_ALLOW_LIST.default
        self.unexpected: Exception | None = None
        self.end_of_new_jobs: JobStatus | None = None
        self.events = EventLog("5e551017a2b3c4d5", capacity=8)

    @property
    def ready(self) -> bool:
        return self.jobs.ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self.jobs.ready = ready

    async def event_log(self) -> EventLog:
        self.jobs.check_leads()
        return self.events

    def move(self, job_id: str, status: JobStatus) -> None:
        self.now += 10
        job = self.jobs[job_id]
        job.status = status
        job.timestamps[status] = self.now

    def add_job(self, job_id: str = "fa461ac280c9aa36bde4a060aa97618c", name: str = "contract-job") -> FakeJob:
        request = g.RunRequest("pipeline", job_id=job_id)
        timestamps = {JobStatus.INITIALIZING: self.now, JobStatus.CREATED: self.now + 1}
        job = FakeJob(job_id, request, graph_of(name), JobStatus.CREATED, timestamps, submitted_config({}))
        self.jobs[job_id] = job
        self.move(job_id, JobStatus.RUNNING)
        return job

    def complete_checkpoint(
        self, job: FakeJob, kind: CheckpointType = CheckpointType.CHECKPOINT, savepoint_format: str | None = None
    ) -> tuple[int, str]:
        checkpoint_id = self.start_checkpoint(job, kind, savepoint_format)
        for vertex in VERTICES:
            for index in range(PARALLELISM):
                self.now += 1
                metrics = CheckpointMetrics(1, 2, 100, processed_data=5, alignment_duration=3, start_delay=1)
                stats = SubtaskStats(index, self.now, 100, metrics)
                job.tracker.report_subtask(checkpoint_id, vertex, stats)
        name = (
            f"chk-{checkpoint_id}" if savepoint_format is None else f"savepoint-{job.job_id[:6]}-{checkpoint_id:012x}"
        )
        path = f"file:/data/{name}"
        job.tracker.report_completed(checkpoint_id, path)
        return checkpoint_id, path

    def start_checkpoint(
        self, job: FakeJob, kind: CheckpointType = CheckpointType.CHECKPOINT, savepoint_format: str | None = None
    ) -> int:
        checkpoint_id = job.next_checkpoint
        job.next_checkpoint += 1
        job.tracker.report_pending(
            checkpoint_id, self.now, kind, savepoint_format, dict.fromkeys(VERTICES, PARALLELISM), self.now + 600_000
        )
        return checkpoint_id

    # cluster

    async def cluster_overview(self) -> g.ClusterOverview:
        self.jobs.check_leads()
        return g.ClusterOverview(8, 6, 4, Counter(job.status for job in self.jobs.values()))

    async def slot_agents(self) -> tuple[TaskManager, ...]:
        self.jobs.check_leads()
        return tuple(task_manager(f"0-{n}", is_free=n > 1, heard_ms=self.now) for n in range(4))

    async def dashboard_config(self) -> DashboardConfig:
        return DashboardConfig(
            refresh_interval_ms=3000,
            timezone_name="Coordinated Universal Time",
            timezone_offset_ms=0,
            flink_version="2.3.0",
            flink_revision="c0f8d1a",
            ckpt_version=VERSION,
            connect_port=self.connect_port,
            features=Features(cancel_and_retain=True),
        )

    async def ended_worker_logs(self) -> tuple[EndedWorkerLog, ...]:
        return tuple(self.ended_logs)

    async def cluster_configuration(self) -> Mapping[str, str]:
        return {"rest.port": "0"}

    async def shutdown_cluster(self) -> None:
        self.shut_down = True

    # pipelines

    async def store_pipeline(self, filename: str, content: AsyncIterator[bytes]) -> g.StoredPipeline:
        data = b"".join([chunk async for chunk in content])
        stored = g.StoredPipeline(hashlib.sha256(data).hexdigest()[:32] + "_p", filename, self.now, ("job:main",))
        self.pipelines[stored.id] = stored
        self.contents[stored.id] = data
        return stored

    async def list_pipelines(self) -> tuple[g.StoredPipeline, ...]:
        return tuple(self.pipelines.values())

    async def delete_pipeline(self, pipeline_id: str) -> None:
        if pipeline_id not in self.pipelines:
            raise g.PipelineNotFound(pipeline_id)
        if self.pipelines[pipeline_id].holds:
            raise g.PipelineInUse(pipeline_id, sorted(self.pipelines[pipeline_id].holds))
        del self.pipelines[pipeline_id]

    async def hold_pipeline(self, pipeline_id: str, owner: str) -> g.StoredPipeline:
        if pipeline_id not in self.pipelines:
            raise g.PipelineNotFound(pipeline_id)
        known = self.pipelines[pipeline_id]
        self.pipelines[pipeline_id] = replace(known, holds={owner: self.now, **known.holds})
        return self.pipelines[pipeline_id]

    async def release_pipeline(self, pipeline_id: str, owner: str) -> None:
        known = self.pipelines.get(pipeline_id)
        if known is not None:
            holds = {name: since for name, since in known.holds.items() if name != owner}
            self.pipelines[pipeline_id] = replace(known, holds=holds)

    async def retire_job_id(self, job_id: str) -> None:
        job = self.jobs.get(job_id)
        if job is not None and not job.status.is_globally_terminal:
            raise JobStillRunning(job_id)
        self.retired.setdefault(job_id, self.now)

    async def retired_job_ids(self) -> Mapping[str, int]:
        return self.retired

    async def plan_pipeline(self, request: g.RunRequest) -> PlanPreview:
        """As if all kept state fitted but that of one operator, whose snapshot has "refused" in its name."""
        self.jobs.check_leads()
        if request.pipeline_id not in self.pipelines:
            raise g.PipelineNotFound(request.pipeline_id)
        self.planned.append(request)
        if request.savepoint_path is None:
            return PlanPreview(graph_of("flights"))
        refused = "refused" in request.savepoint_path
        schema = ("key.word: string", "count: int64")
        states = (
            StatePreview("count", "aggregates", "refused", schema, schema, "no")
            if refused
            else StatePreview("count", "aggregates", "matched", schema, schema),
            StatePreview("old", "last", "dropped", schema),
        )
        operators = (
            OperatorPreview("count", "count", "matched", 1, 2, 128, 128),
            OperatorPreview("old", "old", "dropped", 1, None, 128, None),
        )
        refusals = ("state 'aggregates' of operator 'count': no",) if refused else ()
        restore = RestorePreview(
            snapshot=request.savepoint_path,
            type=CheckpointType.SAVEPOINT,
            format=SavepointFormat.NATIVE,
            state_backend="any",
            fits=not refused,
            refusals=refusals,
            operators=operators,
            states=states,
        )
        return PlanPreview(graph_of("flights"), restore)

    async def run_pipeline(self, request: g.RunRequest) -> str:
        self.jobs.check_leads()
        if request.pipeline_id not in self.pipelines:
            raise g.PipelineNotFound(request.pipeline_id)
        job_id = request.job_id or f"{len(self.jobs) + 1:032x}"
        if job_id in self.jobs:
            if self.jobs[job_id].request == request:
                return job_id
            raise g.JobAlreadyExists(job_id)
        if request.savepoint_path is not None and "nope" in request.savepoint_path:
            raise g.SubmissionFailed(f"Cannot find checkpoint or savepoint directory '{request.savepoint_path}'.")
        for key in request.configuration:
            if key == "bad.option":
                raise g.InvalidRequest(key, request.configuration[key], "no such option")
        job = self.add_job(job_id, request.configuration.get("pipeline.name", self.pipelines[request.pipeline_id].name))
        job.request = request
        job.end = self.end_of_new_jobs
        return job_id

    # jobs

    def _overview(self, job: FakeJob) -> g.JobOverview:
        state = ExecutionState.RUNNING if job.status is JobStatus.RUNNING else ExecutionState.CANCELED
        end = job.timestamps[job.status] if job.status.is_terminal else g.NOT_YET
        tasks = {state: PARALLELISM * len(VERTICES)}
        return g.JobOverview(
            job.job_id,
            job.graph.name,
            job.status,
            START_MS,
            end,
            self.now,
            tasks,
            drill=job.request.drill,
            lineage=g.LineagePlace(job.job_id),
        )

    async def list_jobs(self) -> tuple[g.JobOverview, ...]:
        self.jobs.check_leads()
        return tuple(self._overview(job) for job in reversed(self.jobs.values()))

    async def job_details(self, job_id: str) -> g.JobDetails:
        job = self.jobs[job_id]
        if job.end is not None and not job.status.is_terminal:
            job.polls_before_end -= 1
            if job.polls_before_end < 0:
                self.move(job_id, job.end)
        overview = self._overview(job)
        state = next(iter(overview.tasks_by_state))
        measures = SubtaskMeasures("v", 0, 15_371, 446_375, 15_371, 411_510, 0, 389.0, 15_139, 0)
        steps = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", state)
        times = {ExecutionState(step): START_MS + number for number, step in enumerate(steps, start=1)}
        subtasks = [
            g.SubtaskDetails(
                index, 0, state, "localhost:37401", "agent-0", START_MS + 5, overview.end_time_ms, times, measures
            )
            for index in range(max(vertex.parallelism for vertex in job.graph.vertices))
        ]
        vertices = tuple(
            g.VertexDetails(
                vertex.id,
                vertex.name,
                vertex.parallelism,
                128,
                state,
                START_MS + 5,
                overview.end_time_ms,
                tuple(subtasks[: vertex.parallelism]),
            )
            for vertex in job.graph.vertices
        )
        return g.JobDetails(overview, job.timestamps, vertices, job.graph)

    async def change_job_config(self, job_id: str, request: ConfigurationRequest) -> ConfigChange:
        """Judges as in production, and plans nothing."""
        job = self.jobs[job_id].living()
        if self.unexpected is not None:
            raise self.unexpected
        present = job.own
        wanted = wanted_configuration(present.given, request)
        changes = differences(present.given, wanted)
        if not changes:
            return ConfigChange(present.version, False, request.dry_run, {})
        if request.version not in (None, present.version):
            raise VersionConflict(job_id, request.version, present.version)
        judge(changes, self.allow_list)
        note = ChangeNote(present.version + 1, 1_700_000_000_000, request.by, tuple(change.key for change in changes))
        if not request.dry_run:
            job.changed = present.changed(wanted, note)
        return config_change(note.version, changes, job.overrides, dry_run=request.dry_run)

    def _vertex(self, job_id: str, vertex_id: str) -> None:
        self.jobs[job_id]
        if vertex_id not in VERTICES:
            raise g.VertexNotFound(vertex_id)

    async def thread_dump(self, slot_id: str | None) -> tuple[ThreadInfo, ...]:
        self._check_slot(slot_id)
        return (
            ThreadInfo("control", '"control" Id=7\n\tat ckpt_runtime.task.worker.TaskWorker.run(worker.py:120)\n\n'),
        )

    async def recent_log(self, slot_id: str | None) -> str:
        self._check_slot(slot_id)
        return "2023-11-14 22:13:20,000 INFO ckpt_runtime: a line\n"

    def _check_slot(self, slot_id: str | None) -> None:
        self.jobs.check_leads()
        if slot_id not in (None, "0-0"):
            raise g.NotFound(f"Task manager {slot_id} not found")

    async def sampled_stacks(self, job_id: str, vertex_id: str) -> StackSamples:
        self._vertex(job_id, vertex_id)
        if self.jobs[job_id].status.is_terminal:
            return StackSamples(None)
        inner = SampledStack(0, ("worker.run(worker.py:1)", "job.count(job.py:7)"), 3, 1)
        return StackSamples(self.now, (inner, SampledStack(1, ("worker.run(worker.py:1)",), 0, 2)))

    async def vertex_metrics(self, job_id: str, vertex_id: str) -> Mapping[int, Mapping[str, float]]:
        self._vertex(job_id, vertex_id)
        return {0: {"numRecordsIn": 16_012, "busyTimeMsPerSecond": 32.5}, 1: {"numRecordsIn": 15_371}}

    async def process_figures(self) -> ProcessFigures:
        return PROCESS

    async def worker_figures(self) -> tuple[g.WorkerFigures, ...]:
        return tuple(g.WorkerFigures(f"0-{n}", "localhost:37401", PROCESS if n else None) for n in range(4))

    async def task_metrics(self) -> tuple[tuple[g.MetricSeries, ...], int]:
        labels = {"job_id": next(iter(self.jobs)), "task_name": "source", "subtask_index": "0"}
        task = {"numRecordsIn": 16_012, "buffers.inPoolUsage": 0.5}
        operator = g.MetricSeries({**labels, "operator_name": "source"}, True, {"numRecordsIn": 7})
        return (g.MetricSeries(labels, False, task), operator), 3

    async def vertex_backpressure(self, job_id: str, vertex_id: str) -> Backpressure:
        self._vertex(job_id, vertex_id)
        if vertex_id == VERTICES[2]:
            return vertex_pressure(g.NOT_YET, ())
        return vertex_pressure(self.now, (subtask_pressure(0, 0, 0.7, 0.1, 0.2), subtask_pressure(1, 0, 0.0, 1, 0)))

    async def cancel_job(
        self, job_id: str, *, retain: bool = False, condition: g.Precondition = g.ANY_JOB
    ) -> CheckpointStats | None:
        job = self.jobs[job_id]
        self.conditions.append(condition)
        if job.status is not JobStatus.CANCELED:
            if job.status.is_terminal:
                raise g.JobTerminated(job_id, job.status)
            self.move(job_id, JobStatus.CANCELED)
        return job.tracker.snapshot().latest_completed if retain else None

    async def hold_lineage(self, job_id: str, request: g.HoldRequest) -> HeldUpgrade:
        self.jobs[job_id]
        until = self.now + request.duration_ms
        held = HeldUpgrade(request.owner, job_id, self.now, until, request.requester, request.snapshot)
        self.held[job_id] = held
        return held

    async def release_lineage(self, job_id: str, owner: str | None) -> None:
        self.jobs[job_id]
        self.held.pop(job_id, None)

    # checkpoints

    async def update_resource_requirements(
        self, job_id: str, bounds: Mapping[str, ParallelismBounds], condition: g.Precondition = g.ANY_JOB
    ) -> None:
        job = self.jobs[job_id].living()
        try:
            check_bounds(job.graph, bounds)
        except ReplacementRefusedError as error:
            raise g.RequirementsRefused(str(error)) from error
        if self.rescale_failure is not None:
            raise g.Conflict(self.rescale_failure)
        job.graph = rescaled(job.graph, bounds, self.slots_for_rescale)

    # operations

    def _start(self, kind: g.OperationKind, job_id: str | None, trigger_id: str | None, run: object) -> str:
        chosen = trigger_id or f"{len(self.operations) + 1:032x}"
        if chosen in self.operations:
            return chosen
        if job_id is not None and self.jobs[job_id].status.is_terminal:
            raise g.JobTerminated(job_id, self.jobs[job_id].status)
        self.triggered[kind.value] += 1
        self.operations[chosen] = Operation(kind, job_id, self.polls_until_done, run)
        return chosen

    async def trigger_checkpoint(self, job_id: str, kind: g.CheckpointKind, trigger_id: str | None) -> str:
        job = self.jobs[job_id]

        def run() -> g.OperationStatus:
            if self.savepoint_failure is not None:
                return g.OperationStatus(True, failure=self.savepoint_failure)
            return g.OperationStatus(True, checkpoint_id=self.complete_checkpoint(job)[0])

        return self._start(g.OperationKind.CHECKPOINT, job_id, trigger_id, run)

    async def take_savepoint(self, job_id: str, request: g.SavepointRequest) -> str:
        self.jobs[job_id]
        self.requesters.append(request.requester)
        if request.then in STOPS:
            self.conditions.append(request.condition)
        return self._start(
            g.OperationKind.SAVEPOINT, job_id, request.trigger_id, lambda: self._savepoint(job_id, request)
        )

    def _savepoint(self, job_id: str, request: g.SavepointRequest) -> g.OperationStatus:
        if self.savepoint_failure is not None:
            return g.OperationStatus(True, failure=self.savepoint_failure)
        stops = request.then in STOPS
        kind = CheckpointType.SYNC_SAVEPOINT if stops else CheckpointType.SAVEPOINT
        _, path = self.complete_checkpoint(self.jobs[job_id], kind, request.format.value)
        if request.then is not g.AfterSavepoint.CONTINUE:
            self.move(job_id, JobStatus.FINISHED if stops else JobStatus.CANCELED)
        return g.OperationStatus(True, location=path)

    async def dispose_savepoint(self, path: str, trigger_id: str | None) -> str:
        def run() -> g.OperationStatus:
            if path in self.disposed:
                cause = FailureCause("ckpt.StorageError", f"Could not dispose savepoint {path}.", "ckpt: gone")
                return g.OperationStatus(True, failure=cause)
            self.disposed.append(path)
            return g.OperationStatus(True)

        return self._start(g.OperationKind.SAVEPOINT_DISPOSAL, None, trigger_id, run)

    async def list_savepoints(self, directory: str | None, job: str | None) -> SavepointList:
        self.jobs.check_leads()
        found = [item for item in self.catalogue if job is None or item.is_of(job)]
        return SavepointList(directory or "file:///data/savepoints", tuple(found))

    async def known_savepoints(self, job: str | None) -> g.KnownSavepoints:
        found = await self.list_savepoints(None, job)
        return g.KnownSavepoints((found.directory,), found.savepoints, {"s3://away/savepoints": "it does not answer"})

    async def latest_savepoint(
        self, directory: str | None, job: str | None, before_ms: int | None = None
    ) -> CataloguedSavepoint:
        for found in (await self.list_savepoints(directory, job)).savepoints:
            at_ms = None if found.entry is None else found.entry.completed_at_ms
            if found.is_good and (before_ms is None or (at_ms is not None and at_ms < before_ms)):
                return found
        raise g.NotFound(f"there is no good savepoint in {directory}")

    async def mark_savepoint(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        self.jobs.check_leads()
        for number, found in enumerate(self.catalogue):
            if found.location == path and found.entry is not None:
                marked = replace(found, entry=found.entry.marked(kind, replace(mark, at_ms=self.now)))
                self.catalogue[number] = marked
                return marked
        raise g.NotFound(f"cannot find checkpoint or savepoint: there is no file or directory {path}")

    async def operation_status(self, kind: g.OperationKind, trigger_id: str, job_id: str | None) -> g.OperationStatus:
        self.jobs.check_leads()
        operation = self.operations.get(trigger_id)
        if operation is None or operation.kind is not kind or operation.job_id != job_id:
            raise g.OperationNotFound(kind, trigger_id, job_id)
        if operation.status.completed:
            return operation.status
        if operation.polls_left > 0:
            operation.polls_left -= 1
            return operation.status
        assert callable(operation.run)
        operation.status = operation.run()
        return operation.status
