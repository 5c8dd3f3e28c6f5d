"""The values passed between REST and the dispatcher: immutable, without I/O, clock or web framework.

Times are milliseconds since the epoch with -1 for "not yet"; durations are milliseconds; sizes are bytes; job, vertex
and trigger ids are 32 lower-case hex digits, already checked by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
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
    """The upgrade and the incarnation of the lineage for which a request is made; for others it is refused.

    ``owner`` holds the lineage for its upgrade; None: no upgrade is in progress. ``incarnation`` None: any.
    """

    owner: str | None = None
    incarnation: int | None = None


ANY_JOB = Precondition()


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
