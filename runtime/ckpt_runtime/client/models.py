"""Answers of the REST API as plain frozen values, which msgspec reads. They also accept Flink's own answers.

Times are milliseconds since the epoch (-1: not yet), durations milliseconds, sizes bytes, states Flink's names in
upper case. Fields that a newer server adds are ignored. A missing value or one of the wrong type raises a
``ValueError`` that names it; the clients then raise :class:`UnexpectedAnswer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from ckpt_runtime.client.stack_traces import root_message

T = TypeVar("T")
Json = Mapping[str, Any]

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
RETAINS = "cancel-and-retain"
"""The feature of servers that can cancel a job and retain its checkpoints: a session has it, Flink never."""


def read(document: Any, kind: type[T]) -> T:
    """Read the document as a value. Numbers may be given as text: Flink sends ``"NaN"``."""
    return msgspec.convert(document, kind, strict=False)


def reader(kind: type[T], inside: str | None = None) -> Callable[[Any], T]:
    """Make a function that reads a document, or the part of it under the key ``inside``."""
    return lambda document: read(document if inside is None else document[inside], kind)


class ClusterOverview(Struct, frozen=True, rename="kebab"):
    """``/overview``. ``jobs_running`` counts every job that has not ended.

    ``flink_version`` is Flink's own version, or the version of Flink whose REST API a session offers;
    ``ckpt_version`` is the session's version, and empty on Flink.
    """

    slots_total: int
    slots_available: int
    slot_agents: int = field(name="taskmanagers")
    jobs_running: int
    jobs_finished: int
    jobs_cancelled: int
    jobs_failed: int
    flink_version: str = ""
    ckpt_version: str = ""

    @property
    def version(self) -> str:
        """The version to show to users: that of the session, if it is one."""
        return self.ckpt_version or self.flink_version


class EntryPoint(Struct, frozen=True):
    """An entry point of a pipeline: ``name`` is ``module:function``."""

    name: str


class Holder(Struct, frozen=True):
    """The holder of an uploaded pipeline, and since when it holds it."""

    owner: str
    since_ms: int = field(name="since")


class Pipeline(Struct, frozen=True):
    """An uploaded pipeline."""

    id: str
    name: str
    uploaded_at_ms: int = field(name="uploaded")
    entries: tuple[EntryPoint, ...] = field(name="entry", default=())
    holders: tuple[Holder, ...] = ()

    @property
    def entry_points(self) -> tuple[str, ...]:
        """Each as ``module:function``."""
        return tuple(entry.name for entry in self.entries)


class RetiredJobId(Struct, frozen=True):
    """A retired id: no job can be started with it."""

    id: str
    since_ms: int = field(name="since")


class OperatorPreview(Struct, frozen=True, rename="kebab"):
    """An operator with state. ``verdict``: matched, new or dropped."""

    uid: str
    name: str
    verdict: str
    restored_parallelism: int | None = None
    parallelism: int | None = None
    restored_max_parallelism: int | None = None
    max_parallelism: int | None = None


class StatePreview(Struct, frozen=True):
    """A keyed state. ``stored`` and ``wanted`` are the fields of its schema in the snapshot and in the program."""

    operator: str
    state: str
    verdict: str
    stored: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    reason: str | None = None


class RestorePreview(Struct, frozen=True, rename="kebab"):
    """How a snapshot fits a program; ``refusals`` are the reasons why it does not."""

    snapshot: str
    type: str
    format: str
    state_backend: str
    fits: bool
    refusals: tuple[str, ...] = ()
    operators: tuple[OperatorPreview, ...] = ()
    states: tuple[StatePreview, ...] = ()


class PlanPreview(Struct, frozen=True):
    """What a job would run: ``plan`` as the server sends it, and ``restore`` if the job starts from a snapshot."""

    plan: dict[str, Any]
    restore: RestorePreview | None = None
    warnings: tuple[str, ...] = ()


class JobLine(Struct, frozen=True):
    """One job of the list. ``tasks`` counts subtasks by lower-case state, ``total`` included.

    ``lineage`` and ``incarnation`` are None on Flink, and for a job that could not be recovered.
    """

    job_id: str = field(name="jid")
    name: str
    state: str
    start_time_ms: int = field(name="start-time")
    end_time_ms: int = field(name="end-time")
    duration_ms: int = field(name="duration")
    last_modification_ms: int = field(name="last-modification")
    tasks: dict[str, int]
    drill: bool = field(name="restore-drill", default=False)
    lineage: str | None = None
    incarnation: int | None = None


class UpgradeInProgress(Struct, frozen=True, rename="kebab"):
    """An upgrade in progress, which replaces, suspends or resumes a job, and its owner.

    The requests of other owners are refused until ``until_ms``.
    """

    owner: str
    job_id: str
    since_ms: int = field(name="since")
    until_ms: int = field(name="until")
    requester: str | None = None
    snapshot: str | None = None


class IoMetrics(Struct, frozen=True, rename="kebab"):
    """Counters of a vertex or subtask since its present attempt started; ``complete`` once all have reported."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_records: int = 0
    write_records: int = 0
    backpressured_ms: int = field(name="accumulated-backpressured-time", default=0)
    idle_ms: int = field(name="accumulated-idle-time", default=0)
    busy_ms: float = field(name="accumulated-busy-time", default=0.0)
    complete: bool = field(name="read-records-complete", default=False)


