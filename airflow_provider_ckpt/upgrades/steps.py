"""The steps of replacing a job by a new version of it, without clock, network and Airflow.

A step is a coroutine over ``ask``, which performs a request, see :mod:`airflow_provider_ckpt.upgrades.actions`. It
returns the record to keep next, or None when it has to look again later. A step whose result was not kept runs again
from its beginning, so each first reads the state of the jobs, and requests only the missing changes. All rules that
keep two versions from running at once are here:

* The new version is started only after the old job was seen to have ended, and the old one is started again only after
  the new one was seen to have ended.
* Each request for a change requires the lineage of the job, which the job manager grants to one upgrade at a time. An
  upgrade that loses the lineage ends, and does not touch what another upgrade has begun.
* Before another job replaces one that was requested, or the message says that nothing runs, the id of the requested
  job is retired: a request for it that arrives late is refused.
* What the next version starts from is fixed before anything is started, and a rollback starts from the same.
* Nothing is stopped before the programs are held and the snapshot was checked against the new program.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from airflow_provider_ckpt.upgrades.actions import (
    Action,
    Answer,
    Cancel,
    Claim,
    Hold,
    JobMissing,
    Look,
    Lost,
    Newest,
    Preview,
    ReadStop,
    Refused,
    Release,
    Retire,
    Run,
    Seen,
    SnapshotFit,
    Stop,
    StopSeen,
)
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade

Ask: TypeAlias = Callable[[Action], Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class Turn:
    """The state of a step at one moment: a way to make requests, and the time."""

    ask: Ask
    now_ms: int


_NAMESPACE = uuid.UUID("7a0f2f0e-6f3c-5c0e-9c55-27d94f1f1f0b")
_RETENTION = "execution.checkpointing.externalized-checkpoint-retention"
_CHECK_THE_ID = ". Check the id, and the connection"
_CLAIM_MS, _PAUSED_CLAIM_MS = 24 * 3_600_000, 7 * 24 * 3_600_000
"""How long an upgrade holds its lineage without extending the claim."""
MAX_REFUSED_STOPS = 3
REPEAT_AFTER_MS = 30_000
"""A request that was accepted shows an effect within this time, or is made again."""
WATCHES = frozenset({Step.SAVEPOINT, Step.GATE, Step.ROLL_BACK})
"""Steps that poll repeatedly until an expected event has happened."""
READS: Final = (Look, ReadStop, Preview)
"""Requests that change nothing."""


class ChangeIsDue(Exception):
    """A step that may only read has found that a change is necessary."""

    def __init__(self, action: Action) -> None:
        super().__init__(type(action).__name__)


class _LineageLost(Exception):
    """Another client holds the lineage, or has started another job of it."""


def begin(desired: DesiredUpgrade, series: str) -> Upgrade:
    """Return the record before the first step; no other upgrade has the same ``series``."""
    upgrades, new_job = desired.goal is Goal.UPGRADE, _id(series, "new")
    # From the owner name suspended-JOB the job manager learns which jobs are suspended, and protects their snapshots.
    return Upgrade(
        desired=desired,
        series=series,
        new_job=new_job,
        restarted_job=_id(series, "restarted"),
        owner=f"upgrade-{new_job}" if upgrades else f"suspended-{desired.job}",
        step=Step.PREPARE,
    )


def decide(record: Upgrade, *, approved: bool, by: str = "") -> Upgrade:
    """Return the record of a paused upgrade after a person has decided."""
    if approved:
        return _next(record, Step.SUBMIT, approved_by=by)
    return _next(record, Step.ROLL_BACK, why="the new version was rejected" + (f" by {by}" if by else ""))


# --- taking steps


def drive(record: Upgrade, take: Callable[[Upgrade], Upgrade | None], keep: Callable[[Upgrade], None]) -> Upgrade:
    """Take steps until one has to poll again later, a person has to decide, or the upgrade has ended."""
    while record.step is not Step.ENDED and (changed := take(record)) is not None:
        keep(changed)
        record = changed
    return record


async def take_step(record: Upgrade, ask: Ask, now_ms: int) -> Upgrade | None:
    """Take the record's step, under the claim to the lineage; the module describes its result."""

    async def claim() -> None:
        answer = await ask(claim_of(record))
        if isinstance(answer, Lost):
            raise _LineageLost(answer.reason)

    async def claimed(action: Action) -> Answer:
        if not isinstance(action, (*READS, Release)):
            await claim()
        return await ask(action)

    try:
        if record.step is not Step.CLEAN:
            await claim()
        if record.step is Step.PAUSED:
            return None
        return await STEPS[record.step](record, Turn(claimed, now_ms))
    except _LineageLost as error:
        return _end(replace(record, lost=True), Outcome.REFUSED, str(error))


