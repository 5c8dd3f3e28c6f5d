"""Jobs, vertices, plans, metrics, exceptions and results in Flink's JSON shapes. Pure functions, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.configuration_requests import ConfigurationAnswer
from ckpt_runtime.jobmaster.gateway_values import (
    NOT_YET,
    ExceptionEntry,
    ExceptionHistory,
    ExecutionResult,
    ExecutionState,
    JobConfigInfo,
    JobDetails,
    JobOverview,
    SubtaskDetails,
    VertexDetails,
    VertexPressure,
)
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.rest.serialized_throwable import serialized_throwable
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.held_upgrades import HeldUpgrade

Json = dict[str, Any]

_APPLICATION_STATUS = {
    JobStatus.FINISHED: "SUCCEEDED",
    JobStatus.FAILED: "FAILED",
    JobStatus.CANCELED: "CANCELED",
}
_HIGH_PRESSURE, _LOW_PRESSURE = 0.5, 0.1


def duration(start_ms: int, end_ms: int, now_ms: int) -> int:
    """The milliseconds from the start to the end, or until now; -1 before the start."""
    if start_ms == NOT_YET:
        return NOT_YET
    return max(0, (now_ms if end_ms == NOT_YET else end_ms) - start_ms)


def times(start_ms: int, end_ms: int, now_ms: int) -> Json:
    """Shows start, end and duration in Flink's three fields."""
    return {"start-time": start_ms, "end-time": end_ms, "duration": duration(start_ms, end_ms, now_ms)}


def counts_by_state(counts: Mapping[ExecutionState, int]) -> Json:
    """Counts subtasks by state, including states without any subtask."""
    return {state.value: counts.get(state, 0) for state in ExecutionState}


def job_line(job: JobOverview, now_ms: int) -> Json:
    """Makes an entry of ``/jobs/overview``. Flink's CLI needs all ten lower-case states and the total."""
    tasks = {state.value.lower(): job.tasks_by_state.get(state, 0) for state in ExecutionState}
    return {
        "jid": job.job_id,
        "name": job.name,
        "jobType": "STREAMING",
        "schedulerType": "Default",
        **times(job.start_time_ms, job.end_time_ms, now_ms),
        "state": job.status.value,
        "last-modification": job.last_modification_ms,
        "tasks": {**tasks, "total": sum(tasks.values())},
        "pending-operators": job.pending_operators,
        "restore-drill": job.drill,
        **_lineage(job),
    }


def job_details(details: JobDetails, now_ms: int) -> Json:
    """Answers ``/jobs/:jobid``."""
    job = details.overview
    statuses = Counter(vertex.status for vertex in details.vertices)
    return {
        "jid": job.job_id,
        "application-id": job.job_id,
        "name": job.name,
        "isStoppable": False,
        "state": job.status.value,
        "job-type": "STREAMING",
        "schedulerType": "Default",
        **times(job.start_time_ms, job.end_time_ms, now_ms),
        "maxParallelism": details.max_parallelism,
        "now": now_ms,
        "timestamps": {status.value: details.state_timestamps_ms.get(status, 0) for status in JobStatus},
        "vertices": [vertex_line(vertex, now_ms) for vertex in details.vertices],
        "status-counts": counts_by_state(statuses),
        "plan": plan(job.job_id, details.graph),
        "pending-operators": job.pending_operators,
        "restore-drill": job.drill,
        "status-reason": details.status_reason,
        **_lineage(job),
        "upgrade": None if details.upgrade is None else upgrade(details.upgrade),
    }


def upgrade(held: HeldUpgrade) -> Json:
    """Shows an upgrade in progress."""
    return {
        "owner": held.owner,
        "requester": held.requester,
        "job-id": held.job_id,
        "since": held.since_ms,
        "until": held.until_ms,
        "snapshot": held.snapshot,
    }


def _lineage(job: JobOverview) -> Json:
    return {"lineage": job.lineage.id, "incarnation": job.lineage.incarnation} if job.lineage is not None else {}


