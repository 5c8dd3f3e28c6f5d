"""Aggregates of groups: rows of a batch are numbered by their group, and one pass adds them to one value per group.

A group's values start at zero, with ``has`` at zero. ``bitmap`` is empty for a column without nulls, and nulls change
nothing. The same kernels combine stored values, which are then the input column.
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
    inlined,
    kernel,
)
from ckpt_runtime.state.kernels.hash_kernels import is_valid, same_bytes

AND, OR, XOR = 0, 1, 2
"""Operations of :func:`combine_bits`."""


@inlined
def _holds(bitmap: Any, bit: Any) -> Any:
    return bitmap.size == 0 or is_valid(bitmap, bit)


@kernel((IN_U32, U32, U32, U32))
def number_groups(slots: Any, marks: Any, groups: Any, firsts: Any) -> Any:
    """Numbers the distinct slots in the order in which they come; returns their count.

    ``groups`` gets the number of each row's slot, ``firsts`` the first row of each number. ``marks`` has an entry per
    slot, is zero before and zero again afterwards.
    """
    count = 0
    for row in range(slots.size):
        slot = slots[row]
        mark = marks[slot]
        if mark == 0:
            firsts[count] = row
            count += 1
            mark = np.uint32(count)
            marks[slot] = mark
        groups[row] = mark - np.uint32(1)
    for number in range(count):
        marks[slots[firsts[number]]] = 0
    return count


@kernel((IN_U64, INT64, U32, U32, U32))
def number_hashes(hashes: Any, most: Any, table: Any, groups: Any, firsts: Any) -> Any:
    """Numbers the distinct hashes in the order in which they come; returns their count, or -1 for more than ``most``.

    ``groups`` and ``firsts`` are as in :func:`number_groups`. ``table`` is zero; its length is a power of two above
    ``most``.
    """
    mask = np.uint64(table.size - 1)
    count = 0
    for row in range(hashes.size):
        key_hash = hashes[row]
        place = key_hash & mask
        while True:
            number = table[place]
            if number == 0:
                if count == most:
                    return -1
                firsts[count] = row
                count += 1
                number = np.uint32(count)
                table[place] = number
                break
            if hashes[firsts[number - np.uint32(1)]] == key_hash:
                break
            place = (place + np.uint64(1)) & mask
        groups[row] = number - np.uint32(1)
    return count


@kernel((IN_U32, IN_U32, IN_I64, IN_U8, INT64))
def equal_fixed(groups: Any, firsts: Any, values: Any, bitmap: Any, bit_offset: Any) -> Any:
    """Whether each row has the value of its group's first row."""
    for row in range(groups.size):
        first = firsts[groups[row]]
        valid = _holds(bitmap, bit_offset + row)
        if valid != _holds(bitmap, bit_offset + first) or (valid and values[row] != values[first]):
            return False
    return True


@kernel((IN_U32, IN_U32, IN_I32, IN_U8, IN_U8, INT64), (IN_U32, IN_U32, IN_I64, IN_U8, IN_U8, INT64))
def equal_bytes(groups: Any, firsts: Any, offsets: Any, data: Any, bitmap: Any, bit_offset: Any) -> Any:
    """The same for values of variable length."""
    for row in range(groups.size):
        first = firsts[groups[row]]
        valid = _holds(bitmap, bit_offset + row)
        if valid != _holds(bitmap, bit_offset + first):
            return False
        start, other = np.int64(offsets[row]), np.int64(offsets[first])
        if not valid or start == other:
            continue
        length = np.int64(offsets[row + 1]) - start
        if length != np.int64(offsets[first + 1]) - other or not same_bytes(data, start, data, other, length):
            return False
    return True


@kernel((IN_U32, IN_U8, INT64, I64))
def count_rows(groups: Any, bitmap: Any, bit_offset: Any, counts: Any) -> None:
    """Counts rows that are not null."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            counts[groups[row]] += 1


@kernel((IN_U32, IN_I64, IN_U8, INT64, BOOL, I64, U8))
def add_int64(groups: Any, values: Any, bitmap: Any, bit_offset: Any, checked: Any, sums: Any, has: Any) -> Any:
    """Sums integers. Returns -1, or with ``checked`` the row whose sum left 64 bits."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            before = sums[group]
            value = values[row]
            after = before + value
            if checked and ((before ^ after) & (value ^ after)) < 0:
                return row
            sums[group] = after
            has[group] = 1
    return -1


