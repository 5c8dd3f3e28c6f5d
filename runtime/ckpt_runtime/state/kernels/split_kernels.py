"""Key groups of hashes and the counting sorts by owner or key group."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import (
    I32,
    I64,
    IN_I32,
    IN_U8,
    IN_U16,
    IN_U32,
    IN_U64,
    INT64,
    U8,
    U16,
    U32,
    U64,
    UINT64,
    inlined,
    kernel,
)

_HALF = np.uint64(32)
_ONE = np.uint64(1)


@inlined
def key_group_of(key_hash: Any, max_parallelism: Any) -> Any:
    """High 32 bits, scaled; see ``graph/key_groups.py``."""
    return ((key_hash >> _HALF) * max_parallelism) >> _HALF


@kernel((IN_U64, UINT64, I32))
def key_groups(hashes: Any, max_parallelism: Any, out: Any) -> None:
    """The key group of each hash."""
    for row in range(hashes.size):
        out[row] = np.int32(key_group_of(hashes[row], max_parallelism))


@kernel((IN_U64, IN_U32, U64, U32))
def places_by_owner(hashes: Any, owner_of_group: Any, ends: Any, places: Any) -> None:
    """Stable counting sort of rows by owning subtask: row ``i`` belongs at ``places[i]``.

    ``owner_of_group`` has an entry per key group. ``ends`` has a zero per owner, and gets the end of each owner's rows.
    """
    groups = np.uint64(owner_of_group.size)
    for row in range(hashes.size):
        owner = owner_of_group[key_group_of(hashes[row], groups)]
        places[row] = owner
        ends[owner] += _ONE
    start = np.uint64(0)
    for owner in range(ends.size):
        count = ends[owner]
        ends[owner] = start
        start += count
    for row in range(hashes.size):
        owner = places[row]
        place = ends[owner]
        places[row] = np.uint32(place)
        ends[owner] = place + _ONE


@kernel((IN_U8, IN_U32, U8), (IN_U16, IN_U32, U16), (IN_U32, IN_U32, U32), (IN_U64, IN_U32, U64))
def scatter(values: Any, places: Any, out: Any) -> None:
    """Puts each value at its place."""
    for row in range(values.size):
        out[places[row]] = values[row]


@kernel((IN_U32, I32))
def rows_at_places(places: Any, rows: Any) -> None:
    """The inverse: which row belongs at each place."""
    for row in range(places.size):
        rows[places[row]] = np.int32(row)


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
