"""NumPy views on Arrow columns, in the one form that kernels take: read-only, contiguous, offset applied.

Data is copied only if the layout requires it; narrow integers are widened to 64 bits. Arrow buffers are not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.state.arrays import read_only

AnyArray: TypeAlias = np.ndarray[Any, Any]

NO_BITMAP: AnyArray = read_only(np.empty(0, dtype=np.uint8))
_NO_BYTES: AnyArray = NO_BITMAP


@dataclass(frozen=True, slots=True)
class FixedColumn:
    """Values of one column with its validity bitmap (empty when there are no nulls) and the bit of row 0."""

    values: AnyArray
    bitmap: AnyArray
    bit_offset: int


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Variable-length values: row ``i`` is ``data[offsets[i]:offsets[i + 1]]``; offsets are int32 or int64."""

    offsets: AnyArray
    data: AnyArray
    bitmap: AnyArray
    bit_offset: int


_INTEGERS = {
    pa.lib.Type_INT8: "i1", pa.lib.Type_INT16: "<i2", pa.lib.Type_INT32: "<i4", pa.lib.Type_INT64: "<i8",
    pa.lib.Type_UINT8: "u1", pa.lib.Type_UINT16: "<u2", pa.lib.Type_UINT32: "<u4", pa.lib.Type_UINT64: "<u8",
    pa.lib.Type_DATE32: "<i4", pa.lib.Type_DATE64: "<i8", pa.lib.Type_TIME32: "<i4", pa.lib.Type_TIME64: "<i8",
    pa.lib.Type_TIMESTAMP: "<i8", pa.lib.Type_DURATION: "<i8",
}  # fmt: skip
_FLOATS = {pa.lib.Type_HALF_FLOAT: "<f2", pa.lib.Type_FLOAT: "<f4", pa.lib.Type_DOUBLE: "<f8"}
_NUMBERS = {kind: np.dtype(name) for kind, name in (_INTEGERS | _FLOATS).items()}
_INT64_WIDE = frozenset(kind for kind, name in _INTEGERS.items() if name.endswith("8"))
_BYTES = frozenset(
    kind().id for kind in (pa.string, pa.binary, pa.large_string, pa.large_binary, pa.string_view, pa.binary_view)
)
_UNSIGNED = {kind: np.dtype(f"<u{number.itemsize}") for kind, number in _NUMBERS.items()}
"""These tables have Arrow type ids as keys: using ids costs a tenth of calling the tests in ``pa.types`` one by one."""