def vertex_line(vertex: VertexDetails, now_ms: int) -> Json:
    """Shows a vertex inside the job's details; all vertices share one slot sharing group."""
    return {
        "id": vertex.vertex_id,
        "slotSharingGroupId": "0" * 32,
        "name": vertex.name,
        "maxParallelism": vertex.max_parallelism,
        "parallelism": vertex.parallelism,
        "status": vertex.status.value,
        **times(vertex.start_time_ms, vertex.end_time_ms, now_ms),
        "tasks": counts_by_state(Counter(subtask.state for subtask in vertex.subtasks)),
        "metrics": io_metrics([subtask.measures for subtask in vertex.subtasks]),
    }


def vertex_details(vertex: VertexDetails, now_ms: int) -> Json:
    """Answers ``/jobs/:jobid/vertices/:vertexid``."""
    return {
        "id": vertex.vertex_id,
        "name": vertex.name,
        "parallelism": vertex.parallelism,
        "maxParallelism": vertex.max_parallelism,
        "now": now_ms,
        "subtasks": [subtask(item, now_ms) for item in vertex.subtasks],
        "aggregated": _aggregated(vertex.subtasks, now_ms),
    }


def subtask_times(vertex: VertexDetails, now_ms: int) -> Json:
    """Answers ``/jobs/:jobid/vertices/:vertexid/subtasktimes``."""
    return {
        "id": vertex.vertex_id,
        "name": vertex.name,
        "now": now_ms,
        "subtasks": [
            {
                "subtask": subtask.index,
                "endpoint": subtask.endpoint,
                "duration": duration(subtask.start_time_ms, subtask.end_time_ms, now_ms),
                "timestamps": {state.value: subtask.state_timestamps_ms.get(state, 0) for state in ExecutionState},
            }
            for subtask in vertex.subtasks
        ],
    }


def subtask(details: SubtaskDetails, now_ms: int) -> Json:
    """Shows a subtask with its present attempt."""
    return {
        "subtask": details.index,
        "status": details.state.value,
        "attempt": details.attempt,
        "endpoint": details.endpoint,
        **times(details.start_time_ms, details.end_time_ms, now_ms),
        "metrics": io_metrics([details.measures]),
        "taskmanager-id": details.slot_agent_id,
        "status-duration": status_durations(details, now_ms),
        "start_time": details.start_time_ms,
    }


def vertex_task_managers(vertex: VertexDetails, now_ms: int) -> Json:
    """Answers ``/jobs/:jobid/vertices/:vertexid/taskmanagers``: its subtasks by the slot agent that runs them."""
    by_agent: dict[str, list[SubtaskDetails]] = {}
    for subtask in vertex.subtasks:
        by_agent.setdefault(subtask.slot_agent_id, []).append(subtask)
    agents = [_vertex_task_manager(agent_id, subtasks, now_ms) for agent_id, subtasks in by_agent.items()]
    return {"id": vertex.vertex_id, "name": vertex.name, "now": now_ms, "taskmanagers": agents}


def _vertex_task_manager(agent_id: str, subtasks: Sequence[SubtaskDetails], now_ms: int) -> Json:
    states = Counter(subtask.state for subtask in subtasks)
    started = [subtask.start_time_ms for subtask in subtasks if subtask.start_time_ms != NOT_YET]
    start = min(started, default=NOT_YET)
    ended = [subtask.end_time_ms for subtask in subtasks]
    end = NOT_YET if NOT_YET in ended else max(ended)
    return {
        "host": subtasks[0].endpoint,
        "endpoint": subtasks[0].endpoint,
        "taskmanager-id": agent_id,
        "status": states.most_common(1)[0][0].value,
        **times(start, end, now_ms),
        "metrics": io_metrics([subtask.measures for subtask in subtasks]),
        "status-counts": counts_by_state(states),
        "aggregated": _aggregated(subtasks, now_ms),
    }


