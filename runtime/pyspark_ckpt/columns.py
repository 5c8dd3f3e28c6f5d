"""A state as a table: the columns of a DataFrame from stored rows, and back.

``key_group``, then the structs ``key``, ``user_key`` (of a map) and ``value`` (of an aggregate: its stored columns),
then ``time``, ``matched`` and ``expires_at`` where the state has them. Types that Spark lacks become the
closest Spark type that holds all their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from ckpt_runtime.state.stored_rows import EXPIRES_AT, KEY_PREFIX, MATCHED, TIME, USER_KEY_PREFIX, VALUE_PREFIX

KEY_GROUP = "key_group"
BATCH_ROWS = 1 << 14

_PREFIXES = {"key": KEY_PREFIX, "user_key": USER_KEY_PREFIX, "value": VALUE_PREFIX}
_PLAIN = (TIME, MATCHED, EXPIRES_AT)


_COLUMNS_OF = {
    "value": ("key", "value"),
    "list": ("key", "value"),
    "map": ("key", "user_key", "value"),
    "timers": ("key", TIME),
}
"""The columns of the kinds of state that a table fully describes. Those with values may also have ``expires_at``."""


class UnsupportedColumnError(TypeError):
    """A column of a state has a type that no Spark type can represent."""


class TableError(ValueError):
    """A table does not have the columns or the values that the state requires."""


def new_stored_schema(kind: str, table: StructType) -> pa.Schema:
    """The stored rows of a new state that is given as a table. Raises :class:`TableError` for other columns."""
    names = _COLUMNS_OF[kind]
    optional = (KEY_GROUP,) if kind == "timers" else (KEY_GROUP, EXPIRES_AT)
    if not set(names) <= set(table.names) <= {*names, *optional}:
        raise TableError(f"a state of kind {kind!r} has the columns {names}, the table has {tuple(table.names)}")
    fields: list[pa.Field] = []
    for field in to_arrow_schema(table, timezone="UTC"):
        if field.name in _PREFIXES:
            if not pa.types.is_struct(field.type) or field.type.num_fields == 0:
                raise TableError(f"column {field.name!r} has to be a struct with fields, it is {field.type}")
            fields += [member.with_name(_PREFIXES[field.name] + member.name).remove_metadata() for member in field.type]
        elif field.name != KEY_GROUP:
            fields.append(pa.field(field.name, pa.int64(), nullable=field.name != TIME))
    return pa.schema(fields)


class StateColumns:
    """The columns of one kind of state with this schema of stored rows."""

    def __init__(self, kind: str, stored: pa.Schema) -> None:
        """Raises :class:`UnsupportedColumnError` naming the column."""
        for field in stored:
            try:
                to_arrow_schema(_spark_schema(pa.schema([field])), timezone="UTC")
            except (PySparkTypeError, ValueError) as error:
                raise UnsupportedColumnError(f"column {field.name!r}: Spark has no type for {field.type}") from error
        self.stored = stored
        self._parts = _parts(kind, stored)
        fields = [pa.field(KEY_GROUP, pa.int32(), nullable=False)]
        for name, members in self._parts.items():
            found = [self.stored.field(member).with_name(short) for short, member in members.items()]
            fields.append(found[0] if name in _PLAIN else pa.field(name, pa.struct(found), nullable=False))
        self.spark_schema = _spark_schema(pa.schema(fields))
        self.arrow_schema = to_arrow_schema(self.spark_schema, timezone="UTC")

    def tables(self, rows: Iterable[tuple[int, pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
        """Stored rows by key group as batches of the table. Raises ArrowException for a value that does not fit."""
        groups: list[int] = []
        batches: list[pa.RecordBatch] = []
        waiting = 0
        for group, batch in rows:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                piece = batch.slice(start, BATCH_ROWS)
                if waiting + piece.num_rows > BATCH_ROWS:
                    yield self._table(groups, batches)
                    groups, batches, waiting = [], [], 0
                groups.append(group)
                batches.append(piece)
                waiting += piece.num_rows
        if batches:
            yield self._table(groups, batches)

    def _table(self, groups: Sequence[int], batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
        rows = pa.concat_batches(batches)
        numbers = np.repeat(np.array(groups, np.int32), [batch.num_rows for batch in batches])
        columns = [pa.array(numbers)]
        for name, members in self._parts.items():
            found = [rows.column(member) for member in members.values()]
            if name not in _PLAIN:
                fields = [self.stored.field(member).with_name(short) for short, member in members.items()]
                found = [pa.StructArray.from_arrays(found, fields=fields)]
            columns += found
        cast = [column.cast(field.type) for column, field in zip(columns, self.arrow_schema, strict=True)]
        return pa.RecordBatch.from_arrays(cast, schema=self.arrow_schema)

    def check_table(self, table: StructType) -> None:
        """Raises :class:`TableError` unless a table has these columns; ``key_group`` may be missing.

        Numbers may have other types, and fields of structs any order. Values are checked when they are written.
        """
        wanted = {name: None if name in _PLAIN else [*members] for name, members in self._parts.items()}
        found = {
            field.name: field.dataType.names if isinstance(field.dataType, StructType) else None
            for field in table
            if field.name != KEY_GROUP
        }
        if found.keys() != wanted.keys():
            raise TableError(f"the state has the columns {sorted(wanted)}, the table has {sorted(found)}")
        for name, members in wanted.items():
            if sorted(found[name] or ()) != sorted(members or ()):
                raise TableError(f"column {name!r} has the fields {members} in the state, {found[name]} in the table")
        given = to_arrow_schema(table, timezone="UTC")
        if KEY_GROUP in given.names and not pa.types.is_integer(given.field(KEY_GROUP).type):
            raise TableError(f"column {KEY_GROUP!r} has to be of an integer type, it is {given.field(KEY_GROUP).type}")
        for name, stored in self._parts.items():
            column = given.field(name).type
            for short, member in stored.items():
                kind = column if name in _PLAIN else column.field(short).type
                own = _readable(self.stored.field(member).type)
                if not _is_taken_for(kind, own):
                    raise TableError(f"column {member!r} has the type {own} in the state, {kind} in the table")

    def stored_rows(self, table: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of a table as stored rows. Raises :class:`TableError` for values that do not fit the state's schema."""
        columns: dict[str, pa.Array] = {}
        for name, members in self._parts.items():
            column = table.column(name)
            if name in _PLAIN:
                columns[name] = column
            elif column.null_count:
                raise TableError(f"column {name!r} is null in {column.null_count} rows")
            else:
                shorts = [field.name for field in column.type]
                columns |= {members[short]: found for short, found in zip(shorts, column.flatten(), strict=True)}
        return pa.RecordBatch.from_arrays(
            [_fitting(columns[field.name], field) for field in self.stored], schema=self.stored
        )