@kernel((IN_U32, IN_F64, IN_U8, INT64, F64, U8))
def add_float64(groups: Any, values: Any, bitmap: Any, bit_offset: Any, sums: Any, has: Any) -> None:
    """Sums floats, in the order of the rows."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            sums[group] += values[row]
            has[group] = 1


@kernel((IN_U32, IN_F64, IN_U8, INT64, F64, U8))
def multiply_float64(groups: Any, values: Any, bitmap: Any, bit_offset: Any, products: Any, has: Any) -> None:
    """Multiplies floats, in the order of the rows."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            products[group] = values[row] if has[group] == 0 else products[group] * values[row]
            has[group] = 1


@kernel((IN_U32, IN_I64, IN_U8, INT64, BOOL, I64, U8))
def extreme_int64(groups: Any, values: Any, bitmap: Any, bit_offset: Any, greatest: Any, best: Any, has: Any) -> None:
    """Minimum or maximum of integers."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            value = values[row]
            if has[group] == 0 or (value > best[group] if greatest else value < best[group]):
                best[group] = value
                has[group] = 1


@kernel((IN_U32, IN_F64, IN_U8, INT64, BOOL, F64, U8))
def extreme_float64(groups: Any, values: Any, bitmap: Any, bit_offset: Any, greatest: Any, best: Any, has: Any) -> None:
    """Minimum or maximum of floats, among which NaN is the greatest."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            value = values[row]
            old = best[group]
            if greatest:
                better = value > old or (value != value and old == old)
            else:
                better = value < old or (old != old and value == value)
            if has[group] == 0 or better:
                best[group] = value
                has[group] = 1


@kernel((IN_U32, IN_I64, IN_U8, INT64, INT64, I64, U8))
def combine_bits(groups: Any, values: Any, bitmap: Any, bit_offset: Any, operation: Any, bits: Any, has: Any) -> None:
    """Combines the bits of integers."""
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            if has[group] == 0:
                bits[group] = values[row]
                has[group] = 1
            elif operation == AND:
                bits[group] &= values[row]
            elif operation == OR:
                bits[group] |= values[row]
            else:
                bits[group] ^= values[row]


@kernel((IN_U32, IN_I64, IN_U8, INT64, BOOL, I64))
def pick_rows(groups: Any, ranks: Any, bitmap: Any, bit_offset: Any, later: Any, picked: Any) -> None:
    """Picks for each group the row of the greatest rank; of equal ones the first, or with ``later`` the last.

    ``picked`` starts at -1, which stays for groups of which every rank is null.
    """
    for row in range(groups.size):
        if _holds(bitmap, bit_offset + row):
            group = groups[row]
            best = picked[group]
            if best < 0 or ranks[row] > ranks[best] or (later and ranks[row] == ranks[best]):
                picked[group] = row


@kernel((IN_U32, IN_F64, IN_U8, INT64, F64, F64, F64, F64, F64))
def add_moments(
    groups: Any, values: Any, bitmap: Any, bit_offset: Any, counts: Any, means: Any, m2: Any, m3: Any, m4: Any
) -> None:
    """Central moments by the update formulas of Pébay (SAND2008-6212), which Spark uses; in the order of the rows."""
    for row in range(groups.size):
        if not _holds(bitmap, bit_offset + row):
            continue
        group = groups[row]
        count = counts[group] + 1.0
        delta = values[row] - means[group]
        part = delta / count
        second = m2[group] + delta * (delta - part)
        third = m3[group] - 3.0 * part * second + delta * (delta * delta - part * part)
        m4[group] = (
            m4[group]
            - 4.0 * part * third
            - 6.0 * part * part * second
            + delta * (delta * delta * delta - part * part * part)
        )
        counts[group] = count
        means[group] += part
        m2[group] = second
        m3[group] = third


