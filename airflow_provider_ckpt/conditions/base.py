"""What can be waited for: a condition looks once at the remote side, and judges what it sees.

The same condition serves an operator in its worker, a poking sensor and the triggerer: each gives it a client that
carries out its calls. Nothing here sleeps or looks at a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from msgspec import json

from airflow_provider_ckpt.advice import REFUSED_TOKEN
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.event_stream import StreamedEvent

POLL = "poll"
"""The event type that a condition gets repeatedly where there is no stream of events."""

Json: TypeAlias = dict[str, Any]


class Log(Protocol):
    """The part of a task's or trigger's logger that is needed here; ``args`` fill in ``text`` by ``%``."""

    def info(self, text: Any, /, *args: Any) -> Any: ...

    def warning(self, text: Any, /, *args: Any) -> Any: ...

    def error(self, text: Any, /, *args: Any) -> Any: ...


class KilledTask(Protocol):
    """What a condition can do when the task that waits for it is killed in the triggerer."""

    @property
    def log(self) -> Log: ...

    async def is_given_up(self) -> bool:
        """Whether no other try continues with what this one has started."""

    async def cancel(self, job_id: str, name: str) -> None:
        """Cancel a job, and log what became of it."""


class Status(StrEnum):
    """How a wait ended. The first three are a condition's verdicts, the others come from the wait that polls."""

    DONE = "done"
    FAILED = "failed"
    MISSING = "missing"
    TIMEOUT = "timeout"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a wait: plain JSON values, since it travels in a trigger's event.

    ``trace`` is the remote side's account of a failure, for the task's log.
    """

    status: Status
    message: str = ""
    result: Json = field(default_factory=dict)
    trace: str = ""

    @property
    def refuses_token(self) -> bool:
        """Whether the wait has ended because the job manager refused its token."""
        return bool(self.result.get(REFUSED_TOKEN))


class MissingPolicy:
    """Counts consecutive answers "not found": a single one is not believed, since it may come from a proxy, or from a
    job manager that has not recovered its jobs yet."""

    LIMIT = 3

    def __init__(self) -> None:
        self._times = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the last answer was such a one, not believed yet."""
        return 0 < self._times < self.LIMIT

    def seen(self) -> None:
        """Note that it was there."""
        self._times = 0

    def missing(self, message: str) -> Verdict | None:
        """Note that it was not there; a verdict once that has happened often enough."""
        self._times += 1
        return Verdict(Status.MISSING, message) if self._times >= self.LIMIT else None


@dataclass(eq=False)
class Condition(ABC):
    """Something that can be waited for. Instances may remember what earlier looks saw.

    A subclass is a dataclass, whose fields are JSON values or what msgspec makes of them: so a trigger carries it.
    ``standing`` says in a few words what the last look saw that was not a verdict.
    """

    def __post_init__(self) -> None:
        self.absence = MissingPolicy()
        self.standing = "not there yet"

    def to_json(self) -> Json:
        """The class and its fields, from which an equal condition is made elsewhere."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"type": type(self).__name__, **json.decode(json.encode(given))}

    @property
    def job(self) -> str | None:
        """The job whose events can be the reason for another look; None where no event does."""
        return None

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event of that job is a reason for another look."""
        return True

    @abstractmethod
    async def poll(self, client: AsyncCalls) -> Verdict | None:
        """Look once at the remote side; None means "not yet"."""

    async def detail(self, client: AsyncCalls) -> str:
        """More about the standing, for the log; called when a line is due, and may fail."""
        return ""

    @property
    @abstractmethod
    def subject(self) -> str:
        """What is waited for, as a noun phrase for messages."""

    def left_over(self) -> str:
        """What becomes of the remote side when the waiting task is killed; empty if nothing was begun there."""
        return ""

    async def on_kill(self, task: KilledTask) -> None:
        """Called in the triggerer when the waiting task is killed."""
        if self.left_over():
            task.log.warning("The task was killed; %s.", self.left_over())


def moment(epoch_ms: int) -> str:
    """A point in time for people; a number that is none is shown as it is."""
    try:
        return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{epoch_ms} ms"