async def watch_step(record: Upgrade, look: Ask, now_ms: int) -> Upgrade | None:
    """As :func:`take_step`, but only reads. Raises ChangeIsDue where the step has something to request."""

    async def refuse_changes(action: Action) -> Answer:
        if not isinstance(action, READS):
            raise ChangeIsDue(action)
        return await look(action)

    return await STEPS[record.step](record, Turn(refuse_changes, now_ms))


def claim_of(record: Upgrade) -> Claim:
    """Return the claim that ensures that no other client ends or starts a job of the lineage."""
    duration = _PAUSED_CLAIM_MS if record.step is Step.PAUSED else _CLAIM_MS
    own_jobs = (record.new_job, record.restarted_job)
    return Claim(record.old_job, record.claim, own_jobs, record.snapshot, duration)


def _id(series: str, purpose: str) -> str:
    return uuid.uuid5(_NAMESPACE, f"{series}/{purpose}").hex


def _next(record: Upgrade, step: Step, deadline: int | None = None, **changes: Any) -> Upgrade:
    return replace(record, step=step, deadline=deadline, revision=record.revision + 1, **changes)


def _end(record: Upgrade, outcome: Outcome, why: str = "") -> Upgrade:
    return _next(record, Step.CLEAN, outcome=outcome, why=why or record.why)


def _refuse(record: Upgrade, why: str) -> Upgrade:
    return _end(record, Outcome.REFUSED, why)


def _strand(record: Upgrade, why: str, what: str = "Nothing runs") -> Upgrade:
    place = f"The snapshot to start from is {record.snapshot}" if record.snapshot else "There is no snapshot"
    return _end(record, Outcome.STRANDED, f"{why}. {what}. {place}; {record.owner} keeps holding the programs")


def _known(program: str | None) -> str:
    assert program is not None, "a step before this one has found it"
    return program


def _refusal(answer: Refused | JobMissing) -> str:
    return answer.reason if isinstance(answer, Refused) else answer.what


def _is_due(record: Upgrade, now_ms: int) -> bool:
    return record.deadline is not None and now_ms >= record.deadline


# --- before anything has changed


async def _prepare(record: Upgrade, turn: Turn) -> Upgrade | None:
    """Hold the programs, and refuse an upgrade that cannot succeed."""
    desired, old = record.desired, f"job {record.old_job}"
    if desired.goal is Goal.UPGRADE:
        held = await turn.ask(Hold(_known(desired.program), record.owner))
        if isinstance(held, Refused | JobMissing):
            return _refuse(record, _refusal(held))
    job = await turn.ask(Look(record.old_job, closely=True))
    if not isinstance(job, Seen):
        return _refuse(record, f"{old} is unknown to the job manager{_CHECK_THE_ID}")
    record = replace(
        record,
        name=job.name,
        old_program=job.program,
        origin=job.restored,
        snapshot=job.restored if job.newest is None else job.newest.path,
        retainable=job.retainable,
    )
    why = next(_of_resuming(record, job) if desired.goal is Goal.RESUME else _of_ending(record, job), "")
    if why:  # the hold of a job that is suspended already stays with its suspension
        suspends = desired.goal is Goal.SUSPEND
        return _refuse(replace(record, old_program=None) if suspends else record, why)
    held = await turn.ask(Hold(_known(record.old_program), record.owner))
    if isinstance(held, Refused | JobMissing):
        return _refuse(record, f"the program that the job runs cannot be kept: {_refusal(held)}")
    if desired.goal is Goal.RESUME:
        return _next(record, Step.SUBMIT)
    if desired.goal is Goal.UPGRADE:
        fit = await turn.ask(_preview(record))
        if why := _mismatch(record, fit):
            return _refuse(record, why)
        record = replace(record, diff=fit.diff if isinstance(fit, SnapshotFit) else ())
    deadline = turn.now_ms + desired.savepoint_within if desired.mode is Mode.SAVEPOINT else None
    return _next(record, Step.SAVEPOINT, deadline)


