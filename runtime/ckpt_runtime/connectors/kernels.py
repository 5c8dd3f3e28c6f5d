"""Compiled kernels of the benchmark source and the verifying sink. Loops over arrays; no Python objects, no lock held.

Arithmetic is modulo 2**64 where it is unsigned. :data:`BLOCK` and :data:`SPLITS` are part of saved positions: a change
of either makes old snapshots unreadable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_runtime.connectors.splits import SPLITS
from ckpt_runtime.state.kernels.compiler import I64, IN_I32, IN_I64, IN_U8, INT64, U8, UINT64, inlined, kernel

BLOCK = 256
"""Consecutive rows that belong to one split: row ``i`` is in split ``i // BLOCK % SPLITS``."""

_CYCLE = BLOCK * SPLITS
_LOW_10_BITS = np.uint64(1023)

Int64Array = npt.NDArray[np.int64]


@inlined
def _mix(row: Any) -> Any:
    """splitmix64 of a row number."""
    z = np.uint64(row) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel((IN_I64, I64, INT64, INT64, I64))
def next_rows(splits: Int64Array, positions: Int64Array, turn: int, limit: int, rows: Int64Array) -> tuple[int, int]:
    """Fills ``rows`` with the next row numbers below ``limit``, a block of each split in turn.

    ``positions[i]`` counts the rows of ``splits[i]`` handed out, and is advanced. Returns how many rows were filled
    and whose turn is next; fewer than requested means that all splits are at their end.
    """
    filled = 0
    exhausted = 0
    while filled < rows.shape[0] and exhausted < splits.shape[0]:
        inside = positions[turn] % BLOCK
        first = positions[turn] // BLOCK * _CYCLE + splits[turn] * BLOCK + inside
        if first >= limit:
            exhausted += 1
            turn = (turn + 1) % splits.shape[0]
            continue
        exhausted = 0
        count = min(BLOCK - inside, limit - first, rows.shape[0] - filled)
        for offset in range(count):
            rows[filled + offset] = first + offset
        filled += count
        positions[turn] += count
        if inside + count == BLOCK:
            turn = (turn + 1) % splits.shape[0]
    return filled, turn


@kernel((IN_I64, UINT64, I64, I64))
def keyed_values(rows: Int64Array, keys: int, key: Int64Array, value: Int64Array) -> None:
    """``key = splitmix64(row) mod keys`` (unsigned), ``value = splitmix64(row) & 1023``."""
    for index in range(rows.shape[0]):
        mixed = _mix(rows[index])
        key[index] = np.int64(mixed % keys)
        value[index] = np.int64(mixed & _LOW_10_BITS)


@inlined
def _unmix(mixed: Any) -> Any:
    """The inverse of :func:`_mix`; the factors are the inverses of its factors modulo 2**64."""
    z = np.uint64(mixed)
    z = z ^ (z >> np.uint64(31)) ^ (z >> np.uint64(62))
    z *= np.uint64(0x319642B2D24D8EC3)
    z = z ^ (z >> np.uint64(27)) ^ (z >> np.uint64(54))
    z *= np.uint64(0x96DE1B173F119089)
    z = z ^ (z >> np.uint64(30)) ^ (z >> np.uint64(60))
    return z - np.uint64(0x9E3779B97F4A7C15)


@kernel((I64,))
def scatter_keys(keys: Int64Array) -> None:
    """Replaces each key by its splitmix64, so that keys spread over all 64-bit integers."""
    for index in range(keys.shape[0]):
        keys[index] = np.int64(_mix(keys[index]))


@kernel((IN_I64, I64))
def gathered_keys(scattered: Int64Array, keys: Int64Array) -> None:
    """The inverse of :func:`scatter_keys`."""
    for index in range(keys.shape[0]):
        keys[index] = np.int64(_unmix(scattered[index]))


@kernel((IN_I64, U8))
def hex_digits(keys: Int64Array, text: Any) -> None:
    """Writes each key as 16 lower-case hexadecimal digits of its 64 bits, the highest first."""
    for index in range(keys.shape[0]):
        bits = np.uint64(keys[index])
        for digit in range(16):
            number = np.uint8((bits >> np.uint64(60 - 4 * digit)) & np.uint64(15))
            text[16 * index + digit] = number + np.uint8(48 if number < 10 else 87)


@kernel((IN_I32, IN_U8, I64))
def keys_of_digits(offsets: Any, text: Any, keys: Int64Array) -> int:
    """The inverse of :func:`hex_digits`; returns the first row that is not such a text, or -1."""
    for index in range(keys.shape[0]):
        if offsets[index + 1] - offsets[index] != 16:
            return index
        bits = np.uint64(0)
        for place in range(offsets[index], offsets[index + 1]):
            byte = text[place]
            if np.uint8(48) <= byte <= np.uint8(57):
                number = byte - np.uint8(48)
            elif np.uint8(97) <= byte <= np.uint8(102):
                number = byte - np.uint8(87)
            else:
                return index
            bits = (bits << np.uint64(4)) | np.uint64(number)
        keys[index] = np.int64(bits)
    return -1


@kernel((IN_I64, I64, I64))
def sequence_numbers(rows: Int64Array, split: Int64Array, number: Int64Array) -> None:
    """Each row's split, and its number within the split, from 0 without gaps."""
    for index in range(rows.shape[0]):
        row = rows[index]
        split[index] = row // BLOCK % SPLITS
        number[index] = row // _CYCLE * BLOCK + row % BLOCK


@kernel((IN_I64, IN_I64, IN_I64, I64))
def check_updates(key: Int64Array, count: Int64Array, total: Int64Array, last: Int64Array) -> int:
    """Checks that each key's count grows by one from update to update, and keeps the last count and total of each.

    ``last[2 * key]`` is the key's last count, 0 for a key not seen yet, and ``last[2 * key + 1]`` its total: side by
    side, since memory access dominates the time. A key's first update may have any count (state is older than this
    attempt). Returns the number of violations.
    """
    violations = 0
    for index in range(key.shape[0]):
        place = np.uint64(2 * key[index])
        known = last[place]
        if count[index] != known + 1 and known != 0:  # in this order: the first is false for nearly every row
            violations += 1
        last[place] = count[index]
        last[place + np.uint64(1)] = total[index]
    return violations


@kernel((IN_I64,))
def digest(rows: Int64Array) -> int:
    """The sum of ``splitmix64(row)`` modulo 2**64: equal for equal multisets in any order, hardly ever for others."""
    total = np.uint64(0)
    for index in range(rows.shape[0]):
        total += _mix(rows[index])
    return total  # type: ignore[return-value]
