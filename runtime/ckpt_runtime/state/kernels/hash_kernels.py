"""The stable 64-bit hash, one column at a time. ``state/hashing.py`` documents it; changing it breaks every savepoint.

``bitmap`` is Arrow's validity bitmap (empty: no nulls), ``bit_offset`` the position of row 0 in it.

Rows are split by owner or key group of their hash with a counting sort.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import (
    I32,
    I64,
    IN_F64,
    IN_I32,
    IN_I64,
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

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
NULL_HASH = np.uint64(0xD6E8FEB86659FD93)
CANONICAL_NAN = np.uint64(0x7FF8000000000000)
_MIX_A = np.uint64(0xBF58476D1CE4E5B9)
_MIX_B = np.uint64(0x94D049BB133111EB)
_WORD_A = np.uint64(0xC2B2AE3D27D4EB4F)
_WORD_B = np.uint64(0x9E3779B185EBCA87)
_WORD_C = np.uint64(0x85EBCA77C2B2AE63)
_S27, _S30, _S31, _S33, _S37 = (np.uint64(shift) for shift in (27, 30, 31, 33, 37))
_U3, _U7, _U8 = np.uint64(3), np.uint64(7), np.uint64(8)
_ONE, _ZERO = np.uint64(1), np.uint64(0)


@inlined
def mix64(word: Any) -> Any:
    """A bijective finaliser: every input bit reaches every output bit."""
    word = (word ^ (word >> _S30)) * _MIX_A
    word = (word ^ (word >> _S27)) * _MIX_B
    return word ^ (word >> _S31)


@inlined
def hash_of_int64(value: Any) -> Any:
    """The hash of one 64-bit integer."""
    return mix64(np.uint64(value) + GOLDEN)


@inlined
def is_valid(bitmap: Any, position: Any) -> Any:
    """Bit ``position`` of a validity bitmap."""
    return (bitmap[position >> 3] >> np.uint8(position & 7)) & np.uint8(1)


@inlined
def load_word(data: Any, start: Any) -> Any:
    """The eight bytes from ``start`` as a little-endian word; compiled to one load."""
    word = _ZERO
    for byte in range(8):
        word |= np.uint64(data[start + np.uint64(byte)]) << np.uint64(8 * byte)
    return word


@inlined
def store_word(data: Any, start: Any, word: Any) -> None:
    """The inverse of :func:`load_word`."""
    for byte in range(8):
        data[start + np.uint64(byte)] = np.uint8((word >> np.uint64(8 * byte)) & np.uint64(255))


@inlined
def copy_bytes(source: Any, start: Any, target: Any, at: Any, length: Any) -> None:
    """Copies ``source[start:start + length]`` to ``target[at:]``: by words, the last of which may overlap another one.

    LLVM compiles a loop over bytes for long stretches, and keys are short.
    """
    first, to, size = np.uint64(start), np.uint64(at), np.uint64(length)
    if size < _U8:
        for byte in range(size):
            target[to + np.uint64(byte)] = source[first + np.uint64(byte)]
        return
    last = size - _U8
    done = _ZERO
    while done < last:
        store_word(target, to + done, load_word(source, first + done))
        done += _U8
    store_word(target, to + last, load_word(source, first + last))


@inlined
def same_bytes(left: Any, left_start: Any, right: Any, right_start: Any, length: Any) -> Any:
    """Whether two stretches are equal, compared like :func:`copy_bytes` copies."""
    at, other, size = np.uint64(left_start), np.uint64(right_start), np.uint64(length)
    if size < _U8:
        for byte in range(size):  # noqa: SIM110
            if left[at + np.uint64(byte)] != right[other + np.uint64(byte)]:
                return False
        return True
    last = size - _U8
    done = _ZERO
    while done < last:
        if load_word(left, at + done) != load_word(right, other + done):
            return False
        done += _U8
    return load_word(left, at + last) == load_word(right, other + last)


@inlined
def hash_of_bytes(data: Any, start: Any, stop: Any) -> Any:
    """The hash of ``data[start:stop]``: little-endian words, the last one padded with zeros, seeded by the length."""
    position = np.uint64(start)
    end = np.uint64(stop)
    length = end - position
    state = length * _WORD_B + GOLDEN
    for _ in range(length >> _U3):
        word = load_word(data, position)
        state = _absorb(state, word)
        position += _U8
    rest = length & _U7
    if rest:
        word = _ZERO
        for byte in range(rest):
            word |= np.uint64(data[position + np.uint64(byte)]) << (np.uint64(byte) * _U8)
        state = _absorb(state, word)
    return mix64(state)


@inlined
def _absorb(state: Any, word: Any) -> Any:
    word = word * _WORD_A
    word = ((word << _S31) | (word >> _S33)) * _WORD_B
    state ^= word
    state = (state << _S27) | (state >> _S37)
    return state * _WORD_B + _WORD_C


@kernel((IN_I64, IN_U8, INT64, U64))
def hash_int64(values: Any, bitmap: Any, bit_offset: Any, out: Any) -> None:
    """Hashes integers; nulls get :data:`NULL_HASH`."""
    for row in range(values.size):
        out[row] = hash_of_int64(values[row])
    if bitmap.size:
        for row in range(values.size):
            if not is_valid(bitmap, bit_offset + row):
                out[row] = NULL_HASH


@kernel((IN_I32, IN_U8, IN_U8, INT64, U64), (IN_I64, IN_U8, IN_U8, INT64, U64))
def hash_bytes(offsets: Any, data: Any, bitmap: Any, bit_offset: Any, out: Any) -> None:
    """Hashes variable-length values: row ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""
    for row in range(out.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            out[row] = NULL_HASH
        else:
            out[row] = hash_of_bytes(data, offsets[row], offsets[row + 1])


@kernel((U64, IN_U64))
def combine_hashes(out: Any, column: Any) -> None:
    """Folds the next column of a composite key into ``out``; the order of columns counts."""
    for row in range(out.size):
        out[row] = mix64(out[row] * _WORD_B + column[row] + GOLDEN)


@kernel((IN_F64, U64))
def canonical_float_bits(values: Any, out: Any) -> None:
    """Bits of each float with -0.0 as 0.0 and every NaN as one NaN."""
    bits = values.view(np.uint64)
    for row in range(values.size):
        value = values[row]
        if value != value:
            out[row] = CANONICAL_NAN
        elif value == 0.0:
            out[row] = _ZERO
        else:
            out[row] = bits[row]


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