def status_durations(subtask: SubtaskDetails, now_ms: int) -> dict[str, int]:
    """How long each entered state lasted: until the next state was entered, or until now for the present one.

    The states that lead to RUNNING are always included, as -1 if not entered, because Flink's client requires them.
    """
    entered = sorted((at, state) for state, at in subtask.state_timestamps_ms.items() if at > 0)
    last_end = now_ms if subtask.end_time_ms == NOT_YET else subtask.end_time_ms
    ends = [at for at, _ in entered[1:]] + [last_end]
    lasted = {state.value: max(0, end - at) for (at, state), end in zip(entered, ends, strict=False)}
    return dict.fromkeys(_UP_TO_RUNNING, NOT_YET) | lasted


_UP_TO_RUNNING = ("CREATED", "SCHEDULED", "DEPLOYING", "INITIALIZING", "RUNNING")


def io_metrics(parts: Sequence[SubtaskMeasures | None]) -> Json:
    """Makes the ``metrics`` object for all subtasks together; a value that was not measured is 0 and not complete."""
    measured = {
        name: sum((kind(getattr(part, figure, 0)) for part in parts), kind(0))
        for name, (figure, kind) in _MEASURED.items()
    }
    complete = bool(parts) and None not in parts
    return measured | {f"{name}-complete": complete for name in measured if not name.startswith("accumulated")}


_MEASURED: Mapping[str, tuple[str, type[int] | type[float]]] = {
    "read-bytes": ("bytes_in", int),
    "write-bytes": ("bytes_out", int),
    "read-records": ("rows_in", int),
    "write-records": ("rows_out", int),
    "accumulated-backpressured-time": ("backpressured_ms", int),
    "accumulated-idle-time": ("idle_ms", int),
    "accumulated-busy-time": ("busy_ms", float),
}


def _aggregated(subtasks: Sequence[SubtaskDetails], now_ms: int) -> Json:
    """Aggregates over subtasks; the durations include all states, because Flink's dashboard requires each of them."""
    lasted = [status_durations(subtask, now_ms) for subtask in subtasks]
    return {
        "metrics": {
            name: distribution([int(getattr(subtask.measures, figure, 0)) for subtask in subtasks])
            for name, (figure, _) in _MEASURED.items()
        },
        "status-duration": {
            state.value: distribution([max(0, durations.get(state.value, 0)) for durations in lasted])
            for state in ExecutionState
        },
    }


def distribution(values: Sequence[int]) -> Json:
    """Nearest-rank quantiles of subtask values; all zero if there are no values."""
    ordered = sorted(values) or [0]

    def rank(percent: int) -> int:
        return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]

    return {
        "min": ordered[0],
        "max": ordered[-1],
        "avg": sum(ordered) // len(ordered),
        "sum": sum(ordered),
        "median": rank(50),
        "p25": rank(25),
        "p75": rank(75),
        "p95": rank(95),
    }


def plan(job_id: str, graph: JobGraph) -> Json:
    """Lists vertices, sinks first, each with its inputs."""
    nodes = []
    for vertex in reversed(graph.vertices):
        node: Json = {
            "id": vertex.id,
            "operator": "",
            "parallelism": vertex.parallelism,
            "operator_strategy": "",
            "description": vertex.name,
            "optimizer_properties": {},
        }
        inputs = [
            {
                "id": edge.source,
                "num": number,
                "exchange": "pipelined_bounded",
                "ship_strategy": edge.partitioning.value,
            }
            for number, edge in enumerate(graph.inputs(vertex.id))
        ]
        nodes.append({**node, "inputs": inputs} if inputs else node)
    return {"jid": job_id, "name": graph.name, "type": "STREAMING", "nodes": nodes}


