"""The record of an upgrade: the request, every id that it uses, its step, and the messages about it. Plain data.

All ids are chosen before the first request is sent, so after any crash the next try requests the same things.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, ValidationError, convert, json


class Goal(StrEnum):
    """The purpose of the steps."""

    UPGRADE = "UPGRADE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"


class Mode(StrEnum):
    """The new version starts from a savepoint that ends the old one, from the old one's latest checkpoint, or from
    nothing."""

    SAVEPOINT = "SAVEPOINT"
    LAST_STATE = "LAST_STATE"
    STATELESS = "STATELESS"


class Step(StrEnum):
    """The step that is due next.

    PREPARE: nothing has changed, and an upgrade that cannot succeed is refused. SAVEPOINT: the old version ends, with a
    savepoint or its latest checkpoint. CHECK: the snapshot is checked. PAUSED: a person has to decide. SUBMIT, GATE:
    the new version is started and has to become healthy. ROLL_BACK: it did not, and the old one is started again.
    CLEAN: the holds on the programs are released.
    """

    PREPARE = "PREPARE"
    SAVEPOINT = "SAVEPOINT"
    CHECK = "CHECK"
    PAUSED = "PAUSED"
    SUBMIT = "SUBMIT"
    GATE = "GATE"
    ROLL_BACK = "ROLL_BACK"
    CLEAN = "CLEAN"
    ENDED = "ENDED"


class Outcome(StrEnum):
    """How the upgrade ended. REFUSED: the old job is unchanged, or keeps running. STRANDED: a person has to act."""

    UPGRADED = "UPGRADED"
    ROLLED_BACK = "ROLLED_BACK"
    REFUSED = "REFUSED"
    SUSPENDED = "SUSPENDED"
    RESUMED = "RESUMED"
    STRANDED = "STRANDED"


class DesiredUpgrade(Struct, frozen=True, kw_only=True):
    """The request. Times in milliseconds.

    ``program`` is the new version's, ``options`` are those of its run, by the names of ``RunOptions``;
    ``rollback_options`` are additional options of the old version, when it is started again. ``fallback_age`` is the
    greatest age of a checkpoint to fall back to when no savepoint can be taken; None: no fallback. ``pauses``: before
    the new version is started, for an approval. ``checkpoints`` have to complete within ``healthy_within``.
    """

    goal: Goal
    job: str
    mode: Mode = Mode.SAVEPOINT
    program: str | None = None
    options: dict[str, Any] = {}
    rollback_options: dict[str, Any] = {}
    directory: str | None = None
    format: str = "NATIVE"
    fallback_age: int | None = None
    savepoint_within: int = 600_000
    healthy_within: int = 300_000
    checkpoints: int = 1
    pauses: bool = False


class Upgrade(Struct, frozen=True, kw_only=True):
    """The record. ``revision`` counts its changes.

    ``series`` is the seed of its ids; ``new_job`` and ``restarted_job`` are the ids of the jobs that it may start.
    ``owner`` holds the programs. ``origin`` is the snapshot that the old job began with, ``snapshot`` the one that the
    next job resumes from. ``retainable``: its checkpoints can outlive it. ``stop_requested``: the old job may have been
    asked to stop, and ``refused_stops`` counts the refusals. ``restarted``: the old version was started again. ``why``
    is the reason for the outcome. ``lost``: another client holds the lineage.
    """

    desired: DesiredUpgrade
    series: str
    new_job: str
    restarted_job: str
    owner: str
    step: Step
    revision: int = 0
    deadline: int | None = None
    name: str = ""
    old_program: str | None = None
    origin: str | None = None
    snapshot: str | None = None
    retainable: bool = True
    falls_back: bool = False
    stop_requested: bool = False
    refused_stops: int = 0
    restarted: bool = False
    diff: tuple[str, ...] = ()
    why: str = ""
    outcome: Outcome | None = None
    approved_by: str = ""
    lost: bool = False

    @property
    def claim(self) -> str:
        """The token that holds the lineage: another one for each record, and the same for each try of it."""
        return f"{self.desired.goal.lower()}-{self.new_job}"

    @property
    def old_job(self) -> str:
        """The job that is replaced, suspended or resumed."""
        return self.desired.job

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON values, without tuples, for the journal and the next task."""
        document: dict[str, Any] = json.decode(json.encode(self))
        return document

    @classmethod
    def from_json(cls, document: object) -> Upgrade:
        """Raises ValueError for a document of another shape."""
        try:
            return convert(document, cls)
        except ValidationError as error:
            raise ValueError(f"it is not a record of an upgrade: {error}") from error


# --- messages


def standing(record: Upgrade) -> str:
    """The state of the remote side at this step, as a sentence."""
    old, new, desired, snapshot = record.old_job, record.new_job, record.desired, record.snapshot
    match record.step:
        case Step.PREPARE if desired.goal is Goal.RESUME:
            text = f"job {old} is suspended"
        case Step.PREPARE:
            text = f"job {old} keeps running as it was"
        case Step.SAVEPOINT if desired.mode is Mode.SAVEPOINT and not record.stop_requested and not record.falls_back:
            text = f"job {old} keeps running as it was, until it is ready for a savepoint"
        case Step.SAVEPOINT:
            text = f"job {old} is ending or has ended"
        case Step.CHECK | Step.PAUSED:
            text = f"job {old} has ended, and nothing runs; {snapshot} is the snapshot from which to continue"
        case Step.SUBMIT:
            text = f"job {old} has ended, and {new} is being started instead, from {snapshot}"
        case Step.GATE:
            text = f"job {new} was started instead of {old}, from {snapshot}"
        case Step.ROLL_BACK if record.restarted:
            text = f"the old version was started again as job {record.restarted_job}, from {snapshot}"
        case Step.ROLL_BACK:
            text = (
                f"job {new} is ending, or was never started; then the old version is started again as job "
                f"{record.restarted_job}, from {snapshot}"
            )
        case _:
            text = f"the {desired.goal.lower()} has ended: {ending(record)}"
    return text


def ending(record: Upgrade) -> str:
    """The end in one sentence, with the facts that a person needs to continue."""
    old, why, goal = record.old_job, record.why, record.desired.goal.lower()
    match record.outcome:
        case Outcome.UPGRADED:
            return f"job {record.new_job} runs instead of {old}" + (f" ({why})" if why else "")
        case Outcome.RESUMED:
            return f"job {old} continues as {record.new_job}"
        case Outcome.SUSPENDED:
            place = record.snapshot or "nothing: it has completed no checkpoint"
            return f"job {old} is suspended; ResumeJobOperator resumes it from {place}" + (f" ({why})" if why else "")
        case Outcome.ROLLED_BACK:
            return f"the old version runs again as job {record.restarted_job}, from {record.snapshot}: {why}"
        case Outcome.REFUSED:
            return f"the {goal} was refused, and nothing was started: {why}"
        case Outcome.STRANDED:
            return f"the {goal} has to be completed manually: {why}"
    return f"the step is {record.step}"


def result_of(record: Upgrade) -> dict[str, Any]:
    """The result of a task. ``job_id`` is the job that runs now, if any."""
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