def _of_resuming(record: Upgrade, job: Seen) -> Iterator[str]:
    """The reasons not to resume this job."""
    old = f"job {record.old_job}"
    if record.old_program is None:
        yield f"the server does not report which program {old} has run"
    if not job.has_ended:
        yield f"{old} is {job.state}: it is not suspended"
    if job.state == "FINISHED" and not _was_stopped(job):
        yield f"{old} has finished by itself"
    if record.snapshot is None:
        yield f"{old} is {job.state} and has left no snapshot to resume from"


def _of_ending(record: Upgrade, job: Seen) -> Iterator[str]:
    """The reasons not to upgrade or suspend this job."""
    old, desired = f"job {record.old_job}", record.desired
    if record.old_program is None:
        yield f"the server does not report which program {old} runs, so a rollback would be impossible"
    if job.state == "FINISHED":
        yield f"{old} is FINISHED" + (": it was stopped, and can be resumed" if _was_stopped(job) else "")
    if job.has_ended and desired.goal is Goal.SUSPEND:
        yield f"{old} is already {job.state}"
    if job.has_ended and record.snapshot is None and desired.mode is not Mode.STATELESS:
        yield f"{old} is {job.state} and has left no snapshot (see {_RETENTION})"
    if desired.mode is Mode.LAST_STATE and not job.has_ended and not job.retainable:
        yield (
            f"the checkpoints of {old} would be deleted with it ({_RETENTION}), and the server cannot cancel a job "
            "and retain them"
        )
    if desired.mode is Mode.LAST_STATE and record.snapshot is None:
        yield f"{old} has no completed checkpoint to start from"
    if desired.mode is Mode.SAVEPOINT and job.has_ended and desired.fallback_age is None:
        yield f"{old} is {job.state} and can no longer take a savepoint; use the mode LAST_STATE, or a fallback"


def _was_stopped(job: Seen) -> bool:
    return job.newest is not None and job.newest.is_stop


def _preview(record: Upgrade) -> Preview:
    desired, passing = record.desired, record.step is Step.PREPARE
    snapshot = None if desired.mode is Mode.STATELESS else record.snapshot
    return Preview(_known(desired.program), record.old_job, desired.options, snapshot, passing)


def _mismatch(record: Upgrade, answer: Answer) -> str:
    """The reason why the new version cannot be started from the snapshot, according to its plan; empty if it can."""
    match answer:
        case Refused() | JobMissing():
            return _refusal(answer)
        case SnapshotFit(refusals) if refusals and record.desired.mode is not Mode.STATELESS:
            return f"the state of {record.snapshot} does not fit the new version: {'; '.join(refusals)}"
    return ""


# --- the old version ends


async def _savepoint(record: Upgrade, turn: Turn) -> Upgrade | None:
    """End the old version with a savepoint, or with its latest checkpoint retained."""
    cancels = record.desired.mode is not Mode.SAVEPOINT or record.falls_back
    return await (_cancel_old if cancels else _stop_old)(record, turn)


