"""Keys and entries of states as bytes. Pure.

A key in the database is its key group and its state's id, two bytes each, big endian, and then the key's columns. Its
value is the id of a schema, two bytes, and then the rows of the entry: one for a value, several for a list, a map or
timers. Each row has the columns after the key in the state's stored form (``stored_rows``). Columns are MessagePack, in
the one form that ``msgspec`` gives equal values; they are decoded only by the types of their schema.

A list or a map of many rows is *split*: the value of its key is a :class:`SplitList`, and its rows are in *elements*,
whose keys are that key followed by a *tail*: the number of a part of a list, or a map's own key, in MessagePack. No
other key is a prefix of another one, so elements follow their key in the database, and parts of a list are in order.

An entry keeps the schema with which it was written, and is converted to the state's present schema on reading.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

import msgspec
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import values
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.states import Key
from ckpt_runtime.state.stored_rows import EXPIRES_AT, KEY_PREFIX

Row: TypeAlias = tuple[Any, ...]
Converter: TypeAlias = Callable[[Any], Any] | None

ID_BYTES = 2
PREFIX_BYTES = 2 * ID_BYTES
BATCH = 10_000
"""Entries of one write: larger batches are no faster, and make other writers wait."""
_DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError)

_encode = msgspec.msgpack.Encoder(enc_hook=values.plain_number).encode

SPLIT = b"\xff\xff"
"""Marks a split entry, in place of the schema id of other entries. No state has that many schemas."""
_NUMBER, _PAIR = b"\xcf", b"\x92"
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_split_decoder = msgspec.msgpack.Decoder(tuple[_Count, _Count])


class SplitList(NamedTuple):
    """The value of a key instead of rows: the number of elements, and the number of the next part of a list."""

    elements: int
    next: int

    def encode(self) -> bytes:
        """The encoded entry."""
        return SPLIT + _encode((self.elements, self.next))

    @classmethod
    def decode(cls, encoded: bytes) -> SplitList:
        """The inverse. Raises CorruptStateError."""
        try:
            return cls(*_split_decoder.decode(memoryview(encoded)[ID_BYTES:]))
        except _DAMAGED as error:
            raise CorruptStateError(f"an entry cannot be read: {error}") from error


def number_tail(number: int) -> bytes:
    """The tail of a part of a list; tails are ordered like their numbers."""
    return _NUMBER + number.to_bytes(8, "big")


def elements_of(key: bytes) -> tuple[bytes, bytes]:
    """The range of the keys of a key's elements: no tail begins with these bytes."""
    return key + b"\0", key + b"\xff"


def group_prefix(key_group: int) -> bytes:
    """The prefix of the keys of a key group."""
    return key_group.to_bytes(ID_BYTES, "big")


def state_prefix(key_group: int, state_id: int) -> bytes:
    """The prefix of the keys of a state in one key group."""
    return ((key_group << 16) + state_id).to_bytes(PREFIX_BYTES, "big")


def without_key(schema: pa.Schema) -> pa.Schema:
    """The columns after the key's columns."""
    return pa.schema([field for field in schema if not field.name.startswith(KEY_PREFIX)])


class KeyCodec:
    """Keys of one schema, for the key groups that a subtask owns."""

    def __init__(self, schema: pa.Schema, owned: KeyGroupRange, max_parallelism: int) -> None:
        self._schema = schema
        self._owned = owned
        self._max_parallelism = max_parallelism
        self._has_floats = any(pa.types.is_floating(field.type) for field in schema)
        self._decoder = msgspec.msgpack.Decoder(_row_type(schema))
        self._element_decoder = msgspec.msgpack.Decoder(tuple[_row_type(schema), msgspec.Raw])  # type: ignore[misc]

    def __len__(self) -> int:
        return len(self._schema)

    def encode(self, state_id: int, keys: Sequence[Key], *, to_write: bool = False) -> list[bytes]:
        """Encoded keys of a state. Raises CorruptStateError for a key to write that belongs to another subtask."""
        if not keys:
            return []
        arrays = [
            values.to_arrow(column, field.type)
            for column, field in zip(zip(*keys, strict=True), self._schema, strict=True)
        ]
        groups = key_groups_of(hash_arrays(arrays, self._schema.names), self._max_parallelism)
        own = self._owned
        if to_write and not own.first <= groups.min() <= groups.max() <= own.last:
            raise CorruptStateError(
                f"there are keys of key groups {groups.min()} to {groups.max()}; {own.first} to {own.last} are its own"
            )
        if self._has_floats:  # 0.0 and -0.0 are one key
            keys = [tuple([part + 0.0 if type(part) is float else part for part in key]) for key in keys]
        prefixes = {group: state_prefix(group, state_id) for group in set(groups.tolist())}
        return [prefixes[group] + _encode(key) for group, key in zip(groups.tolist(), keys, strict=True)]

    def decode(self, encoded: bytes) -> Key:
        """The key."""
        try:
            return values.canonical_key(self._decoder.decode(memoryview(encoded)[PREFIX_BYTES:]))
        except _DAMAGED as error:
            raise CorruptStateError(f"the key {encoded!r} cannot be read: {error}") from error

    def decode_element(self, encoded: bytes) -> tuple[Key, bytes]:
        """The key, and the tail of an element; the tail is empty for other entries."""
        try:
            return self.decode(encoded), b""
        except CorruptStateError:
            try:
                key, tail = self._element_decoder.decode(_PAIR + encoded[PREFIX_BYTES:])
            except _DAMAGED as error:
                raise CorruptStateError(f"the key {encoded!r} cannot be read: {error}") from error
            return values.canonical_key(key), bytes(tail)


