"""Rows that are written as a state come back, however they were spread over parts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.storage.filesystem import resolve
from tests.support.effort import examples
from tests.support.written_states import content, new_state, write


@pytest.mark.row("203.9")
@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9) | st.none(), st.integers(0, 99)), max_size=12), max_size=5),
    st.integers(1, 6),
)
def test_any_rows_in_any_parts_come_back(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[tuple[Any, ...]]], max_parallelism: int
) -> None:
    target = resolve(tmp_path_factory.mktemp("written") / "new")
    snapshot = write(target, new_state("list", max_parallelism), parts)
    found = content(snapshot) if any(parts) else []
    given_rows = [row for rows in parts for row in rows]
    for key in {key for key, _ in given_rows}:
        assert [row for row in found if row[0] == key] == [row for row in given_rows if row[0] == key]
    assert len(found) == len(given_rows)
    assert verify_snapshot(snapshot) == []