def in_type(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Converts a column to a type, and decodes it if need be. Raises an error of Arrow if a value does not fit."""
    return column if column.type == kind else plain(column).cast(kind)


def plain(column: pa.Array) -> pa.Array:
    """Decodes dictionary, run-end and view encodings, so that equal values look equal."""
    kind = column.type
    if kind.id in _NUMBERS:
        return column
    if pa.types.is_dictionary(kind):
        return plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return plain(pc.run_end_decode(column))
    if pa.types.is_string_view(kind):
        return column.cast(pa.large_string())
    if pa.types.is_binary_view(kind):
        return column.cast(pa.large_binary())
    if isinstance(column, pa.ExtensionArray):
        return plain(column.storage)
    return column


def decoded_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values behind an encoding."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return decoded_type(kind.value_type)
    return kind


def validity(column: pa.Array) -> tuple[AnyArray, int]:
    """Bitmap and bit of row 0."""
    if column.null_count == 0:
        return NO_BITMAP, 0
    buffer = column.buffers()[0]
    if buffer is None:  # a NullArray has no buffer
        return read_only(np.zeros((len(column) + 7) // 8, dtype=np.uint8)), 0
    return _read_only_view(buffer, np.uint8), column.offset


def is_integer_like(kind: pa.DataType) -> bool:
    """Types that are kept as one 64-bit integer."""
    return kind.id in _INTEGERS or kind.id == pa.lib.Type_BOOL


def is_int64_wide(kind: pa.DataType) -> bool:
    """Integer-like types of 64 bits."""
    return kind.id in _INT64_WIDE


def is_bytes_like(kind: pa.DataType) -> bool:
    """Strings and binaries of variable length."""
    return kind.id in _BYTES


def _fixed_values(column: pa.Array) -> AnyArray:
    number = _NUMBERS.get(column.type.id)
    buffer = column.buffers()[1]
    if number is None:
        bits = np.frombuffer(buffer, dtype=np.uint8)
        return np.unpackbits(bits, count=column.offset + len(column), bitorder="little")[column.offset :]
    return _number_view(column, buffer, number)


def _number_view(column: pa.Array, buffer: pa.Buffer | None, number: np.dtype[Any]) -> AnyArray:
    rows = len(column)
    if buffer is None or rows == 0:
        return read_only(np.empty(0, dtype=number))
    view = np.frombuffer(buffer, dtype=number, count=rows, offset=column.offset * number.itemsize)
    return view if view.flags.aligned else view.copy()


def unsigned_values(column: pa.Array) -> AnyArray | None:
    """Numbers and times without nulls as unsigned integers of their width; None for any other column."""
    number = _UNSIGNED.get(column.type.id)
    if number is None or column.null_count:
        return None
    return read_only(_number_view(column, column.buffers()[1], number))


def int64_column(column: pa.Array) -> FixedColumn:
    """Integers, booleans, dates, times, timestamps and durations as int64; unsigned 64-bit ones keep their bits."""
    values = _fixed_values(column)
    if values.dtype == np.uint64:
        values = values.view(np.int64)
    elif values.dtype != np.int64:
        values = values.astype(np.int64)
    bitmap, bit_offset = validity(column)
    return FixedColumn(read_only(values), bitmap, bit_offset)


def float64_column(column: pa.Array) -> FixedColumn:
    """Floats and integers as float64."""
    values = _fixed_values(column)
    if values.dtype != np.float64:
        values = values.astype(np.float64)
    bitmap, bit_offset = validity(column)
    return FixedColumn(read_only(values), bitmap, bit_offset)


def bytes_column(column: pa.Array) -> BytesColumn:
    """Strings and binaries without copying their data."""
    kind = column.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    _, offset_buffer, data_buffer = column.buffers()
    bitmap, bit_offset = validity(column)
    if len(column) == 0 or offset_buffer is None:
        return BytesColumn(read_only(np.zeros(1, dtype=np.int64)), _NO_BYTES, bitmap, bit_offset)
    offsets = _read_only_view(offset_buffer, np.int64 if wide else np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    if not offsets.flags.aligned:
        offsets = read_only(offsets.copy())
    data = _NO_BYTES if data_buffer is None else _read_only_view(data_buffer, np.uint8)
    return BytesColumn(offsets, data, bitmap, bit_offset)


def fixed_bytes_column(column: pa.Array, width: int) -> BytesColumn:
    """Values of ``width`` bytes each (decimals, fixed-size binaries) as variable-length ones."""
    bitmap, bit_offset = validity(column)
    first = column.offset
    offsets = np.arange(first * width, (first + len(column) + 1) * width, width, dtype=np.int64)
    buffer = column.buffers()[1]
    data = _NO_BYTES if buffer is None else _read_only_view(buffer, np.uint8)
    return BytesColumn(read_only(offsets[: len(column) + 1]), data, bitmap, bit_offset)


def _read_only_view(buffer: pa.Buffer, number: Any) -> AnyArray:
    """The numbers in a buffer, whose memory may be writable, such as that of an array that Arrow has computed."""
    view = np.frombuffer(buffer, dtype=number)
    view.setflags(write=False)
    return view


def bytes_array(kind: pa.DataType, ends: AnyArray, data: AnyArray) -> pa.Array:
    """The inverse of :func:`bytes_column` without nulls: ``ends`` are int64 offsets, one more than there are values."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        narrow = ends.astype(np.int32)
        if ends[-1] == narrow[-1]:
            return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(narrow), pa.py_buffer(data)])
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    wide = pa.large_string() if text else pa.large_binary()
    array = pa.Array.from_buffers(wide, len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(data)])
    return array if kind == wide else array.cast(kind)


def arrow_from_numpy(kind: pa.DataType, values: AnyArray, bitmap: pa.Buffer | None = None) -> pa.Array:
    """A primitive Arrow array over a NumPy array's memory, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [bitmap, pa.py_buffer(values)])


def bitmap_of(valid: AnyArray) -> pa.Buffer | None:
    """The validity bitmap of one byte per row; None when all are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