async def _stop_old(record: Upgrade, turn: Turn) -> Upgrade | None:
    """Stop the old version as soon as it is ready for that. A stop that a new driver has forgotten is requested again.

    The intention to request a stop is recorded before the request: afterwards a stopped job is taken for the upgrade's
    work.
    """
    requested, old = record.stop_requested, f"job {record.old_job}"
    look = ReadStop(record.old_job, _id(record.series, "stop")) if requested else Look(record.old_job)
    seen = await turn.ask(look)
    stop = seen if isinstance(seen, StopSeen) else StopSeen(_job(seen), known=False)
    if isinstance(stop.job, JobMissing):
        if requested:
            return _strand(record, f"{old} was being stopped and is now unknown to the job manager")
        return _refuse(record, f"{old} is unknown to the job manager{_CHECK_THE_ID}")
    if stop.job.has_ended:
        return _with_snapshot(record, stop.path) if stop.path else _ended_by_itself(record, stop.job, turn.now_ms)
    changed = _without_savepoint(record, stop, stop.job, turn.now_ms)
    if changed is None and not stop.known and stop.job.ready:
        desired = record.desired
        if not record.stop_requested:
            return _next(record, Step.SAVEPOINT, turn.now_ms + desired.savepoint_within, stop_requested=True)
        stop_id = _id(record.series, "stop")
        request = Stop(record.old_job, stop_id, desired.directory, desired.format, record.claim)
        answer = await turn.ask(request)
        if isinstance(answer, Refused):  # an earlier request may have been carried out: only another poll shows it
            refused = record.refused_stops + 1
            return _next(record, Step.SAVEPOINT, record.deadline, why=answer.reason, refused_stops=refused)
        return None
    return changed


def _without_savepoint(record: Upgrade, stop: StopSeen, job: Seen, now_ms: int) -> Upgrade | None:
    """Fall back or refuse, when the job that still lives takes no savepoint; None while it may still take one."""
    old = f"job {record.old_job}"
    if stop.failure or record.refused_stops >= MAX_REFUSED_STOPS:
        why = f"the stop of {old} failed: {stop.failure or record.why}"
        return _fall_back(record, job, why, now_ms) or _refuse(record, f"{why}. The job keeps running")
    if stop.path is not None or not _is_due(record, now_ms):
        return None
    if stop.known:
        return _fall_back(record, job, "the savepoint takes too long", now_ms)
    why = f"{old} is {job.state} and cannot take a savepoint"
    return _fall_back(record, job, why, now_ms) or _refuse(record, why)


def _job(answer: Answer) -> Seen | JobMissing:
    assert isinstance(answer, Seen | JobMissing)
    return answer


def _fall_back(record: Upgrade, job: Seen, why: str, now_ms: int) -> Upgrade | None:
    """Fall back to the latest checkpoint, if that is allowed and the checkpoint is recent enough."""
    newest = job.newest
    if newest is None or newest.path is None or _is_too_old(record, newest, now_ms) or not record.retainable:
        return None
    why = f"{why}; it falls back to the latest checkpoint"
    return _next(record, Step.SAVEPOINT, falls_back=True, why=why)


def _is_too_old(record: Upgrade, newest: Newest | None, now_ms: int) -> bool:
    age = record.desired.fallback_age
    return age is None or newest is None or now_ms - newest.taken_at_ms > age


def _ended_by_itself(record: Upgrade, job: Seen, now_ms: int) -> Upgrade:
    """Handle the end of the old job without a known savepoint for this upgrade."""
    old, newest, stopped = f"job {record.old_job}", job.newest, _was_stopped(job)
    if job.state == "CANCELED" or (stopped and not record.stop_requested):
        return _refuse(record, f"{old} was {'stopped' if stopped else 'cancelled'} by another client")
    if job.state == "FINISHED" and not stopped:
        return _refuse(record, f"{old} has finished by itself")
    if newest is not None and newest.path is None:
        return _strand(record, f"{old} is {job.state}, and its latest checkpoint is not retained")
    snapshot = record.origin if newest is None else newest.path
    if stopped:
        return _with_snapshot(record, snapshot)
    record = replace(record, snapshot=snapshot, why=f"{old} is {job.state} by itself{job.cause}")
    if not _is_too_old(record, newest, now_ms):
        return _with_snapshot(replace(record, falls_back=True), snapshot)
    if record.desired.goal is Goal.SUSPEND:
        return _end(record, Outcome.SUSPENDED)
    return _next(record, Step.ROLL_BACK)


