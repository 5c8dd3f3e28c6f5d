"""Jobs: lists, details, vertices, plans, failures, results, health, and what starts and upgrades them.

Flink sends whole traces, of eight kilobytes and more, as error messages, and nests causes in each other. So
:func:`root_cause_line` finds the line that says what went wrong: Java's innermost cause, else the first line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from msgspec import Struct, to_builtins

from ckpt_runtime.contract import spelling
from ckpt_runtime.contract.spelling import always

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
RETAINS = "cancel-and-retain"
"""The feature of servers that can cancel a job and retain its checkpoints: a session has it, Flink never."""

# --- lists


class JobState(Struct, frozen=True):
    """An entry of ``/jobs``."""

    id: str
    status: str


class JobStates(Struct, frozen=True):
    """``/jobs``."""

    jobs: tuple[JobState, ...]


class JobStatusAnswer(Struct, frozen=True):
    """``/jobs/:jobid/status``."""

    status: str


class JobLine(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.JOB_LINE):
    """One job of the list. ``tasks`` counts subtasks by lower-case state, ``total`` included.

    ``lineage`` and ``incarnation`` are None on Flink, and for a job that could not be recovered.
    """

    job_id: str
    name: str
    job_type: str = always("STREAMING")
    scheduler_type: str | None = always("Default")
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    state: str
    last_modification_ms: int
    tasks: dict[str, int]
    pending_operators: int = always(0)
    drill: bool = always(False)
    lineage: str | None = None
    incarnation: int | None = None


class JobLines(Struct, frozen=True):
    """``/jobs/overview``."""

    jobs: tuple[JobLine, ...]


class Application(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """An entry of ``/applications/overview``: a job as an application with the same id. ``jobs`` counts by state."""

    id: str
    name: str
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    status: str
    jobs: dict[str, int]


class Applications(Struct, frozen=True):
    """``/applications/overview``."""

    applications: tuple[Application, ...]


class ApplicationDetails(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """``/applications/:applicationid``, with the times at which it entered its states, 0 for never."""

    id: str
    name: str
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    status: str
    timestamps: dict[str, int]
    jobs: tuple[JobLine, ...]


# --- vertices and subtasks


class IoMetrics(Struct, frozen=True, kw_only=True, rename=spelling.IO_METRICS):
    """Counters of a vertex or subtask since its present attempt started.

    A counter is complete once all subtasks have reported it; ``complete`` is that flag for ``read_records``.
    """

    read_bytes: int = 0
    write_bytes: int = 0
    read_records: int = 0
    write_records: int = 0
    backpressured_ms: int = 0
    idle_ms: int = 0
    busy_ms: float = 0.0
    read_bytes_complete: bool = False
    write_bytes_complete: bool = False
    complete: bool = False
    write_records_complete: bool = False


class Distribution(Struct, frozen=True):
    """How a value is distributed over subtasks: nearest-rank quantiles; all zero without subtasks."""

    min: int
    max: int
    avg: int
    sum: int
    median: int
    p25: int
    p75: int
    p95: int


class Aggregated(Struct, frozen=True, rename="kebab"):
    """Metrics, and durations of states in milliseconds, over subtasks."""

    metrics: dict[str, Distribution]
    status_duration: dict[str, Distribution]


class Subtask(Struct, frozen=True, kw_only=True, rename=spelling.SUBTASK):
    """One subtask of a vertex. ``durations_ms`` says how long its present attempt has been in each state."""

    index: int
    state: str
    attempt: int
    endpoint: str = ""
    start_time_ms: int
    end_time_ms: int
    duration_ms: int = -1
    io: IoMetrics
    slot_agent_id: str = ""
    durations_ms: dict[str, int] = {}
    started_at_ms: int = -1


class Vertex(Struct, frozen=True, kw_only=True, rename=spelling.VERTEX):
    """A vertex of the job. ``tasks`` counts subtasks by state. All vertices share one slot sharing group."""

    id: str
    slot_sharing_group: str = "0" * 32
    name: str
    max_parallelism: int
    parallelism: int
    state: str
    start_time_ms: int = -1
    end_time_ms: int = -1
    duration_ms: int = -1
    tasks: dict[str, int] = {}
    io: IoMetrics = IoMetrics()


class VertexDetails(Struct, frozen=True, kw_only=True, rename=spelling.VERTEX):
    """``/jobs/:jobid/vertices/:vertexid``. ``now_ms`` is the server's time."""

    id: str
    name: str
    parallelism: int
    max_parallelism: int
    now_ms: int = 0
    subtasks: tuple[Subtask, ...]
    aggregated: Aggregated = Aggregated({}, {})


