"""What is written down of an upgrade: what was asked for, every id that it uses, and where it stands. Plain data.

All ids are chosen before the first request is sent, so after any crash the next try requests the same things.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from msgspec import Struct, ValidationError, convert, json


class Goal(StrEnum):
    """What the steps are for."""

    UPGRADE = "UPGRADE"
    SUSPEND = "SUSPEND"
    RESUME = "RESUME"


class Mode(StrEnum):
    """What the new version starts from: a savepoint that the old one takes as its last act, the old one's latest
    checkpoint, or nothing."""

    SAVEPOINT = "SAVEPOINT"
    LAST_STATE = "LAST_STATE"
    STATELESS = "STATELESS"


class Step(StrEnum):
    """Where it stands: what is to be done next. The order is that of :mod:`airflow_provider_ckpt.upgrades.machine`."""

    PIN_NEW = "PIN_NEW"
    INSPECT = "INSPECT"
    PIN_OLD = "PIN_OLD"
    PREVIEW = "PREVIEW"
    READY = "READY"
    STOP = "STOP"
    STOPPING = "STOPPING"
    CANCEL = "CANCEL"
    CANCELLING = "CANCELLING"
    CHECK = "CHECK"
    PAUSED = "PAUSED"
    START = "START"
    GATE = "GATE"
    CANCEL_NEW = "CANCEL_NEW"
    CANCELLING_NEW = "CANCELLING_NEW"
    RETIRE_NEW = "RETIRE_NEW"
    ROLL_BACK = "ROLL_BACK"
    GATE_OLD = "GATE_OLD"
    RETIRE_RESTARTED = "RETIRE_RESTARTED"
    RELEASE = "RELEASE"
    ENDED = "ENDED"


class Outcome(StrEnum):
    """How it ended. REFUSED: the old job was left alone, or keeps running. STRANDED: a person has to act."""

    UPGRADED = "UPGRADED"
    ROLLED_BACK = "ROLLED_BACK"
    REFUSED = "REFUSED"
    SUSPENDED = "SUSPENDED"
    RESUMED = "RESUMED"
    STRANDED = "STRANDED"


class DesiredUpgrade(Struct, frozen=True, kw_only=True):
    """What was asked for. Times in milliseconds.

    ``program`` is the new version's, ``options`` are those of its run, by the names of ``RunOptions``. ``fallback_age``
    is the greatest age of a checkpoint to fall back to when no savepoint can be taken; None: no fallback. ``pauses``:
    before the new version is started, for an approval. ``checkpoints`` have to complete within ``healthy_within``.
    """

    goal: Goal
    job: str
    mode: Mode = Mode.SAVEPOINT
    program: str | None = None
    options: dict[str, Any] = {}
    directory: str | None = None
    format: str = "NATIVE"
    fallback_age: int | None = None
    savepoint_within: int = 600_000
    healthy_within: int = 300_000
    checkpoints: int = 1
    pauses: bool = False


class Upgrade(Struct, frozen=True, kw_only=True):
    """The record. ``revision`` counts its changes.

    ``series`` is what ids are made of, and ``new_job`` and ``restarted_job`` are those of the jobs that it may start.
    ``owner`` holds the programs. ``origin`` is what the old job began with, ``snapshot`` what the next resumes from.
    ``retainable``: its checkpoints can outlive it. ``stops`` counts forgotten stops. ``why`` says why it went this way.
    ``lost``: another client holds the lineage.
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
    stops: int = 0
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
        """For the journal, and for the next task: what JSON has, no tuples."""
        document: dict[str, Any] = json.decode(json.encode(self))
        return document

    @classmethod
    def from_json(cls, document: object) -> Upgrade:
        """Raises ValueError for a document of another shape."""
        try:
            return convert(document, cls)
        except ValidationError as error:
            raise ValueError(f"it is no record of an upgrade: {error}") from error
