"""The protocol between a condition and whoever performs its requests.

A condition's ``poll`` is a generator: it yields calls (functions of a client), receives their answers, and returns a
verdict, or ``None`` for "not yet". The same condition thus serves the synchronous client in a worker and the
asynchronous one in the triggerer, and is tested with neither. Nothing here does I/O, sleeps or looks at a clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[Any], Any]
"""Given a client, performs one request: returns the answer, or an awaitable of it for an asynchronous client."""


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


Poll: TypeAlias = Generator[Call, Any, Verdict | None]


class Condition(ABC):
    """Something that can be waited for. Instances may remember what earlier polls saw."""

    @abstractmethod
    def poll(self) -> Poll:
        """One look at the remote side."""

    @property
    @abstractmethod
    def subject(self) -> str:
        """What is waited for, as a noun phrase for messages."""
