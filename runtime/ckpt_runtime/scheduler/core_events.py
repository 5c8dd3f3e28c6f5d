"""What enters a job core beside the events of its two machines, and what leaves it beside their effects. Values only.

``JobInput`` is the core's one input type and ``JobOutput`` its one output type. The shell starts outputs in the order
given; the docstring of an output names the inputs that answer it, exactly one of which comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.checkpoint import effects as checkpoint_effects
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.events import CoordinatorEvent, TriggerRequested
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.checkpoint.state_handles import ChannelStateStream, OperatorSubtaskState
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.own_configuration import OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import job_effects
from ckpt_runtime.scheduler.job_events import FailureInfo, JobEvent
from ckpt_runtime.scheduler.job_plan import JobPlan
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.scheduler.restart_strategies import RestartStrategy

# --- wishes


@dataclass(frozen=True, slots=True)
class PatchRequested:
    """FLIP-571: ``overrides`` are merged into those in force; None drops all of them. Answer: a ChangeAnswered."""

    request_id: str
    overrides: CheckpointOverrides | None


@dataclass(frozen=True, slots=True)
class RescaleRequested:
    """The job's vertices, all of them by id, are to run at other parallelisms. Answer: a ChangeAnswered."""

    request_id: str
    bounds: Mapping[str, ParallelismBounds]


@dataclass(frozen=True, slots=True)
class ConfigurationRequested:
    """FLIP-530: the job is to run ``plan``, which was made of ``base`` and has its next version.

    Settings of checkpoints hold once it is stored, as does ``strategy``, None for the same one. ``restarts``: the
    present deployment has to end for it. A parallelism that differs is that of a live rescale.
    Answer: a ChangeAnswered.
    """

    request_id: str
    plan: JobPlan
    base: JobPlan
    restarts: bool
    strategy: RestartStrategy | None = None


@dataclass(frozen=True, slots=True)
class SavepointBeforeCancel:
    """A savepoint, behind which the job is cancelled: until then, or its failure, no checkpoint commits anything.

    Answered as ``trigger`` is; who asked cancels.
    """

    trigger: TriggerRequested


@dataclass(frozen=True, slots=True)
class LeadershipLost:
    """Another driver leads the job: nothing of it may be changed here any more."""


# --- answers


@dataclass(frozen=True, slots=True)
class AttemptRecorded:
    """Answers RecordAttempt: no later driver gives this number again."""

    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptNotRecorded:
    """Answers RecordAttempt. ``cause`` fails the attempt."""

    attempt: int
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class OverridesStored:
    """Answers StoreOverrides and SettleOverrides: ``text`` is what is stored now, None without any override."""

    request_id: str
    text: str | None


@dataclass(frozen=True, slots=True)
class OverridesRefused:
    """Answers StoreOverrides: the values do not fit together, and nothing has changed."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class SlotsReserved:
    """Answers ReserveSlots: with those that it holds, the job has ``slots`` for its next deployment."""

    request_id: str
    slots: int


@dataclass(frozen=True, slots=True)
class SlotsNotReserved:
    """Answers ReserveSlots; or, after SlotsReserved, one of those slots was lost."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class PlanStored:
    """Answers StorePlan and SettlePlan: every later driver runs that plan."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ChangeNotStored:
    """Answers orders to store or settle: this call changed nothing.

    ``final``: no earlier one has or will; the job is stored no more, or what is stored was settled.
    """

    request_id: str
    message: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class ChangeUnknown:
    """Answers orders to store or settle: it may have been done."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class ResultStored:
    """Answers StoreResult: no driver will run the job again."""


@dataclass(frozen=True, slots=True)
class ResultNotStored:
    """Answers StoreResult: it is not there, or that is unknown."""


# --- outputs


