"""Rows as bytes and back, a column at a time: keys in an index, keys and rows in a database. Pure.

The form is that of ``kernels/key_codec_kernels.py``; equal keys have equal bytes. Rows that come from storage are
checked before they are decoded, because the kernels check no bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ckpt_runtime.state import columns
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.hashing import canonical_floats, variable_bytes
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.key_codec_kernels import (
    add_bytes_sizes,
    add_fixed_sizes,
    check_rows,
    decode_bytes,
    decode_fixed,
    decode_lengths,
    encode_bytes,
    encode_fixed,
)


def fixed_key(array: pa.Array) -> columns.FixedColumn:
    """A key column of numbers or times as int64."""
    return canonical_floats(array) if pa.types.is_floating(array.type) else columns.int64_column(array)


def _fixed_value(array: pa.Array) -> columns.FixedColumn:
    """The same for a column that is not a key: every float keeps its bits."""
    if not pa.types.is_floating(array.type):
        return columns.int64_column(array)
    floats = columns.float64_column(array)
    return columns.FixedColumn(floats.values.view(np.int64), floats.bitmap, floats.bit_offset)


def is_fixed(kind: pa.DataType) -> bool:
    """Whether values are kept as 64-bit integers."""
    return columns.is_integer_like(kind) or pa.types.is_floating(kind)


def alike_bytes(kind: pa.DataType) -> int:
    """The number of bytes before a value of this type that do not depend on its content: null flag and length."""
    return 1 if is_fixed(kind) else 5


def encode_rows(
    arrays: Sequence[pa.Array], names: Sequence[str], *, header: int = 0, keys: bool = False
) -> tuple[AnyArray, AnyArray]:
    """Offsets (one more than rows) and bytes; each row follows ``header`` bytes that the caller fills."""
    sizes = np.full(len(arrays[0]), header, dtype=np.int64)
    views: list[columns.FixedColumn | columns.BytesColumn] = []
    for array, name in zip(map(columns.plain, arrays), names, strict=True):
        if is_fixed(array.type):
            fixed = fixed_key(array) if keys else _fixed_value(array)
            add_fixed_sizes(fixed.bitmap, fixed.bit_offset, sizes)
            views.append(fixed)
        else:
            var = variable_bytes(array, name)
            add_bytes_sizes(var.offsets, var.bitmap, var.bit_offset, sizes)
            views.append(var)
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    data = np.empty(int(offsets[-1]), dtype=np.uint8)
    cursors = offsets[:-1] + header
    for view in views:
        if isinstance(view, columns.FixedColumn):
            encode_fixed(view.values, view.bitmap, view.bit_offset, cursors, data)
        else:
            encode_bytes(view.offsets, view.data, view.bitmap, view.bit_offset, cursors, data)
    return offsets, data


def check_encoded(kinds: Sequence[pa.DataType], data: AnyArray, starts: AnyArray, ends: AnyArray) -> None:
    """Raises CorruptStateError unless each row fills ``data[start:end]`` exactly."""
    widths = np.array([8 if is_fixed(kind) else _width(kind) for kind in kinds], dtype=np.int64)
    fixed = np.array([is_fixed(kind) for kind in kinds], dtype=np.uint8)
    row = int(check_rows(data, starts, ends, read_only(fixed), read_only(widths)))
    if row >= 0:
        raise CorruptStateError(f"a stored row of {', '.join(map(str, kinds))} cannot be read")


def decode_rows(kinds: Sequence[pa.DataType], data: AnyArray, starts: AnyArray) -> list[pa.Array]:
    """The columns of the rows at ``starts``. Only rows that were encoded here, or checked, may be decoded."""
    cursors = np.array(starts, dtype=np.int64)
    return [_decode_column(columns.decoded_type(kind), read_only(data), cursors) for kind in kinds]


def _decode_column(kind: pa.DataType, data: AnyArray, cursors: AnyArray) -> pa.Array:
    rows = len(cursors)
    valid = np.empty(rows, dtype=np.uint8)
    if is_fixed(kind):
        values = np.empty(rows, dtype=np.int64)
        decode_fixed(data, cursors, values, valid)
        return fixed_array(kind, values, valid)
    ends = np.zeros(rows + 1, dtype=np.int64)
    decode_lengths(data, cursors, ends, valid)
    out = np.empty(int(ends[-1]), dtype=np.uint8)
    decode_bytes(data, cursors, read_only(ends), out)
    buffers = [columns.bitmap_of(valid), pa.py_buffer(ends), pa.py_buffer(out)]
    return _from_binary(pa.Array.from_buffers(pa.large_binary(), rows, buffers), kind)


def fixed_array(kind: pa.DataType, values: AnyArray, valid: AnyArray | None) -> pa.Array:
    """An Arrow array of an integer-like or float type from its 64-bit form."""
    bitmap = None if valid is None else columns.bitmap_of(valid)
    if columns.is_int64_wide(kind):
        return columns.arrow_from_numpy(kind, values, bitmap)
    if pa.types.is_boolean(kind):
        bits = np.packbits(values.astype(np.uint8), bitorder="little")
        return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(bits)])
    if pa.types.is_floating(kind):
        floats = values.view(np.float64)
        if kind.bit_width < 64:
            floats = floats.astype(f"<f{kind.bit_width // 8}")
        return columns.arrow_from_numpy(kind, floats, bitmap)
    return columns.arrow_from_numpy(kind, values.astype(f"<i{kind.bit_width // 8}"), bitmap)


def _width(kind: pa.DataType) -> int:
    """The number of bytes of a value of fixed size; -1 for variable size."""
    if columns.is_bytes_like(kind):
        return -1
    return 16 if pa.types.is_decimal(kind) and not pa.types.is_decimal256(kind) else int(kind.byte_width)


def _from_binary(binary: pa.Array, kind: pa.DataType) -> pa.Array:
    """Converts encoded bytes back to their type."""
    if columns.is_bytes_like(kind):
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
            binary = binary.view(pa.large_string())
        return binary.cast(kind)
    width = _width(kind)
    fixed = binary.cast(pa.binary(width)) if len(binary) else pa.nulls(0, pa.binary(width))
    if not pa.types.is_decimal(kind):
        return fixed
    wide = pa.decimal256 if pa.types.is_decimal256(kind) else pa.decimal128
    buffers = fixed.buffers()
    return pa.Array.from_buffers(wide(kind.precision, kind.scale), len(fixed), buffers).cast(kind)
