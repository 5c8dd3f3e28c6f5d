"""A job's own configuration, its version, and the author of each version (FLIP-530). Values only."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.configuration.configuration import Configuration

MAX_NOTES = 20
"""Number of changes that are kept."""


@dataclass(frozen=True, slots=True)
class ChangeNote:
    """The author and time (milliseconds since the epoch) of ``version``, and the keys of the options it changed."""

    version: int
    timestamp_ms: int
    by: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnConfiguration:
    """``given`` holds the pipeline's options, overridden by those of the submission or later; never the cluster's.

    ``version`` counts accepted changes from 1, of which ``notes`` has the latest, oldest first.
    """

    given: Configuration = field(default_factory=Configuration)
    version: int = 1
    notes: tuple[ChangeNote, ...] = ()

    def changed(self, given: Configuration, note: ChangeNote) -> OwnConfiguration:
        """Returns the next version."""
        return OwnConfiguration(given, note.version, (*self.notes, note)[-MAX_NOTES:])
