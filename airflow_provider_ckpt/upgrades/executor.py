"""The actions of an upgrade as requests of the client, and their answers. Pure: requests go out as steps.

A job counts as missing only after several answers in a row that say so, see
:class:`airflow_provider_ckpt.conditions.base.MissingPolicy`. The caller handles transient errors and those of the
connection.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from airflow_provider_ckpt.advice import on_failure
from airflow_provider_ckpt.conditions.base import MissingPolicy
from airflow_provider_ckpt.conditions.job import is_starting
from airflow_provider_ckpt.conditions.job_log import root_cause
from airflow_provider_ckpt.upgrades import actions as act
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import CheckpointStatistics
from ckpt_runtime.client.errors import BadRequest, Conflict, NotFound, NotServed
from ckpt_runtime.client.models import (
    RETAINS,
    TERMINAL_STATES,
    JobDetails,
    JobHealth,
    PlanPreview,
    RestorePreview,
    RunOptions,
)
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.stack_traces import telling_line
from ckpt_runtime.client.waiting import Pause, Steps

T = TypeVar("T")
Requests = Generator[Call[Any], Any, T]

_MOST_LINES = 40
_HIGH_BACKPRESSURE = 0.5
"""From this back-pressure on, the job manager calls a job DEGRADED."""
_TROUBLED = ("FAILED", "RESTARTING", "FAILING")


def perform(action: act.Action, pause: float, requester: str | None = None) -> Steps[act.Answer]:
    """Carry an action out; ``pause`` is the number of seconds between two looks at something that seems missing."""
    for look in range(MissingPolicy.LIMIT):
        if look:
            yield Pause(pause)
        try:
            return (yield from _performed(action, requester))
        except NotFound as error:
            missing = str(error)
        except NotServed as error:  # a session of an earlier release has no lineages
            return act.Accepted() if isinstance(action, act.Claim) else act.JobMissing(str(error))
        except (BadRequest, Conflict) as error:
            return act.Lost(str(error)) if isinstance(action, act.Claim) else act.Refused(str(error))
    return act.Accepted() if isinstance(action, act.Release) else act.JobMissing(missing)


def _performed(action: act.Action, requester: str | None) -> Requests[act.Answer]:
    match action:
        case act.Claim(job, owner, own_jobs, snapshot, duration_ms):
            claim = requests.hold_lineage(
                job, owner, duration_ms, own_jobs=own_jobs, snapshot=snapshot, requester=requester
            )
            yield claim
        case act.Hold(program, owner):
            yield requests.hold_pipeline(program, owner)
        case act.Release(programs, owner, job, claim):
            for program in programs:
                yield requests.release_pipeline(program, owner)
            with suppress(NotServed):
                yield requests.release_lineage(job, claim)
        case act.Preview():
            return (yield from _preview(action))
        case act.Stop(job, trigger, directory, form, claim):
            native: requests.Format = "CANONICAL" if form == "CANONICAL" else "NATIVE"
            yield requests.stop_with_savepoint(
                job, directory, savepoint_format=native, trigger_id=trigger, requester=requester, owner=claim
            )
        case act.Cancel(job, retain, claim):
            retains = retain and (yield from _can_retain())
            cancels = requests.cancel_and_retain if retains else requests.cancel_job
            yield cancels(job, owner=claim)
        case act.Run(program, job, like_job, options, snapshot, claim):
            yield requests.run_pipeline(program, _options(options, like_job, snapshot), job_id=job, owner=claim)
        case act.Retire(job):
            try:
                yield requests.retire_job_id(job)
            except BadRequest as error:  # a repeated request would fail in the same way
                return act.JobMissing(str(error))
        case _:
            return (yield from watched(action))
    return act.Accepted()


def _options(given: dict[str, Any], like_job: str, snapshot: str | None) -> RunOptions:
    arguments = tuple(given.get("arguments", ()))
    return RunOptions(**{**given, "arguments": arguments, "like_job": like_job, "savepoint_path": snapshot})


def _can_retain() -> Requests[bool]:
    features = (yield requests.dashboard_config()).get("features", {})
    return bool(features.get(RETAINS))


def _preview(action: act.Preview) -> Requests[act.Answer]:
    snapshot = action.snapshot
    while True:
        options = _options(action.options, action.like_job, snapshot)
        try:
            found: PlanPreview = yield requests.plan_pipeline(action.program, options)
        except BadRequest:
            job = (yield from _seen(action.like_job)) if action.is_passing else None
            later = None if job is None or job.newest is None else job.newest.path
            if later in (None, snapshot):
                raise
            snapshot = later
        else:
            restore = found.restore
            return act.Fits() if restore is None else act.Fits(restore.refusals, shown_diff(restore))


def shown_diff(restore: RestorePreview) -> tuple[str, ...]:
    """Return a line for each operator and state that is not simply taken over, and one line for the rest."""
    verdicts = [each.verdict for each in restore.operators] + [each.verdict for each in restore.states]
    others = [each for each in restore.operators if _counts(each.verdict)]
    lines = [f"{each.verdict}: operator {each.name} ({each.uid})" for each in others]
    for state in restore.states:
        if _counts(state.verdict):
            fields = f", {_fields(state.stored)} -> {_fields(state.wanted)}" if state.verdict == "changed" else ""
            reason = f": {state.reason}" if state.reason else ""
            lines.append(f"{state.verdict}: state {state.state} of {state.operator}{fields}{reason}")
    more = len(lines) - _MOST_LINES
    shown = [*lines[:_MOST_LINES], *([f"and {more} more"] if more > 0 else [])]
    return (f"matched: {verdicts.count('matched')} operators and states", *shown)


def _counts(verdict: str) -> bool:
    return verdict != "matched"


def _fields(schema: Iterable[str]) -> str:
    return "(" + ", ".join(schema) + ")"


# --- looking


def watched(action: act.Action) -> Requests[act.Answer]:
    """Look once. Raises NotFound; an unknown stop is reported together with its job."""
    match action:
        case act.LookAtStop(job, trigger):
            return (yield from _stop_seen(job, trigger))
        case act.Look(job, closely, judged):
            return (yield from _seen(job, closely=closely, judged=judged))
    raise TypeError(f"{action} is no look")


def _stop_seen(job: str, trigger: str) -> Requests[act.Answer]:
    try:
        status = yield requests.operation_status("savepoint", trigger, job)
    except NotFound:
        return act.StopSeen((yield from _seen(job)), known=False)
    seen = yield from _seen(job)  # after the stop, so that a job seen living has not ended in between
    if not status.done:
        return act.StopSeen(seen)
    if status.failure is not None:
        why = telling_line(status.failure.stack_trace) or status.failure.exception
        return act.StopSeen(seen, failure=on_failure(why))
    return act.StopSeen(seen, path=status.location)


def _seen(job_id: str, *, closely: bool = False, judged: bool = False) -> Requests[act.Seen]:
    job: JobDetails = yield requests.job_details(job_id)
    statistics = yield from _statistics(job_id)
    history = () if statistics is None else statistics.history
    stops = any(item.kind == "SYNC_SAVEPOINT" and item.status == "IN_PROGRESS" for item in history)
    restored = None if statistics is None else statistics.latest_restored
    cause = (yield from root_cause(job_id)).clause if job.state in _TROUBLED else ""
    completed, ailment = 0 if statistics is None else statistics.counts.completed, ""
    if judged and statistics is not None:
        completed, ailment = yield from _judged(job, statistics)
    program, retainable = None, True
    if closely:
        program = (yield requests.job_config(job_id)).pipeline_id
        kept = not (yield requests.checkpoint_config(job_id)).deleted_on_cancellation
        retainable = kept or (yield from _can_retain())
    return act.Seen(
        state=job.state,
        ready=job.state == "RUNNING" and not is_starting(job) and not stops,
        has_ended=job.state in TERMINAL_STATES,
        completed=completed,
        newest=None if statistics is None else _newest(statistics),
        restored=None if restored is None else restored.external_path,
        cause=cause,
        ailment=ailment,
        name=job.name,
        program=program,
        retainable=retainable,
    )


def _judged(job: JobDetails, statistics: CheckpointStatistics) -> Requests[tuple[int, str]]:
    """Return how many checkpoints the job has completed since it was last started, and why it is not healthy.

    For a restarted job, only the history shows which checkpoints came after the restart. A job that reads the backlog
    from its downtime is back-pressured, but healthy.
    """
    since = job.timestamps_ms.get("RUNNING", 0)
    in_a_row = sum(item.triggered_at_ms >= since for item in statistics.completed)
    try:
        health: JobHealth = yield requests.job_health(job.job_id)
    except NotServed:
        return in_a_row, ""
    others = len(health.reasons) - (health.backpressure.ratio >= _HIGH_BACKPRESSURE)
    ailment = "; ".join(health.reasons) if health.verdict == "UNHEALTHY" or others > 0 else ""
    return in_a_row if health.restarts else statistics.counts.completed, ailment


def _statistics(job_id: str) -> Requests[CheckpointStatistics | None]:
    try:
        found: CheckpointStatistics = yield requests.checkpoint_statistics(job_id)
    except NotFound:  # a Flink job without checkpoints has none
        return None
    return found


def _newest(statistics: CheckpointStatistics) -> act.Newest | None:
    """Plain savepoints do not commit output: output since the checkpoint before would be written again."""
    completed = [item for item in statistics.completed if item.kind != "SAVEPOINT"]
    if not completed:
        return None
    newest = completed[-1]
    path = None if newest.discarded else newest.external_path
    return act.Newest(path, newest.triggered_at_ms, newest.kind == "SYNC_SAVEPOINT")
