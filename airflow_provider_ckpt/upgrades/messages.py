"""The messages of an upgrade: where it stands, how it ended, and how a person continues. Pure."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.upgrades.record import Goal, Outcome, Step, Upgrade

_BEFORE = frozenset({Step.PIN_NEW, Step.INSPECT, Step.PIN_OLD, Step.PREVIEW, Step.READY})
_ENDING = frozenset({Step.STOP, Step.STOPPING, Step.CANCEL, Step.CANCELLING})


def standing(record: Upgrade) -> str:
    """What is true of the remote side at this step."""
    old, new, step = record.old_job, record.new_job, record.step
    if step in _BEFORE:
        return f"job {old} goes on as it was" if record.desired.goal is not Goal.RESUME else f"job {old} is suspended"
    if step in _ENDING:
        return f"job {old} is being ended, or has ended"
    if step in (Step.CHECK, Step.PAUSED, Step.START):
        return f"job {old} has ended, and nothing runs; {record.snapshot} is what to go on from"
    if step in (Step.GATE, Step.CANCEL_NEW, Step.CANCELLING_NEW):
        return f"job {new} was started in the place of {old}, from {record.snapshot}"
    if step is Step.RETIRE_NEW:
        return f"job {old} has ended, and {new}, which was to take its place, is not to be started any more"
    if step in (Step.ROLL_BACK, Step.GATE_OLD, Step.RETIRE_RESTARTED):
        return f"the old version is started again as job {record.restarted_job}, from {record.snapshot}"
    return f"it has ended: {ending(record)}"


def ending(record: Upgrade) -> str:
    """One sentence, with what a person needs to go on."""
    old, why, goal = record.old_job, record.why, record.desired.goal.lower()
    match record.outcome:
        case Outcome.UPGRADED:
            return f"job {record.new_job} runs in the place of {old}" + (f" ({why})" if why else "")
        case Outcome.RESUMED:
            return f"job {old} goes on as {record.new_job}"
        case Outcome.SUSPENDED:
            place = record.snapshot or "nothing: it has completed no checkpoint"
            return f"job {old} is suspended; ResumeJobOperator goes on from {place}" + (f" ({why})" if why else "")
        case Outcome.ROLLED_BACK:
            return f"the old version runs again as job {record.restarted_job}, from {record.snapshot}: {why}"
        case Outcome.REFUSED:
            return f"the {goal} was refused, and nothing was started: {why}"
        case Outcome.STRANDED:
            return f"the {goal} needs a person: {why}"
    return f"it stands at {record.step}"


def result_of(record: Upgrade) -> dict[str, Any]:
    """What a task returns. ``job_id`` is the job that runs now, if any."""
    runs = {
        Outcome.UPGRADED: record.new_job,
        Outcome.RESUMED: record.new_job,
        Outcome.ROLLED_BACK: record.restarted_job,
    }
    outcome = None if record.outcome is None else record.outcome
    return {
        "outcome": record.step.value if outcome is None else outcome.value,
        "job_id": record.old_job if outcome is None else runs.get(outcome, record.old_job),
        "old_job_id": record.old_job,
        "name": record.name,
        "savepoint_path": record.snapshot,
        "mode": record.desired.mode.value,
        "fell_back": record.falls_back,
        "pipeline_id": record.desired.program or record.old_program,
        "old_pipeline_id": record.old_program,
        "diff": list(record.diff),
        "why": record.why,
        "approved_by": record.approved_by,
    }
