"""The reasons not to begin an upgrade, or not to start a new version. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from airflow_provider_ckpt.upgrades.actions import Answer, Fits, JobMissing, Refused, Seen
from airflow_provider_ckpt.upgrades.record import Goal, Mode, Upgrade

_RETENTION = "execution.checkpointing.externalized-checkpoint-retention"


def objection(record: Upgrade, job: Seen) -> str:
    """Why nothing is begun with this job; empty when there is no reason. The record has what was seen of it."""
    found = _of_resuming(record, job) if record.desired.goal is Goal.RESUME else _of_ending(record, job)
    return next(found, "")


def _of_resuming(record: Upgrade, job: Seen) -> Iterator[str]:
    named = f"job {record.old_job}"
    if record.old_program is None:
        yield f"the server does not say which program {named} has run"
    if not job.has_ended:
        yield f"{named} is {job.state}: it is not suspended"
    if job.state == "FINISHED" and not _was_stopped(job):
        yield f"{named} has finished by itself"
    if record.snapshot is None:
        yield f"{named} is {job.state} and has left no snapshot to resume from"


def _of_ending(record: Upgrade, job: Seen) -> Iterator[str]:
    named, desired = f"job {record.old_job}", record.desired
    if record.old_program is None:
        yield f"the server does not say which program {named} runs, and nothing could be rolled back to"
    if job.state == "FINISHED":
        yield f"{named} is FINISHED" + (": it was stopped, and can be resumed" if _was_stopped(job) else "")
    if job.has_ended and desired.goal is Goal.SUSPEND:
        yield f"{named} is {job.state} already"
    if job.has_ended and record.snapshot is None and desired.mode is not Mode.STATELESS:
        yield f"{named} is {job.state} and has left no snapshot (see {_RETENTION})"
    if desired.mode is Mode.LAST_STATE and not job.has_ended and not job.retainable:
        yield (
            f"the checkpoints of {named} would be deleted with it ({_RETENTION}), and the server cannot cancel a job "
            "and retain them"
        )
    if desired.mode is Mode.LAST_STATE and record.snapshot is None:
        yield f"{named} has no completed checkpoint to start from"
    if desired.mode is Mode.SAVEPOINT and job.has_ended and desired.fallback_age is None:
        yield f"{named} is {job.state} and can no longer take a savepoint; use the mode LAST_STATE, or a fallback"


def _was_stopped(job: Seen) -> bool:
    return job.newest is not None and job.newest.is_stop


def misfit(record: Upgrade, answer: Answer) -> str:
    """Why the new version cannot be started from the snapshot, by what its plan says; empty when it can."""
    match answer:
        case Refused(reason):
            return reason
        case JobMissing(what):
            return what
        case Fits(refusals) if refusals and record.desired.mode is not Mode.STATELESS:
            return f"the state of {record.snapshot} does not fit the new version: {'; '.join(refusals)}"
    return ""
