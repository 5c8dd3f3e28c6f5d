"""The proof that a published address is the leader's: a signature made with the session's token. Pure.

The signature is an HMAC under a key that is derived from the token. It covers every field: the address, the cluster's
name, the epoch, the application, the process, and the expiry. Without the token, a document can therefore neither be
made, changed or moved to another cluster, nor be used after its expiry. The module is outside the rooms because both
the publisher and the reader use it; it has no clock and does no I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

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
    leader = _leader(document)
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


def _leader(document: Mapping[str, Any]) -> PublishedLeader:
    rest, app_id, epoch = document.get("rest"), document.get("app_id"), document.get("epoch")
    good_until = document.get(GOOD_UNTIL)
    if not isinstance(rest, str) or not _is_address(rest):
        raise DamagedDocument(f"rest: {rest!r} is not acceptable, it must be the URL of a REST API")
    if not isinstance(app_id, str) or type(epoch) is not int or epoch < 1:
        raise DamagedDocument(f"epoch: {epoch!r} is not acceptable, it must be a number from 1 on")
    if good_until is not None and (isinstance(good_until, bool) or not isinstance(good_until, (int, float))):
        raise DamagedDocument(f"{GOOD_UNTIL}: {good_until!r} is not acceptable, it must be a time in seconds")
    return PublishedLeader(rest, app_id, epoch, good_until)


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
