"""File names of a transactional sink."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.sink_state import new_sink_id
from ckpt_runtime.connectors.part_directory import PartName, owner_of, parse_hidden

SINK = "0123456789abcdef"
NUMBERS = st.integers(0, 1 << 40)


@given(st.text(min_size=1), st.text(min_size=1), NUMBERS, NUMBERS, NUMBERS, NUMBERS)
def test_hidden_names_read_back(job: str, uid: str, subtask: int, attempt: int, sequence: int, checkpoint: int) -> None:
    open_part = PartName(owner_of(job, uid, SINK), subtask, attempt, sequence, "0123abcd")
    assert parse_hidden(open_part.in_progress) == open_part
    pending = PartName(owner_of(job, uid, SINK), subtask, attempt, sequence, "0123abcd", checkpoint)
    assert parse_hidden(pending.pending) == pending
    assert parse_hidden(pending.visible) is None
    assert pending.visible.startswith("part-")
    assert pending.visible.endswith(".parquet")
    assert len(pending.pending) < 255
    assert "/" not in pending.pending


def test_an_owner_is_a_job_and_a_sink() -> None:
    assert new_sink_id("job@1", "a/b") != new_sink_id("job@1", "a_b")
    assert new_sink_id("job@1", "a") != new_sink_id("job@2", "a")
    part = PartName(owner_of("f" * 32, "out-1", SINK), 0, 0, 0, "0123abcd")
    assert (part.job_id, part.uid, part.sink_id) == ("f" * 32, "out_1", SINK)


def test_names_of_earlier_versions_are_read() -> None:
    part = parse_hidden(".part-j-u-00000000-s0-a0-n0-00000000-c1.parquet.pending")
    assert part is not None
    assert part.sink_id == "00000000"


@pytest.mark.parametrize(
    "name",
    ["", "part.parquet", ".part-x.parquet.pending", "../.part-j-u-00000000-s0-a0-n0-00000000-c1.parquet.pending",
     ".part-j-u-00000000-s0-a0-n0-00000000.parquet.pending",
     ".part-j-u-00000000-s0-a0-n0-00000000-c1.parquet.inprogress",
     ".part-j-u-00000000-s00-a0-n0-00000000-c1.parquet.pending"],
)  # fmt: skip
def test_other_names_belong_to_no_job(name: str) -> None:
    assert parse_hidden(name) is None