@kernel((IN_U32, IN_F64, IN_F64, IN_F64, IN_F64, IN_F64, F64, F64, F64, F64, F64))
def merge_moments(
    groups: Any, n: Any, mean: Any, s2: Any, s3: Any, s4: Any, counts: Any, means: Any, m2: Any, m3: Any, m4: Any
) -> None:
    """Combines stored central moments, by the formulas of the same report."""
    for row in range(groups.size):
        if n[row] == 0.0:
            continue
        group = groups[row]
        n1, n2 = counts[group], n[row]
        count = n1 + n2
        delta = mean[row] - means[group]
        part = delta / count
        first, second, third = m2[group], m2[group] + s2[row] + delta * part * n1 * n2, m3[group]
        m4[group] = (
            m4[group]
            + s4[row]
            + part * part * part * delta * n1 * n2 * (n1 * n1 - n1 * n2 + n2 * n2)
            + 6.0 * part * part * (n1 * n1 * s2[row] + n2 * n2 * first)
            + 4.0 * part * (n1 * s3[row] - n2 * third)
        )
        m3[group] = (
            third + s3[row] + part * part * delta * n1 * n2 * (n1 - n2) + 3.0 * part * (n1 * s2[row] - n2 * first)
        )
        m2[group] = second
        means[group] += part * n2
        counts[group] = count


@kernel((IN_U32, IN_F64, IN_F64, IN_U8, F64, F64, F64, F64, F64, F64))
def add_comoments(
    groups: Any, xs: Any, ys: Any, valid: Any, counts: Any, x_means: Any, y_means: Any, c: Any, x2: Any, y2: Any
) -> None:
    """The common moments of pairs, as Spark updates them; ``valid`` has a byte per row."""
    for row in range(groups.size):
        if not valid[row]:
            continue
        group = groups[row]
        count = counts[group] + 1.0
        dx = xs[row] - x_means[group]
        dy = ys[row] - y_means[group]
        x_mean = x_means[group] + dx / count
        y_mean = y_means[group] + dy / count
        c[group] += dx * (ys[row] - y_mean)
        x2[group] += dx * (xs[row] - x_mean)
        y2[group] += dy * (ys[row] - y_mean)
        counts[group] = count
        x_means[group] = x_mean
        y_means[group] = y_mean


@kernel((IN_U32, IN_F64, IN_F64, IN_F64, IN_F64, IN_F64, IN_F64, F64, F64, F64, F64, F64, F64))
def merge_comoments(
    groups: Any, n: Any, x: Any, y: Any, c0: Any, s2: Any, t2: Any,
    counts: Any, x_means: Any, y_means: Any, c: Any, x2: Any, y2: Any,
) -> None:  # fmt: skip
    """Combines stored moments of pairs."""
    for row in range(groups.size):
        if n[row] == 0.0:
            continue
        group = groups[row]
        n1, n2 = counts[group], n[row]
        count = n1 + n2
        dx, dy = x[row] - x_means[group], y[row] - y_means[group]
        c[group] += c0[row] + dx * dy * n1 * n2 / count
        x2[group] += s2[row] + dx * dx * n1 * n2 / count
        y2[group] += t2[row] + dy * dy * n1 * n2 / count
        x_means[group] += dx * n2 / count
        y_means[group] += dy * n2 / count
        counts[group] = count


@kernel((IN_U32, IN_I64, IN_I64, U32, I64, I64))
def merge_sessions(keys: Any, starts: Any, ends: Any, sessions: Any, session_starts: Any, session_ends: Any) -> Any:
    """Merges intervals of one key that overlap or touch; returns the number of sessions.

    Rows are sorted by key, then by start. ``sessions`` gets the number of each row's session.
    """
    count = -1
    for row in range(keys.size):
        if row == 0 or keys[row] != keys[row - 1] or starts[row] > session_ends[count]:
            count += 1
            session_starts[count] = starts[row]
            session_ends[count] = ends[row]
        elif ends[row] > session_ends[count]:
            session_ends[count] = ends[row]
        sessions[row] = count
    return count + 1
