"""The protocol between a condition and whoever performs its requests.

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

from ckpt_runtime.client.requests import Call

Json: TypeAlias = dict[str, Any]


class Status(StrEnum):
    """How a wait ended. The first three are a condition's verdicts, the others are of whoever polls."""

    DONE = "done"
    FAILED = "failed"
    MISSING = "missing"
    TIMEOUT = "timeout"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a wait: plain JSON values, since it travels in a trigger's event."""

    status: Status
    message: str = ""
    result: Json = field(default_factory=dict)


Poll: TypeAlias = Generator[Call[Any], Any, Verdict | None]


class Absence:
    """Counts answers "not found" in a row: one is not believed, since what answers may be a proxy, or a job manager
    that has not recovered its jobs yet."""

    LIMIT = 3

    def __init__(self) -> None:
        self._times = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the last answer was such a one, not believed yet."""
        return 0 < self._times < self.LIMIT

    def seen(self) -> None:
        """It was there."""
        self._times = 0

    def missing(self, message: str) -> Verdict | None:
        """It was not there; a verdict once that has happened often enough."""
        self._times += 1
        return Verdict(Status.MISSING, message) if self._times >= self.LIMIT else None


class Condition(ABC):
    """Something that can be waited for. Instances may remember what earlier polls saw."""

    def __init__(self) -> None:
        self.absence = Absence()

    @abstractmethod
    def poll(self) -> Poll:
        """One look at the remote side."""

    @property
    @abstractmethod
    def subject(self) -> str:
        """What is waited for, as a noun phrase for messages."""
