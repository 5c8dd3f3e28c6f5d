"""A state as a table: the columns of a DataFrame from stored rows, and back.

``key_group``, then the structs ``key``, ``user_key`` (of a map) and ``value`` (of an aggregate: its stored columns),
then ``time``, ``matched`` and ``expires_at`` where the state has them. Types that Spark does not have become the next
one that holds all their values.
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


class UnsupportedColumnError(TypeError):
    """A column of a state has a type that no Spark type holds."""


class StateColumns:
    """The columns of one kind of state with this schema of stored rows."""

    def __init__(self, kind: str, stored: pa.Schema) -> None:
        """Raises :class:`UnsupportedColumnError` naming the column."""
        _check_readable(stored)
        self.stored = stored
        self._parts = _parts(kind, stored)
        self.spark_schema = _spark_schema(self._table_schema())
        self.arrow_schema = to_arrow_schema(self.spark_schema, timezone="UTC")

    def _table_schema(self) -> pa.Schema:
        fields = [pa.field(KEY_GROUP, pa.int32(), nullable=False)]
        for name, members in self._parts.items():
            found = [self.stored.field(member).with_name(short) for short, member in members.items()]
            fields.append(found[0] if name in _PLAIN else pa.field(name, pa.struct(found), nullable=False))
        return pa.schema(fields)

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


def _parts(kind: str, stored: pa.Schema) -> dict[str, dict[str, str]]:
    """The table's columns: for each its members' names and those of the stored columns that they are."""
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


def _check_readable(stored: pa.Schema) -> None:
    for field in stored:
        try:
            to_arrow_schema(_spark_schema(pa.schema([field])), timezone="UTC")
        except (PySparkTypeError, ValueError) as error:
            raise UnsupportedColumnError(f"column {field.name!r}: Spark has no type for {field.type}") from error


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
