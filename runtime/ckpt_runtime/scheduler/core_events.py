"""The inputs and outputs of a job core, in addition to the events and effects of its two machines. Values only.

``JobInput`` is the core's only input type and ``JobOutput`` its only output type. The shell starts outputs in the order
given; the docstring of an output names the inputs that answer it; there is exactly one answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.checkpoint import effects as checkpoint_effects
from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream, CompletedCheckpoint, OperatorSubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides, OverridesChange
from ckpt_runtime.checkpoint.events import CoordinatorEvent, TriggerRequested
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import job_effects
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.scheduler.restart_strategies import RestartStrategy

# --- requests


@dataclass(frozen=True, slots=True)
class PatchRequested:
    """FLIP-571: ``overrides`` are merged into those in force; None drops all of them. Answer: a ChangeAnswered."""

    request_id: str
    overrides: CheckpointOverrides | None


@dataclass(frozen=True, slots=True)
class RescaleRequested:
    """Run the job's vertices, all given by id, at other parallelisms. Answer: a ChangeAnswered."""

    request_id: str
    bounds: Mapping[str, ParallelismBounds]


@dataclass(frozen=True, slots=True)
class ConfigurationRequested:
    """FLIP-530: the job is to run ``plan``, which was derived from ``base`` and has its next version.

    Checkpoint settings and ``strategy`` (None: unchanged) take effect once the plan is stored. ``restarts``: the
    current deployment has to end for the change. A different parallelism is applied as in a live rescale. Answer: a
    ChangeAnswered.
    """

    request_id: str
    plan: JobPlan
    base: JobPlan
    restarts: bool
    strategy: RestartStrategy | None = None


@dataclass(frozen=True, slots=True)
class SavepointBeforeCancel:
    """Take a savepoint before the job is cancelled. Other checkpoints resume only if the savepoint fails.

    Answered as ``trigger`` is; the requester then cancels the job.
    """

    trigger: TriggerRequested


@dataclass(frozen=True, slots=True)
class LeadershipLost:
    """Another driver leads the job: this one may no longer change it."""


# --- answers


@dataclass(frozen=True, slots=True)
class AttemptRecorded:
    """Answers RecordAttempt: no later driver assigns this number again."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptNotRecorded:
    """Answers RecordAttempt. ``cause`` fails the attempt."""

    attempt: int
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class OverridesStored:
    """Answers StoreOverrides and SettleOverrides: ``text`` is the stored document, None without overrides."""

    request_id: str
    text: str | None


@dataclass(frozen=True, slots=True)
class OverridesRefused:
    """Answers StoreOverrides: the values are not compatible, and nothing has changed."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """Answers ReserveSlots: including its current slots, the job has ``slots`` for its next deployment."""

    request_id: str
    slots: int


@dataclass(frozen=True, slots=True)
class SlotsNotReserved:
    """Answers ReserveSlots; or, after SlotsReserved, reports that one of these slots was lost."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class PlanStored:
    """Answers StorePlan and SettlePlan: every later driver runs the new plan."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ChangeNotStored:
    """Answers a Store or Settle output: this call changed nothing.

    ``final``: no earlier call changed anything or ever will, because the job is no longer stored or the stored state
    was settled.
    """

    request_id: str
    message: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class ChangeUnknown:
    """Answers a Store or Settle output: the write may have been done."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class ResultStored:
    """Answers StoreResult: no driver will run the job again."""


@dataclass(frozen=True, slots=True)
class ResultNotStored:
    """Answers StoreResult: the result is not stored, or the outcome is unknown."""


# --- outputs


@dataclass(frozen=True, slots=True)
class RestoredState:
    """The state a deployment starts from, by subtask and operator uid, and the subtasks that had finished.

    ``in_flight`` is the data that subtasks process first. If not ``owned``, the user keeps the snapshot: no new
    snapshot may refer to its files.
    """

    checkpoint_id: int
    directory: str
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    finished_vertices: frozenset[str] = frozenset()
    in_flight: Mapping[SubtaskKey, tuple[ChannelStateStream, ...]] = field(default_factory=dict)
    owned: bool = True


@dataclass(frozen=True, slots=True)
class RecordAttempt:
    """Durably record that this attempt number is used. Answer: AttemptRecorded or AttemptNotRecorded."""

    attempt: int


