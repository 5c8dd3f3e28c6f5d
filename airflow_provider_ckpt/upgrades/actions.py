"""The requests of an upgrade to the job manager, and their answers. Values only.

Each action may be performed again: the ids that it carries make that harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Claim:
    """Hold the job's lineage for this upgrade, so that no other client ends or starts a job of it. It is performed
    before each change, which it permits, and extends an existing claim. ``own_jobs`` are the jobs that the upgrade
    itself may have started. Answers: Accepted, Lost, JobMissing.
    """

    job: str
    owner: str
    own_jobs: tuple[str, ...]
    snapshot: str | None
    duration_ms: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Have a program kept. Answers: Accepted, JobMissing."""

    program: str
    owner: str


@dataclass(frozen=True, slots=True)
class Release:
    """Give up the holds of these programs, and the lineage of the job. Answer: Accepted."""

    programs: tuple[str, ...]
    owner: str
    job: str
    claim: str


@dataclass(frozen=True, slots=True)
class Look:
    """Request the state of a job; ``closely`` and ``judged`` select further facts. Answers: Seen, JobMissing."""

    job: str
    closely: bool = False
    judged: bool = False


@dataclass(frozen=True, slots=True)
class Preview:
    """How a snapshot fits a program. Answers: SnapshotFit, Refused, JobMissing.

    ``is_passing``: it is the latest of a job that runs, and a later one may have taken its place.
    """

    program: str
    like_job: str
    options: dict[str, Any]
    snapshot: str | None
    is_passing: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop a job with a savepoint. Answers: Accepted, Refused, JobMissing."""

    job: str
    trigger: str
    directory: str | None
    format: str
    claim: str


@dataclass(frozen=True, slots=True)
class ReadStop:
    """The state of a stop, and its job. Answer: StopSeen."""

    job: str
    trigger: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a job; with ``retain`` its checkpoints stay. Answers: Accepted, Refused (it has ended), JobMissing."""

    job: str
    retain: bool
    claim: str


@dataclass(frozen=True, slots=True)
class Run:
    """Start a job with the settings of another, overridden by the options. Answers: Accepted, Refused, JobMissing."""

    program: str
    job: str
    like_job: str
    options: dict[str, Any]
    snapshot: str | None
    claim: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Make sure that no request, not even a late one, starts a job with this id.

    Answers: Accepted, Refused (a job of the id lives), JobMissing (the server cannot do that).
    """

    job: str


Action: TypeAlias = Claim | Hold | Release | Look | Preview | Stop | ReadStop | Cancel | Run | Retire


@dataclass(frozen=True, slots=True)
class Accepted:
    """The action is done, or has begun, now or earlier."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The action was not done, for a reason that a repetition does not cure."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """Another client holds the lineage, or has started another job of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class JobMissing:
    """The job manager has answered several times that it does not know the object of the action."""

    what: str


@dataclass(frozen=True, slots=True)
class SnapshotFit:
    """Whether a snapshot can be restored, with a line for each state that is not simply matched."""

    refusals: tuple[str, ...] = ()
    diff: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest snapshot up to which a job has committed its output; ``path`` is None when it is missing."""

    path: str | None
    taken_at_ms: int
    is_stop: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """A job. ``ready``: all tasks run, and no stop is in progress. ``restored`` is the snapshot that it began with.

    ``completed`` counts its checkpoints since its last restart, and ``ailment`` is the reason why it is not healthy, if
    its health was requested. ``cause`` is the reason for its failure. The rest is seen closely: what it runs, and
    whether its checkpoints outlive it when it is cancelled.
    """

    state: str
    ready: bool = False
    has_ended: bool = False
    completed: int = 0
    newest: Newest | None = None
    restored: str | None = None
    cause: str = ""
    ailment: str = ""
    name: str = ""
    program: str | None = None
    retainable: bool = True


@dataclass(frozen=True, slots=True)
class StopSeen:
    """A stop. ``path`` once it has succeeded, ``failure`` once it has not; ``known`` is false for a forgotten one."""

    job: Seen | JobMissing
    known: bool = True
    path: str | None = None
    failure: str = ""


Answer: TypeAlias = Accepted | Refused | Lost | JobMissing | SnapshotFit | Seen | StopSeen
