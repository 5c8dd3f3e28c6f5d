"""A published address is believed when who knows the token made it, for this cluster, a short while ago."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.storage.leader_store import (
    DamagedDocument,
    LeaderDocumentError,
    OutdatedDocument,
    PublishedLeader,
    UnprovenDocument,
    opened,
    signed,
)

NOW = 1_800_000_000.0
PLAIN = {"rest": "http://driver:8081", "app_id": "app-1", "attempt": "a", "epoch": 3}
SIGNED = signed(PLAIN, "token", "flights", NOW + 20)


def data(document: object) -> bytes:
    return json.dumps(document).encode()


def test_signed_document_opens_with_the_same_token_and_does_not_contain_it() -> None:
    assert opened(data(SIGNED), "token", "flights", NOW) == PublishedLeader("http://driver:8081", "app-1", 3, NOW + 20)
    reordered = dict(reversed(SIGNED.items()))
    assert opened(data(reordered), "token", "flights", NOW).epoch == 3
    assert b"token" not in data(signed(PLAIN, "a-token-of-256-bits", "flights", NOW))


@pytest.mark.parametrize("field", sorted(SIGNED))
def test_every_field_is_covered(field: str) -> None:
    other: Any = SIGNED[field] + 1 if isinstance(SIGNED[field], int | float) else "http://driver:8082"
    for changed in ({**SIGNED, field: other}, {key: value for key, value in SIGNED.items() if key != field}):
        with pytest.raises(UnprovenDocument):
            opened(data(changed), "token", "flights", NOW)
    with pytest.raises(UnprovenDocument):
        opened(data({**SIGNED, "more": 1}), "token", "flights", NOW)


@pytest.mark.parametrize(
    ("token", "cluster", "now", "error", "said"),
    [
        ("other", "flights", NOW, UnprovenDocument, "does not match this token"),
        ("token", "trains", NOW, UnprovenDocument, "of cluster 'flights', not of 'trains'"),
        ("token", "flights", NOW + 21, OutdatedDocument, "no leader has renewed it"),
        ("token", "flights", NOW - 3600, OutdatedDocument, "clocks"),
    ],
)
def test_false_proof_is_refused(
    token: str, cluster: str, now: float, error: type[LeaderDocumentError], said: str
) -> None:
    with pytest.raises(error, match=said):
        opened(data(SIGNED), token, cluster, now)


def test_a_document_without_a_signature_is_for_clients_without_a_token() -> None:
    assert opened(data(PLAIN), None, "flights", NOW) == PublishedLeader("http://driver:8081", "app-1", 3, None)
    with pytest.raises(UnprovenDocument, match="not signed"):
        opened(data(PLAIN), "token", "flights", NOW)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        data(SIGNED)[:-9],
        b"[]",
        b"\xff",
        b"[" * 100_000,
        data({**PLAIN, "rest": "file:///etc/passwd"}),
        data({**PLAIN, "rest": "http://"}),
        data({**PLAIN, "rest": "http://h:99999"}),
        data({**PLAIN, "rest": 1}),
        data({**PLAIN, "epoch": True}),
        data({**PLAIN, "epoch": 0}),
        data({**PLAIN, "app_id": None}),
        data({**PLAIN, "good_until": "soon"}),
    ],
)
def test_damage_is_named(damage: bytes) -> None:
    with pytest.raises(DamagedDocument):
        opened(damage, None, "flights", NOW)


@given(st.binary(max_size=200))
def test_anything_else_is_refused(content: bytes) -> None:
    with pytest.raises(LeaderDocumentError):
        opened(content, "token", "flights", NOW)
