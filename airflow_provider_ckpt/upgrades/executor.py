"""The actions of an upgrade as requests of the client, and their answers; and the condition that watches a step.

A job counts as missing only after several such answers in a row, see
:class:`airflow_provider_ckpt.conditions.base.MissingPolicy`. The caller handles transient errors and those of the
connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from airflow_provider_ckpt.advice import on_failure
from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict
from airflow_provider_ckpt.conditions.job import is_starting, job_line, root_cause, statistics_of
from airflow_provider_ckpt.upgrades import actions as act
from airflow_provider_ckpt.upgrades.actions import Action, Answer, JobMissing, ReadStop, Seen, StopSeen
from airflow_provider_ckpt.upgrades.record import Step, Upgrade, standing
from airflow_provider_ckpt.upgrades.steps import REPEAT_AFTER_MS, ChangeIsDue, watch_step
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import BadRequest, Conflict, NotFound, NotServed
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.jobs import RETAINS, TERMINAL_STATES, JobDetails, RestorePreview, RunOptions, root_cause_line

_MOST_LINES = 40
_HIGH_BACKPRESSURE = 0.5
"""From this back-pressure on, the job manager calls a job DEGRADED."""
_TROUBLED = ("FAILED", "RESTARTING", "FAILING")


async def perform(client: AsyncCalls, action: act.Action, pause: float, requester: str | None = None) -> act.Answer:
    """Carry an action out; ``pause`` is the number of seconds between two polls for something that seems missing."""
    for look in range(MissingPolicy.LIMIT):
        if look:
            await asyncio.sleep(pause)
        try:
            return await _performed(client, action, requester)
        except NotFound as error:
            missing = str(error)
        except NotServed as error:  # a session of an earlier release has no lineages
            return act.Accepted() if isinstance(action, act.Claim) else act.JobMissing(str(error))
        except (BadRequest, Conflict) as error:
            return act.Lost(str(error)) if isinstance(action, act.Claim) else act.Refused(str(error))
    return act.Accepted() if isinstance(action, act.Release) else act.JobMissing(missing)


async def _performed(client: AsyncCalls, action: act.Action, requester: str | None) -> act.Answer:
    match action:
        case act.Claim(job, owner, own_jobs, snapshot, duration_ms):
            await client.hold_lineage(
                job, owner, duration_ms, own_jobs=own_jobs, snapshot=snapshot, requester=requester
            )
        case act.Hold(program, owner):
            await client.hold_pipeline(program, owner)
        case act.Release(programs, owner, job, claim):
            for program in programs:
                await client.release_pipeline(program, owner)
            with suppress(NotServed):
                await client.release_lineage(job, claim)
        case act.Preview():
            return await _preview(client, action)
        case act.Stop(job, trigger, directory, form, claim):
            native: requests.Format = "CANONICAL" if form == "CANONICAL" else "NATIVE"
            await client.stop_with_savepoint(
                job, directory, savepoint_format=native, trigger_id=trigger, requester=requester, owner=claim
            )
        case act.Cancel(job, retain, claim):
            if retain and await _can_retain(client):
                await client.cancel_and_retain(job, owner=claim)
            else:
                await client.cancel_job(job, owner=claim)
        case act.Run(program, job, like_job, options, snapshot, claim):
            await client.run_pipeline(program, _options(options, like_job, snapshot), job_id=job, owner=claim)
        case act.Retire(job):
            try:
                await client.retire_job_id(job)
            except BadRequest as error:  # a repeated request would fail in the same way
                return act.JobMissing(str(error))
        case _:
            return await looked_at(client, action)
    return act.Accepted()


def _options(given: dict[str, Any], like_job: str, snapshot: str | None) -> RunOptions:
    arguments = tuple(given.get("arguments", ()))
    changed: dict[str, Any] = {"arguments": arguments, "like_job": like_job, "savepoint_path": snapshot}
    if snapshot is None:  # the plan is shown before there is a snapshot whose positions could be set
        changed["source_positions"] = {}
    return RunOptions(**{**given, **changed})


async def _can_retain(client: AsyncCalls) -> bool:
    features = (await client.dashboard_config()).get("features", {})
    return bool(features.get(RETAINS))


async def _preview(client: AsyncCalls, action: act.Preview) -> act.Answer:
    snapshot = action.snapshot
    while True:
        options = _options(action.options, action.like_job, snapshot)
        try:
            found = await client.plan_pipeline(action.program, options)
        except BadRequest:
            job = await _seen(client, action.like_job) if action.is_passing else None
            later = None if job is None or job.newest is None else job.newest.path
            if later in (None, snapshot):
                raise
            snapshot = later
        else:
            restore = found.restore
            return act.SnapshotFit() if restore is None else act.SnapshotFit(restore.refusals, shown_diff(restore))


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


async def looked_at(client: AsyncCalls, action: act.Action) -> act.Answer:
    """Request the facts once. Raises NotFound; an unknown stop is reported together with its job."""
    match action:
        case act.ReadStop(job, trigger):
            return await _stop_seen(client, job, trigger)
        case act.Look(job, closely, judged):
            return await _seen(client, job, closely=closely, judged=judged)
    raise TypeError(f"{action} is no look")


async def _stop_seen(client: AsyncCalls, job: str, trigger: str) -> act.Answer:
    try:
        status = await client.operation_status("savepoint", trigger, job)
    except NotFound:
        return act.StopSeen(await _seen(client, job), known=False)
    seen = await _seen(client, job)  # after the stop, so a job that was seen alive has not ended in between
    if not status.done:
        return act.StopSeen(seen)
    if status.failure is not None:
        why = root_cause_line(status.failure.stack_trace) or status.failure.exception
        return act.StopSeen(seen, failure=on_failure(why))
    return act.StopSeen(seen, path=status.location)


async def _seen(client: AsyncCalls, job_id: str, *, closely: bool = False, judged: bool = False) -> act.Seen:
    job = await client.job_details(job_id)
    statistics = await statistics_of(client, job_id)
    history = () if statistics is None else statistics.history
    stops = any(item.kind == "SYNC_SAVEPOINT" and item.status == "IN_PROGRESS" for item in history)
    restored = None if statistics is None else statistics.latest_restored
    cause = (await root_cause(client, job_id)).clause if job.state in _TROUBLED else ""
    completed, ailment = 0 if statistics is None else statistics.counts.completed, ""
    if judged and statistics is not None:
        completed, ailment = await _judged(client, job, statistics)
    program, retainable = None, True
    if closely:
        program = (await client.job_config(job_id)).pipeline_id
        kept = not (await client.checkpoint_config(job_id)).deleted_on_cancellation
        retainable = kept or await _can_retain(client)
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


async def _judged(client: AsyncCalls, job: JobDetails, statistics: CheckpointStatistics) -> tuple[int, str]:
    """Return how many checkpoints the job has completed since it was last started, and why it is not healthy.

    For a restarted job, only the history shows which checkpoints came after the restart. A job that reads the backlog
    from its downtime is back-pressured, but healthy.
    """
    since = job.timestamps_ms.get("RUNNING", 0)
    in_a_row = sum(item.triggered_at_ms >= since for item in statistics.completed)
    try:
        health = await client.job_health(job.job_id)
    except NotServed:
        return in_a_row, ""
    others = len(health.reasons) - (health.backpressure.ratio >= _HIGH_BACKPRESSURE)
    ailment = "; ".join(health.reasons) if health.verdict == "UNHEALTHY" or others > 0 else ""
    return in_a_row if health.restarts else statistics.counts.completed, ailment


def _newest(statistics: CheckpointStatistics) -> act.Newest | None:
    """Plain savepoints do not commit output: output since the checkpoint before would be written again."""
    completed = [item for item in statistics.completed if item.kind != "SAVEPOINT"]
    if not completed:
        return None
    newest = completed[-1]
    path = None if newest.discarded else newest.external_path
    return act.Newest(path, newest.triggered_at_ms, newest.kind == "SYNC_SAVEPOINT")


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: limits of steps outlive processes."""
    return round(time.time() * 1000)


