"""Leader election: stores epochs, each claimed by one driver, the current leader's lease, and its address for clients.

The store compares no times: a challenger watches :attr:`Lease.sequence` with its own clock and claims the next epoch
when the sequence has not changed for too long. From then on the fence refuses every change by the old leader.

The published address has a signature under a key that is derived from the session's token. It covers every field: the
address, the cluster's name, the epoch, the application, the process, and the expiry. Without the token, a document can
therefore neither be made, changed or moved to another cluster, nor be used after its expiry.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

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
        # A lease of an earlier epoch that remains or reappears does no harm, because it is never read.
        with suppress(StorageError):
            for name in list_names(self._root):
                if name.startswith("lease-") and name < self._lease_file(info.epoch).name:
                    delete_file(self._root.child(name))
        return info

    def renew(self, info: LeaderInfo, sequence: int) -> None:
        """Renews the lease and corrects the published address if necessary. Raises :class:`NotLeaderError`."""
        self.check(info)
        replace(self._lease_file(info.epoch), encode_document({"epoch": info.epoch, "sequence": sequence}))
        published = self._published()
        if not (
            published == asdict(info) if self._signature is None else self._signature.is_good(published, asdict(info))
        ):
            self.publish_address(info)

    def release(self, info: LeaderInfo, *, ended: bool = False) -> None:
        """Ends the lease, as the last act of a leader, so that the next leader does not have to wait. Raises
        :class:`NotLeaderError`.

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

    def publish_address(self, info: LeaderInfo) -> None:
        """Writes the document that clients read."""
        make_directory(self._root)
        document = asdict(info) if self._signature is None else self._signature.signed(asdict(info))
        replace(self._root.child(LEADER_DOCUMENT_NAME), orjson.dumps(document) + b"\n")

    def _published(self) -> Any:
        with suppress(NotFoundError, orjson.JSONDecodeError):
            return orjson.loads(read_bytes(self._root.child(LEADER_DOCUMENT_NAME), _MAX_BYTES))
        return None

    def _lease_file(self, epoch: int) -> Location:
        return self._root.child(f"lease-{epoch:020d}.json")


SIGNATURE = "signature"
CLUSTER = "cluster"
GOOD_UNTIL = "good_until"
MOST_AHEAD_S = 600.0
"""A document that claims to be good for longer than this was not made by a leader with a working clock."""

_PURPOSE = b"ckpt: address of the leader, 1"


class LeaderDocumentError(ValueError):
    """Base of the errors of documents that yield no leader."""


class DamagedDocument(LeaderDocumentError):
    """The document is truncated or not a leader's document. A later one may be valid."""


class OutdatedDocument(LeaderDocumentError):
    """The document was a leader's, but has expired. A later one may be valid."""


class UnprovenDocument(LeaderDocumentError):
    """The document was not made for this cluster with the token."""


@dataclass(frozen=True, slots=True)
class PublishedLeader:
    """The content of a document. ``good_until`` is in seconds since the epoch; None for an unsigned document."""

    rest: str
    app_id: str
    epoch: int
    good_until: float | None


def signed(document: Mapping[str, Any], token: str, cluster: str, good_until: float) -> dict[str, Any]:
    """The document with the cluster's name, its expiry, and the signature over everything."""
    whole = {**document, CLUSTER: cluster, GOOD_UNTIL: round(good_until, 3)}
    return {**whole, SIGNATURE: _signature(whole, token)}


def opened(data: bytes, token: str | None, cluster: str, now: float) -> PublishedLeader:
    """Read the leader from the document; with a token, the signature must be valid and the document not expired.

    Raises a :class:`LeaderDocumentError`. Without a token no address is proven, and there is no secret to disclose.
    """
    document = _parsed(data)
    if token is not None:
        _check_signature(document, token, cluster)
    rest, app_id, epoch = document.get("rest"), document.get("app_id"), document.get("epoch")
    good_until = document.get(GOOD_UNTIL)
    if not isinstance(rest, str) or not _is_address(rest):
        raise DamagedDocument(f"rest: {rest!r} is not acceptable, it must be the URL of a REST API")
    if not isinstance(app_id, str) or type(epoch) is not int or epoch < 1:
        raise DamagedDocument(f"epoch: {epoch!r} is not acceptable, it must be a number from 1 on")
    if good_until is not None and (isinstance(good_until, bool) or not isinstance(good_until, (int, float))):
        raise DamagedDocument(f"{GOOD_UNTIL}: {good_until!r} is not acceptable, it must be a time in seconds")
    leader = PublishedLeader(rest, app_id, epoch, good_until)
    if leader.good_until is None:
        return leader
    if leader.good_until < now:
        late = f"{now - leader.good_until:.0f} s ago"
        raise OutdatedDocument(
            f"the address {leader.rest} was valid until {late}: no leader has renewed it since, or the clocks of the "
            "machines differ"
        )
    if leader.good_until - now > MOST_AHEAD_S:
        ahead = f"{leader.good_until - now:.0f} s"
        raise OutdatedDocument(f"the address {leader.rest} is valid for {ahead}: the clocks of the machines differ")
    return leader


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise DamagedDocument(f"it is not JSON: {error}") from error
    except RecursionError as error:
        raise DamagedDocument("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise DamagedDocument("it is not an object")
    return document


def _check_signature(document: Mapping[str, Any], token: str, cluster: str) -> None:
    given = document.get(SIGNATURE)
    if not isinstance(given, str):
        raise UnprovenDocument("it is not signed: its leader has no token")
    whole = {key: value for key, value in document.items() if key != SIGNATURE}
    if not hmac.compare_digest(given.encode("utf-8", "replace"), _signature(whole, token).encode()):
        raise UnprovenDocument(
            "its signature does not match this token: the document was changed, or its session has another token"
        )
    if document.get(CLUSTER) != cluster:
        raise UnprovenDocument(f"it is the document of cluster {document.get(CLUSTER)!r}, not of {cluster!r}")


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _signature(whole: Mapping[str, Any], token: str) -> str:
    """The signature over the document's canonical text."""
    key = hmac.new(token.encode(), _PURPOSE, hashlib.sha256).digest()
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=True)
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
