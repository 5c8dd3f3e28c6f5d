"""What one schedule consists of, whatever it simulates."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Action:
    """Something that a user or the world does at a time or step; ``value`` decides its details."""

    at: int
    kind: str
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """``fault_scale`` multiplies the probabilities of faults; in a ``plain`` one every delay is the shortest."""

    actions: tuple[Action, ...] = ()
    fault_scale: float = 1.0
    plain: bool = False

    @abstractmethod
    def describe(self) -> list[str]:
        """Settings and topology, a line each; what a failure's report begins with."""


def weighted(kinds: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Each kind as often as its weight says, to choose from."""
    return tuple(kind for kind, weight in kinds for _ in range(weight))
