"""Checkpoint ids: rising, never reused. The in-memory counter; what makes it durable is the shell's affair."""

from __future__ import annotations

from typing import Protocol


class CheckpointIdUnavailableError(RuntimeError):
    """No id can be had now: high availability does not answer, or this driver does not lead any more."""


class CheckpointIdSource(Protocol):
    """Where a coordinator takes ids from."""

    def next_id(self) -> int:
        """A fresh id, greater than all before. Raises :class:`CheckpointIdUnavailableError`."""
        ...

    def advance_to(self, at_least: int) -> None:
        """Later ids are ``at_least`` or greater."""
        ...


class CheckpointIdCounter:
    """Starts at 1, as Flink's."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def next_id(self) -> int:
        self._next += 1
        return self._next - 1

    def advance_to(self, at_least: int) -> None:
        self._next = max(self._next, at_least)