_FAMILIES = (
    lambda kind: pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind),
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind),
    pa.types.is_boolean,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
"""Families of types whose values are converted to each other. Arrow would also cast a timestamp to a number."""


def _is_taken_for(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of this type is accepted for a column of the state, whose type is one that Spark has."""
    if pa.types.is_null(kind):
        return True
    if pa.types.is_struct(wanted):
        if not pa.types.is_struct(kind) or sorted(kind.names) != sorted(wanted.names):
            return False
        return all(_is_taken_for(kind.field(name).type, wanted.field(name).type) for name in wanted.names)
    if pa.types.is_map(wanted):
        keys_and_items = pa.types.is_map(kind) and (kind.key_type, kind.item_type)
        return bool(keys_and_items) and all(map(_is_taken_for, keys_and_items, (wanted.key_type, wanted.item_type)))
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(kind)) and _is_taken_for(kind.value_type, wanted.value_type)
    return kind == wanted or any(family(kind) and family(wanted) for family in _FAMILIES)


def _fitting(column: pa.Array, field: pa.Field) -> pa.Array:
    _check_nulls(column, field.with_type(_readable(field.type)), field.name)
    try:
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise TableError(f"column {field.name!r} does not fit the state's type {field.type}: {error}") from error


def _check_nulls(values: pa.Array, field: pa.Field, path: str) -> None:
    """Raises :class:`TableError` for a null where the state allows none, at any depth. Arrow casts nested nulls."""
    nulls = values.null_count
    if nulls and not field.nullable:
        places = "place" if nulls == 1 else "places"
        raise TableError(
            f"column {path!r} is null in {nulls} {places}, only values are allowed: the state has it NOT NULL"
        )
    kind, wanted = values.type, field.type
    if nulls == len(values) or not pa.types.is_nested(kind):
        return
    values = values.drop_null()
    if pa.types.is_struct(kind):
        for name, members in zip(kind.names, values.flatten(), strict=True):
            _check_nulls(members, wanted.field(name), f"{path}.{name}")
    elif pa.types.is_map(kind):
        # As a list, because the keys and items of a sliced map include those outside of the slice.
        entries = values.cast(pa.list_(pa.struct([kind.key_field, kind.item_field]))).flatten()
        _check_nulls(entries.field(0), wanted.key_field, f"{path}{{key}}")
        _check_nulls(entries.field(1), wanted.item_field, f"{path}{{value}}")
    else:
        _check_nulls(values.flatten(), wanted.value_field, f"{path}[]")


def _parts(kind: str, stored: pa.Schema) -> dict[str, dict[str, str]]:
    """The table's columns: for each the names of its members, with the names of their stored columns."""
    parts: dict[str, dict[str, str]] = {}
    for part, prefix in _PREFIXES.items():
        members = {name.removeprefix(prefix): name for name in stored.names if name.startswith(prefix)}
        if kind == "aggregate" and part == "value":
            members = {name: name for name in stored.names if not name.startswith(KEY_PREFIX)}
        if members:
            parts[part] = members
    if kind != "aggregate":
        parts |= {name: {name: name} for name in _PLAIN if name in stored.names}
    return parts


def _spark_schema(schema: pa.Schema) -> StructType:
    return from_arrow_schema(pa.schema([field.with_type(_readable(field.type)) for field in schema]))


_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
    pa.time32("s"): pa.time64("ns"),
    pa.time32("ms"): pa.time64("ns"),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


def _readable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _readable(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_readable(field.type)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_readable(kind.key_type), kind.item_field.with_type(_readable(kind.item_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_readable(kind.value_type)))
    return _WIDER.get(kind, kind)