def job_config(config: JobConfigInfo) -> Json:
    """Shows Flink's shape plus FLIP-530's ``configuration`` and ``version``."""
    return {
        "jid": config.job_id,
        "name": config.name,
        "execution-config": {
            "restart-strategy": config.restart_strategy,
            "job-parallelism": config.parallelism,
            "object-reuse-mode": False,
            "user-config": {},
        },
        "configuration": dict(config.configuration),
        "version": config.version,
        "running-version": config.running_version,
        "jarid": config.pipeline_id,
        "changes": [
            {"version": note.version, "timestamp": note.timestamp_ms, "by": note.by, "options": list(note.options)}
            for note in config.notes
        ],
        "effective": [
            {"key": option.key, "value": option.value, "origin": option.origin.value} for option in config.effective
        ],
    }


def changed_config(answer: ConfigurationAnswer) -> Json:
    """Answers changes of ``/jobs/:jobid/config`` (FLIP-530)."""
    return {
        "version": answer.version,
        "restart": answer.needs_restart,
        "dry-run": answer.dry_run,
        "changes": {
            change.key: {
                "before": change.before,
                "after": change.after,
                "change": "restart" if change.needs_restart else "live",
                "hidden-by-override": change.hidden_by,
            }
            for change in answer.changes
        },
    }


def failure(cause: FailureCause) -> Json:
    """Makes Flink's ``SerializedThrowable``; Flink's CLI fails if the bytes are missing."""
    return {
        "class": cause.exception,
        "stack-trace": cause.stack_trace,
        "serialized-throwable": serialized_throwable(cause.exception, cause.message, cause.stack_trace),
    }


def exceptions(history: ExceptionHistory) -> Json:
    """Answers ``/jobs/:jobid/exceptions``."""
    entries = [
        {**_exception(entry), "concurrentExceptions": [_exception(other) for other in entry.concurrent]}
        for entry in history.entries
    ]
    return {"exceptionHistory": {"entries": entries, "truncated": history.truncated}}


def _exception(entry: ExceptionEntry) -> Json:
    document: Json = {
        "exceptionName": entry.failure.exception,
        "stacktrace": entry.failure.stack_trace,
        "timestamp": entry.timestamp_ms,
        "failureLabels": {},
    }
    if entry.task_name is not None:
        document |= {
            "taskName": entry.task_name,
            "endpoint": entry.endpoint,
            "taskManagerId": entry.slot_agent_id,
        }
    return document


def execution_result(result: ExecutionResult) -> Json:
    """Answers ``/jobs/:jobid/execution-result``; no result object while the job runs."""
    if result.status is None:
        return {"status": {"id": "IN_PROGRESS"}, "job-execution-result": None}
    document: Json = {
        "id": result.job_id,
        "name": result.name,
        "application-status": _APPLICATION_STATUS.get(result.status, "UNKNOWN"),
        "accumulator-results": {},
        "net-runtime": max(0, result.end_time_ms - result.start_time_ms),
        "application-id": result.job_id,
        "start-time": result.start_time_ms,
        "end-time": result.end_time_ms,
    }
    if result.failure is not None:
        document["failure-cause"] = failure(result.failure)
    return {"status": {"id": "COMPLETED"}, "job-execution-result": document}


def backpressure(pressure: VertexPressure) -> Json:
    """Is ``deprecated`` before the first measurement."""
    if not pressure.subtasks:
        return {"status": "deprecated"}
    return {
        "status": "ok",
        **_level(max(subtask.backpressured for subtask in pressure.subtasks)),
        "end-timestamp": pressure.measured_at_ms,
        "subtasks": [
            {
                "subtask": subtask.index,
                "attempt-number": subtask.attempt,
                **_level(subtask.backpressured),
                "ratio": subtask.backpressured,
                "idleRatio": subtask.idle,
                "busyRatio": subtask.busy,
            }
            for subtask in pressure.subtasks
        ],
    }


def _level(ratio: float) -> Json:
    """Names the level in both of Flink's spellings."""
    level = "high" if ratio > _HIGH_PRESSURE else "low" if ratio > _LOW_PRESSURE else "ok"
    return {"backpressureLevel": level, "backpressure-level": level}
