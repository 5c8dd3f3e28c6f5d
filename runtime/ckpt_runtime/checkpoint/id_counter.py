"""Checkpoint ids: increasing, never reused. This is the in-memory counter; the shell makes it durable."""

from __future__ import annotations

from typing import Protocol


class CheckpointIdUnavailableError(RuntimeError):
    """No id is available: high availability does not answer, or this driver is no longer the leader."""


class CheckpointIdSource(Protocol):
    """The source of a coordinator's checkpoint ids."""

    def next_id(self) -> int:
        """A new id, greater than all before. Raises :class:`CheckpointIdUnavailableError`."""
        ...

    def advance_to(self, at_least: int) -> None:
        """Later ids are ``at_least`` or greater."""
        ...


class CheckpointIdCounter:
    """The in-memory source; starts at 1, as in Flink."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def next_id(self) -> int:
        self._next += 1
        return self._next - 1

    def advance_to(self, at_least: int) -> None:
        self._next = max(self._next, at_least)
