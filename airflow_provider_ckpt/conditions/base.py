"""The protocol between a condition and the runner that performs its requests.

A condition's ``poll`` is a generator: it yields calls of the REST client's request table, receives their answers, and
returns a verdict, or ``None`` for "not yet". The same condition thus serves the synchronous client in a worker and the
asynchronous one in the triggerer, and is tested with neither. Nothing here does I/O, sleeps or looks at a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from airflow_provider_ckpt.advice import REFUSED_TOKEN
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.requests import Call

POLL = "poll"
"""The event type that a condition gets repeatedly where there is no stream of events."""

Json: TypeAlias = dict[str, Any]


class Status(StrEnum):
    """How a wait ended. The first three are a condition's verdicts, the others come from the runner that polls."""

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


Poll: TypeAlias = Generator[Call[Any], Any, Verdict | None]


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
        """Notes that it was there."""
        self._times = 0

    def missing(self, message: str) -> Verdict | None:
        """Notes that it was not there; a verdict once that has happened often enough."""
        self._times += 1
        return Verdict(Status.MISSING, message) if self._times >= self.LIMIT else None


class Condition(ABC):
    """Something that can be waited for. Instances may remember what earlier polls saw.

    ``standing`` says in a few words what the last poll saw that was not a verdict.
    """

    def __init__(self) -> None:
        self.absence = MissingPolicy()
        self.standing = "not there yet"

    @property
    def job(self) -> str | None:
        """The job whose events can be the reason for another look; None where nothing tells of it."""
        return None

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event of that job is a reason for another look."""
        return True

    @abstractmethod
    def poll(self) -> Poll:
        """Looks once at the remote side."""

    def detail(self) -> Generator[Call[Any], Any, str]:
        """More about the standing, for the log; asked for when a line of it is due, and may fail."""
        yield from ()
        return ""

    @property
    @abstractmethod
    def subject(self) -> str:
        """Says what is waited for, as a noun phrase for messages."""