def map_tail(name: Row) -> bytes:
    """The tail of a map's own key: equal keys, also nested ones, have equal tails."""
    return _encode(name)


class RowsCodec:
    """The codec of the rows of one state: ``schemas`` by their ids, all without the key's columns.

    Rows are written, and returned, with the schema ``current``; the others must have passed ``check_evolution``.
    Rows without an expiry time get ``fresh_stamp`` if the state has a time to live now.
    """

    def __init__(self, schemas: Mapping[int, pa.Schema], current: int, fresh_stamp: Callable[[], int | None]) -> None:
        self._header = current.to_bytes(ID_BYTES, "big")
        self._decoders = {
            schema_id.to_bytes(ID_BYTES, "big"): _decoder(schema, schemas[current], fresh_stamp)
            for schema_id, schema in schemas.items()
        }

    def encode(self, rows: Iterable[Row]) -> bytes:
        """The rows of one entry."""
        return self._header + _encode(rows)

    def is_current(self, encoded: bytes) -> bool:
        """Whether it was written with the present schema."""
        return encoded.startswith(self._header)

    def decode(self, encoded: bytes) -> list[Row]:
        """The inverse. Raises CorruptStateError."""
        decode = self._decoders.get(encoded[:ID_BYTES])
        if decode is None:
            raise CorruptStateError(f"an entry has the unknown schema {int.from_bytes(encoded[:ID_BYTES], 'big')}")
        try:
            return decode(memoryview(encoded)[ID_BYTES:])
        except _DAMAGED as error:
            raise CorruptStateError(f"an entry cannot be read: {error}") from error


def _decoder(
    stored: pa.Schema, wanted: pa.Schema, fresh_stamp: Callable[[], int | None]
) -> Callable[[memoryview], list[Row]]:
    decoder = msgspec.msgpack.Decoder(list[_row_type(stored)])  # type: ignore[misc]
    steps = [_row_converter(stored), _evolution(stored, wanted)]
    if EXPIRES_AT in wanted.names:
        steps.append(lambda row: row if row[-1] is not None else (*row[:-1], fresh_stamp()))
    changes = [step for step in steps if step is not None]
    if not changes:
        return decoder.decode

    def decode(encoded: memoryview) -> list[Row]:
        rows: list[Row] = decoder.decode(encoded)
        for change in changes:
            rows = [change(row) for row in rows]
        return rows

    return decode


def _evolution(stored: pa.Schema, wanted: pa.Schema) -> Converter:
    """Converts a row of one schema to the other; None if no field moves. Widenings change nothing in Python."""
    if stored.names == wanted.names:
        return None
    places = [stored.get_field_index(name) for name in wanted.names]
    return lambda row: tuple([None if place < 0 else row[place] for place in places])


_SCALARS: tuple[tuple[Callable[[pa.DataType], bool], type], ...] = (
    (pa.types.is_integer, int),
    (pa.types.is_boolean, bool),
    (pa.types.is_floating, float),
    (pa.types.is_string, str),
    (pa.types.is_large_string, str),
    (pa.types.is_string_view, str),
    (pa.types.is_binary, bytes),
    (pa.types.is_large_binary, bytes),
    (pa.types.is_binary_view, bytes),
    (pa.types.is_fixed_size_binary, bytes),
    (pa.types.is_decimal, Decimal),
    (pa.types.is_date, dt.date),
    (pa.types.is_time, dt.time),
    (pa.types.is_timestamp, dt.datetime),
    (pa.types.is_duration, dt.timedelta),
    (pa.types.is_null, type(None)),
)


def _python_type(kind: pa.DataType) -> Any:
    """The Python type of canonical values, with None. Structs are tuples here."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return list[_python_type(kind.value_type)] | None  # type: ignore[misc]
    if pa.types.is_map(kind):
        # msgspec rejects a nullable key type, and keys are never null.
        key: Any = get_args(_python_type(kind.key_type))[0]
        return GenericAlias(dict, (key, _python_type(kind.item_type))) | None
    if pa.types.is_struct(kind):
        return _row_type([kind.field(index) for index in range(kind.num_fields)]) | None
    for test, python in _SCALARS:
        if test(kind):
            return python | None
    raise StateSchemaError(f"type {kind} is not supported")


def _row_type(fields: Iterable[pa.Field]) -> Any:
    return tuple[tuple(_python_type(field.type) for field in fields)]  # type: ignore[misc]


def _row_converter(fields: Iterable[pa.Field]) -> Converter:
    """Converts the structs inside a row to ``Row`` values; None if there are no structs."""
    converters = [_converter(field.type) for field in fields]
    if not any(converters):
        return None
    return lambda row: tuple([_converted(convert, part) for convert, part in zip(converters, row, strict=True)])


def _converted(convert: Converter, part: Any) -> Any:
    return part if convert is None or part is None else convert(part)


def _converter(kind: pa.DataType) -> Converter:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        element = _converter(kind.value_type)
        return None if element is None else lambda entries: [_converted(element, entry) for entry in entries]
    if pa.types.is_map(kind):
        key, item = _converter(kind.key_type), _converter(kind.item_type)
        if key is None and item is None:
            return None
        return lambda entries: {_converted(key, k): _converted(item, v) for k, v in entries.items()}
    if pa.types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        build, inner = values.row_builder(tuple(field.name for field in fields)), _row_converter(fields)
        return build if inner is None else lambda entries: build(inner(entries))
    return None
