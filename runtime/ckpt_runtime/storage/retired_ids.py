"""Job ids that nothing is started with any more, in the high-availability directory, for the next driver too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec import Struct, field

from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location

KEPT_MS: Final = 30 * 24 * 3_600_000
"""For so long; no request is on its way any longer than that."""


class _Document(Struct, frozen=True):
    ids: dict[str, int] = field(default_factory=dict)


class RetiredIdStore:
    """Those of one cluster, with since when in milliseconds since the epoch. Blocking; raises StorageError."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, _Document, fence, epoch)

    def adopt(self) -> Mapping[str, int]:
        """All of them; an earlier leader can retire nothing any more."""
        return self._document.adopt().ids

    def read(self) -> Mapping[str, int]:
        """All of them."""
        return self._document.read().ids

    def retire(self, job_id: str, now_ms: int) -> None:
        """The same again is fine. Forgets what is older than :data:`KEPT_MS`."""

        def retired(present: _Document) -> _Document:
            kept = {known: since for known, since in present.ids.items() if now_ms - since < KEPT_MS}
            return _Document({job_id: now_ms, **kept})

        self._document.change(retired)
