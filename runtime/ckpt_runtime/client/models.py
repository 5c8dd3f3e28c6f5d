"""Answers of the REST API as plain frozen values. They accept Flink's own answers too.

Times are milliseconds since the epoch (-1: not yet), durations milliseconds, sizes bytes, states Flink's names in
upper case. Every ``from_json`` raises ``KeyError``, ``TypeError`` or ``ValueError`` for a foreign document; the
clients turn that into :class:`UnexpectedAnswer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_runtime.client.stack_traces import root_message

Json = Mapping[str, Any]

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})
PERIODIC_OFF = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ClusterOverview:
    """``/overview``. ``jobs_running`` counts every job that has not ended."""

    slots_total: int
    slots_available: int
    slot_agents: int
    jobs_running: int
    jobs_finished: int
    jobs_cancelled: int
    jobs_failed: int
    version: str

    @classmethod
    def from_json(cls, document: Json) -> ClusterOverview:
        return cls(
            slots_total=document["slots-total"],
            slots_available=document["slots-available"],
            slot_agents=document["taskmanagers"],
            jobs_running=document["jobs-running"],
            jobs_finished=document["jobs-finished"],
            jobs_cancelled=document["jobs-cancelled"],
            jobs_failed=document["jobs-failed"],
            version=document.get("flink-version", ""),
        )


@dataclass(frozen=True, slots=True)
class Pipeline:
    """An uploaded pipeline; ``entry_points`` are ``module:function``."""

    id: str
    name: str
    uploaded_at_ms: int
    entry_points: tuple[str, ...]

    @classmethod
    def from_json(cls, document: Json) -> Pipeline:
        entries = tuple(entry["name"] for entry in document.get("entry") or ())
        return cls(document["id"], document["name"], document["uploaded"], entries)


@dataclass(frozen=True, slots=True)
class JobLine:
    """One job of the list. ``tasks`` counts subtasks by lower-case state, ``total`` included."""

    job_id: str
    name: str
    state: str
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    last_modification_ms: int
    tasks: Mapping[str, int]

    @classmethod
    def from_json(cls, document: Json) -> JobLine:
        return cls(
            job_id=document["jid"],
            name=document["name"],
            state=document["state"],
            start_time_ms=document["start-time"],
            end_time_ms=document["end-time"],
            duration_ms=document["duration"],
            last_modification_ms=document["last-modification"],
            tasks=dict(document["tasks"]),
        )


@dataclass(frozen=True, slots=True)
class IoMetrics:
    """Counters of a vertex or subtask since its present attempt started; ``complete`` once all have reported."""

    read_bytes: int = 0
    write_bytes: int = 0
    read_records: int = 0
    write_records: int = 0
    backpressured_ms: int = 0
    idle_ms: int = 0
    busy_ms: float = 0.0
    complete: bool = False

    @classmethod
    def from_json(cls, document: Json) -> IoMetrics:
        busy = document.get("accumulated-busy-time", 0.0)
        return cls(
            read_bytes=document["read-bytes"],
            write_bytes=document["write-bytes"],
            read_records=document["read-records"],
            write_records=document["write-records"],
            backpressured_ms=document.get("accumulated-backpressured-time", 0),
            idle_ms=document.get("accumulated-idle-time", 0),
            busy_ms=float(busy),
            complete=document.get("read-records-complete", False),
        )


@dataclass(frozen=True, slots=True)
class Subtask:
    """One subtask of a vertex."""

    index: int
    state: str
    attempt: int
    endpoint: str
    start_time_ms: int
    end_time_ms: int
    io: IoMetrics

    @classmethod
    def from_json(cls, document: Json) -> Subtask:
        return cls(
            index=document["subtask"],
            state=document["status"],
            attempt=document["attempt"],
            endpoint=document.get("endpoint") or "",
            start_time_ms=document["start-time"],
            end_time_ms=document["end-time"],
            io=IoMetrics.from_json(document["metrics"]),
        )


@dataclass(frozen=True, slots=True)
class Vertex:
    """A vertex of the job. ``tasks`` counts subtasks by state; ``subtasks`` is filled by ``vertex_details`` alone."""

    id: str
    name: str
    parallelism: int
    max_parallelism: int
    state: str
    tasks: Mapping[str, int]
    io: IoMetrics
    subtasks: tuple[Subtask, ...] = ()

    @classmethod
    def from_json(cls, document: Json) -> Vertex:
        metrics = document.get("metrics")
        return cls(
            id=document["id"],
            name=document["name"],
            parallelism=document["parallelism"],
            max_parallelism=document["maxParallelism"],
            state=document.get("status", ""),
            tasks=dict(document.get("tasks") or {}),
            io=IoMetrics() if metrics is None else IoMetrics.from_json(metrics),
            subtasks=tuple(Subtask.from_json(item) for item in document.get("subtasks") or ()),
        )


@dataclass(frozen=True, slots=True)
class JobDetails:
    """``/jobs/:jobid``. ``timestamps_ms`` says when each state was entered last, 0 for never."""

    job_id: str
    name: str
    state: str
    start_time_ms: int
    end_time_ms: int
    duration_ms: int
    timestamps_ms: Mapping[str, int]
    vertices: tuple[Vertex, ...]
    plan: Json

    @classmethod
    def from_json(cls, document: Json) -> JobDetails:
        return cls(
            job_id=document["jid"],
            name=document["name"],
            state=document["state"],
            start_time_ms=document["start-time"],
            end_time_ms=document["end-time"],
            duration_ms=document["duration"],
            timestamps_ms=dict(document["timestamps"]),
            vertices=tuple(Vertex.from_json(vertex) for vertex in document["vertices"]),
            plan=document["plan"],
        )


@dataclass(frozen=True, slots=True)
class JobConfig:
    """``configuration`` and ``version`` are FLIP-530's; a Flink without it gives an empty one and None."""

    job_id: str
    name: str
    execution_config: Json
    configuration: Mapping[str, str]
    version: int | None

    @classmethod
    def from_json(cls, document: Json) -> JobConfig:
        return cls(
            job_id=document["jid"],
            name=document["name"],
            execution_config=document["execution-config"],
            configuration=dict(document.get("configuration") or {}),
            version=document.get("version"),
        )


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """A failure on the server; ``message`` is its first line without the class name."""

    exception: str
    message: str
    stack_trace: str

    @classmethod
    def from_json(cls, document: Json) -> RemoteFailure:
        exception, trace = document["class"], document["stack-trace"]
        return cls(exception, root_message(exception, trace), trace)


