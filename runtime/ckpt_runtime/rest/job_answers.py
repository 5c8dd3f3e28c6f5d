"""Fills the contract's structs about jobs, vertices and subtasks from the engine's values. Pure, without a clock.

Flink's client reads a failed operation's ``serialized-throwable`` as a Java object stream that holds an
``org.apache.flink.util.SerializedThrowable``. That stream (Java Object Serialization protocol 5) is built from
texts here, just enough for Flink's command line to print a failure. Nothing in the project reads such streams.
"""

from __future__ import annotations

import struct
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import structs

from ckpt_runtime.contract import jobs as contract
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.flame_graphs import StackSamples
from ckpt_runtime.jobmaster.gateway_values import (
    NOT_YET,
    ExceptionEntry,
    ExecutionResult,
    ExecutionState,
    JobDetails,
    JobOverview,
    SubtaskDetails,
    VertexDetails,
)
from ckpt_runtime.jobmaster.planning import PlanPreview
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.ha_store import HeldUpgrade

_RESULTS = {JobStatus.FINISHED: "SUCCEEDED", JobStatus.FAILED: "FAILED", JobStatus.CANCELED: "CANCELED"}
_APPLICATION_STATES = ("CREATED", "RUNNING", "FAILING", "FAILED", "CANCELLING", "CANCELED", "FINISHED")
_APPLICATION_STATE = {
    JobStatus.INITIALIZING: "CREATED",
    JobStatus.RESTARTING: "RUNNING",
    JobStatus.SUSPENDED: "RUNNING",
    JobStatus.RECONCILING: "RUNNING",
}
_UP_TO_RUNNING = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING")
FLAME_GRAPH_KINDS = ("full", "on_cpu", "off_cpu")


def _duration(start_ms: int, end_ms: int, now_ms: int) -> int:
    """The milliseconds from the start to the end, or until now; -1 before the start."""
    if start_ms == NOT_YET:
        return NOT_YET
    return max(0, (now_ms if end_ms == NOT_YET else end_ms) - start_ms)


def _counts(states: Mapping[ExecutionState, int]) -> dict[str, int]:
    """Counts subtasks by state, including states without any subtask."""
    return {state.value: states.get(state, 0) for state in ExecutionState}


def job_line(job: JobOverview, now_ms: int) -> contract.JobLine:
    """Flink's command line needs all ten lower-case states and the total."""
    tasks = {state.lower(): number for state, number in _counts(job.tasks_by_state).items()}
    return contract.JobLine(
        job_id=job.job_id,
        name=job.name,
        start_time_ms=job.start_time_ms,
        end_time_ms=job.end_time_ms,
        duration_ms=_duration(job.start_time_ms, job.end_time_ms, now_ms),
        state=job.status,
        last_modification_ms=job.last_modification_ms,
        tasks={**tasks, "total": sum(tasks.values())},
        pending_operators=job.pending_operators,
        drill=job.drill,
        lineage=None if job.lineage is None else job.lineage.id,
        incarnation=None if job.lineage is None else job.lineage.incarnation,
    )


def job_details(details: JobDetails, warnings: Sequence[str], now_ms: int) -> contract.JobDetails:
    """Everything about one job."""
    job = details.overview
    return contract.JobDetails(
        job_id=job.job_id,
        application_id=job.job_id,
        name=job.name,
        state=job.status,
        start_time_ms=job.start_time_ms,
        end_time_ms=job.end_time_ms,
        duration_ms=_duration(job.start_time_ms, job.end_time_ms, now_ms),
        max_parallelism=details.max_parallelism,
        now_ms=now_ms,
        timestamps_ms={status.value: details.state_timestamps_ms.get(status, 0) for status in JobStatus},
        vertices=tuple(_vertex(vertex, now_ms) for vertex in details.vertices),
        status_counts=_counts(Counter(vertex.status for vertex in details.vertices)),
        plan=plan(job.job_id, details.graph),
        pending_operators=job.pending_operators,
        drill=job.drill,
        status_reason=details.status_reason,
        lineage=None if job.lineage is None else job.lineage.id,
        incarnation=None if job.lineage is None else job.lineage.incarnation,
        upgrade=None if details.upgrade is None else upgrade(details.upgrade),
        warnings=tuple(warnings),
        explained=details.graph.explained,
    )