class Subtask(Struct, frozen=True, kw_only=True):
    """One subtask of a vertex. ``durations_ms`` says how long its present attempt has been in each state."""

    index: int = field(name="subtask")
    state: str = field(name="status")
    attempt: int
    endpoint: str = ""
    start_time_ms: int = field(name="start-time")
    end_time_ms: int = field(name="end-time")
    durations_ms: dict[str, int] = field(name="status-duration", default_factory=dict)
    io: IoMetrics = field(name="metrics")


class SubtaskTimes(Struct, frozen=True):
    """When the present attempt of a subtask entered each state, 0 for never."""

    index: int = field(name="subtask")
    timestamps_ms: dict[str, int] = field(name="timestamps")


Bounds = tuple[int, int]
"""The lower and the upper bound of a vertex's parallelism: the least the job runs with, and the most it uses."""


class Vertex(Struct, frozen=True):
    """A vertex of the job. ``tasks`` counts subtasks by state; only ``vertex_details`` fills ``subtasks``."""

    id: str
    name: str
    parallelism: int
    max_parallelism: int = field(name="maxParallelism")
    state: str = field(name="status", default="")
    tasks: dict[str, int] = field(default_factory=dict)
    io: IoMetrics = field(name="metrics", default_factory=IoMetrics)
    subtasks: tuple[Subtask, ...] = ()


class JobDetails(Struct, frozen=True):
    """``/jobs/:jobid``. ``timestamps_ms`` says when the job last entered each state, 0 for never.

    ``status_reason`` says why a job that waits for slots has not got them. ``now_ms`` is the server's time.
    """

    job_id: str = field(name="jid")
    name: str
    state: str
    start_time_ms: int = field(name="start-time")
    end_time_ms: int = field(name="end-time")
    duration_ms: int = field(name="duration")
    timestamps_ms: dict[str, int] = field(name="timestamps")
    vertices: tuple[Vertex, ...]
    plan: dict[str, Any]
    drill: bool = field(name="restore-drill", default=False)
    now_ms: int = field(name="now", default=0)
    warnings: tuple[str, ...] = ()
    status_reason: str | None = field(name="status-reason", default=None)
    lineage: str | None = None
    incarnation: int | None = None
    upgrade: UpgradeInProgress | None = None


class JobConfig(Struct, frozen=True, rename="kebab"):
    """``configuration`` and ``version`` are FLIP-530's; on a Flink without FLIP-530 they are empty and None."""

    job_id: str = field(name="jid")
    name: str
    execution_config: dict[str, Any]
    configuration: dict[str, str] = field(default_factory=dict)
    version: int | None = None
    running_version: int | None = None
    changes: tuple[ConfigVersion, ...] = ()
    pipeline_id: str | None = field(name="jarid", default=None)


class ConfigVersion(Struct, frozen=True):
    """A version of a job's configuration: its author, its time (ms since the epoch) and the changed options."""

    version: int
    timestamp: int
    by: str
    options: tuple[str, ...]


class OptionChange(Struct, frozen=True, rename="kebab"):
    """One changed option; a value of None means that it is not set. ``change`` is ``live`` or ``restart``.

    ``hidden_by_override`` is the field of the FLIP-571 override that takes precedence over the option.
    """

    before: str | None
    after: str | None
    change: str
    hidden_by_override: str | None = None


class ConfigChange(Struct, frozen=True, rename="kebab"):
    """What a change of a job's configuration did, or (``dry_run``) would do; empty ``changes`` means nothing."""

    version: int
    restart: bool
    dry_run: bool
    changes: dict[str, OptionChange]


class RemoteFailure(Struct, frozen=True, rename="kebab"):
    """A failure on the server."""

    exception: str = field(name="class")
    stack_trace: str

    @property
    def message(self) -> str:
        """The first line of the trace without the class name."""
        return root_message(self.exception, self.stack_trace)


