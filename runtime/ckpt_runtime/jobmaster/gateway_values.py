"""The values and errors passed between REST and the dispatcher: immutable, without I/O, clock or web framework.

Times are milliseconds since the epoch with -1 for "not yet"; durations are milliseconds; sizes are bytes; job, vertex
and trigger ids are 32 lower-case hex digits, already checked by the caller. Each error that the dispatcher raises on
purpose is a REST answer, and its message is for the client.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.ha_store import HeldUpgrade

if TYPE_CHECKING:
    from ckpt_runtime.graph.job_graph import JobGraph
    from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint


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


@dataclass(frozen=True, slots=True)
class ClusterOverview:
    """``jobs_by_status`` counts living and kept jobs; states without jobs may be left out.

    Slots that Spark's present executors could run also count: before the first job no slot exists yet.
    """

    slots_total: int
    slots_available: int
    slot_agents: int
    jobs_by_status: Mapping[JobStatus, int]


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The process of the worker in a slot; ``process`` is None before its first heartbeat."""

    slot_id: str
    endpoint: str
    process: ProcessFigures | None = None


@dataclass(frozen=True, slots=True)
class StoredPipeline:
    """An uploaded pipeline. ``id`` is chosen by the server; ``name`` is the client's file name, for display only.

    ``holds`` maps the owners of holds to their start times, in milliseconds since the epoch.
    """

    id: str
    name: str
    uploaded_at_ms: int
    entry_points: tuple[str, ...] = ()
    holds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Precondition:
    """The upgrade and the incarnation that a request requires; the request is refused for any other.

    ``owner`` holds the lineage for its upgrade; None: no upgrade is in progress. ``incarnation`` None: any.
    """

    owner: str | None = None
    incarnation: int | None = None


ANY_JOB = Precondition()


class AfterSavepoint(Enum):
    """What a job does after its savepoint. With STOP and DRAIN it processes nothing that the savepoint does not cover;
    with DRAIN its sources end before the savepoint.
    """

    CONTINUE = "continue"
    CANCEL = "cancel"
    STOP = "stop"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class SavepointRequest:
    """A request for a savepoint. A ``trigger_id`` makes it idempotent; ``requester`` names the client.

    ``condition`` only applies to a savepoint that ends the job.
    """

    directory: str
    then: AfterSavepoint = AfterSavepoint.CONTINUE
    format: SavepointFormat = SavepointFormat.CANONICAL
    trigger_id: str | None = None
    requester: str | None = None
    condition: Precondition = ANY_JOB


@dataclass(frozen=True, slots=True)
class HoldRequest:
    """A request to hold a lineage for ``owner`` for ``duration_ms`` from now; the same owner prolongs its hold.

    ``own_jobs`` are the ids of the jobs that the upgrade itself may have started.
    """

    owner: str
    duration_ms: int
    own_jobs: tuple[str, ...] = ()
    snapshot: str | None = None
    requester: str | None = None


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A request to start a job of an uploaded pipeline.

    ``entry_point`` is ``"module:function"`` or None for the archive's only one. ``job_id`` given by the client makes
    the call idempotent: the same request again returns the same job, a different one is :class:`JobAlreadyExists`.
    ``like_job`` names a running or ended job whose entry point, arguments, parallelism and options fill in those that
    the request leaves out.
    ``drill``: a restore drill, whose job is discarded afterwards and may change nothing outside itself.
    ``fork``: the job has another output than the job whose snapshot it starts from, and starts its own lineage.
    ``condition`` applies to the lineage that the job joins.
    ``source_positions`` are the positions that sources continue from in place of those in the snapshot, by uid.
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
    fork: bool = False
    condition: Precondition = ANY_JOB
    source_positions: Mapping[str, str] = field(default_factory=dict)

    @property
    def option_keys(self) -> frozenset[str]:
        """The keys of the options that the request sets."""
        parallelism = () if self.parallelism is None else (PipelineOptions.PARALLELISM.key,)
        return frozenset((*self.configuration, *parallelism))


