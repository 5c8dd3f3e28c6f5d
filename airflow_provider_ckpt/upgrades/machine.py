"""The steps of replacing a job by a new version of it, as a state machine without clock, network and Airflow. Pure.

:func:`action_of` returns the action for the record's step, and :func:`advance` the record that follows the answer.
:func:`drive` performs the action, has the new record kept, and only then takes the next step. An action whose answer
was never recorded is performed again. All rules that keep two versions from running at once are here:

* The new version is started only after the old job was seen to have ended, and the old one is started again only after
  the new one was seen to have ended.
* Each step requires the lineage of the job, which the job manager grants to one upgrade at a time. An upgrade that
  loses the lineage ends, and does not touch what another upgrade has begun.
* Before another job replaces one that was requested, or the message says that nothing runs, the id of the requested
  job is retired: a request for it that arrives late is refused.
* What the next version starts from is fixed before anything is started, and a rollback starts from the same.
* Nothing is stopped before the programs are held and the snapshot was checked against the new program.

``PIN_NEW, INSPECT, PIN_OLD, PREVIEW``: nothing has changed, and a misfit is refused. ``READY, STOP, STOPPING`` or
``CANCEL, CANCELLING``: the old version ends. ``CHECK, PAUSED, START, GATE``: the new one has to become healthy.
``CANCEL_NEW, CANCELLING_NEW, RETIRE_NEW, ROLL_BACK, GATE_OLD, RETIRE_RESTARTED``: it did not. ``RELEASE, ENDED``: the
holds on the programs are released.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from airflow_provider_ckpt.upgrades.actions import (
    Action,
    Answer,
    Cancel,
    Claim,
    Decided,
    Fits,
    Hold,
    JobMissing,
    Look,
    LookAtStop,
    Lost,
    Newest,
    Preview,
    Refused,
    Release,
    Retire,
    Run,
    Seen,
    Stop,
    StopSeen,
)
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from airflow_provider_ckpt.upgrades.validation import misfit, objection

_NAMESPACE = uuid.UUID("7a0f2f0e-6f3c-5c0e-9c55-27d94f1f1f0b")
_CHECK = ". Check the id, and the connection"
_CLAIM_MS, _PAUSED_CLAIM_MS = 24 * 3_600_000, 7 * 24 * 3_600_000
"""How long an upgrade keeps its lineage from others without prolonging the claim."""
MAX_STOPS = 3
"""Maximum number of stop requests, when the job manager has forgotten the stop and the job still runs."""
WATCHES = frozenset({Step.READY, Step.STOPPING, Step.CANCELLING, Step.GATE, Step.CANCELLING_NEW, Step.GATE_OLD})
"""Steps that only watch, repeatedly, until something has happened."""


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
        step=Step.PIN_NEW if upgrades else Step.INSPECT,
    )


def _id(series: str, purpose: str) -> str:
    return uuid.uuid5(_NAMESPACE, f"{series}/{purpose}").hex


# --- what is to be done


def action_of(record: Upgrade) -> Action | None:
    """Return the next action; None when there is none, or when a person has to decide."""
    action = _ACTIONS.get(record.step)
    return None if action is None else action(record)


def claim_of(record: Upgrade) -> Claim:
    """Return the claim that ensures, before each step, that no other client ends or starts a job of the lineage."""
    duration = _PAUSED_CLAIM_MS if record.step is Step.PAUSED else _CLAIM_MS
    own_jobs = (record.new_job, record.restarted_job)
    return Claim(record.old_job, record.claim, own_jobs, record.snapshot, duration)


def _preview(record: Upgrade) -> Preview:
    desired, passing = record.desired, record.step is Step.PREVIEW
    snapshot = None if desired.mode is Mode.STATELESS else record.snapshot
    return Preview(_known(desired.program), record.old_job, desired.options, snapshot, passing)


def _start(record: Upgrade) -> Run:
    desired = record.desired
    program = record.old_program if desired.goal is Goal.RESUME else desired.program
    snapshot = None if desired.mode is Mode.STATELESS else record.snapshot
    return Run(_known(program), record.new_job, record.old_job, desired.options, snapshot, record.claim)


def _known(program: str | None) -> str:
    assert program is not None, "a step before this one has found it"
    return program


def _trigger(record: Upgrade) -> str:
    return _id(record.series, f"stop/{record.stops}")


def _held(record: Upgrade) -> tuple[str, ...]:
    """A suspended job's program stays held, and so do the programs when a person has to take over.

    The hold of a suspended job belongs to its suspension: an upgrade that has lost the lineage leaves it alone.
    """
    suspended = record.outcome is Outcome.REFUSED and record.desired.goal is Goal.RESUME
    if suspended or (record.lost and record.desired.goal is not Goal.UPGRADE):
        return ()
    if record.outcome in (Outcome.SUSPENDED, Outcome.STRANDED):
        return ()
    return tuple(sorted({program for program in (record.desired.program, record.old_program) if program is not None}))


_ACTIONS: Mapping[Step, Callable[[Upgrade], Action]] = {
    Step.PIN_NEW: lambda record: Hold(_known(record.desired.program), record.owner),
    Step.INSPECT: lambda record: Look(record.old_job, closely=True),
    Step.PIN_OLD: lambda record: Hold(_known(record.old_program), record.owner),
    Step.PREVIEW: _preview,
    Step.READY: lambda record: Look(record.old_job),
    Step.STOP: lambda record: Stop(
        record.old_job, _trigger(record), record.desired.directory, record.desired.format, record.claim
    ),
    Step.STOPPING: lambda record: LookAtStop(record.old_job, _trigger(record)),
    Step.CANCEL: lambda record: Cancel(record.old_job, True, record.claim),
    Step.CANCELLING: lambda record: Look(record.old_job),
    Step.CHECK: _preview,
    Step.START: _start,
    Step.GATE: lambda record: Look(record.new_job, judged=True),
    Step.CANCEL_NEW: lambda record: Cancel(record.new_job, False, record.claim),
    Step.CANCELLING_NEW: lambda record: Look(record.new_job),
    Step.RETIRE_NEW: lambda record: Retire(record.new_job),
    Step.ROLL_BACK: lambda record: Run(
        _known(record.old_program), record.restarted_job, record.old_job, {}, record.snapshot, record.claim
    ),
    Step.GATE_OLD: lambda record: Look(record.restarted_job),
    Step.RETIRE_RESTARTED: lambda record: Retire(record.restarted_job),
    Step.RELEASE: lambda record: Release(_held(record), record.owner, record.old_job, record.claim),
}


# --- what follows


def advance(record: Upgrade, answer: Answer, now_ms: int) -> Upgrade:
    """Return the record after the answer; the same record when a watching step has to keep watching."""
    if isinstance(answer, Lost):
        changed = _refuse(replace(record, lost=True), answer.reason)
    else:
        changed = _AFTER[record.step](_Turn(record, answer, now_ms))
    return record if changed == record else replace(changed, revision=record.revision + 1)


def _to(record: Upgrade, step: Step, deadline: int | None = None, **changes: Any) -> Upgrade:
    return replace(record, step=step, deadline=deadline, **changes)


def _end(record: Upgrade, outcome: Outcome, why: str = "") -> Upgrade:
    return _to(record, Step.RELEASE, outcome=outcome, why=why or record.why)


def _refuse(record: Upgrade, why: str) -> Upgrade:
    return _end(record, Outcome.REFUSED, why)


def _strand(record: Upgrade, why: str, what: str = "Nothing runs") -> Upgrade:
    place = f"The snapshot to start from is {record.snapshot}" if record.snapshot else "There is no snapshot"
    return _end(record, Outcome.STRANDED, f"{why}. {what}. {place}; {record.owner} keeps holding the programs")


def _with_snapshot(record: Upgrade, snapshot: str | None) -> Upgrade:
    """The old version has ended and left this snapshot."""
    record = replace(record, snapshot=snapshot)
    if record.desired.goal is Goal.SUSPEND:
        return _end(record, Outcome.SUSPENDED)
    return _checked(record) if record.desired.mode is Mode.STATELESS else _to(record, Step.CHECK)


def _checked(record: Upgrade) -> Upgrade:
    return _to(record, Step.PAUSED if record.desired.pauses else Step.START)


def _refusal(answer: Refused | JobMissing) -> str:
    return answer.reason if isinstance(answer, Refused) else answer.what


@dataclass(frozen=True, slots=True)
class _Turn:
    """Handles one answer at one moment; it has a method for each step."""

    record: Upgrade
    answer: Answer
    now_ms: int

    @property
    def is_due(self) -> bool:
        return self.record.deadline is not None and self.now_ms >= self.record.deadline

    @property
    def _old(self) -> str:
        return f"job {self.record.old_job}"

    def _limited(self, step: Step, milliseconds: int, **changes: Any) -> Upgrade:
        return _to(self.record, step, self.now_ms + milliseconds, **changes)

    # --- before anything has changed

    def pin_new(self) -> Upgrade:
        if isinstance(self.answer, JobMissing):
            return _refuse(self.record, self.answer.what)
        return _to(self.record, Step.INSPECT)

    def inspect(self) -> Upgrade:
        job = self.answer
        if not isinstance(job, Seen):
            return _refuse(self.record, f"{self._old} is unknown to the job manager{_CHECK}")
        snapshot = job.restored if job.newest is None else job.newest.path
        record = replace(
            self.record,
            name=job.name,
            old_program=job.program,
            origin=job.restored,
            snapshot=snapshot,
            retainable=job.retainable,
        )
        why = objection(record, job)
        return _refuse(record, why) if why else _to(record, Step.PIN_OLD)

    def pin_old(self) -> Upgrade:
        if isinstance(self.answer, JobMissing):
            return _refuse(self.record, f"the program that the job runs cannot be kept: {self.answer.what}")
        match self.record.desired.goal:
            case Goal.UPGRADE:
                return _to(self.record, Step.PREVIEW)
            case Goal.RESUME:
                return _to(self.record, Step.START)
        return self._end_the_old_one(self.record)

    def preview(self) -> Upgrade:
        why = misfit(self.record, self.answer)
        if why:
            return _refuse(self.record, why)
        diff = self.answer.diff if isinstance(self.answer, Fits) else ()
        return self._end_the_old_one(replace(self.record, diff=diff))

    # --- the old version ends

    def _end_the_old_one(self, record: Upgrade) -> Upgrade:
        if record.desired.mode is Mode.SAVEPOINT:
            return _to(record, Step.READY, self.now_ms + record.desired.savepoint_within)
        return _to(record, Step.CANCEL)

    def ready(self) -> Upgrade:
        job = self.answer
        if not isinstance(job, Seen):
            return _refuse(self.record, f"{self._old} is unknown to the job manager{_CHECK}")
        if job.has_ended:
            return self._ended_by_itself(job)
        if job.ready:
            return _to(self.record, Step.STOP)
        if self.is_due:
            why = f"{self._old} is {job.state} and takes no savepoint"
            return self._fall_back(job, why) or _refuse(self.record, why)
        return self.record

    def _fall_back(self, job: Seen, why: str) -> Upgrade | None:
        """Fall back to the latest checkpoint, if that is allowed and the checkpoint is recent enough."""
        newest = job.newest
        if newest is None or newest.path is None or self._is_too_old(newest) or not self.record.retainable:
            return None
        return _to(self.record, Step.CANCEL, falls_back=True, why=f"{why}; it falls back to the latest checkpoint")

    def _is_too_old(self, newest: Newest | None) -> bool:
        age = self.record.desired.fallback_age
        return age is None or newest is None or self.now_ms - newest.taken_at_ms > age

    def stop(self) -> Upgrade:
        """A later look shows whether the stop was accepted; a refused one may have been carried out before."""
        desired = self.record.desired
        why = self.answer.reason if isinstance(self.answer, Refused) else self.record.why
        if desired.fallback_age is None:
            return _to(self.record, Step.STOPPING, why=why)
        return self._limited(Step.STOPPING, desired.savepoint_within, why=why)

    def stopping(self) -> Upgrade:
        assert isinstance(self.answer, StopSeen)
        job, path = self.answer.job, self.answer.path
        if isinstance(job, JobMissing):
            return _strand(self.record, f"{self._old} was being stopped and is unknown to the job manager now")
        if not job.has_ended:
            return self._still_stopping(job, self.answer)
        return self._ended_by_itself(job) if path is None else _with_snapshot(self.record, path)

    def _still_stopping(self, job: Seen, stop: StopSeen) -> Upgrade:
        if stop.path is not None:
            return self.record  # its tasks are ending
        if not stop.known and self.record.stops + 1 < MAX_STOPS:
            return self._limited(Step.READY, self.record.desired.savepoint_within, stops=self.record.stops + 1)
        if not stop.known or stop.failure:
            why = f"the stop of {self._old} failed: {stop.failure or self.record.why or 'it was forgotten'}"
            return self._fall_back(job, why) or _refuse(self.record, f"{why}. The job keeps running")
        if self.is_due:
            return self._fall_back(job, "the savepoint takes too long") or self.record
        return self.record

    def _ended_by_itself(self, job: Seen) -> Upgrade:
        """The old job has ended, and no savepoint that it took for this upgrade is known."""
        newest, record = job.newest, self.record
        stopped = newest is not None and newest.is_stop
        if job.state == "CANCELED" or (stopped and record.step is Step.READY and not record.stops):
            return _refuse(record, f"{self._old} was {'stopped' if stopped else 'cancelled'} by another client")
        if job.state == "FINISHED" and not stopped:
            return _refuse(record, f"{self._old} has finished by itself")
        if newest is not None and newest.path is None:
            return _strand(record, f"{self._old} is {job.state}, and its latest checkpoint is not retained")
        snapshot = record.origin if newest is None else newest.path
        if stopped:
            return _with_snapshot(record, snapshot)
        why = f"{self._old} is {job.state} by itself{job.cause}"
        record = replace(record, snapshot=snapshot, why=why)
        if not self._is_too_old(newest):
            return _with_snapshot(replace(record, falls_back=True), snapshot)
        return _end(record, Outcome.SUSPENDED) if record.desired.goal is Goal.SUSPEND else _to(record, Step.ROLL_BACK)

    def cancel(self) -> Upgrade:
        return _to(self.record, Step.CANCELLING)

    def cancelling(self) -> Upgrade:
        job = self.answer
        if not isinstance(job, Seen):
            return _strand(self.record, f"{self._old} was being cancelled and is unknown to the job manager now")
        if not job.has_ended:
            return self.record
        newest = job.newest
        if job.state == "FINISHED" and not (newest is not None and newest.is_stop):
            return _refuse(self.record, f"{self._old} has finished by itself")
        if newest is not None and newest.path is None:
            return _strand(self.record, f"{self._old} is {job.state}, and its latest checkpoint was not retained")
        return _with_snapshot(self.record, self.record.origin if newest is None else newest.path)

    # --- the new version

    def check(self) -> Upgrade:
        why = misfit(self.record, self.answer)
        if why:
            return _to(self.record, Step.ROLL_BACK, why=why)
        diff = self.answer.diff if isinstance(self.answer, Fits) else self.record.diff
        return _checked(replace(self.record, diff=diff))

    def paused(self) -> Upgrade:
        assert isinstance(self.answer, Decided)
        by = f" by {self.answer.by}" if self.answer.by else ""
        if self.answer.approved:
            return _to(self.record, Step.START, approved_by=self.answer.by)
        return _to(self.record, Step.ROLL_BACK, why=f"the new version was rejected{by}")

    def start(self) -> Upgrade:
        desired = self.record.desired
        if not isinstance(self.answer, Refused | JobMissing):
            return self._limited(Step.GATE, desired.healthy_within)
        what = "the job" if desired.goal is Goal.RESUME else "the new version"
        return _to(self.record, Step.RETIRE_NEW, why=f"{what} was not started: {_refusal(self.answer)}")

    def gate(self) -> Upgrade:
        job, desired = self.answer, self.record.desired
        if isinstance(job, Seen):
            well = job.ready and job.state == "RUNNING" and not job.ailment
            healthy = well and job.completed >= desired.checkpoints
            if healthy or job.state == "FINISHED":
                return _end(self.record, Outcome.RESUMED if desired.goal is Goal.RESUME else Outcome.UPGRADED)
            if not job.has_ended and not self.is_due:
                return self.record
            ailment = f", and it is not well: {job.ailment}" if job.ailment else ""
            in_a_row = f"{job.completed} of {desired.checkpoints} checkpoints in time, in a row without a restart"
            late = f"it is {job.state} and has completed {in_a_row}{ailment}"
            why = f"it is {job.state}{job.cause}" if job.has_ended else late
        elif desired.goal is Goal.RESUME:
            unknown = (
                f"the job, resumed as {self.record.new_job}, is unknown to the job manager, and may have committed"
            )
            return _to(self.record, Step.RETIRE_NEW, why=unknown)
        else:
            why = "it is unknown to the job manager"
        if desired.goal is Goal.RESUME:  # there is no version to go back to
            what = "What it has committed is not to be repeated: it is left as it is"
            return _strand(self.record, f"the job, resumed as {self.record.new_job}, is not healthy: {why}", what)
        return _to(self.record, Step.CANCEL_NEW, why=f"the new version is not healthy: {why}")

    # --- back to the old version

    def cancel_new(self) -> Upgrade:
        return _to(self.record, Step.CANCELLING_NEW)

    def cancelling_new(self) -> Upgrade:
        job = self.answer
        if isinstance(job, Seen) and not job.has_ended:
            return self.record
        if isinstance(job, Seen) and job.state == "FINISHED":
            return _end(self.record, Outcome.UPGRADED, "the new version has finished")
        return _to(self.record, Step.RETIRE_NEW)

    def retire_new(self) -> Upgrade:
        """Refused means that the start request, which had no answer, has arrived after all."""
        lives, resumes = isinstance(self.answer, Refused), self.record.desired.goal is Goal.RESUME
        if resumes:
            within = self.record.desired.healthy_within
            return self._limited(Step.GATE, within) if lives else _strand(self.record, self.record.why)
        return _to(self.record, Step.CANCEL_NEW if lives else Step.ROLL_BACK)

    def roll_back(self) -> Upgrade:
        if isinstance(self.answer, Refused | JobMissing):
            why = f"{self.record.why}; and the old version was not started again: {_refusal(self.answer)}"
            return _to(self.record, Step.RETIRE_RESTARTED, why=why)
        return self._limited(Step.GATE_OLD, self.record.desired.healthy_within)

    def gate_old(self) -> Upgrade:
        job, started = self.answer, f"{self.record.why}; and the old version, started again, is"
        if not isinstance(job, Seen):
            return _to(self.record, Step.RETIRE_RESTARTED, why=f"{started} unknown to the job manager")
        if job.state == "FINISHED" or (job.ready and job.state == "RUNNING"):
            return _end(self.record, Outcome.ROLLED_BACK)
        if job.has_ended:
            return _strand(self.record, f"{started} {job.state}{job.cause}")
        if self.is_due:
            return _end(self.record, Outcome.ROLLED_BACK, f"{started} still {job.state}")
        return self.record

    def retire_restarted(self) -> Upgrade:
        if isinstance(self.answer, Refused):
            why = f"{self.record.why}; then the request for it arrived after all"
            return self._limited(Step.GATE_OLD, self.record.desired.healthy_within, why=why)
        return _strand(self.record, self.record.why)

    def release(self) -> Upgrade:
        return _to(self.record, Step.ENDED)


_AFTER: Mapping[Step, Callable[[_Turn], Upgrade]] = {
    step: getattr(_Turn, step.value.lower()) for step in Step if step is not Step.ENDED
}


# --- driving


def drive(
    record: Upgrade,
    perform: Callable[[Action], Answer],
    keep: Callable[[Upgrade], None],
    now_ms: Callable[[], int],
) -> Upgrade:
    """Take steps until one has to watch, a person has to decide, or the upgrade has ended.

    ``perform`` carries an action out, ``keep`` records each record before it is used. No step is taken, and nothing is
    watched, without the lineage.
    """
    while (action := action_of(record)) is not None or record.step is Step.PAUSED:
        answer = perform(claim_of(record)) if record.step is not Step.RELEASE else None
        if not isinstance(answer, Lost):
            if action is None or record.step in WATCHES:
                break
            answer = perform(action)
        record = advance(record, answer, now_ms())
        keep(record)
    return record