@dataclass(frozen=True, slots=True)
class ExceptionEntry:
    """One failure of the job; task fields are None for failures of the job itself."""

    exception: str
    stack_trace: str
    timestamp_ms: int
    task_name: str | None
    endpoint: str | None

    @classmethod
    def from_json(cls, document: Json) -> ExceptionEntry:
        return cls(
            exception=document["exceptionName"],
            stack_trace=document["stacktrace"],
            timestamp_ms=document["timestamp"],
            task_name=document.get("taskName"),
            endpoint=document.get("endpoint"),
        )


@dataclass(frozen=True, slots=True)
class ExceptionHistory:
    """Newest first."""

    entries: tuple[ExceptionEntry, ...]
    truncated: bool

    @classmethod
    def from_json(cls, document: Json) -> ExceptionHistory:
        history = document["exceptionHistory"]
        return cls(tuple(ExceptionEntry.from_json(entry) for entry in history["entries"]), history["truncated"])


@dataclass(frozen=True, slots=True)
class ExecutionResult:
    """``status`` is SUCCEEDED, FAILED, CANCELED or UNKNOWN, and None while the job runs."""

    status: str | None
    net_runtime_ms: int = 0
    failure: RemoteFailure | None = None

    @classmethod
    def from_json(cls, document: Json) -> ExecutionResult:
        if document["status"]["id"] != "COMPLETED":
            return cls(None)
        result = document["job-execution-result"]
        cause = result.get("failure-cause")
        return cls(
            status=result["application-status"],
            net_runtime_ms=result["net-runtime"],
            failure=None if cause is None else RemoteFailure.from_json(cause),
        )


@dataclass(frozen=True, slots=True)
class OperationStatus:
    """An asynchronous operation. ``location`` is a savepoint's, ``checkpoint_id`` a checkpoint's result."""

    done: bool
    location: str | None = None
    checkpoint_id: int | None = None
    failure: RemoteFailure | None = None

    @classmethod
    def from_json(cls, document: Json) -> OperationStatus:
        if document["status"]["id"] != "COMPLETED":
            return cls(done=False)
        outcome = document.get("operation") or {}
        cause = outcome.get("failure-cause") or outcome.get("failureCause")
        return cls(
            done=True,
            location=outcome.get("location"),
            checkpoint_id=outcome.get("checkpointId"),
            failure=None if cause is None else RemoteFailure.from_json(cause),
        )


@dataclass(frozen=True, slots=True)
class SubtaskPressure:
    """Shares of the last measuring window, each in 0..1."""

    index: int
    backpressured: float
    idle: float
    busy: float


@dataclass(frozen=True, slots=True)
class Backpressure:
    """``level`` is ok, low or high, and None before the first measurement."""

    level: str | None
    measured_at_ms: int = -1
    subtasks: tuple[SubtaskPressure, ...] = ()

    @classmethod
    def from_json(cls, document: Json) -> Backpressure:
        if document["status"] != "ok":
            return cls(None)
        subtasks = tuple(
            SubtaskPressure(item["subtask"], float(item["ratio"]), float(item["idleRatio"]), float(item["busyRatio"]))
            for item in document["subtasks"]
        )
        return cls(document["backpressureLevel"], document["end-timestamp"], subtasks)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How to start a job of an uploaded pipeline; ``claim_mode`` is NO_CLAIM or CLAIM."""

    entry_point: str | None = None
    arguments: tuple[str, ...] = ()
    parallelism: int | None = None
    configuration: Mapping[str, str] = field(default_factory=dict)
    savepoint_path: str | None = None
    allow_non_restored_state: bool = False
    claim_mode: str = "NO_CLAIM"