@dataclass(frozen=True, slots=True)
class ConfigurationRequest:
    """``options`` are the whole configuration; with ``partial`` those to change, where None removes one.

    ``version`` is the version that the request is based on, None for the present one. ``by`` names the requester.
    """

    options: Mapping[str, str | None]
    version: int | None
    partial: bool = False
    dry_run: bool = False
    by: str = ""


@dataclass(frozen=True, slots=True)
class LineagePlace:
    """A job's place in its lineage, the jobs that started from each other's snapshots.

    ``id`` is the id of the first job; ``incarnation`` rises with each job that this cluster starts in the lineage.
    """

    id: str
    incarnation: int = 1

    @property
    def query_id(self) -> str:
        """The id in Spark's form, which a query keeps when it continues; a foreign snapshot may have any text."""
        try:
            return str(uuid.UUID(self.id))
        except ValueError:
            return self.id


@dataclass(frozen=True, slots=True)
class JobOverview:
    """A line of the job list. ``tasks_by_state`` counts subtasks; ``pending_operators`` wait for the plan to adapt.

    ``lineage`` is None for a job that could not be recovered.
    """

    job_id: str
    name: str
    status: JobStatus
    start_time_ms: int
    end_time_ms: int
    last_modification_ms: int
    tasks_by_state: Mapping[ExecutionState, int]
    pending_operators: int = 0
    drill: bool = False
    lineage: LineagePlace | None = None


@dataclass(frozen=True, slots=True)
class SubtaskDetails:
    """One subtask. ``state_timestamps_ms`` has the time at which each state was entered; ``endpoint`` is ``host:port``.

    ``measures`` count from the start of its present attempt, None before the first report. ``still_ms`` is for how
    long no row has moved in it, and ``stalled_ms`` for how long no row has moved although work waited all the time.
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
    still_ms: float = 0.0
    stalled_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """The metrics of one subtask, or of one operator in it, by Flink's names, with the labels of Flink's reporter."""

    labels: Mapping[str, str]
    of_operator: bool
    values: Mapping[str, float]


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
    """``overview`` plus when each state was entered last, the vertices in topological order and the plan.

    ``status_reason`` is the reason why a waiting job does not get slots, or why a job has failed.
    ``upgrade`` is the upgrade of its lineage that is in progress, if any.
    """

    overview: JobOverview
    state_timestamps_ms: Mapping[JobStatus, int]
    vertices: tuple[VertexDetails, ...]
    graph: JobGraph
    max_parallelism: int = NOT_YET
    status_reason: str | None = None
    upgrade: HeldUpgrade | None = None


@dataclass(frozen=True, slots=True)
class EffectiveCheckpointConfig:
    """The settings in effect: submitted configuration, then overrides (FLIP-571), whose fields ``overrides`` names."""

    settings: CheckpointConfiguration
    exactly_once: bool
    state_backend: str
    checkpoint_storage: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """An asynchronous operation. It is done when it has a ``location``, a ``checkpoint_id``, a ``failure`` or
    ``completed``.

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
    """``status`` is None until the job has ended; ``failure`` is set only when it failed."""

    job_id: str
    name: str
    status: JobStatus | None
    start_time_ms: int
    end_time_ms: int
    failure: FailureCause | None = None


@dataclass(frozen=True, slots=True)
class SavepointList:
    """The catalogued savepoints below ``directory``, the latest first."""

    directory: str
    savepoints: tuple[CataloguedSavepoint, ...]


@dataclass(frozen=True, slots=True)
class KnownSavepoints:
    """The catalogued savepoints below every directory that the session knows, the latest first.

    ``unread`` maps directories that cannot be listed now to the reason.
    """

    directories: tuple[str, ...]
    savepoints: tuple[CataloguedSavepoint, ...]
    unread: dict[str, str]