def upgrade(held: HeldUpgrade) -> contract.UpgradeInProgress:
    """An upgrade in progress."""
    return contract.UpgradeInProgress(
        owner=held.owner,
        requester=held.requester,
        job_id=held.job_id,
        since_ms=held.since_ms,
        until_ms=held.until_ms,
        snapshot=held.snapshot,
    )


# --- applications: a pipeline is one job, so it is also an application with the job's id


def application(job: JobOverview, now_ms: int) -> contract.Application:
    """An entry of the list of applications."""
    return contract.Application(
        id=job.job_id,
        name=job.name,
        start_time_ms=job.start_time_ms,
        end_time_ms=job.end_time_ms,
        duration_ms=_duration(job.start_time_ms, job.end_time_ms, now_ms),
        status=_application_state(job.status),
        jobs={job.status.value: 1},
    )


def application_details(details: JobDetails, now_ms: int) -> contract.ApplicationDetails:
    """One application with the times at which it entered its states."""
    job, line = details.overview, application(details.overview, now_ms)
    timestamps = dict.fromkeys(_APPLICATION_STATES, 0)
    for status, entered in details.state_timestamps_ms.items():
        timestamps[_application_state(status)] = max(entered, timestamps[_application_state(status)])
    if job.start_time_ms != NOT_YET:
        timestamps["CREATED"] = job.start_time_ms
    return contract.ApplicationDetails(
        id=line.id,
        name=line.name,
        start_time_ms=line.start_time_ms,
        end_time_ms=line.end_time_ms,
        duration_ms=line.duration_ms,
        status=line.status,
        timestamps=timestamps,
        jobs=(job_line(job, now_ms),),
    )


def _application_state(status: JobStatus) -> str:
    return _APPLICATION_STATE.get(status, status.value)


# --- vertices and subtasks


def _vertex(vertex: VertexDetails, now_ms: int) -> contract.Vertex:
    return contract.Vertex(
        id=vertex.vertex_id,
        name=vertex.name,
        max_parallelism=vertex.max_parallelism,
        parallelism=vertex.parallelism,
        state=vertex.status,
        start_time_ms=vertex.start_time_ms,
        end_time_ms=vertex.end_time_ms,
        duration_ms=_duration(vertex.start_time_ms, vertex.end_time_ms, now_ms),
        tasks=_counts(Counter(subtask.state for subtask in vertex.subtasks)),
        io=io_metrics([subtask.measures for subtask in vertex.subtasks]),
    )


def vertex_details(vertex: VertexDetails, now_ms: int) -> contract.VertexDetails:
    """One vertex with its subtasks."""
    return contract.VertexDetails(
        id=vertex.vertex_id,
        name=vertex.name,
        parallelism=vertex.parallelism,
        max_parallelism=vertex.max_parallelism,
        now_ms=now_ms,
        subtasks=tuple(subtask(item, now_ms) for item in vertex.subtasks),
        aggregated=_aggregated(vertex.subtasks, now_ms),
    )


def vertex_times(vertex: VertexDetails, now_ms: int) -> contract.VertexTimes:
    """When the subtasks of a vertex entered their states."""
    times = (
        contract.SubtaskTimes(
            index=item.index,
            endpoint=item.endpoint,
            duration_ms=_duration(item.start_time_ms, item.end_time_ms, now_ms),
            timestamps_ms={state.value: item.state_timestamps_ms.get(state, 0) for state in ExecutionState},
        )
        for item in vertex.subtasks
    )
    return contract.VertexTimes(id=vertex.vertex_id, name=vertex.name, now_ms=now_ms, subtasks=tuple(times))


def subtask(details: SubtaskDetails, now_ms: int) -> contract.Subtask:
    """A subtask with its present attempt."""
    return contract.Subtask(
        index=details.index,
        state=details.state,
        attempt=details.attempt,
        endpoint=details.endpoint,
        start_time_ms=details.start_time_ms,
        end_time_ms=details.end_time_ms,
        duration_ms=_duration(details.start_time_ms, details.end_time_ms, now_ms),
        io=io_metrics([details.measures]),
        slot_agent_id=details.slot_agent_id,
        durations_ms=status_durations(details, now_ms),
        started_at_ms=details.start_time_ms,
    )


