"""Running aggregates: one pass over the rows of a batch, updating each row's slot and writing the value after that row.

``has`` is 1 for slots that have a value; nulls change nothing. ``out_valid`` is written only when the batch has nulls:
otherwise every running value is valid.

While a snapshot shows columns unchanged, the kernels record the first change of each value, and where values moved.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import (
    BOOL,
    F64,
    I64,
    IN_F64,
    IN_I32,
    IN_I64,
    IN_U8,
    IN_U32,
    IN_U64,
    INT64,
    U8,
    U32,
    U64,
    inlined,
    kernel,
)
from ckpt_runtime.state.kernels.hash_kernels import copy_bytes, is_valid


@kernel((IN_U32, IN_U8, INT64, I64, I64))
def update_count(slots: Any, bitmap: Any, bit_offset: Any, counts: Any, out: Any) -> None:
    """count(*) with an empty bitmap, else count of the non-null rows."""
    if bitmap.size == 0:
        for row in range(slots.size):
            count = counts[slots[row]] + 1
            counts[slots[row]] = count
            out[row] = count
        return
    for row in range(slots.size):
        count = counts[slots[row]] + np.int64(is_valid(bitmap, bit_offset + row))
        counts[slots[row]] = count
        out[row] = count


@kernel((IN_U32, IN_I64, IN_U8, INT64, I64, U8, I64, U8))
def update_sum_int64(
    slots: Any, values: Any, bitmap: Any, bit_offset: Any, sums: Any, has: Any, out: Any, out_valid: Any
) -> Any:
    """Sum of integers; ``has`` is empty while every slot has a value. Returns -1, or the row that overflowed."""
    nulls = bitmap.size > 0
    track = has.size > 0
    for row in range(slots.size):
        slot = slots[row]
        if nulls and not is_valid(bitmap, bit_offset + row):
            out[row] = sums[slot]
            out_valid[row] = has[slot]
            continue
        before = sums[slot]
        value = values[row]
        after = before + value
        if ((before ^ after) & (value ^ after)) < 0:
            return row
        sums[slot] = after
        out[row] = after
        if track:
            has[slot] = 1
        if nulls:
            out_valid[row] = 1
    return -1


@kernel((IN_U32, IN_F64, IN_U8, INT64, F64, U8, F64, U8))
def update_sum_float64(
    slots: Any, values: Any, bitmap: Any, bit_offset: Any, sums: Any, has: Any, out: Any, out_valid: Any
) -> None:
    """Sum of floats; ``has`` is empty while every slot has a value."""
    nulls = bitmap.size > 0
    track = has.size > 0
    for row in range(slots.size):
        slot = slots[row]
        if not nulls or is_valid(bitmap, bit_offset + row):
            sums[slot] += values[row]
            if track:
                has[slot] = 1
        if nulls:
            out_valid[row] = has[slot]
        out[row] = sums[slot]


@kernel((IN_U32, IN_F64, IN_U8, INT64, F64, I64, F64, U8))
def update_average(
    slots: Any, values: Any, bitmap: Any, bit_offset: Any, sums: Any, counts: Any, out: Any, out_valid: Any
) -> None:
    """Average, kept as sum and count."""
    nulls = bitmap.size > 0
    for row in range(slots.size):
        slot = slots[row]
        if not nulls or is_valid(bitmap, bit_offset + row):
            sums[slot] += values[row]
            counts[slot] += 1
        if nulls:
            out_valid[row] = counts[slot] > 0
        out[row] = sums[slot] / counts[slot] if counts[slot] > 0 else 0.0


@kernel((IN_U32, IN_I64, IN_U8, INT64, BOOL, I64, U8, I64, U8))
def update_extreme_int64(
    slots: Any, values: Any, bitmap: Any, bit_offset: Any, greatest: Any, best: Any, has: Any, out: Any, out_valid: Any
) -> None:
    """Minimum or maximum of integers."""
    nulls = bitmap.size > 0
    for row in range(slots.size):
        slot = slots[row]
        if not nulls or is_valid(bitmap, bit_offset + row):
            value = values[row]
            if not has[slot] or (value > best[slot] if greatest else value < best[slot]):
                best[slot] = value
                has[slot] = 1
        if nulls:
            out_valid[row] = has[slot]
        out[row] = best[slot]


@inlined
def _float_is_less(left: Any, right: Any) -> Any:
    """SQL order: NaN is the greatest value."""
    return left < right or (left == left and right != right)


@kernel((IN_U32, IN_F64, IN_U8, INT64, BOOL, F64, U8, F64, U8))
def update_extreme_float64(
    slots: Any, values: Any, bitmap: Any, bit_offset: Any, greatest: Any, best: Any, has: Any, out: Any, out_valid: Any
) -> None:
    """Minimum or maximum of floats."""
    nulls = bitmap.size > 0
    for row in range(slots.size):
        slot = slots[row]
        if not nulls or is_valid(bitmap, bit_offset + row):
            value = values[row]
            better = _float_is_less(best[slot], value) if greatest else _float_is_less(value, best[slot])
            if not has[slot] or better:
                best[slot] = value
                has[slot] = 1
        if nulls:
            out_valid[row] = has[slot]
        out[row] = best[slot]


@inlined
def _bytes_order(left: Any, left_start: Any, left_size: Any, right: Any, right_start: Any, right_size: Any) -> Any:
    """Negative, zero or positive, compared byte by byte (for UTF-8 that is code point order)."""
    for byte in range(min(left_size, right_size)):
        difference = np.int64(left[left_start + byte]) - np.int64(right[right_start + byte])
        if difference != 0:
            return difference
    return left_size - right_size


@kernel(
    (IN_U32, IN_I32, IN_U8, IN_U8, INT64, BOOL, U8, I64, I64, U8, I64, I64, U8),
    (IN_U32, IN_I64, IN_U8, IN_U8, INT64, BOOL, U8, I64, I64, U8, I64, I64, U8),
)
def update_extreme_bytes(
    slots: Any,
    offsets: Any,
    data: Any,
    bitmap: Any,
    bit_offset: Any,
    greatest: Any,
    arena: Any,
    state: Any,
    sizes: Any,
    has: Any,
    out_starts: Any,
    out_sizes: Any,
    out_valid: Any,
) -> Any:
    """Minimum or maximum of strings. ``state`` is each slot's start in the arena, its last entry the arena's end."""
    end = state[state.size - 1]
    for row in range(slots.size):
        slot = slots[row]
        if bitmap.size == 0 or is_valid(bitmap, bit_offset + row):
            start = np.int64(offsets[row])
            size = np.int64(offsets[row + 1]) - start
            better = has[slot] == 0
            if not better:
                order = _bytes_order(data, start, size, arena, state[slot], sizes[slot])
                better = order > 0 if greatest else order < 0
            if better:
                copy_bytes(data, start, arena, end, size)
                state[slot] = end
                sizes[slot] = size
                has[slot] = 1
                end += size
        out_valid[row] = has[slot]
        out_starts[row] = state[slot]
        out_sizes[row] = sizes[slot]
    state[state.size - 1] = end


@kernel((IN_I64, IN_I64, IN_U8, I64, U8))
def gather_bytes(starts: Any, sizes: Any, arena: Any, ends: Any, out: Any) -> None:
    """Copies pieces of an arena one after another; ``ends`` has their running ends, ``ends[0]`` is 0."""
    for row in range(starts.size):
        copy_bytes(arena, starts[row], out, ends[row], sizes[row])


@kernel((IN_U32, INT64, U8, U32, INT64))
def first_touches(slots: Any, size: Any, touched: Any, found: Any, known: Any) -> Any:
    """Appends slots below ``size`` that are new to the ``known`` ones in ``found``; returns the new number of them.

    ``touched`` has a bit per slot.
    """
    for row in range(slots.size):
        slot = slots[row]
        if slot < size:
            bit = np.uint8(1 << (slot & 7))
            if not touched[slot >> 3] & bit:
                touched[slot >> 3] |= bit
                found[known] = slot
                known += 1
    return known


@kernel((IN_U32, U8))
def mark(slots: Any, marks: Any) -> None:
    """Sets the bits of the slots."""
    for row in range(slots.size):
        marks[slots[row] >> 3] |= np.uint8(1 << (slots[row] & 7))


@kernel((IN_U8, INT64, U32))
def marked(marks: Any, size: Any, out: Any) -> Any:
    """Writes the slots below ``size`` whose bits are set, ascending; returns their number.

    Without room in ``out`` it only counts them.
    """
    found = 0
    for place in range((size + 7) // 8):
        bits = marks[place]
        slot = place * 8
        while bits and slot < size:
            if bits & 1:
                if out.size:
                    out[found] = slot
                found += 1
            bits >>= 1
            slot += 1
    return found


@kernel((IN_U8, IN_U32, U8), (IN_U64, IN_U32, U64))
def gather(values: Any, places: Any, out: Any) -> None:
    """Copies the values at the places to ``out``."""
    for row in range(places.size):
        out[row] = values[places[row]]