class _Unconfirmed(Exception):
    """An object seems to be missing: only several such answers in a row confirm it."""


@dataclass(eq=False)
class UpgradeCondition(Condition):
    """The result has the next ``record``, or the same one when the task is to take the step again.

    ``asked`` is the last change that the task has requested in this step, and ``asked_at_ms`` when: the effect may take
    a while to show.
    """

    record: Upgrade
    asked: str = ""
    asked_at_ms: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._forgotten = MissingPolicy()

    @property
    def subject(self) -> str:
        return f"the step {self.record.step} of the {self.record.desired.goal.lower()} of job {self.record.old_job}"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        async def look(action: Action) -> Answer:
            return await self._look(client, action)

        now_ms = wall_clock_ms()
        try:
            changed = await watch_step(self.record, look, now_ms)
        except _Unconfirmed:
            return None
        except ChangeIsDue as change:
            if str(change) == self.asked and now_ms < self.asked_at_ms + REPEAT_AFTER_MS:
                return None
            changed = self.record
        return None if changed is None else Verdict(Status.DONE, result={"record": changed.to_json()})

    async def _look(self, client: AsyncCalls, action: Action) -> Answer:
        try:
            answer = await looked_at(client, action)
        except NotFound as error:
            missing = self.absence.missing(str(error))
            if missing is None:
                raise _Unconfirmed from error
            gone = JobMissing(missing.message)
            return StopSeen(gone, known=False) if isinstance(action, ReadStop) else gone
        self.absence.seen()
        if isinstance(answer, StopSeen) and not answer.known:
            if not self._forgotten.missing(""):
                raise _Unconfirmed
        else:
            self._forgotten.seen()
        job = answer.job if isinstance(answer, StopSeen) else answer
        if isinstance(job, Seen):
            self.standing = f"it is {job.state}, {job.completed} checkpoints completed"
        return answer

    async def detail(self, client: AsyncCalls) -> str:
        record = self.record
        started = record.restarted_job if record.restarted else record.new_job
        return await job_line(client, record.old_job if record.step is Step.SAVEPOINT else started)

    def left_over(self) -> str:
        return (
            f"it stood at the step {self.record.step}: {standing(self.record)}. Nothing is undone; a cleared task "
            "continues from there"
        )
