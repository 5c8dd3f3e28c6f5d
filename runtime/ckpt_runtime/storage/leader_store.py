"""Leader election: stores epochs, each claimed by one driver, the current leader's lease, and its address for clients.

The store compares no times: a challenger watches :attr:`Lease.sequence` with its own clock and claims the next epoch
when the sequence has not changed for too long. From then on the fence refuses every change by the old leader.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import orjson

from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    ConflictError,
    CorruptFileError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, make_directory, read_bytes
from ckpt_runtime.storage.publish import check_exclusive_creation, replace
from ckpt_runtime.storage.versioned_document import VersionedDocument, decode_document, encode_document

LEADER_DOCUMENT_NAME = "leader.json"
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LeaderInfo:
    """One leader. ``rest`` is the URL of its REST API, ``app_id`` the Spark application's id, ``attempt`` distinguishes
    processes of that application, ``epoch`` is its fencing token."""

    rest: str
    app_id: str
    attempt: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The last sign of life of one epoch's leader; ``sequence`` is 0 before the first.

    ``released``: that leader has ended in order and will not change anything again. ``ended``: it was asked to end the
    whole cluster, so standby drivers that waited for it end, too.
    """

    epoch: int
    sequence: int
    released: bool = False
    ended: bool = False


class AddressSignature(Protocol):
    """Signs an address for clients that know a secret. A signature expires after a time that it states itself."""

    def signed(self, document: dict[str, Any]) -> dict[str, Any]:
        """The document with its signature, as it is published."""

    def is_good(self, published: Any, document: dict[str, Any]) -> bool:
        """Whether ``published`` is this document with a signature that is valid for long enough."""


class LeaderStore:
    """The leader of one high-availability directory.

    Clients find the leader in ``leader.json``, plain JSON with the fields of :class:`LeaderInfo`. It is a copy; the
    highest claimed epoch decides.
    """

    def __init__(self, root: Location, signature: AddressSignature | None = None) -> None:
        """``root`` need not exist; ``signature`` proves the address to clients. Touches nothing."""
        self._root = root
        self._signature = signature
        self._epochs = VersionedDocument(root.child("leader"))

    def signed_by(self, signature: AddressSignature) -> LeaderStore:
        """The same store, for a driver that proves its address."""
        return type(self)(self._root, signature)

    def prepare(self) -> None:
        """Makes the directory and checks that its store can prevent a second leader. Raises :class:`StorageError`."""
        check_exclusive_creation(self._root)

    def current(self) -> LeaderInfo | None:
        """The leader that claimed the highest epoch; None before the first."""
        revision = self._epochs.read()
        if revision is None:
            return None
        try:
            return checked({**revision.document, "epoch": revision.number}, LeaderInfo)
        except DocumentError as error:
            url = self._epochs.directory.url
            raise CorruptFileError(f"{url} holds no usable leader: {error}", url) from error

    def claim(self, rest: str, app_id: str, attempt: str, *, after: int) -> LeaderInfo:
        """Becomes the leader in the epoch after ``after`` (0 for the first).

        Raises :class:`NotLeaderError` when another driver has claimed the lease first, :class:`StorageError` when
        nothing was claimed.
        """
        info = LeaderInfo(rest, app_id, attempt, after + 1)
        try:
            self._epochs.write(after, asdict(info))
        except (ConflictError, AmbiguousWriteError) as error:
            if self.current() != info:
                raise NotLeaderError(f"another driver leads in {self._root.url}", self._root.url) from error
        with suppress(StorageError):  # the next renewal corrects it
            self.publish_address(info)
        self._delete_old_leases(info.epoch)
        return info

    def renew(self, info: LeaderInfo, sequence: int) -> None:
        """Gives a sign of life and corrects the published address if need be. Raises :class:`NotLeaderError`."""
        self.check(info)
        replace(self._lease_file(info.epoch), encode_document({"epoch": info.epoch, "sequence": sequence}))
        if not self._is_published(info):
            self.publish_address(info)

    def release(self, info: LeaderInfo, *, ended: bool = False) -> None:
        """Ends the lease, as the last act of a leader: the next one need not wait. Raises :class:`NotLeaderError`.

        ``ended``: the cluster was asked to end, and standby drivers that waited for this leader end as well.
        """
        self.check(info)
        document = {"epoch": info.epoch, "sequence": 0, "released": True} | ({"ended": True} if ended else {})
        replace(self._lease_file(info.epoch), encode_document(document))

    def lease(self, epoch: int) -> Lease:
        """The last sign of life of an epoch's leader."""
        file = self._lease_file(epoch)
        try:
            return checked(decode_document(read_bytes(file, _MAX_BYTES), file.url), Lease)
        except NotFoundError:
            return Lease(epoch, 0)
        except DocumentError as error:
            raise CorruptFileError(f"{file.url} is not a lease: {error}", file.url) from error

    def check(self, info: LeaderInfo) -> None:
        """The fence: raises :class:`NotLeaderError` unless ``info`` is the present leader."""
        present = self.current()
        if present != info:
            holder = "no driver" if present is None else f"{present.app_id} (epoch {present.epoch})"
            message = f"{info.app_id} (epoch {info.epoch}) no longer leads, {holder} does"
            raise NotLeaderError(message, self._root.url)

    def _delete_old_leases(self, epoch: int) -> None:
        """Deletes leases of earlier epochs. One that remains or reappears does no harm, because it is never read."""
        with suppress(StorageError):
            for name in list_names(self._root):
                if name.startswith("lease-") and name < self._lease_file(epoch).name:
                    delete_file(self._root.child(name))

    def publish_address(self, info: LeaderInfo) -> None:
        """Writes the document that clients read."""
        make_directory(self._root)
        document = asdict(info) if self._signature is None else self._signature.signed(asdict(info))
        replace(self._root.child(LEADER_DOCUMENT_NAME), orjson.dumps(document) + b"\n")

    def _is_published(self, info: LeaderInfo) -> bool:
        published = self._published()
        return (
            published == asdict(info) if self._signature is None else self._signature.is_good(published, asdict(info))
        )

    def _published(self) -> Any:
        with suppress(NotFoundError, orjson.JSONDecodeError):
            return orjson.loads(read_bytes(self._root.child(LEADER_DOCUMENT_NAME), _MAX_BYTES))
        return None

    def _lease_file(self, epoch: int) -> Location:
        return self._root.child(f"lease-{epoch:020d}.json")