@dataclass(frozen=True, slots=True)
class RestoredState:
    """What a deployment starts from: state by subtask and operator uid, and the subtasks that had finished.

    ``in_flight`` is what subtasks have to process first. Without ``owned`` the snapshot stays the user's: nothing new
    may refer to its files.
    """

    checkpoint_id: int
    directory: str
    states: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    finished_vertices: frozenset[str] = frozenset()
    in_flight: Mapping[SubtaskKey, tuple[ChannelStateStream, ...]] = field(default_factory=dict)
    owned: bool = True


@dataclass(frozen=True, slots=True)
class RecordAttempt:
    """Make it durable that this number is used up. Answer: AttemptRecorded or AttemptNotRecorded."""

    attempt: int


@dataclass(frozen=True, slots=True)
class DeployTasks:
    """Start these subtasks of ``graph``. Each answers TaskRunning, and later TaskFinished, -Canceled or -Failed.

    ``lineage`` is the snapshot that says who the sinks are: the restored one, or the last that was known.
    ``savepoint_id`` is the number of the last savepoint that a user has, 0 without one.
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
    """Put a failure into the exception history. ``concurrent``: it came while another one was being dealt with.

    ``durable``: the job goes on, and a later driver has to show it.
    """

    cause: FailureInfo
    execution: ExecutionId | None
    concurrent: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class OverridesChange:
    """What a patch makes of the stored overrides, whatever they are by then."""

    overrides: CheckpointOverrides | None
    settings: CheckpointConfiguration

    def __call__(self, text: str | None) -> str | None:
        """Returns what is to be stored. Raises CheckpointConfigurationError when the result could not be used.

        Nothing that would make the next start of the job fail is ever stored.
        """
        known = CheckpointOverrides.from_document(text)
        overrides = CheckpointOverrides() if self.overrides is None else known.merged_with(self.overrides)
        overrides.applied_to(self.settings)
        return overrides.to_document() if overrides.given else None


@dataclass(frozen=True, slots=True)
class StoreOverrides:
    """Fetch, modify and write under one lock; ``attempt`` counts from 0, pause before later ones.

    Answer: OverridesStored, OverridesRefused, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    change: OverridesChange
    attempt: int


@dataclass(frozen=True, slots=True)
class SettleOverrides:
    """Write what is stored again as it is, so that no earlier write can take effect any more; pause longer with growing
    ``attempt``. Answer: OverridesStored, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class ReserveSlots:
    """Get the slots of another deployment while the present one runs: ``count``, or as many as the session can have,
    ``least`` at least. Answer: SlotsReserved or SlotsNotReserved.
    """

    request_id: str
    count: int
    least: int


@dataclass(frozen=True, slots=True)
class ReleaseReserve:
    """Give back what was reserved and is not in use, and reserve nothing any more."""


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Make it durable that the job runs this graph with its ``own`` configuration, both at once; ``attempt`` as in
    StoreOverrides.

    Answer: PlanStored, ChangeNotStored or ChangeUnknown.
    """

    request_id: str
    graph: JobGraph
    own: OwnConfiguration
    attempt: int


@dataclass(frozen=True, slots=True)
class SettlePlan:
    """As SettleOverrides. Answer: PlanStored if both are what is stored, else ChangeNotStored or ChangeUnknown."""

    request_id: str
    graph: JobGraph
    own: OwnConfiguration
    attempt: int


class ChangeOutcome(Enum):
    """What became of a change, as far as its sender can be told."""

    APPLIED = "applied"
    BUSY = "another update is in progress"
    STALE = "it was made of a configuration or graph that is not the present one"
    REFUSED = "the values are not possible, or do not fit together"
    NOT_NOW = "the state of the job does not allow it"
    NOT_STORED = "nothing has changed"
    UNKNOWN = "it may have been stored, and is applied if it has been"
    JOB_ENDED = "the job has ended"


@dataclass(frozen=True, slots=True)
class ChangeAnswered:
    """Tell the sender of a change. What is APPLIED is durable and in force."""

    request_id: str
    outcome: ChangeOutcome
    message: str = ""


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Store the result of a job that ends. Nobody hears of the end before. Pause longer with growing ``attempt``.

    Answer: ResultStored or ResultNotStored.
    """

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