async def _cancel_old(record: Upgrade, turn: Turn) -> Upgrade | None:
    job, old = await turn.ask(Look(record.old_job)), f"job {record.old_job}"
    if not isinstance(job, Seen):
        return _strand(record, f"{old} was being cancelled and is now unknown to the job manager")
    if not job.has_ended:
        if job.state != "CANCELLING":
            await turn.ask(Cancel(record.old_job, True, record.claim))
        return None
    newest = job.newest
    if job.state == "FINISHED" and not _was_stopped(job):
        return _refuse(record, f"{old} has finished by itself")
    if newest is not None and newest.path is None:
        return _strand(record, f"{old} is {job.state}, and its latest checkpoint was not retained")
    return _with_snapshot(record, record.origin if newest is None else newest.path)


def _with_snapshot(record: Upgrade, snapshot: str | None) -> Upgrade:
    """Continue with the snapshot that the old version left when it ended."""
    record = replace(record, snapshot=snapshot)
    if record.desired.goal is Goal.SUSPEND:
        return _end(record, Outcome.SUSPENDED)
    return _checked(record) if record.desired.mode is Mode.STATELESS else _next(record, Step.CHECK)


def _checked(record: Upgrade) -> Upgrade:
    return _next(record, Step.PAUSED if record.desired.pauses else Step.SUBMIT)


# --- the new version


async def _check(record: Upgrade, turn: Turn) -> Upgrade | None:
    """Check the snapshot itself against the new program."""
    fit = await turn.ask(_preview(record))
    if why := _mismatch(record, fit):
        return _next(record, Step.ROLL_BACK, why=why)
    return _checked(replace(record, diff=fit.diff if isinstance(fit, SnapshotFit) else record.diff))


async def _submit(record: Upgrade, turn: Turn) -> Upgrade | None:
    """Start the new version, or the suspended job."""
    answer, desired = await turn.ask(_start(record)), record.desired
    deadline = turn.now_ms + desired.healthy_within
    if not isinstance(answer, Refused | JobMissing):
        return _next(record, Step.GATE, deadline)
    what = "the job" if desired.goal is Goal.RESUME else "the new version"
    why = f"{what} was not started: {_refusal(answer)}"
    if desired.goal is not Goal.RESUME:
        return _next(record, Step.ROLL_BACK, why=why)
    if isinstance(await turn.ask(Retire(record.new_job)), Refused):  # an earlier request has started it
        return _next(record, Step.GATE, deadline, why=why)
    return _strand(record, why)


def _start(record: Upgrade) -> Run:
    desired = record.desired
    program = record.old_program if desired.goal is Goal.RESUME else desired.program
    snapshot = None if desired.mode is Mode.STATELESS else record.snapshot
    return Run(_known(program), record.new_job, record.old_job, desired.options, snapshot, record.claim)


async def _gate(record: Upgrade, turn: Turn) -> Upgrade | None:
    """Wait until the started job is healthy."""
    job, desired = await turn.ask(Look(record.new_job, judged=True)), record.desired
    resumes = desired.goal is Goal.RESUME
    if isinstance(job, Seen):
        well = job.ready and job.state == "RUNNING" and not job.ailment
        if (well and job.completed >= desired.checkpoints) or job.state == "FINISHED":
            return _end(record, Outcome.RESUMED if resumes else Outcome.UPGRADED)
        if not job.has_ended and not _is_due(record, turn.now_ms):
            return None
        ailment = f", and it is not healthy: {job.ailment}" if job.ailment else ""
        in_a_row = f"{job.completed} of {desired.checkpoints} checkpoints in time, without a restart in between"
        late = f"it is {job.state} and has completed {in_a_row}{ailment}"
        why = f"it is {job.state}{job.cause}" if job.has_ended else late
    elif resumes:
        why = f"the job, resumed as {record.new_job}, is unknown to the job manager, and may have committed"
        if isinstance(await turn.ask(Retire(record.new_job)), Refused):
            return _next(record, Step.GATE, turn.now_ms + desired.healthy_within, why=why)
        return _strand(record, why)
    else:
        why = "it is unknown to the job manager"
    if resumes:  # there is no version to go back to
        what = "Its committed output must not be repeated: it is not changed"
        return _strand(record, f"the job, resumed as {record.new_job}, is not healthy: {why}", what)
    return _next(record, Step.ROLL_BACK, why=f"the new version is not healthy: {why}")


