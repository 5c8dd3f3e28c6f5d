"""The native form in memory keeps to the key groups of its subtask."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.memory.pages import SectionWriter


@pytest.mark.parametrize("strange", [3, 8, -1])
def test_a_row_of_a_key_group_of_another_subtask_is_refused(strange: int) -> None:
    stream = io.BytesIO()
    groups = np.array([4, strange, 7], dtype=np.int64)
    with pytest.raises(CorruptStateError, match=r"state 'count' has rows of key groups .*; 4 to 7 are its own"):
        SectionWriter(stream).write_table("count", {}, pa.table({"key": [1, 2, 3]}), groups, KeyGroupRange(4, 7))
    assert stream.getvalue() == b""