class ExceptionEntry(Struct, frozen=True):
    """One failure of the job; task fields are None for failures of the job itself."""

    exception: str = field(name="exceptionName")
    stack_trace: str = field(name="stacktrace")
    timestamp_ms: int = field(name="timestamp")
    task_name: str | None = field(name="taskName", default=None)
    endpoint: str | None = None


class ExceptionHistory(Struct, frozen=True):
    """The failures of a job, newest first."""

    entries: tuple[ExceptionEntry, ...]
    truncated: bool


class CheckpointHealth(Struct, frozen=True, rename="kebab"):
    """``success_rate`` (0 to 1) is the rate among the ``ended`` checkpoints in the history; None if there are none."""

    success_rate: float | None
    ended: int
    last_completed_age_ms: int | None = field(name="last-completed-age")


class BackpressureHealth(Struct, frozen=True):
    """The greatest share of time (0 to 1) that a subtask of ``vertex`` could not send."""

    ratio: float
    vertex: str | None


class SlotAgent(Struct, frozen=True, rename="camel"):
    """An entry of ``/taskmanagers``."""

    id: str
    path: str
    free_slots: int = 0


class ThreadInfo(Struct, frozen=True):
    """A thread: ``text`` has its name and its frames, innermost first."""

    name: str = field(name="threadName")
    text: str = field(name="stringifiedThreadInfo")


class JobHealth(Struct, frozen=True):
    """``verdict`` is HEALTHY, DEGRADED or UNHEALTHY; ``reasons`` is empty only for HEALTHY."""

    verdict: str
    reasons: tuple[str, ...]
    state: str
    checkpoints: CheckpointHealth
    restarts: int
    backpressure: BackpressureHealth


class ExecutionResult(Struct, frozen=True, rename="kebab"):
    """``status`` is SUCCEEDED, FAILED, CANCELED or UNKNOWN, and None while the job runs."""

    status: str | None = field(name="application-status", default=None)
    net_runtime_ms: int = field(name="net-runtime", default=0)
    failure: RemoteFailure | None = field(name="failure-cause", default=None)


def read_execution_result(document: Any) -> ExecutionResult:
    """Read the result, which comes with a separate status and is missing until that status is COMPLETED."""
    done = document["status"]["id"] == "COMPLETED"
    return read(document["job-execution-result"], ExecutionResult) if done else ExecutionResult()


class OperationStatus(Struct, frozen=True):
    """An asynchronous operation. A savepoint results in a ``location``, a checkpoint in a ``checkpoint_id``."""

    done: bool
    location: str | None = None
    checkpoint_id: int | None = field(name="checkpointId", default=None)
    failure: RemoteFailure | None = field(name="failureCause", default=None)


def read_operation_status(document: Any) -> OperationStatus:
    """Read the status; Flink uses different field names for the failure of a checkpoint and of a savepoint."""
    done = document["status"]["id"] == "COMPLETED"
    outcome = (done and document.get("operation")) or {}
    failure = outcome.get("failure-cause") or outcome.get("failureCause")
    return read({**outcome, "done": done, "failureCause": failure}, OperationStatus)


class SubtaskPressure(Struct, frozen=True):
    """Shares of time in the last measuring window, each in 0..1."""

    index: int = field(name="subtask")
    backpressured: float = field(name="ratio")
    idle: float = field(name="idleRatio")
    busy: float = field(name="busyRatio")


class Backpressure(Struct, frozen=True):
    """``level`` is ok, low or high, and None before the first measurement."""

    level: str | None = field(name="backpressureLevel", default=None)
    measured_at_ms: int = field(name="end-timestamp", default=-1)
    subtasks: tuple[SubtaskPressure, ...] = ()


def read_backpressure(document: Any) -> Backpressure:
    """Read the backpressure; before the first measurement the document contains none."""
    return read(document, Backpressure) if document["status"] == "ok" else Backpressure()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to start a job of an uploaded pipeline; ``claim_mode`` is NO_CLAIM or CLAIM.

    ``like_job``: options not given here are taken from that job, which may have ended. ``fork``: the job writes to
    other places than the job whose snapshot it starts from, and may run beside it. Flink has neither.
    """

    entry_point: str | None = None
    arguments: tuple[str, ...] = ()
    parallelism: int | None = None
    configuration: Mapping[str, str] = dataclass_field(default_factory=dict)
    savepoint_path: str | None = None
    allow_non_restored_state: bool = False
    claim_mode: str = "NO_CLAIM"
    like_job: str | None = None
    fork: bool = False
