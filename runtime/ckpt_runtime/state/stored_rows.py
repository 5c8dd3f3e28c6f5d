"""Stored rows: the columnar form of keyed state that backends, formats and tools share.

A state consists of its name, a *descriptor* and rows, in record batches per key group. The descriptor (JSON) makes
the rows readable without the job:

* ``format``: 1; ``kind``: ``aggregate``, ``value``, ``list``, ``map``, ``timers`` or ``rows``
* ``schema``: the Arrow schema of every batch of the state, ``key_schema``: of the key alone. A schema is
  ``{"arrow": base64 of the IPC schema message, "fields": ["name: type", …]}``; ``fields`` is for human readers
* aggregate: columns ``key.<name>`` then each aggregate's stored columns; ``aggregates``: list of ``{alias, function,
  column, input_type, result_type, stored: [column names]}``. One row per key. An average stores a sum and a count
* value: ``key.<name>``, ``value.<name>``; one row per key
* list: the same, one row per element, elements of a key are in order and in one block
* map: ``key.<name>``, ``user_key.<name>``, ``value.<name>``; one row per entry
* value, list and map with time to live also have ``expires_at`` (int64, ms since epoch)
* timers: ``key.<name>``, ``time`` (int64 ms); one row per timer
* rows: ``key.<name>``, ``value.<name>``, ``matched`` (bool); rows of a key are in order and in one block;
  ``rows``: ``{event_time: the column by which rows expire or null, keeps_matched: whether matched rows stay}``;
  in increments of the in-memory backend there is a last column ``#row`` (int64), the number of the row

A row's key group comes from the stable hash of its key columns (``state/hashing.py``). Nothing here is pickled, and
rows that do not match their descriptor raise :class:`CorruptStateError`.

Keys in an index, and keys and rows in a database, are rows as bytes, converted a column at a time. The form is that
of ``kernels/key_codec_kernels.py``; equal keys have equal bytes. Rows that come from storage are checked before they
are decoded, because the kernels check no bounds.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.hashing import canonical_floats, variable_bytes
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

FORMAT_VERSION = 1
KEY_PREFIX = "key."
USER_KEY_PREFIX = "user_key."
VALUE_PREFIX = "value."
EXPIRES_AT = "expires_at"
TIME = "time"
MATCHED = "matched"
ROW = "#row"
"""The number of a row of a join, in increments only."""


def schema_to_json(schema: pa.Schema) -> dict[str, Any]:
    """The JSON form of a schema; metadata of the schema and its fields is left out."""
    bare = schema.remove_metadata()
    return {
        "arrow": b64encode(bare.serialize().to_pybytes()).decode(),
        "fields": [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in bare],
    }


def schema_from_json(document: Any) -> pa.Schema:
    """The inverse of :func:`schema_to_json`."""
    try:
        return pa.ipc.read_schema(pa.py_buffer(b64decode(document["arrow"], validate=True)))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptStateError(f"a state descriptor holds no readable schema: {error}") from error


def prefixed(schema: pa.Schema, prefix: str) -> list[pa.Field]:
    """The fields under their names in stored batches."""
    return [field.with_name(prefix + field.name).remove_metadata() for field in schema]


def without_prefix(schema: pa.Schema, prefix: str) -> pa.Schema:
    """The fields that carry ``prefix``, under their own names."""
    fields = [field for field in schema if field.name.startswith(prefix)]
    return pa.schema([field.with_name(field.name.removeprefix(prefix)) for field in fields])


def descriptor_of(kind: str, key_schema: pa.Schema, schema: pa.Schema, **extra: Any) -> dict[str, Any]:
    """A state's descriptor."""
    return {
        "format": FORMAT_VERSION,
        "kind": kind,
        "key_schema": schema_to_json(key_schema),
        "schema": schema_to_json(schema),
        **extra,
    }


class _Schema(Struct):
    arrow: str


class _Aggregate(Struct):
    """One aggregate of a descriptor; its other fields are only compared."""

    alias: str
    function: str
    stored: tuple[str, ...]


class _Descriptor(Struct):
    key_schema: _Schema
    schema: _Schema
    aggregates: tuple[_Aggregate, ...] | None = None
    rows: dict[str, Any] | None = None


def check_descriptor(name: str, descriptor: dict[str, Any]) -> None:
    """Raises :class:`CorruptStateError` for a descriptor that this version cannot read."""
    version = descriptor.get("format")
    if version != FORMAT_VERSION:
        message = f"state {name!r} has stored rows of version {version!r}, this version reads {FORMAT_VERSION}"
        raise CorruptStateError(message)
    if descriptor.get("kind") not in ("aggregate", "value", "list", "map", "timers", "rows"):
        raise CorruptStateError(f"state {name!r} has the unknown kind {descriptor.get('kind')!r}")
    try:
        found = checked(descriptor, _Descriptor)
    except DocumentError as error:
        raise CorruptStateError(f"state {name!r} has a malformed descriptor: {error}") from error
    schema_from_json(descriptor["key_schema"])
    columns = schema_from_json(descriptor["schema"]).names
    if descriptor["kind"] == "aggregate" and found.aggregates is None:
        raise CorruptStateError(f"state {name!r} has a descriptor without aggregates")
    if descriptor["kind"] == "rows" and found.rows is None:
        raise CorruptStateError(f"state {name!r} has a descriptor that does not say how its rows end")
    unknown = [column for entry in found.aggregates or () for column in entry.stored if column not in columns]
    if unknown:
        raise CorruptStateError(f"state {name!r} has aggregates of columns that its schema does not have: {unknown}")


def check_owned(name: str, groups: AnyArray, owned: KeyGroupRange) -> None:
    """Raises :class:`CorruptStateError` for rows of key groups that another subtask owns."""
    if groups.size and not owned.first <= groups.min() <= groups.max() <= owned.last:
        raise CorruptStateError(
            f"state {name!r} has rows of key groups {groups.min()} to {groups.max()}; "
            f"{owned.first} to {owned.last} are its own"
        )


class StateWriter(Protocol):
    """The target to which a frozen state is written: the files of its backend, or the canonical form."""

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """Writes rows in any order of their keys; ``groups`` holds each row's key group. Equal keys keep their order.

        Raises :class:`CorruptStateError` for a row outside ``owned``.
        """

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """Writes a stream of rows that are ordered by key group, ascending."""


def fixed_key(array: pa.Array) -> columns.FixedColumn:
    """A key column of numbers or times as int64."""
    return canonical_floats(array) if pa.types.is_floating(array.type) else columns.int64_column(array)


def fixed_value(array: pa.Array) -> columns.FixedColumn:
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
            fixed = fixed_key(array) if keys else fixed_value(array)
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
    return decoded_bytes(kind, data, cursors, ends, valid)


def decoded_bytes(kind: pa.DataType, data: AnyArray, cursors: AnyArray, ends: AnyArray, valid: AnyArray) -> pa.Array:
    """An array of a type that is not fixed. ``cursors`` say where bytes begin, and are moved past them.

    ``ends`` has running ends, one more than rows; ``valid`` a 0 for each null.
    """
    out = np.empty(int(ends[-1]), dtype=np.uint8)
    decode_bytes(data, cursors, read_only(ends), out)
    buffers = [columns.bitmap_of(valid), pa.py_buffer(ends), pa.py_buffer(out)]
    return _from_binary(pa.Array.from_buffers(pa.large_binary(), len(cursors), buffers), kind)


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