class SubtaskTimes(Struct, frozen=True, kw_only=True, rename=spelling.SUBTASK_TIMES):
    """When the present attempt of a subtask entered each state, 0 for never."""

    index: int
    endpoint: str = ""
    duration_ms: int = -1
    timestamps_ms: dict[str, int]


class VertexTimes(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """``/jobs/:jobid/vertices/:vertexid/subtasktimes``."""

    id: str
    name: str
    now_ms: int
    subtasks: tuple[SubtaskTimes, ...]


class VertexTaskManager(Struct, frozen=True, kw_only=True, rename=spelling.VERTEX_TASK_MANAGER):
    """The subtasks of a vertex that one slot agent runs, taken together."""

    host: str
    endpoint: str
    slot_agent_id: str
    state: str
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    io: IoMetrics
    status_counts: dict[str, int]
    aggregated: Aggregated


class VertexTaskManagers(Struct, frozen=True, kw_only=True):
    """``/jobs/:jobid/vertices/:vertexid/taskmanagers``."""

    id: str
    name: str
    now: int
    taskmanagers: tuple[VertexTaskManager, ...]


class SubtaskPressure(Struct, frozen=True, kw_only=True, rename=spelling.SUBTASK_PRESSURE):
    """Shares of time in the last measuring window, each in 0..1."""

    index: int
    attempt: int = 0
    level: str = ""
    level_in_kebab: str = ""
    backpressured: float
    idle: float
    busy: float


class Backpressure(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.BACKPRESSURE):
    """``level`` is ok, low or high, and None before the first measurement, when ``status`` is ``deprecated``."""

    status: str
    level: str | None = None
    level_in_kebab: str | None = None
    measured_at_ms: int = -1
    subtasks: tuple[SubtaskPressure, ...] = ()


class FlameGraphNode(Struct, frozen=True):
    """A function with the number of samples in which it was on the stack, and the functions that it called."""

    name: str
    value: int
    children: tuple[FlameGraphNode, ...] = ()


class FlameGraph(Struct, frozen=True, rename=spelling.FLAME_GRAPH):
    """The functions in which the subtasks of a vertex spend their time. For a vertex that has ended, the fields are -1
    and None.
    """

    sampled_at_ms: int
    data: FlameGraphNode | None


class VertexAccumulators(Struct, frozen=True, rename="kebab"):
    """There are no accumulators."""

    id: str
    user_accumulators: tuple[str, ...] = ()


class SubtaskAccumulators(Struct, frozen=True):
    """There are no accumulators."""

    id: str
    parallelism: int
    subtasks: tuple[str, ...] = ()


class JobAccumulators(Struct, frozen=True, rename="kebab"):
    """There are no accumulators."""

    job_accumulators: tuple[str, ...] = ()
    user_task_accumulators: tuple[str, ...] = ()
    serialized_user_task_accumulators: dict[str, str] = {}


# --- plans


class PlanInput(Struct, frozen=True):
    """An input of a vertex: the vertex that it comes from, and how rows are distributed."""

    id: str
    num: int
    exchange: str
    ship_strategy: str


class PlanNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A vertex of the plan. Sources have no ``inputs``."""

    id: str
    operator: str = always("")
    parallelism: int
    operator_strategy: str = always("")
    description: str
    optimizer_properties: dict[str, Any] = always({})
    inputs: tuple[PlanInput, ...] = ()


class Plan(Struct, frozen=True, kw_only=True, rename=spelling.PLAN):
    """The vertices of a job, sinks first, each with its inputs."""

    job_id: str = ""
    name: str = ""
    type: str = "STREAMING"
    nodes: tuple[PlanNode, ...] = ()

    def flat(self) -> dict[str, Any]:
        """The plan for scripts, spelled as on the wire: tools that draw Flink's plans read it."""
        document: dict[str, Any] = to_builtins(self)
        return document


class PlanAnswer(Struct, frozen=True):
    """``/jobs/:jobid/plan``."""

    plan: Plan


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


class PlanPreview(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The plan of a job, and ``restore`` if the job starts from a snapshot.

    ``explained`` has the plans that the program shows by ``explain()``.
    """

    plan: Plan
    warnings: tuple[str, ...] = always(())
    explained: tuple[str, ...] = ()
    restore: RestorePreview | None = None


# --- one job


class UpgradeInProgress(Struct, frozen=True, kw_only=True, rename=spelling.kebab()):
    """An upgrade in progress, which replaces, suspends or resumes a job, and its owner.

    The requests of other owners are refused until ``until_ms``.
    """

    owner: str
    requester: str | None = None
    job_id: str
    since_ms: int
    until_ms: int
    snapshot: str | None = None


class JobDetails(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.JOB_DETAILS):
    """``/jobs/:jobid``. ``timestamps`` says when the job last entered each state, 0 for never.

    ``status_reason`` is the reason why a waiting job has no slots, or why a job has failed. ``now_ms`` is the
    server's time. ``explained`` has the plans that the program showed by ``explain()``.
    """

    job_id: str
    application_id: str | None = always("")
    name: str
    is_stoppable: bool = always(False)
    state: str
    job_type: str = always("STREAMING")
    scheduler_type: str | None = always("Default")
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    max_parallelism: int = always(-1)
    now_ms: int = always(0)
    timestamps_ms: dict[str, int]
    vertices: tuple[Vertex, ...]
    status_counts: dict[str, int] = always({})
    plan: Plan = always(Plan())
    pending_operators: int = always(0)
    drill: bool = always(False)
    status_reason: str | None = always(None)
    lineage: str | None = None
    incarnation: int | None = None
    upgrade: UpgradeInProgress | None = always(None)
    warnings: tuple[str, ...] = always(())
    explained: tuple[str, ...] = ()


class StartedJob(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.STARTED_JOB):
    """The answer to a submission. Flink's answer has no warnings."""

    job_id: str
    application_id: str
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to start a job of an uploaded pipeline; ``claim_mode`` is NO_CLAIM or CLAIM.

    ``like_job``: options not given here are taken from that job, which may have ended. ``fork``: the job writes to
    other places than the job whose snapshot it starts from, and may run beside it. ``source_positions``: where sources
    continue in place of their positions in the snapshot, by uid. Flink has none of these options.
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
    source_positions: Mapping[str, str] = dataclass_field(default_factory=dict)


# --- failures, results, health


class RemoteFailure(Struct, frozen=True, kw_only=True, rename=spelling.FAILURE):
    """A failure on the server. Flink's command line needs the bytes of ``serialized_throwable``."""

    exception: str
    stack_trace: str
    serialized_throwable: str = ""

    @property
    def message(self) -> str:
        """The first line of the trace without the class name."""
        return root_message(self.exception, self.stack_trace)


class ExceptionEntry(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.EXCEPTION):
    """One failure of the job; task fields are None for failures of the job itself.

    ``concurrent_exceptions`` are failures that occurred with it; their own lists are None.
    """

    exception: str
    stack_trace: str
    timestamp_ms: int
    failure_labels: dict[str, str] = always({})
    task_name: str | None = None
    endpoint: str | None = None
    slot_agent_id: str | None = None
    concurrent_exceptions: tuple[ExceptionEntry, ...] | None = None


class ExceptionHistory(Struct, frozen=True):
    """The failures of a job, newest first; ``truncated`` if older ones were left off."""

    entries: tuple[ExceptionEntry, ...]
    truncated: bool


class Exceptions(Struct, frozen=True, rename=spelling.EXCEPTIONS):
    """``/jobs/:jobid/exceptions``."""

    history: ExceptionHistory


class ProgressReports(Struct, frozen=True):
    """``/jobs/:jobid/progress``: reports of the progress of queries, as Spark's ``recentProgress`` has them in JSON."""

    progress: tuple[dict[str, Any], ...]


class QueueStatus(Struct, frozen=True):
    """``id`` is IN_PROGRESS or COMPLETED."""

    id: str

    @property
    def done(self) -> bool:
        return self.id == "COMPLETED"


COMPLETED = QueueStatus("COMPLETED")
IN_PROGRESS = QueueStatus("IN_PROGRESS")


class JobResult(Struct, frozen=True, kw_only=True, omit_defaults=True, rename=spelling.JOB_RESULT):
    """How a job ended. ``status`` is SUCCEEDED, FAILED, CANCELED or UNKNOWN."""

    job_id: str = always("")
    name: str = always("")
    status: str
    accumulator_results: dict[str, Any] = always({})
    net_runtime_ms: int
    application_id: str | None = always("")
    start_time_ms: int = always(-1)
    end_time_ms: int = always(-1)
    failure: RemoteFailure | None = None


class ExecutionResult(Struct, frozen=True, rename=spelling.EXECUTION_RESULT):
    """``/jobs/:jobid/execution-result``. The result is None while the job runs, as are the properties made of it."""

    queue: QueueStatus
    result: JobResult | None = None

    @property
    def status(self) -> str | None:
        return None if self.result is None else self.result.status

    @property
    def net_runtime_ms(self) -> int:
        return 0 if self.result is None else self.result.net_runtime_ms

    @property
    def failure(self) -> RemoteFailure | None:
        return None if self.result is None else self.result.failure

    def flat(self) -> dict[str, Any]:
        """The result for scripts, without the nesting."""
        return {"status": self.status, "net_runtime_ms": self.net_runtime_ms, "failure": self.failure}


class CheckpointHealth(Struct, frozen=True, rename=spelling.CHECKPOINT_HEALTH):
    """``success_rate`` (0 to 1) is the rate among the ``ended`` checkpoints in the history, without savepoints; None if
    there are none.
    """

    success_rate: float | None
    ended: int
    last_completed_age_ms: int | None


class BackpressureHealth(Struct, frozen=True):
    """The greatest share of time (0 to 1) that a subtask of ``vertex`` could not send."""

    ratio: float
    vertex: str | None


class JobHealth(Struct, frozen=True, kw_only=True):
    """``verdict`` is HEALTHY, DEGRADED or UNHEALTHY; ``reasons`` is empty only for HEALTHY."""

    verdict: str
    reasons: tuple[str, ...]
    state: str
    checkpoints: CheckpointHealth
    restarts: int
    backpressure: BackpressureHealth


_CAUSE = "Caused by: "
_ENVELOPE = ("<Exception on server side:", "End of exception on server side>")
_WRAPPERS = (
    "java.util.concurrent.CompletionException",
    "java.util.concurrent.ExecutionException",
    "org.apache.flink.runtime.rest.NotFoundException",
)
_MAX_CHARS = 1000


def root_cause_line(trace: str) -> str:
    """``Class: message`` of the root cause, the class without its package; empty for an empty trace."""
    lines = [line.strip() for line in trace.strip().splitlines()]
    lines = [line for line in lines if line and line not in _ENVELOPE]
    causes = [line.removeprefix(_CAUSE) for line in lines if line.startswith(_CAUSE)]
    line = causes[-1] if causes else "".join(lines[:1])
    name, separator, message = line.partition(": ")
    if separator and name in _WRAPPERS:
        return root_cause_line(message)
    short = f"{_without_package(name)}{separator}{message}"
    return short if len(short) <= _MAX_CHARS else f"{short[:_MAX_CHARS]}…"


def root_message(exception: str, trace: str) -> str:
    """Like :func:`root_cause_line`, without the class; ``exception`` if the trace is empty."""
    line = root_cause_line(trace) or exception
    name, separator, message = line.partition(": ")
    return message if separator and " " not in name else line


def _without_package(name: str) -> str:
    """Strip the package of a Java class name; other texts stay unchanged."""
    is_java = name.startswith(("java.", "javax.", "org.", "com.", "scala.", "akka.")) and " " not in name
    return name.rpartition(".")[2] if is_java else name