def vertex_task_managers(vertex: VertexDetails, now_ms: int) -> contract.VertexTaskManagers:
    """The subtasks of a vertex, by the slot agent that runs them."""
    by_agent: dict[str, list[SubtaskDetails]] = {}
    for item in vertex.subtasks:
        by_agent.setdefault(item.slot_agent_id, []).append(item)
    agents = tuple(_vertex_task_manager(agent_id, items, now_ms) for agent_id, items in by_agent.items())
    return contract.VertexTaskManagers(id=vertex.vertex_id, name=vertex.name, now=now_ms, taskmanagers=agents)


def _vertex_task_manager(agent_id: str, subtasks: Sequence[SubtaskDetails], now_ms: int) -> contract.VertexTaskManager:
    states = Counter(item.state for item in subtasks)
    start = min((item.start_time_ms for item in subtasks if item.start_time_ms != NOT_YET), default=NOT_YET)
    ended = [item.end_time_ms for item in subtasks]
    end = NOT_YET if NOT_YET in ended else max(ended)
    return contract.VertexTaskManager(
        host=subtasks[0].endpoint,
        endpoint=subtasks[0].endpoint,
        slot_agent_id=agent_id,
        state=states.most_common(1)[0][0],
        start_time_ms=start,
        end_time_ms=end,
        duration_ms=_duration(start, end, now_ms),
        io=io_metrics([item.measures for item in subtasks]),
        status_counts=_counts(states),
        aggregated=_aggregated(subtasks, now_ms),
    )


def status_durations(subtask: SubtaskDetails, now_ms: int) -> dict[str, int]:
    """How long each entered state lasted: until the next state was entered, or until now for the present one.

    The states that lead to RUNNING are always included, as -1 if not entered, because Flink's client requires them.
    """
    entered = sorted((at, state) for state, at in subtask.state_timestamps_ms.items() if at > 0)
    last_end = now_ms if subtask.end_time_ms == NOT_YET else subtask.end_time_ms
    ends = [at for at, _ in entered[1:]] + [last_end]
    lasted = {state.value: max(0, end - at) for (at, state), end in zip(entered, ends, strict=False)}
    return dict.fromkeys(_UP_TO_RUNNING, NOT_YET) | lasted


_COUNTERS = {
    "read_bytes": "bytes_in",
    "write_bytes": "bytes_out",
    "read_records": "rows_in",
    "write_records": "rows_out",
    "backpressured_ms": "backpressured_ms",
    "idle_ms": "idle_ms",
}
"""The engine's names of the counters. ``busy_ms``, the only float among the metrics, is not in this table."""


def io_metrics(parts: Sequence[SubtaskMeasures | None]) -> contract.IoMetrics:
    """The metrics of all subtasks together; a value that was not measured is 0 and not complete."""
    complete = bool(parts) and None not in parts
    return contract.IoMetrics(
        **{name: sum(int(getattr(part, ours, 0)) for part in parts) for name, ours in _COUNTERS.items()},
        busy_ms=float(sum(0.0 if part is None else part.busy_ms for part in parts)),
        read_bytes_complete=complete,
        write_bytes_complete=complete,
        complete=complete,
        write_records_complete=complete,
    )


def _aggregated(subtasks: Sequence[SubtaskDetails], now_ms: int) -> contract.Aggregated:
    """Aggregates over subtasks; the durations include all states, because Flink's dashboard requires each of them."""
    lasted = [status_durations(item, now_ms) for item in subtasks]
    spelled = {item.name: item.encode_name for item in structs.fields(contract.IoMetrics)}
    return contract.Aggregated(
        metrics={
            spelled[name]: distribution([int(getattr(item.measures, ours, 0)) for item in subtasks])
            for name, ours in {**_COUNTERS, "busy_ms": "busy_ms"}.items()
        },
        status_duration={
            state.value: distribution([max(0, durations.get(state.value, 0)) for durations in lasted])
            for state in ExecutionState
        },
    )


