"""What the REST layer asks of the dispatcher: one protocol, plain values and named errors.

The dispatcher implements :class:`DispatcherGateway`; REST handlers know nothing else of the job manager. Everything
here is immutable data or an interface: no I/O, no clock, no web framework. Times are milliseconds since the epoch
with -1 for "not yet"; durations are milliseconds; sizes are bytes; job, vertex and trigger ids are 32 lower-case hex
digits, already checked by the caller.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.effective import EffectiveOption
from ckpt_runtime.configuration.own_configuration import ChangeNote
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.catalogue_gateway import CatalogueGateway
from ckpt_runtime.jobmaster.event_log import EventLog
from ckpt_runtime.jobmaster.job_id_gateway import JobIdGateway
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds

if TYPE_CHECKING:
    from ckpt_runtime.checkpoint.statistics import CheckpointStats, CheckpointStatsSnapshot
    from ckpt_runtime.graph.job_graph import JobGraph
    from ckpt_runtime.jobmaster.configuration_requests import ConfigurationAnswer, ConfigurationRequest
    from ckpt_runtime.jobmaster.restore_preview import PlanPreview

NOT_YET = -1


class ExecutionState(StrEnum):
    """States of one subtask's execution attempt, as Flink's."""

    CREATED = "CREATED"
    SCHEDULED = "SCHEDULED"
    DEPLOYING = "DEPLOYING"
    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELING = "CANCELING"
    CANCELED = "CANCELED"
    FAILED = "FAILED"
    RECONCILING = "RECONCILING"


class CheckpointKind(StrEnum):
    """What a triggered checkpoint writes: as configured, or everything."""

    CONFIGURED = "CONFIGURED"
    FULL = "FULL"


class OperationKind(StrEnum):
    """Kinds of asynchronous operations. A stop is polled as a savepoint, as in Flink."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"
    SAVEPOINT_DISPOSAL = "savepoint-disposal"


class GatewayError(Exception):
    """Is the base of the errors that a gateway call may raise on purpose; the message is for the client."""


class NotFound(GatewayError):
    """Something that the request names does not exist."""


class JobNotFound(NotFound):
    """No living or kept job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} not found")


class VertexNotFound(NotFound):
    """The job has no such vertex."""

    def __init__(self, vertex_id: str) -> None:
        super().__init__(f"Job vertex {vertex_id} not found")


class CheckpointNotFound(NotFound):
    """No statistics are kept for this checkpoint."""

    def __init__(self, checkpoint_id: int) -> None:
        super().__init__(f"Could not find checkpointing statistics for checkpoint {checkpoint_id}.")


class OperationNotFound(NotFound):
    """No operation has this trigger id, or it was forgotten after its time."""

    def __init__(self, kind: OperationKind, trigger_id: str, job_id: str | None = None) -> None:
        suffix = "" if job_id is None else f" for job {job_id}"
        super().__init__(f"There is no {kind.value} operation with triggerId={trigger_id}{suffix}.")


class PipelineNotFound(NotFound):
    """Nothing uploaded has this id."""

    def __init__(self, pipeline_id: str) -> None:
        super().__init__(f"There is no uploaded pipeline {pipeline_id!r}")


class InvalidRequest(GatewayError):
    """A value is not acceptable. ``field`` is the request's field or configuration option; nothing has changed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not acceptable, {allowed}")
        self.field = field


class RequirementsRefused(GatewayError):
    """A job cannot run with these bounds of its vertices' parallelism; a line for each thing that is wrong."""


class SubmissionFailed(GatewayError):
    """The pipeline's entry point raised, its plan is wrong, or the snapshot to restore from cannot be used."""


class Conflict(GatewayError):
    """The request is fine, but the present state of its target forbids it; nothing has changed."""


class PipelineInUse(Conflict):
    """An uploaded pipeline that somebody holds is not deleted."""

    def __init__(self, pipeline_id: str, owners: Sequence[str]) -> None:
        super().__init__(f"Pipeline {pipeline_id} is held by {', '.join(owners)}; release it first")


class UpdateInProgress(Conflict):
    """FLIP-571: of two concurrent updates of one job the second is refused."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another update of the configuration of job {job_id} is in progress")


class RescaleInProgress(Conflict):
    """One rescale of a job after the other."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another rescale of job {job_id} is in progress")


class JobTerminated(Conflict):
    """The job has ended for good."""

    def __init__(self, job_id: str, status: JobStatus, message: str | None = None) -> None:
        super().__init__(message or f"Job {job_id} has already reached the terminal state {status.value}")
        self.status = status


class SnapshotInUse(Conflict):
    """A snapshot that is to be disposed of, or claimed, is one that a living job refers to."""

    def __init__(self, path: str, job_id: str, state: str, reason: str, wish: str = "disposed of") -> None:
        super().__init__(f"{path} cannot be {wish} while job {job_id} is {state}: {reason}")