@dataclass(frozen=True, slots=True)
class LimitSources:
    """The sources of the deployed tasks read at most these numbers of rows per second, by their uids; 0 pauses one."""

    rates: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class DeployTasks:
    """Start these subtasks of ``graph``. Each answers TaskRunning, and later TaskFinished, -Canceled or -Failed.

    ``lineage`` is the snapshot that defines the sinks' identities: the restored one, or the last known one.
    ``savepoint_id`` is the number of the user's last savepoint, 0 without one.
    """

    attempt: int
    executions: tuple[ExecutionId, ...]
    graph: JobGraph
    configuration: Configuration
    restored: RestoredState | None
    lineage: CompletedCheckpoint | None
    savepoint_id: int


@dataclass(frozen=True, slots=True)
class RecordFailure:
    """Add a failure to the exception history. ``concurrent``: it occurred while another failure was being handled.

    ``durable``: the job continues, and a later driver has to show the failure.
    """

    cause: FailureInfo
    execution: ExecutionId | None
    concurrent: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class StoreOverrides:
    """Read, modify and write under one lock; ``attempt`` counts from 0, pause before later attempts.

    Answer: OverridesStored, OverridesRefused, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    change: OverridesChange
    attempt: int


@dataclass(frozen=True, slots=True)
class SettleOverrides:
    """Rewrite the stored overrides unchanged, so that no earlier write can take effect later. The pause grows with
    ``attempt``. Answer: OverridesStored, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ReserveSlots:
    """Reserve slots for another deployment while the current one runs: ``count``, or as many as the session can get,
    but at least ``least``. Answer: SlotsReserved or SlotsNotReserved.
    """

    request_id: str
    count: int
    least: int


@dataclass(frozen=True, slots=True)
class ReleaseReserve:
    """Release the reserved slots that are not in use, and stop reserving."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Durably store this graph and the ``own`` configuration of the job, both atomically; ``attempt`` as in
    StoreOverrides.

    Answer: PlanStored, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    graph: JobGraph
    own: OwnConfiguration
    attempt: int


@dataclass(frozen=True, slots=True)
class SettlePlan:
    """Rewrite the stored plan unchanged, as SettleOverrides does. Answer: PlanStored, ChangeNotStored or
    ChangeUnknown."""

    request_id: str
    graph: JobGraph
    own: OwnConfiguration
    attempt: int


class ChangeOutcome(Enum):
    """The outcome of a change, as reported to its sender."""

    APPLIED = "applied"
    BUSY = "another update is in progress"
    STALE = "it is based on a configuration or graph that is not the current one"
    REFUSED = "the values are impossible or inconsistent"
    NOT_NOW = "the state of the job does not allow it"
    NOT_STORED = "nothing has changed"
    UNKNOWN = "it may have been stored, and is applied if it has been"
    JOB_ENDED = "the job has ended"


@dataclass(frozen=True, slots=True)
class ChangeAnswered:
    """Report the outcome to the sender of a change. An APPLIED change is durable and in force."""

    request_id: str
    outcome: ChangeOutcome
    message: str = ""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Store an ending job's result, before the end is reported. Answer: ResultStored or ResultNotStored."""

    ended: job_effects.JobEnded
    attempt: int


JobInput = (
    JobEvent
    | CoordinatorEvent
    | PatchRequested
    | RescaleRequested
    | ConfigurationRequested
    | SavepointBeforeCancel
    | LeadershipLost
    | AttemptRecorded
    | AttemptNotRecorded
    | OverridesStored
    | OverridesRefused
    | SlotsReserved
    | SlotsNotReserved
    | PlanStored
    | ChangeNotStored
    | ChangeUnknown
    | ResultStored
    | ResultNotStored
)
JobOutput = (
    job_effects.StatusChanged
    | job_effects.AcquireSlots
    | job_effects.CancelTasks
    | job_effects.StopCompleted
    | job_effects.StopFailed
    | job_effects.ScheduleRestart
    | job_effects.CancelRestart
    | job_effects.JobEnded
    | checkpoint_effects.Effect
    | RecordAttempt
    | DeployTasks
    | LimitSources
    | RecordFailure
    | StoreOverrides
    | SettleOverrides
    | ReserveSlots
    | ReleaseReserve
    | StorePlan
    | SettlePlan
    | ChangeAnswered
    | StoreResult
)