def distribution(values: Sequence[int]) -> contract.Distribution:
    """Nearest-rank quantiles of subtask values; all zero if there are no values."""
    ordered = sorted(values) or [0]

    def rank(percent: int) -> int:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    total = sum(ordered)
    return contract.Distribution(
        ordered[0], ordered[-1], total // len(ordered), total, rank(50), rank(25), rank(75), rank(95)
    )


class _Node:
    """A node of a flame graph while samples are counted."""

    def __init__(self) -> None:
        self.value = 0
        self.children: dict[str, _Node] = {}

    def finished(self, name: str) -> contract.FlameGraphNode:
        children = sorted(self.children.items(), key=lambda child: -child[1].value)
        return contract.FlameGraphNode(name, self.value, tuple(node.finished(child) for child, node in children))


def flame_graph(samples: StackSamples, kind: str, subtask: int | None) -> contract.FlameGraph:
    """Counts how often each function was sampled, as a child of its caller; for all subtasks, or for one."""
    if samples.ended_at_ms is None:
        return contract.FlameGraph(NOT_YET, None)
    root = _Node()
    for stack in samples.stacks:
        count = {"full": stack.on_cpu + stack.off_cpu, "on_cpu": stack.on_cpu, "off_cpu": stack.off_cpu}[kind]
        if count and subtask in (None, stack.subtask):
            node = root
            node.value += count
            for frame in stack.frames:
                node = node.children.setdefault(frame, _Node())
                node.value += count
    return contract.FlameGraph(samples.ended_at_ms, root.finished("root"))


# --- plans


def plan(job_id: str, graph: JobGraph) -> contract.Plan:
    """Lists vertices, sinks first, each with its inputs."""
    nodes = (
        contract.PlanNode(
            id=vertex.id,
            parallelism=vertex.parallelism,
            description=vertex.name,
            inputs=tuple(
                contract.PlanInput(edge.source, number, "pipelined_bounded", edge.partitioning)
                for number, edge in enumerate(graph.inputs(vertex.id))
            ),
        )
        for vertex in reversed(graph.vertices)
    )
    return contract.Plan(job_id=job_id, name=graph.name, nodes=tuple(nodes))


def plan_preview(found: PlanPreview) -> contract.PlanPreview:
    """Flink's plan with additional warnings, and ``restore`` if a snapshot was given."""
    shown = plan("", found.graph)
    return contract.PlanPreview(
        plan=shown, warnings=found.warnings, explained=found.graph.explained, restore=found.restore
    )


# --- failures and results


def failure(cause: FailureCause) -> contract.RemoteFailure:
    """Makes Flink's ``SerializedThrowable``; Flink's command line fails if the bytes are missing."""
    return contract.RemoteFailure(
        exception=cause.exception,
        stack_trace=cause.stack_trace,
        serialized_throwable=serialized_throwable(cause.exception, cause.message, cause.stack_trace),
    )


def exception(entry: ExceptionEntry, *, with_concurrent: bool = True) -> contract.ExceptionEntry:
    """One failure with its concurrent failures, which have no such list themselves."""
    concurrent = tuple(exception(other, with_concurrent=False) for other in entry.concurrent)
    of_task = entry.task_name is not None
    return contract.ExceptionEntry(
        exception=entry.failure.exception,
        stack_trace=entry.failure.stack_trace,
        timestamp_ms=entry.timestamp_ms,
        task_name=entry.task_name,
        endpoint=entry.endpoint if of_task else None,
        slot_agent_id=entry.slot_agent_id if of_task else None,
        concurrent_exceptions=concurrent if with_concurrent else None,
    )


def execution_result(result: ExecutionResult) -> contract.ExecutionResult:
    """No result while the job runs."""
    if result.status is None:
        return contract.ExecutionResult(contract.IN_PROGRESS)
    found = contract.JobResult(
        job_id=result.job_id,
        name=result.name,
        status=_RESULTS.get(result.status, "UNKNOWN"),
        net_runtime_ms=max(0, result.end_time_ms - result.start_time_ms),
        application_id=result.job_id,
        start_time_ms=result.start_time_ms,
        end_time_ms=result.end_time_ms,
        failure=None if result.failure is None else failure(result.failure),
    )
    return contract.ExecutionResult(contract.COMPLETED, found)


