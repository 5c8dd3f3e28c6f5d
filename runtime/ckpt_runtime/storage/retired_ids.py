"""Job ids with which no job may be started again, in the high-availability directory for the next driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location

KEPT_MS: Final = 30 * 24 * 3_600_000
"""How long an id is kept; no request stays in flight for longer."""


class _Document(Struct, frozen=True):
    ids: dict[str, int] = field(default_factory=dict)


class RetiredIdStore:
    """The retired ids of one cluster, with their time in milliseconds since the epoch. Blocks; raises StorageError."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, _Document, fence, epoch)

    def adopt(self) -> Mapping[str, int]:
        """All retired ids; earlier leaders can no longer retire any."""
        return self._document.adopt().ids

    def read(self) -> Mapping[str, int]:
        """All retired ids."""
        return self._document.read().ids

    def retire(self, job_id: str, now_ms: int) -> None:
        """Retires an id; repeating is fine. Forgets ids older than :data:`KEPT_MS`."""

        def retired(present: _Document) -> _Document:
            kept = {known: since for known, since in present.ids.items() if now_ms - since < KEPT_MS}
            return _Document({job_id: now_ms, **kept})

        self._document.change(retired)