class GatewayError(Exception):
    """Base of the errors that the dispatcher raises on purpose; the message is for the client."""


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
    """No operation has this trigger id, or the operation has expired."""

    def __init__(self, kind: OperationKind, trigger_id: str, job_id: str | None = None) -> None:
        suffix = "" if job_id is None else f" for job {job_id}"
        super().__init__(f"There is no {kind.value} operation with triggerId={trigger_id}{suffix}.")


class PipelineNotFound(NotFound):
    """No uploaded pipeline has this id."""

    def __init__(self, pipeline_id: str) -> None:
        super().__init__(f"There is no uploaded pipeline {pipeline_id!r}")


class InvalidRequest(GatewayError):
    """A value is not acceptable. ``field`` is the request's field or configuration option; nothing has changed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not acceptable, {allowed}")
        self.field = field


class RequirementsRefused(GatewayError):
    """A job cannot run with these parallelism bounds of its vertices; the message has one line per problem."""


class SubmissionFailed(GatewayError):
    """The pipeline's entry point raised, its plan is wrong, or the snapshot to restore from cannot be used."""


class Conflict(GatewayError):
    """The request is fine, but the present state of its target forbids it; nothing has changed."""


class PipelineInUse(Conflict):
    """An uploaded pipeline is not deleted while an owner holds it."""

    def __init__(self, pipeline_id: str, owners: Sequence[str]) -> None:
        super().__init__(f"Pipeline {pipeline_id} is held by {', '.join(owners)}; release it first")


class UpdateInProgress(Conflict):
    """FLIP-571: of two concurrent updates of one job the second is refused."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another update of the configuration of job {job_id} is in progress")


class RescaleInProgress(Conflict):
    """Another rescale of the job is in progress; only one may run at a time."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Another rescale of job {job_id} is in progress")


class JobTerminated(Conflict):
    """The job has ended for good."""

    def __init__(self, job_id: str, status: JobStatus) -> None:
        super().__init__(f"Job {job_id} has already reached the terminal state {status.value}")
        self.status = status


class SnapshotInUse(Conflict):
    """A snapshot to be disposed of, or claimed, is in use by a living job."""

    def __init__(self, path: str, job_id: str, state: str, reason: str, action: str = "disposed of") -> None:
        super().__init__(f"{path} cannot be {action} while job {job_id} is {state}: {reason}")


class SnapshotNotFound(Conflict):
    """The directory to be disposed of is not a snapshot."""

    def __init__(self, path: str) -> None:
        super().__init__(
            f"{path} cannot be disposed of: it is not a checkpoint or savepoint, because there is no _metadata"
        )


class JobAlreadyExists(Conflict):
    """A client-chosen job id is taken by a job of another submission."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"Job {job_id} already exists and was submitted with a different request")


class NotReady(GatewayError):
    """This driver cannot serve now (it is starting, is not the leader, or is shutting down); try again later."""


class ConfigurationRefused(GatewayError):
    """A job cannot run with this configuration or cannot change to it; the message has one line per problem."""


class OptionsNotAllowed(GatewayError):
    """The request changes options that are not on the cluster's allow-list. Nothing has changed."""

    def __init__(self, keys: Sequence[str], allow_list: Sequence[str]) -> None:
        allowed = ", ".join(allow_list) or "none"
        super().__init__(
            f"{', '.join(keys)}: cannot be changed while a job runs; the options that this cluster allows to change "
            f"are {allowed} (jobmanager.execution.dynamic-configuration.allow-list)"
        )


class VersionConflict(Conflict):
    """A change is based on an outdated version."""

    def __init__(self, job_id: str, version: int | None, present: int) -> None:
        made_of = "another configuration" if version is None or version == present else f"version {version}"
        super().__init__(
            f"The change is based on {made_of}, but the configuration of job {job_id} has version {present}. Read it "
            "again"
        )