# --- back to the old version


async def _roll_back(record: Upgrade, turn: Turn) -> Upgrade | None:
    """End the new version for good, start the old one again, and wait until it runs."""
    if record.restarted:
        return await _gate_old(record, turn)
    job = await turn.ask(Look(record.new_job))
    if isinstance(job, Seen) and not job.has_ended:
        if job.state != "CANCELLING":
            await turn.ask(Cancel(record.new_job, False, record.claim))
        return None
    if isinstance(job, Seen) and job.state == "FINISHED":
        return _end(record, Outcome.UPGRADED, "the new version has finished")
    if isinstance(await turn.ask(Retire(record.new_job)), Refused):
        return None  # its request, which had no answer, has arrived after all
    return await _start_old(record, turn)


async def _start_old(record: Upgrade, turn: Turn) -> Upgrade:
    program, job = _known(record.old_program), record.restarted_job
    options = record.desired.rollback_options
    answer = await turn.ask(Run(program, job, record.old_job, options, record.snapshot, record.claim))
    why, deadline = record.why, turn.now_ms + record.desired.healthy_within
    if isinstance(answer, Refused | JobMissing):
        why = f"{why}; and the old version was not started again: {_refusal(answer)}"
        if not isinstance(await turn.ask(Retire(job)), Refused):
            return _strand(record, why)
        why = f"{why}; then the request for it arrived after all"
    return _next(record, Step.ROLL_BACK, deadline, restarted=True, why=why)


async def _gate_old(record: Upgrade, turn: Turn) -> Upgrade | None:
    job, started = await turn.ask(Look(record.restarted_job)), f"{record.why}; and the old version, started again, is"
    if not isinstance(job, Seen):
        why = f"{started} unknown to the job manager"
        if isinstance(await turn.ask(Retire(record.restarted_job)), Refused):
            return _next(record, Step.ROLL_BACK, turn.now_ms + record.desired.healthy_within)
        return _strand(record, why)
    if job.state == "FINISHED" or (job.ready and job.state == "RUNNING"):
        return _end(record, Outcome.ROLLED_BACK)
    if job.has_ended:
        return _strand(record, f"{started} {job.state}{job.cause}")
    if _is_due(record, turn.now_ms):
        return _end(record, Outcome.ROLLED_BACK, f"{started} still {job.state}")
    return None


# --- the end


async def _clean(record: Upgrade, turn: Turn) -> Upgrade | None:
    await turn.ask(Release(_held(record), record.owner, record.old_job, record.claim))
    return _next(record, Step.ENDED)


def _held(record: Upgrade) -> tuple[str, ...]:
    """The programs to release. A suspended job's program stays held, and so do all when a person has to take over.

    The hold of a suspended job belongs to its suspension: an upgrade that has lost the lineage leaves it alone.
    """
    suspended = record.outcome is Outcome.REFUSED and record.desired.goal is Goal.RESUME
    if suspended or (record.lost and record.desired.goal is not Goal.UPGRADE):
        return ()
    if record.outcome in (Outcome.SUSPENDED, Outcome.STRANDED):
        return ()
    return tuple(sorted({program for program in (record.desired.program, record.old_program) if program is not None}))


STEPS: Mapping[Step, Callable[[Upgrade, Turn], Awaitable[Upgrade | None]]] = {
    Step.PREPARE: _prepare,
    Step.SAVEPOINT: _savepoint,
    Step.CHECK: _check,
    Step.SUBMIT: _submit,
    Step.GATE: _gate,
    Step.ROLL_BACK: _roll_back,
    Step.CLEAN: _clean,
}
