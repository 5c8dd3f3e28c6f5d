"""Composite and string keys as bytes, a column at a time: encodes rows, decodes slots.

A key is the sequence of its columns: a byte 1 and the value, or a byte 0 for null. Fixed values take 8 little-endian
bytes, variable ones a 4-byte little-endian length and their bytes. Equal keys have equal bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import I64, IN_I32, IN_I64, IN_U8, INT64, U8, U64, kernel
from ckpt_runtime.state.kernels.hash_kernels import copy_bytes, is_valid, load_word, store_word


@kernel((IN_U8, INT64, I64))
def add_fixed_sizes(bitmap: Any, bit_offset: Any, sizes: Any) -> None:
    """Adds the encoded size of a fixed column to each row's size."""
    for row in range(sizes.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            sizes[row] += 1
        else:
            sizes[row] += 9


@kernel((IN_I32, IN_U8, INT64, I64), (IN_I64, IN_U8, INT64, I64))
def add_bytes_sizes(offsets: Any, bitmap: Any, bit_offset: Any, sizes: Any) -> None:
    """The same for a variable column."""
    for row in range(sizes.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            sizes[row] += 1
        else:
            sizes[row] += 5 + np.int64(offsets[row + 1]) - np.int64(offsets[row])


@kernel((IN_I64, IN_U8, INT64, I64, U8))
def encode_fixed(values: Any, bitmap: Any, bit_offset: Any, cursors: Any, out: Any) -> None:
    """Writes a fixed column at each row's cursor and advances the cursor."""
    for row in range(values.size):
        at = cursors[row]
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            out[at] = 0
            cursors[row] = at + 1
            continue
        out[at] = 1
        store_word(out, np.uint64(at + 1), np.uint64(values[row]))
        cursors[row] = at + 9


@kernel((IN_I32, IN_U8, IN_U8, INT64, I64, U8), (IN_I64, IN_U8, IN_U8, INT64, I64, U8))
def encode_bytes(offsets: Any, data: Any, bitmap: Any, bit_offset: Any, cursors: Any, out: Any) -> None:
    """The same for a variable column."""
    for row in range(cursors.size):
        at = cursors[row]
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            out[at] = 0
            cursors[row] = at + 1
            continue
        start = np.int64(offsets[row])
        length = np.int64(offsets[row + 1]) - start
        out[at] = 1
        for byte in range(4):
            out[at + 1 + byte] = np.uint8((length >> (8 * byte)) & 255)
        at += 5
        copy_bytes(data, start, out, at, length)
        cursors[row] = at + length


@kernel((IN_U8, IN_I64, INT64, INT64, U64))
def order_words(data: Any, offsets: Any, prefix: Any, skipped: Any, out: Any) -> None:
    """Computes for each row a word that orders rows nearly like their bytes: the first two bytes, and six later ones.

    The six bytes follow the first ``prefix + skipped`` bytes; ``prefix`` is at least 2. Missing bytes count as 0.
    """
    for row in range(out.size):
        start, end = offsets[row], offsets[row + 1]
        word = (np.uint64(data[start]) << np.uint64(8)) | np.uint64(data[start + 1])
        start += prefix + skipped
        for byte in range(6):
            word <<= np.uint64(8)
            if start + byte < end:
                word |= np.uint64(data[start + byte])
        out[row] = word


@kernel((IN_U8, I64, I64, U8))
def decode_fixed(arena: Any, cursors: Any, values: Any, valid: Any) -> None:
    """Reads a fixed column at each slot's cursor and advances the cursor."""
    for slot in range(cursors.size):
        at = cursors[slot]
        valid[slot] = arena[at]
        word = np.uint64(0)
        if arena[at]:
            word = load_word(arena, np.uint64(at + 1))
            cursors[slot] = at + 9
        else:
            cursors[slot] = at + 1
        values[slot] = np.int64(word)


@kernel((IN_U8, I64, I64, U8))
def decode_lengths(arena: Any, cursors: Any, ends: Any, valid: Any) -> None:
    """Reads the lengths of a variable column into running ends (``ends[0]`` is 0) and moves cursors to the bytes."""
    total = np.int64(0)
    for slot in range(cursors.size):
        at = cursors[slot]
        valid[slot] = arena[at]
        if arena[at]:
            length = np.int64(0)
            for byte in range(4):
                length |= np.int64(arena[at + 1 + byte]) << (8 * byte)
            total += length
            cursors[slot] = at + 5
        else:
            cursors[slot] = at + 1
        ends[slot + 1] = total


@kernel((IN_U8, I64, IN_I64, U8))
def decode_bytes(arena: Any, cursors: Any, ends: Any, out: Any) -> None:
    """Copies the bytes that :func:`decode_lengths` measured and moves cursors past them."""
    for slot in range(cursors.size):
        at = cursors[slot]
        start = ends[slot]
        length = ends[slot + 1] - start
        copy_bytes(arena, at, out, start, length)
        cursors[slot] = at + length


@kernel((IN_U8, IN_I64, IN_I64, IN_U8, IN_I64))
def check_rows(data: Any, starts: Any, ends: Any, fixed: Any, widths: Any) -> Any:
    """The first row whose columns do not fill it from start to end, or -1. ``widths`` are values' sizes, -1 for any.

    Starts and ends must be inside of ``data``.
    """
    for row in range(starts.size):
        at, end = starts[row], ends[row]
        for column in range(fixed.size):
            if at >= end or data[at] > 1:
                return row
            has_value = data[at] == 1
            at += 1
            if not has_value:
                continue
            length = np.int64(8)
            if not fixed[column]:
                if end - at < 4:
                    return row
                length = np.int64(0)
                for byte in range(4):
                    length |= np.int64(data[at + byte]) << (8 * byte)
                at += 4
                if widths[column] >= 0 and length != widths[column]:
                    return row
            if length > end - at:
                return row
            at += length
        if at != end:
            return row
    return -1
