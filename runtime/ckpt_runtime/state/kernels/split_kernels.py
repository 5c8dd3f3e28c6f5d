"""Key groups of hashes and the counting sorts by owner or key group."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import I32, I64, IN_I32, IN_U64, INT64, UINT64, inlined, kernel

_HALF = np.uint64(32)


@inlined
def key_group_of(key_hash: Any, max_parallelism: Any) -> Any:
    """High 32 bits, scaled; see ``graph/key_groups.py``."""
    return ((key_hash >> _HALF) * max_parallelism) >> _HALF


@kernel((IN_U64, UINT64, I32))
def key_groups(hashes: Any, max_parallelism: Any, out: Any) -> None:
    """The key group of each hash."""
    for row in range(hashes.size):
        out[row] = np.int32(key_group_of(hashes[row], max_parallelism))


@kernel((IN_U64, UINT64, UINT64, I32, I64, I32))
def order_by_owner(hashes: Any, max_parallelism: Any, parallelism: Any, owners: Any, ends: Any, order: Any) -> None:
    """Stable counting sort of rows by owning subtask.

    ``owners`` is scratch of one entry per row, ``ends`` has ``parallelism`` zeros and returns where each owner's rows
    end in ``order``.
    """
    for row in range(hashes.size):
        owner = (key_group_of(hashes[row], max_parallelism) * parallelism) // max_parallelism
        owners[row] = np.int32(owner)
        ends[owner] += 1
    start = np.int64(0)
    for owner in range(ends.size):
        count = ends[owner]
        ends[owner] = start
        start += count
    for row in range(owners.size):
        owner = owners[row]
        order[ends[owner]] = np.int32(row)
        ends[owner] += 1


@kernel((IN_I32, INT64, I64, I64))
def order_by_group(groups: Any, first: Any, ends: Any, order: Any) -> None:
    """Stable counting sort by key group, of groups ``first`` to ``first + ends.size - 1``; ``ends`` as above."""
    for row in range(groups.size):
        ends[groups[row] - first] += 1
    start = np.int64(0)
    for group in range(ends.size):
        count = ends[group]
        ends[group] = start
        start += count
    for row in range(groups.size):
        group = groups[row] - first
        order[ends[group]] = row
        ends[group] += 1
