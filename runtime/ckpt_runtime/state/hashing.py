"""The stable 64-bit hash of keys, key groups, and the split of batches by owning subtask.

Savepoints and every running job depend on this definition; a change would require a new format version.

* ``mix64`` is the splitmix64 finaliser; all arithmetic is modulo 2**64.
* Integers, booleans, dates, times, timestamps and durations: ``mix64(v + 0x9E3779B97F4A7C15)`` of the value
  sign-extended to 64 bits (unsigned 64-bit ones by their bits; times in their own unit). So the hash of a number does
  not depend on the width of its column.
* Floats: widened to 64 bits, -0.0 as 0.0, every NaN as 0x7FF8000000000000; the bits are hashed like an integer.
* Strings (UTF-8) and binaries of any offset width: ``state = length * 0x9E3779B185EBCA87 + 0x9E3779B97F4A7C15``; for
  each 8-byte little-endian word ``w``, the last one padded with zeros: ``state ^= rotl(w * 0xC2B2AE3D27D4EB4F, 31) *
  0x9E3779B185EBCA87``, ``state = rotl(state, 27) * 0x9E3779B185EBCA87 + 0x85EBCA77C2B2AE63``; the hash is
  ``mix64(state)``.
* Decimals of up to 38 digits: the unscaled value as 16 little-endian bytes, wider ones as 32; fixed-size binaries:
  their bytes; both hashed like a binary. The scale is not part of the hash.
* Null of any type: 0xD6E8FEB86659FD93.
* Several columns ``c0, c1, …``: ``h = c0; h = mix64(h * 0x9E3779B185EBCA87 + ci + 0x9E3779B97F4A7C15)`` for each next.
* Encoded columns (dictionary, run-end, views) hash like their decoded values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.key_groups import owner_of_key_group
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.errors import UnsupportedKeyTypeError
from ckpt_runtime.state.kernels.hash_kernels import (
    NULL_HASH,
    canonical_float_bits,
    combine_hashes,
    hash_bytes,
    hash_int64,
    key_groups,
    places_by_owner,
    rows_at_places,
    scatter,
)


def hash_columns(batch: pa.RecordBatch, keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """The hash of each row's key.

    Raises KeyError for a column that the batch does not have and :class:`UnsupportedKeyTypeError` for a nested one.
    """
    if not keys:
        raise ValueError("keys must name at least one column")
    return hash_arrays([batch.column(name) for name in keys], keys)


def hash_arrays(arrays: Sequence[pa.Array], names: Sequence[str]) -> npt.NDArray[np.uint64]:
    """The same for arrays; ``names`` are for messages."""
    result = _hash_array(arrays[0], names[0])
    for array, name in zip(arrays[1:], names[1:], strict=True):
        combine_hashes(result, read_only(_hash_array(array, name)))
    return result


def check_key_types(schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raises like :func:`hash_columns` for batches of this schema, before any data arrives."""
    for name in keys:
        if schema.get_field_index(name) < 0:
            raise KeyError(f"key column {name!r} is not among the columns {schema.names}")
        _hash_array(pa.nulls(0, schema.field(name).type), name)


def _hash_array(array: pa.Array, name: str) -> npt.NDArray[np.uint64]:
    if isinstance(array, pa.DictionaryArray) and len(array.dictionary) <= len(array):
        # Each value of the dictionary is hashed once.
        of_values = np.append(_hash_array(array.dictionary, name), NULL_HASH)
        indices = array.indices
        if indices.null_count:
            indices = pc.fill_null(indices.cast(pa.int64()), len(of_values) - 1)
        hashes: npt.NDArray[np.uint64] = of_values[indices.to_numpy()]
        return hashes
    array = columns.plain(array)
    kind = array.type
    out = np.empty(len(array), dtype=np.uint64)
    if pa.types.is_null(kind):
        out.fill(NULL_HASH)
    elif columns.is_integer_like(kind):
        fixed = columns.int64_column(array)
        hash_int64(fixed.values, fixed.bitmap, fixed.bit_offset, out)
    elif pa.types.is_floating(kind):
        fixed = canonical_floats(array)
        hash_int64(fixed.values, fixed.bitmap, fixed.bit_offset, out)
    else:
        var = variable_bytes(array, name)
        hash_bytes(var.offsets, var.data, var.bitmap, var.bit_offset, out)
    return out


