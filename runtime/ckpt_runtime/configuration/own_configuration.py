"""A job's own configuration, its version, and who made each version (FLIP-530). Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.configuration.configuration import Configuration

MAX_NOTES = 20
"""Changes that are remembered."""


@dataclass(frozen=True, slots=True)
class ChangeNote:
    """Who made ``version``, when (milliseconds since the epoch), and the keys of the options that changed with it."""

    version: int
    timestamp_ms: int
    by: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnConfiguration:
    """``given`` is what the job's pipeline set, under what came with its submission or later; never the cluster's.

    ``version`` counts accepted changes from 1, of which ``notes`` has the latest, oldest first.
    """

    given: Configuration = field(default_factory=Configuration)
    version: int = 1
    notes: tuple[ChangeNote, ...] = ()

    def changed(self, given: Configuration, note: ChangeNote) -> OwnConfiguration:
        """The next version."""
        return OwnConfiguration(given, note.version, (*self.notes, note)[-MAX_NOTES:])