class NoSnapshot(Conflict):
    """What is to be disposed of is a directory of something else."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} cannot be disposed of: it holds no checkpoint or savepoint, there is no _metadata")


class JobAlreadyExists(Conflict):
    """A client-chosen job id is taken by a job of another submission."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} already exists and was submitted with a different request")


class NotReady(GatewayError):
    """This driver cannot serve now (it is starting, is not the leader, or is shutting down); try again later."""


@dataclass(frozen=True, slots=True)
class ClusterOverview:
    """``jobs_by_status`` counts living and kept jobs; states without jobs may be left out.

    Slots that Spark could start count as well: there are none before the first job.
    """

    slots_total: int
    slots_available: int
    slot_agents: int
    jobs_by_status: Mapping[JobStatus, int]


@dataclass(frozen=True, slots=True)
class SlotOverview:
    """A slot with the process that supervises it. ``data_port`` is -1 while no worker is ready."""

    slot_id: str
    endpoint: str
    data_port: int
    cpus: int
    is_free: bool
    last_heartbeat_ms: int


@dataclass(frozen=True, slots=True)
class DashboardConfig:
    """``refresh_interval_ms`` is how often the pages poll; ``timezone_offset_ms`` is the driver's."""

    refresh_interval_ms: int
    timezone_name: str
    timezone_offset_ms: int
    version: str
    revision: str


