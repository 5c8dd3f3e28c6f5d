"""A job that this driver does not run: one that ended under an earlier driver, or one that could not be recovered.

Its stored form is a JSON document, made at the job's end and read by later drivers. It answers the requests that REST
makes for any job; figures of single subtasks and the checkpoint history are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, NoReturn

from msgspec import Struct

from ckpt_runtime.checkpoint.statistics import (
    CheckpointCounts,
    CheckpointStats,
    CheckpointStatsSnapshot,
    RestoredCheckpointStats,
)
from ckpt_runtime.configuration.configuration import (
    ChangeNote,
    Configuration,
    EffectiveOption,
    OwnConfiguration,
    own_options,
)
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.contract.configuration import ConfigVersion, JobConfig
from ckpt_runtime.contract.configuration import EffectiveOption as ShownOption
from ckpt_runtime.failure_report import FailureCause, failure_reason
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import DocumentError, checked, malformed
from ckpt_runtime.jobmaster.executions import ExecutionGraph
from ckpt_runtime.jobmaster.gateway_values import (
    NOT_YET,
    EffectiveCheckpointConfig,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionResult,
    ExecutionState,
    JobDetails,
    JobOverview,
    JobTerminated,
    LineagePlace,
    RunRequest,
)
from ckpt_runtime.jobmaster.metric_table import JOB, JobFigures, Kind, texts
from ckpt_runtime.scheduler.job_status import JobStatus

_TASKS = {JobStatus.FINISHED: ExecutionState.FINISHED, JobStatus.FAILED: ExecutionState.FAILED}


class _Result(Struct):
    """The document of :func:`result_document`. Earlier versions did not store the fields that have a default."""

    job_id: str
    status: JobStatus
    graph: dict[str, Any]
    configuration: dict[str, str]
    timestamps: dict[JobStatus, int]
    failure: FailureCause | None
    exceptions: tuple[ExceptionEntry, ...]
    restart_strategy: str
    checkpoint_config: dict[str, Any]
    request: RunRequest | None = None
    checkpoint_counts: CheckpointCounts = CheckpointCounts()
    latest_checkpoints: dict[str, dict[str, Any] | None] = {}
    restarts: int = 0
    version: int = 1
    notes: tuple[ChangeNote, ...] = ()
    lineage: LineagePlace | None = None
    latest_restored: RestoredCheckpointStats | None = None


class ShownJob:
    """A job as users see it, from the facts known about every job. ``failure`` is the failure that ended it."""

    job_id: str
    drill = False
    waits_for_slots = ""
    """The reason why the job is still waiting for slots."""

    def __init__(
        self, graph: JobGraph, status: JobStatus, times: dict[JobStatus, int], changed_ms: int, place: LineagePlace
    ) -> None:
        self.graph = graph
        self.executions = ExecutionGraph(graph)
        self.status = status
        self.failure: FailureCause | None = None
        self._timestamps = times
        self._last_modification = changed_ms
        self._place = place

    def overview(self) -> JobOverview:
        return JobOverview(
            job_id=self.job_id,
            name=self.graph.name,
            status=self.status,
            start_time_ms=self._timestamps[JobStatus.INITIALIZING],
            end_time_ms=self._timestamps[self.status] if self.status.is_globally_terminal else NOT_YET,
            last_modification_ms=self._last_modification,
            tasks_by_state=self.executions.counts(),
            drill=self.drill,
            lineage=self._place,
        )

    def details(self) -> JobDetails:
        vertices = tuple(self.executions.vertex_details(vertex) for vertex in self.graph.vertices)
        # A running job may wait for slots as well, for a rescale; that is not shown.
        waits = self.status in (JobStatus.CREATED, JobStatus.RESTARTING)
        reason = self.waits_for_slots or None if waits else failure_reason(self.failure)
        return JobDetails(self.overview(), dict(self._timestamps), vertices, self.graph, status_reason=reason)

    def result(self) -> ExecutionResult:
        shown = self.overview()
        status = shown.status if shown.status.is_globally_terminal else None
        return ExecutionResult(shown.job_id, shown.name, status, shown.start_time_ms, shown.end_time_ms, self.failure)


class EndedJob(ShownJob):
    """An ended job; read only."""

    cleaned_up = True

    def __init__(self, document: object) -> None:
        """Raises :class:`DocumentError` for a document of another shape."""
        result = checked(document, _Result)
        times = result.timestamps
        if JobStatus.INITIALIZING not in times or (result.status.is_globally_terminal and result.status not in times):
            raise DocumentError("`timestamps` lacks the start or the end of the job")
        place = result.lineage or LineagePlace(result.job_id)
        super().__init__(JobGraph.from_json(result.graph), result.status, times, max(times.values()), place)
        self.job_id = result.job_id
        with malformed():
            self.configuration = Configuration(result.configuration)
        self._version, self._notes = result.version, result.notes
        self.executions.enter_all(_TASKS.get(self.status, ExecutionState.CANCELED))
        self._exceptions = result.exceptions
        self.failure = result.failure
        self.request = result.request
        self._restart_strategy = result.restart_strategy
        self._checkpoint_config = checked(result.checkpoint_config, EffectiveCheckpointConfig)
        self._counts = result.checkpoint_counts
        self._restarts = result.restarts
        self._latest_completed = _checkpoint_of(result.latest_checkpoints.get("completed"))
        self._latest_savepoint = _checkpoint_of(result.latest_checkpoints.get("savepoint"))
        self._latest_restored = result.latest_restored

    def living(self) -> NoReturn:
        """Raises JobTerminated."""
        raise JobTerminated(self.job_id, self.status)

    def config_info(self) -> JobConfig:
        submitted = frozenset[str]() if self.request is None else self.request.option_keys
        return shown_configuration(
            self.job_id,
            self.graph.name,
            self.own,
            restart_strategy=self._restart_strategy,
            parallelism=max(vertex.parallelism for vertex in self.graph.vertices),
            running_version=self._version,
            pipeline_id=None if self.request is None else self.request.pipeline_id,
            effective=own_options(self.own, submitted),
        )

    @property
    def own(self) -> OwnConfiguration:
        """The job's own configuration at its end."""
        return OwnConfiguration(self.configuration, self._version, self._notes)

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        return self._checkpoint_config

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return CheckpointStatsSnapshot(
            self._counts,
            latest_completed=self._latest_completed,
            latest_savepoint=self._latest_savepoint,
            latest_restored=self._latest_restored,
        )

    def metrics(self) -> dict[str, str]:
        """The metrics that do not change once a job has ended."""
        counters = [metric for metric in JOB if metric.kind is Kind.COUNTER]
        return texts(counters, JobFigures(self._restarts, self._counts))

    def exception_history(self, limit: int) -> ExceptionHistory:
        return ExceptionHistory(self._exceptions[:limit], truncated=len(self._exceptions) > limit)

    async def progress(self) -> list[dict[str, Any]]:
        """No reports: the driver that ran the job kept them in memory only."""
        return []


