"""What the REST layer asks of the savepoint catalogue: a part of ``gateway.DispatcherGateway``. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
    from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind


@dataclass(frozen=True, slots=True)
class SavepointList:
    """What the catalogue has below ``directory``, the latest first."""

    directory: str
    savepoints: tuple[CataloguedSavepoint, ...]


class CatalogueGateway(Protocol):
    """Any method may raise ``InvalidRequest``, ``NotFound``, ``Conflict`` for what is damaged, and ``NotReady``."""

    async def list_savepoints(self, directory: str | None, job: str | None) -> SavepointList:
        """The savepoints below a directory, the latest first; of a ``job`` by its id or name.

        Without a directory it is the configured one.
        """
        ...

    async def latest_savepoint(self, directory: str | None, job: str | None) -> CataloguedSavepoint:
        """The latest of these that is good; NotFound when there is none."""
        ...

    async def mark_savepoint(self, path: str, kind: MarkKind, mark: Mark) -> CataloguedSavepoint:
        """Notes what came of a verification or a drill."""
        ...