_STREAM_HEADER = struct.pack(">HH", 0xACED, 5)
_TC_NULL, _TC_OBJECT, _TC_CLASSDESC = b"\x70", b"\x73", b"\x72"
_TC_STRING, _TC_LONGSTRING, _TC_END_BLOCK = b"\x74", b"\x7c", b"\x78"
_TC_REFERENCE = b"\x71"
_FIRST_HANDLE = 0x7E0000
_SERIALIZABLE, _SERIALIZABLE_WITH_WRITE_METHOD = 2, 3
_MAX_CHARS = 64 * 1024

_THROWABLE = ("java.lang.Throwable", -3042686055658047285, _SERIALIZABLE_WITH_WRITE_METHOD)
_EXCEPTION = ("java.lang.Exception", -3387516993124229948, _SERIALIZABLE)
_SERIALIZED_THROWABLE = ("org.apache.flink.util.SerializedThrowable", 7284183123441947635, _SERIALIZABLE)


def serialized_throwable(exception: str, message: str, stack_trace: str) -> str:
    """The stream in Base64. ``exception`` is shown as the error's class, ``stack_trace`` as its full text."""
    handles: dict[str, int] = {}
    out = [_STREAM_HEADER, _TC_OBJECT]
    out.append(
        _class_description(
            _SERIALIZED_THROWABLE,
            [
                ("originalErrorClassName", "Ljava/lang/String;"),
                ("fullStringifiedStackTrace", "Ljava/lang/String;"),
                ("serializedException", "[B"),
            ],
            handles,
        )
    )
    out.append(_class_description(_EXCEPTION, [], handles))
    out.append(
        _class_description(
            _THROWABLE,
            [
                ("cause", "Ljava/lang/Throwable;"),
                ("detailMessage", "Ljava/lang/String;"),
                ("stackTrace", "[Ljava/lang/StackTraceElement;"),
                ("suppressedExceptions", "Ljava/util/List;"),
            ],
            handles,
        )
    )
    out.append(_TC_NULL)  # Throwable's superclass is not serializable
    out += [_TC_NULL, _string(message), _TC_NULL, _TC_NULL, _TC_END_BLOCK]
    out += [_string(exception), _string(stack_trace), _TC_NULL]
    return b64encode(b"".join(out)).decode("ascii")


def _class_description(identity: tuple[str, int, int], fields: list[tuple[str, str]], handles: dict[str, int]) -> bytes:
    """Write a class description without the superclass, which follows; repeated type names are references."""
    name, uid, flags = identity
    out = [_TC_CLASSDESC, _utf(name), struct.pack(">qBH", uid, flags, len(fields))]
    _assign(name, handles)
    for field, type_name in fields:
        out.append(type_name[:1].encode("ascii") + _utf(field))
        if type_name in handles:
            out.append(_TC_REFERENCE + struct.pack(">I", handles[type_name]))
        else:
            out.append(_TC_STRING + _utf(type_name))
            _assign(type_name, handles)
    out.append(_TC_END_BLOCK)
    return b"".join(out)


def _assign(name: str, handles: dict[str, int]) -> None:
    handles[name] = _FIRST_HANDLE + len(handles)


def _utf(text: str) -> bytes:
    encoded = _modified_utf8(text)
    return struct.pack(">H", len(encoded)) + encoded


def _string(text: str) -> bytes:
    encoded = _modified_utf8(text[:_MAX_CHARS])
    if len(encoded) <= 0xFFFF:
        return _TC_STRING + struct.pack(">H", len(encoded)) + encoded
    return _TC_LONGSTRING + struct.pack(">Q", len(encoded)) + encoded


def _modified_utf8(text: str) -> bytes:
    """Encode in Java's modified UTF-8: each UTF-16 code unit separately, and NUL as two bytes."""
    units = text.encode("utf-16-be", "surrogatepass")
    out = bytearray()
    for (unit,) in struct.iter_unpack(">H", units):
        if 1 <= unit <= 0x7F:
            out.append(unit)
        elif unit <= 0x7FF:
            out += bytes((0xC0 | unit >> 6, 0x80 | unit & 0x3F))
        else:
            out += bytes((0xE0 | unit >> 12, 0x80 | unit >> 6 & 0x3F, 0x80 | unit & 0x3F))
    return bytes(out)