def shown_configuration(
    job_id: str,
    name: str,
    own: OwnConfiguration,
    *,
    restart_strategy: str,
    parallelism: int,
    running_version: int,
    pipeline_id: str | None,
    effective: Iterable[EffectiveOption],
) -> JobConfig:
    """The job's configuration as clients see it; secrets are masked."""
    return JobConfig(
        job_id=job_id,
        name=name,
        execution_config={
            "restart-strategy": restart_strategy,
            "job-parallelism": parallelism,
            "object-reuse-mode": False,
            "user-config": own.given.get(PipelineOptions.GLOBAL_JOB_PARAMETERS) or {},
        },
        configuration=own.given.displayed(),
        version=own.version,
        running_version=running_version,
        pipeline_id=pipeline_id,
        changes=tuple(
            ConfigVersion(note.version, note.timestamp_ms, note.by, tuple(note.options)) for note in own.notes
        ),
        effective=tuple(ShownOption(option.key, option.value, option.origin) for option in effective),
    )


def result_document(  # noqa: PLR0913 -- one parameter for each part of the document
    *,
    job_id: str,
    status: JobStatus,
    graph: JobGraph,
    own: OwnConfiguration,
    timestamps: Mapping[JobStatus, int],
    failure: FailureCause | None,
    exceptions: list[dict[str, Any]],
    restart_strategy: str,
    checkpoint_config: EffectiveCheckpointConfig,
    request: RunRequest | None,
    checkpoints: CheckpointStatsSnapshot,
    restarts: int,
    lineage: LineagePlace,
) -> dict[str, Any]:
    """Makes the stored form. Checkpoints that are still in progress fail with the job's end."""
    counts = checkpoints.counts
    failed = counts.failed + counts.in_progress
    restored = checkpoints.latest_restored
    return {
        "job_id": job_id,
        "status": status.value,
        "graph": graph.to_json(),
        "configuration": own.given.to_dict(),
        "version": own.version,
        "notes": [asdict(note) for note in own.notes],
        "timestamps": {known.value: time for known, time in timestamps.items()},
        "failure": None if failure is None else asdict(failure),
        "exceptions": exceptions,
        "restart_strategy": restart_strategy,
        "checkpoint_config": asdict(checkpoint_config),
        "request": None if request is None else asdict(request),
        "checkpoint_counts": asdict(replace(counts, in_progress=0, failed=failed)),
        "latest_checkpoints": {
            "completed": _stored(checkpoints.latest_completed),
            "savepoint": _stored(checkpoints.latest_savepoint),
        },
        "restarts": restarts,
        "lineage": asdict(lineage),
        "latest_restored": None if restored is None else asdict(restored),
    }


_NOT_STORED = frozenset({"vertices"})


def _stored(checkpoint: CheckpointStats | None) -> dict[str, Any] | None:
    """A checkpoint without its vertices."""
    if checkpoint is None:
        return None
    return {item.name: getattr(checkpoint, item.name) for item in fields(checkpoint) if item.name not in _NOT_STORED}


def _checkpoint_of(document: Mapping[str, Any] | None) -> CheckpointStats | None:
    return None if document is None else checked({**document, "vertices": {}}, CheckpointStats)
