"""The native form in memory keeps to the key groups of its subtask."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.memory.pages import ROWS_TAKEN, SectionWriter
from ckpt_runtime.state.memory.parts import read_block


@pytest.mark.parametrize("strange", [3, 8, -1])
def test_a_row_of_a_key_group_of_another_subtask_is_refused(strange: int) -> None:
    stream = io.BytesIO()
    groups = np.array([4, strange, 7], dtype=np.int64)
    with pytest.raises(CorruptStateError, match=r"state 'count' has rows of key groups .*; 4 to 7 are its own"):
        SectionWriter(stream).write_table("count", {}, pa.table({"key": [1, 2, 3]}), groups, KeyGroupRange(4, 7))
    assert stream.getvalue() == b""


def test_every_block_holds_the_rows_of_its_key_group_in_their_order() -> None:
    """Groups of one row, of none and of more rows than are taken at once."""
    owned = KeyGroupRange(4, 31)
    sizes = {4: 1, 7: 3, 8: ROWS_TAKEN - 2, 9: 5, 12: 2 * ROWS_TAKEN + 1, 13: 1, 29: 2, 30: ROWS_TAKEN}
    groups = np.random.default_rng(7).permutation(np.repeat(list(sizes), list(sizes.values()))).astype(np.int64)
    table = pa.table({"key": pa.array(range(len(groups))), "text": [str(row) for row in range(len(groups))]})
    stream = io.BytesIO()
    writer = SectionWriter(stream)
    writer.write_table("count", {}, table, groups, owned)
    found = {}
    for group, offset, length in writer.sections[0].key_group_offsets:
        block = stream.getvalue()[offset : offset + length]
        found[group] = pa.Table.from_batches(read_block("count", table.schema, block)).to_pydict()
    assert found == {group: table.take(np.flatnonzero(groups == group)).to_pydict() for group in sizes}
    assert list(found) == sorted(found)


@pytest.mark.parametrize("error", [MemoryError("0 bytes left"), pa.ArrowMemoryError("malloc of size 8 failed")])
def test_lack_of_memory_does_not_count_as_damage(error: Exception) -> None:
    with pytest.raises(type(error)), reading("a block"):
        raise error
    with pytest.raises(CorruptStateError, match="a block cannot be read: too short"), reading("a block"):
        raise pa.ArrowInvalid("too short")
