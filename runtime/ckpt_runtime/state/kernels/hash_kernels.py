"""The stable 64-bit hash, one column at a time. ``state/hashing.py`` documents it; changing it breaks every savepoint.

``bitmap`` is Arrow's validity bitmap (empty: no nulls), ``bit_offset`` the position of row 0 in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import IN_F64, IN_I32, IN_I64, IN_U8, IN_U64, INT64, U64, inlined, kernel

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