@dataclass(frozen=True, slots=True)
class StoredPipeline:
    """An uploaded pipeline. ``id`` is chosen by the server; ``name`` is the client's file name, for display only.

    ``holds`` maps those who need it to since when, in milliseconds since the epoch.
    """

    id: str
    name: str
    uploaded_at_ms: int
    entry_points: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Start a job of an uploaded pipeline.

    ``entry_point`` is ``"module:function"`` or None for the archive's only one. ``job_id`` given by the client makes
    the call idempotent: the same request again returns the same job, a different one is :class:`JobAlreadyExists`.
    ``like_job`` gives what the request itself does not: the entry point, arguments, parallelism and options of a job
    that runs or has ended.
    ``drill``: the job is thrown away, and nothing outside it may be touched.
    """

    pipeline_id: str
    entry_point: str | None = None
    arguments: tuple[str, ...] = ()
    parallelism: int | None = None
    configuration: Mapping[str, str] = field(default_factory=dict)
    savepoint_path: str | None = None
    allow_non_restored_state: bool = False
    claim_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM
    job_id: str | None = None
    like_job: str | None = None
    drill: bool = False

    @property
    def option_keys(self) -> frozenset[str]:
        """The options that came with it."""
        parallelism = () if self.parallelism is None else (PipelineOptions.PARALLELISM.key,)
        return frozenset((*self.configuration, *parallelism))


@dataclass(frozen=True, slots=True)
class JobOverview:
    """A line of the job list. ``tasks_by_state`` counts subtasks; ``pending_operators`` wait for the plan to adapt."""

    job_id: str
    name: str
    status: JobStatus
    start_time_ms: int
    end_time_ms: int
    last_modification_ms: int
    tasks_by_state: Mapping[ExecutionState, int]
    pending_operators: int = 0
    drill: bool = False


@dataclass(frozen=True, slots=True)
class SubtaskDetails:
    """One subtask. ``state_timestamps_ms`` says when each state was entered; ``endpoint`` is ``host:port``.

    ``measures`` are those since its present attempt started, None before their first report.
    """

    index: int
    attempt: int
    state: ExecutionState
    endpoint: str
    slot_agent_id: str
    start_time_ms: int
    end_time_ms: int
    state_timestamps_ms: Mapping[ExecutionState, int]
    measures: SubtaskMeasures | None = None


@dataclass(frozen=True, slots=True)
class VertexDetails:
    """One vertex with its subtasks, by index. ``status`` is the state that sums them up."""

    vertex_id: str
    name: str
    parallelism: int
    max_parallelism: int
    status: ExecutionState
    start_time_ms: int
    end_time_ms: int
    subtasks: tuple[SubtaskDetails, ...]


@dataclass(frozen=True, slots=True)
class JobDetails:
    """``overview`` plus when each state was entered last, the vertices in topological order and the plan."""

    overview: JobOverview
    state_timestamps_ms: Mapping[JobStatus, int]
    vertices: tuple[VertexDetails, ...]
    graph: JobGraph
    max_parallelism: int = NOT_YET


@dataclass(frozen=True, slots=True)
class JobConfigInfo:
    """``configuration`` holds what was given at submission or changed later, never the cluster's (FLIP-530).

    ``pipeline_id`` is what it runs. ``version`` was accepted last.
    The tasks run with ``running_version``, which is an older one until their restart.
    ``effective`` are all options of the job with what holds by that version, wherever it comes from.
    """

    job_id: str
    name: str
    restart_strategy: str
    parallelism: int
    configuration: Mapping[str, str]
    version: int = 1
    running_version: int = 1
    notes: tuple[ChangeNote, ...] = ()
    pipeline_id: str | None = None
    effective: tuple[EffectiveOption, ...] = ()


@dataclass(frozen=True, slots=True)
class EffectiveCheckpointConfig:
    """What holds now: submitted configuration, then overrides (FLIP-571), whose fields ``overrides`` names."""

    settings: CheckpointConfiguration
    exactly_once: bool
    state_backend: str
    checkpoint_storage: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """An asynchronous operation. Done when it has a ``location``, a ``checkpoint_id``, a ``failure`` or ``completed``.

    ``location`` is a savepoint's URL; ``checkpoint_id`` is a triggered checkpoint's.
    """

    completed: bool
    location: str | None = None
    checkpoint_id: int | None = None
    failure: FailureCause | None = None


@dataclass(frozen=True, slots=True)
class ExceptionEntry:
    """One failure of the job. Task fields are None for failures of the job itself."""

    failure: FailureCause
    timestamp_ms: int
    task_name: str | None = None
    endpoint: str | None = None
    slot_agent_id: str | None = None
    concurrent: tuple[ExceptionEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class ExceptionHistory:
    """Newest first; ``truncated`` when older entries were left off."""

    entries: tuple[ExceptionEntry, ...]
    truncated: bool


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """``status`` is None until the job has ended; ``failure`` only when it failed."""

    job_id: str
    name: str
    status: JobStatus | None
    start_time_ms: int
    end_time_ms: int
    failure: FailureCause | None = None


@dataclass(frozen=True, slots=True)
class SubtaskPressure:
    """Shares of the last measuring window, each in 0..1."""

    index: int
    attempt: int
    backpressured: float
    idle: float
    busy: float


@dataclass(frozen=True, slots=True)
class VertexPressure:
    """``subtasks`` is empty, and ``measured_at_ms`` -1, before the first measurement."""

    measured_at_ms: int
    subtasks: tuple[SubtaskPressure, ...]


class DispatcherGateway(CatalogueGateway, JobIdGateway, Protocol):
    """The job manager as REST sees it. Any method may raise :class:`NotReady`; the others are named."""

    async def cluster_overview(self) -> ClusterOverview: ...

    async def slot_agents(self) -> tuple[SlotOverview, ...]:
        """Lists those that have been started, oldest first."""
        ...

    async def dashboard_config(self) -> DashboardConfig: ...

    async def cluster_configuration(self) -> Mapping[str, str]:
        """Gives the cluster's options, secrets already masked."""
        ...

    async def event_log(self) -> EventLog:
        """What happens in this session, from the moment on that it leads."""
        ...

    async def shutdown_cluster(self) -> None:
        """Start an orderly end of the session; returns at once. Running jobs are suspended, their state kept."""
        ...

    async def store_pipeline(self, filename: str, content: AsyncIterator[bytes]) -> StoredPipeline:
        """Keep an uploaded ``.py`` or ``.zip``. The stored name is the server's; ``filename`` is shown only.

        Raises :class:`InvalidRequest` when the content is no such archive.
        """
        ...

    async def list_pipelines(self) -> tuple[StoredPipeline, ...]: ...

    async def delete_pipeline(self, pipeline_id: str) -> None:
        """Raises :class:`PipelineNotFound`, and :class:`PipelineInUse` while it is held."""
        ...

    async def hold_pipeline(self, pipeline_id: str, owner: str) -> StoredPipeline:
        """Keep it, also for the next driver, until its owner releases it; again is fine.

        One that is not here any more is brought back from a job that runs it. Raises :class:`PipelineNotFound`.
        """
        ...

    async def release_pipeline(self, pipeline_id: str, owner: str) -> None:
        """One that the owner does not hold, or that is not known, is fine."""
        ...

    async def plan_pipeline(self, request: RunRequest) -> PlanPreview:
        """Says what :meth:`run_pipeline` would run, and how the snapshot fits; starts nothing.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, and :class:`SubmissionFailed` for a pipeline or a
        snapshot that nothing can be said of.
        """
        ...

    async def run_pipeline(self, request: RunRequest) -> str:
        """Returns the job id once the plan is checked and stored.

        Raises :class:`PipelineNotFound`, :class:`InvalidRequest`, :class:`SubmissionFailed`,
        :class:`JobAlreadyExists`, and :class:`NotReady` when storage fails: nothing is left then.
        """
        ...

    async def list_jobs(self) -> tuple[JobOverview, ...]:
        """Lists living and ended jobs, newest first."""
        ...

    async def job_status(self, job_id: str) -> JobStatus:
        """Raises :class:`JobNotFound`, as does every method below that takes a job id."""
        ...

    async def job_details(self, job_id: str) -> JobDetails: ...

    async def job_config(self, job_id: str) -> JobConfigInfo: ...

    async def change_job_config(self, job_id: str, request: ConfigurationRequest) -> ConfigurationAnswer:
        """FLIP-530: check, persist, then apply, then return; a restart that it needs is under way then.

        What means the same as the present configuration changes nothing, at any version. Raises
        :class:`ConfigurationRefused`, :class:`OptionsNotAllowed`, :class:`VersionConflict`, :class:`UpdateInProgress`,
        :class:`JobTerminated`, :class:`SubmissionFailed` for a pipeline that cannot be planned with it, and
        :class:`Conflict` when the job's state does not allow it.
        """
        ...

    async def job_metrics(self, job_id: str) -> Mapping[str, str]:
        """Maps Flink's names (``numberOfCompletedCheckpoints``, ``uptime``, ...) to values as text."""
        ...

    async def vertex_metrics(self, job_id: str, vertex_id: str) -> Mapping[int, Mapping[str, float]]:
        """Maps each subtask's index to its metrics by Flink's names. Raises :class:`VertexNotFound`."""
        ...

    async def vertex_backpressure(self, job_id: str, vertex_id: str) -> VertexPressure:
        """Raises :class:`VertexNotFound`."""
        ...

    async def exception_history(self, job_id: str, max_entries: int) -> ExceptionHistory: ...

    async def execution_result(self, job_id: str) -> ExecutionResult: ...

    async def cancel_job(self, job_id: str, *, retain: bool = False) -> CheckpointStats | None:
        """Start cancelling. Nothing to do on a CANCELED job; :class:`JobTerminated` on a FINISHED or FAILED one.

        With ``retain`` its checkpoints outlive it, whatever its options say. Returns the latest that does; one that
        is being completed may still come after it.
        """
        ...

    async def checkpoint_statistics(self, job_id: str) -> CheckpointStatsSnapshot: ...

    async def checkpoint_config(self, job_id: str) -> EffectiveCheckpointConfig: ...

    async def patch_checkpoint_config(self, job_id: str, overrides: CheckpointOverrides) -> EffectiveCheckpointConfig:
        """FLIP-571: persist, then apply, then return what holds now. What is not given stays as it is.

        Raises :class:`UpdateInProgress`, :class:`JobTerminated`, and :class:`InvalidRequest` for values that only
        clash with the job's other settings.
        """
        ...

    async def delete_checkpoint_config_overrides(self, job_id: str) -> EffectiveCheckpointConfig:
        """Return to the submitted values. Raises :class:`UpdateInProgress`, :class:`JobTerminated`."""
        ...

    async def resource_requirements(self, job_id: str) -> Mapping[str, ParallelismBounds]:
        """By vertex id."""
        ...

    async def update_resource_requirements(self, job_id: str, bounds: Mapping[str, ParallelismBounds]) -> None:
        """Rescale a job: get the slots, take a checkpoint, persist, then apply, then return.

        Raises :class:`RequirementsRefused`, :class:`RescaleInProgress`, :class:`JobTerminated`, and :class:`Conflict`
        with the reason when the job goes on as it was.
        """
        ...

    async def default_savepoint_directory(self, job_id: str) -> str | None: ...

    async def trigger_checkpoint(self, job_id: str, kind: CheckpointKind, trigger_id: str | None) -> str:
        """Returns the trigger id: the given one, whose operation is started once only, or a new one.

        A known trigger id is answered with itself whatever the job's state is by now. Otherwise a job that has ended
        raises :class:`JobTerminated`.
        """
        ...

    async def trigger_savepoint(
        self,
        job_id: str,
        directory: str,
        savepoint_format: SavepointFormat,
        cancel_job: bool,
        trigger_id: str | None,
        requester: str | None = None,
    ) -> str:
        """As :meth:`trigger_checkpoint`. Problems with the directory show in the operation. ``requester``: who asks."""
        ...

    async def stop_with_savepoint(
        self,
        job_id: str,
        directory: str,
        savepoint_format: SavepointFormat,
        drain: bool,
        trigger_id: str | None,
        requester: str | None = None,
    ) -> str:
        """As :meth:`trigger_savepoint`; polled as a :attr:`OperationKind.SAVEPOINT`."""
        ...

    async def dispose_savepoint(self, path: str, trigger_id: str | None) -> str:
        """As :meth:`trigger_checkpoint`, for a path and no job."""
        ...

    async def operation_status(self, kind: OperationKind, trigger_id: str, job_id: str | None) -> OperationStatus:
        """Raises :class:`OperationNotFound`, also for the right trigger id with the wrong job id."""
        ...
