"""File names of a transactional sink."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.connectors.part_names import PartName, owner_of, parse_hidden

NUMBERS = st.integers(0, 1 << 40)


@given(st.text(min_size=1), st.text(min_size=1), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_hidden_names_read_back(job: str, uid: str, subtask: int, attempt: int, sequence: int, checkpoint: int) -> None:
    open_part = PartName(owner_of(job, uid), subtask, attempt, sequence, "0123abcd")
    assert parse_hidden(open_part.in_progress) == open_part
    pending = PartName(owner_of(job, uid), subtask, attempt, sequence, "0123abcd", checkpoint)
    assert parse_hidden(pending.pending) == pending
    assert parse_hidden(pending.visible) is None
    assert pending.visible.startswith("part-")
    assert pending.visible.endswith(".parquet")
    assert len(pending.pending) < 255
    assert "/" not in pending.pending


def test_owners_differ_even_when_their_readable_parts_do_not() -> None:
    assert owner_of("job", "a/b") != owner_of("job", "a_b")
    assert owner_of("job", "x" * 50) != owner_of("job", "x" * 51)
    assert owner_of("a", "b-c") != owner_of("a-b", "c")


@pytest.mark.parametrize(
    "name",
    ["", "part.parquet", ".part-x.parquet.pending", "../.part-j-u-00000000-s0-a0-n0-00000000-c1.parquet.pending",
     ".part-j-u-00000000-s0-a0-n0-00000000.parquet.pending",
     ".part-j-u-00000000-s0-a0-n0-00000000-c1.parquet.inprogress",
     ".part-j-u-00000000-s00-a0-n0-00000000-c1.parquet.pending"],
)  # fmt: skip
def test_other_names_are_nobodys(name: str) -> None:
    assert parse_hidden(name) is None
