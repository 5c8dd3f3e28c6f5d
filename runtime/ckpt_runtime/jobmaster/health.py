"""The health of a job and the reasons for it: a pure function of facts known to its driver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot, CheckpointStatsStatus
from ckpt_runtime.contract.jobs import Backpressure, BackpressureHealth, CheckpointHealth, JobHealth
from ckpt_runtime.jobmaster.gateway_values import ExecutionState, JobDetails
from ckpt_runtime.scheduler.job_status import JobStatus

RECENT_RESTART_MS = 300_000
"""How long after a restart a job counts as DEGRADED."""
HIGH_BACKPRESSURE = 0.5
_MOST_NAMED = 3
_NO_FAILURES = (CheckpointFailureReason.CHECKPOINT_SUBSUMED, CheckpointFailureReason.CHECKPOINT_COORDINATOR_SUSPEND)


class HealthVerdict(StrEnum):
    """DEGRADED: look at it soon. UNHEALTHY: it makes no progress that would survive a failure."""

    HEALTHY = "HEALTHY"
    DEGRADED = "DEGRADED"
    UNHEALTHY = "UNHEALTHY"


def job_health(
    details: JobDetails,
    statistics: CheckpointStatsSnapshot,
    settings: CheckpointConfiguration,
    pressures: Mapping[str, Backpressure],
    restarts: int,
    stall_timeout_ms: int,
    now_ms: int,
) -> JobHealth:
    """``pressures`` are by vertex id. ``now_ms`` is from the same wall clock as the other timestamps."""
    status = details.overview.status
    outcomes = _outcomes(statistics)
    latest = statistics.latest_completed
    age = None if latest is None else max(0, now_ms - latest.latest_ack_timestamp)
    backpressure, vertex_id = max(
        ((max((s.backpressured for s in measured.subtasks), default=0.0), key) for key, measured in pressures.items()),
        default=(0.0, None),
    )
    names = {vertex.vertex_id: vertex.name for vertex in details.vertices}
    vertex = None if vertex_id is None or not backpressure else names.get(vertex_id, vertex_id)
    found = [(HealthVerdict.DEGRADED, text) for text in job_warnings(details, settings)]
    if status is JobStatus.RUNNING:
        running_ms = now_ms - details.state_timestamps_ms.get(JobStatus.RUNNING, now_ms)
        found += _of_checkpoints(outcomes, age, settings, running_ms)
        if stall_timeout_ms:
            found += _of_stalls(details, stall_timeout_ms)
        if restarts and running_ms < RECENT_RESTART_MS:
            times = "once" if restarts == 1 else f"{restarts} times"
            found.append((HealthVerdict.DEGRADED, f"it has restarted {times}, last {running_ms // 1000} s ago"))
        if backpressure >= HIGH_BACKPRESSURE:
            found.append((HealthVerdict.DEGRADED, f"{vertex} cannot send for {backpressure:.0%} of the time"))
    elif status not in (JobStatus.FINISHED, JobStatus.CANCELED):
        failed = status in (JobStatus.FAILED, JobStatus.FAILING)
        why = f": {details.status_reason}" if details.status_reason else ""
        found.append((HealthVerdict.UNHEALTHY if failed else HealthVerdict.DEGRADED, f"it is {status.value}{why}"))
    worst = max((verdict for verdict, _ in found), key=list(HealthVerdict).index, default=HealthVerdict.HEALTHY)
    success_rate = sum(outcomes) / len(outcomes) if outcomes else None
    return JobHealth(
        verdict=worst,
        reasons=tuple(reason for _, reason in found),
        state=status,
        checkpoints=CheckpointHealth(success_rate, len(outcomes), age),
        restarts=restarts,
        backpressure=BackpressureHealth(backpressure, vertex),
    )


def job_warnings(details: JobDetails, settings: CheckpointConfiguration) -> tuple[str, ...]:
    """The warnings about a job that has not ended, with the settings in effect now."""
    ended = details.overview.status.is_globally_terminal
    return () if ended else details.graph.warnings(settings.interval_ms)


def _outcomes(statistics: CheckpointStatsSnapshot) -> list[bool]:
    """Outcomes, newest first. A checkpoint aborted for a newer one, or with its deployment, is left out."""
    return [
        stats.status is CheckpointStatsStatus.COMPLETED
        for stats in statistics.history
        if stats.status is not CheckpointStatsStatus.IN_PROGRESS
        and not stats.is_savepoint
        and not (stats.failure_message or "").startswith(tuple(reason.message for reason in _NO_FAILURES))
    ]


def _of_stalls(details: JobDetails, timeout_ms: int) -> Iterator[tuple[HealthVerdict, str]]:
    """Finds subtasks in which no row moves although work waits; subtasks that cannot send are named only if no others
    exist."""
    running = [
        (vertex, subtask)
        for vertex in details.vertices
        for subtask in vertex.subtasks
        if subtask.state is ExecutionState.RUNNING
    ]
    stalled = [(vertex, subtask) for vertex, subtask in running if subtask.stalled_ms >= timeout_ms]
    if not stalled:
        return
    causes = [
        (vertex, subtask) for vertex, subtask in stalled if not (subtask.measures and subtask.measures.backpressured)
    ]
    named = [
        f"{vertex.name} ({subtask.index + 1}/{vertex.parallelism}) for {subtask.stalled_ms // 1000:.0f} s"
        for vertex, subtask in (causes or stalled)
    ]
    where = ", ".join(named[:_MOST_NAMED]) + (f" and {len(named) - _MOST_NAMED} more" if named[_MOST_NAMED:] else "")
    if all(subtask.still_ms >= timeout_ms for _, subtask in running):
        yield HealthVerdict.UNHEALTHY, f"no row of the job has moved although work waits: {where}"
    else:
        yield HealthVerdict.DEGRADED, f"no row has moved although work waits: {where}"


def _of_checkpoints(
    outcomes: list[bool], age_ms: int | None, settings: CheckpointConfiguration, running_ms: int
) -> Iterator[tuple[HealthVerdict, str]]:
    if outcomes and not any(outcomes):
        yield HealthVerdict.UNHEALTHY, f"none of the last {len(outcomes)} checkpoints has completed"
    elif not all(outcomes):
        yield HealthVerdict.DEGRADED, f"{outcomes.count(False)} of the last {len(outcomes)} checkpoints have failed"
    if settings.interval_ms is None:
        return
    # One checkpoint may be skipped, or take its whole timeout. A job that has just started gets the same time for its
    # first checkpoint.
    late_ms = 2 * settings.interval_ms + settings.timeout_ms
    waited_ms = running_ms if age_ms is None else min(age_ms, running_ms)
    if waited_ms > late_ms:
        what = "no checkpoint has completed" if age_ms is None else f"the last checkpoint is {age_ms // 1000} s old"
        yield HealthVerdict.UNHEALTHY, f"{what}, with an interval of {settings.interval_ms} ms"
