"""Which savepoints go, and which stay."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
from airflow_provider_ckpt.retention import StoredSavepoint, decide, savepoints_of, spared

HOUR = 3_600_000


def stored(*ages: int) -> list[StoredSavepoint]:
    """Savepoints of so many hours before the present, which is hour 100."""
    documents = [
        {"location": f"/sp/{age}", "kind": "SAVEPOINT", "completion_timestamp": (100 - age) * HOUR} for age in ages
    ]
    return savepoints_of(documents)


@pytest.mark.parametrize(
    ("keep", "hours", "deleted"),
    [
        (2, None, ["/sp/9", "/sp/5"]),
        (9, None, []),
        (None, 4, ["/sp/9", "/sp/5"]),
        (1, 6, ["/sp/9"]),
        (3, 2, ["/sp/9"]),
        (None, 0, ["/sp/9", "/sp/5", "/sp/3", "/sp/1"]),
    ],
)
def test_what_neither_limit_protects_goes_the_oldest_first(
    keep: int | None, hours: int | None, deleted: list[str]
) -> None:
    limit = None if hours is None else hours * HOUR
    decision = decide(stored(5, 1, 9, 3), keep=keep, keep_for_ms=limit, now_ms=100 * HOUR)
    assert decision.deleted == deleted
    assert {*decision.kept, *decision.deleted} == {"/sp/1", "/sp/3", "/sp/5", "/sp/9"}


@given(st.sets(st.integers(0, 50), min_size=1), st.integers(1, 60), st.data())
def test_the_spared_one_always_stays(ages: set[int], keep: int, data: st.DataObject) -> None:
    found = stored(*ages)
    good = data.draw(st.sampled_from(found))
    decision = spared(decide(found, keep=keep, keep_for_ms=None, now_ms=100 * HOUR), good.path, "good")
    assert good.path in decision.kept
    assert good.path not in decision.deleted
    assert len(decision.kept) + len(decision.deleted) == len(found)


def test_checkpoints_and_what_cannot_be_read_are_not_counted() -> None:
    documents: list[dict[str, Any]] = [
        {"location": "/chk", "kind": "CHECKPOINT", "completion_timestamp": 3},
        {"location": "/bad", "error": "damaged"},
        {"location": "/stop", "kind": "SYNC_SAVEPOINT", "completion_timestamp": 2},
    ]
    assert [item.path for item in savepoints_of(documents)] == ["/stop"]


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "keep"),
        ({"keep": 0}, "keep"),
        ({"keep_for": "soon"}, "keep_for"),
        ({"keep": 1, "directory": ""}, "directory"),
    ],
)
def test_bad_limits_are_named(arguments: dict[str, Any], name: str) -> None:
    operator = CleanUpSavepointsOperator(task_id="t", **{"directory": "/data"} | arguments)
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        operator.limits()