def canonical_floats(array: pa.Array) -> columns.FixedColumn:
    """A float column as the int64 bits of its canonical values."""
    fixed = columns.float64_column(array)
    bits = np.empty(len(array), dtype=np.uint64)
    canonical_float_bits(fixed.values, bits)
    return columns.FixedColumn(read_only(bits.view(np.int64)), fixed.bitmap, fixed.bit_offset)


def variable_bytes(array: pa.Array, name: str) -> columns.BytesColumn:
    """The byte form of a string, binary or decimal column."""
    kind = array.type
    if columns.is_bytes_like(kind):
        return columns.bytes_column(array)
    if pa.types.is_fixed_size_binary(kind):
        return columns.fixed_bytes_column(array, kind.byte_width)
    if pa.types.is_decimal256(kind):
        return columns.fixed_bytes_column(array, 32)
    if pa.types.is_decimal(kind):
        if not pa.types.is_decimal128(kind):
            array = array.cast(pa.decimal128(kind.precision, kind.scale))
        return columns.fixed_bytes_column(array, 16)
    raise UnsupportedKeyTypeError(
        f"key column {name!r} has type {kind}; allowed are integers, floats, booleans, decimals, strings, binaries, "
        "dates, times, timestamps and durations"
    )


def key_groups_of(hashes: npt.NDArray[np.uint64], max_parallelism: int) -> npt.NDArray[np.int32]:
    """The key group of each hash."""
    out = np.empty(len(hashes), dtype=np.int32)
    key_groups(read_only(hashes), np.uint64(max_parallelism), out)
    return out


def split_by_owner(
    batch: pa.RecordBatch, hashes: npt.NDArray[np.uint64], max_parallelism: int, parallelism: int
) -> list[pa.RecordBatch]:
    """One batch per subtask, in order of the subtasks, possibly empty; rows keep their order within each."""
    if parallelism == 1:
        return [batch]
    rows = batch.num_rows
    places = np.empty(rows, dtype=np.uint32)
    ends = np.zeros(parallelism, dtype=np.uint64)
    places_by_owner(read_only(hashes), _owner_of_group(max_parallelism, parallelism), ends, places)
    bounds = ends.tolist()
    if rows in bounds and (bounds.index(rows) == 0 or bounds[bounds.index(rows) - 1] == 0):
        ordered = batch  # a single owner: nothing to move
    else:
        ordered = _moved(batch, read_only(places))
    parts = []
    start = 0
    for end in bounds:
        parts.append(ordered.slice(start, end - start))
        start = end
    return parts


@cache
def _owner_of_group(max_parallelism: int, parallelism: int) -> npt.NDArray[np.uint32]:
    owners = [owner_of_key_group(group, max_parallelism, parallelism) for group in range(max_parallelism)]
    return read_only(np.array(owners, dtype=np.uint32))


def _moved(batch: pa.RecordBatch, places: npt.NDArray[np.uint32]) -> pa.RecordBatch:
    """Moves each row to its place. Plain numbers are scattered, which is twice as fast as Arrow's ``take``."""
    moved: list[pa.Array] = []
    rows: pa.Array | None = None
    for column in batch.columns:
        values = columns.unsigned_values(column)
        if values is not None:
            out = np.empty(len(values), dtype=values.dtype)
            scatter(values, places, out)
            moved.append(columns.arrow_from_numpy(column.type, out))
            continue
        if rows is None:
            inverse = np.empty(len(places), dtype=np.int32)
            rows_at_places(places, inverse)
            rows = columns.arrow_from_numpy(pa.int32(), inverse)
        moved.append(column.take(rows))
    return pa.RecordBatch.from_arrays(moved, schema=batch.schema)
