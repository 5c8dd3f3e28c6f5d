"""Rows between PySpark's Python world (tuples, ``Row``) and Arrow, converted by PySpark's own rules.

Other values that PySpark's readers and writers return are encoded as versioned items, for sending and for state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any, TypeVar

import pyarrow as pa

from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.plan_classes import PlanClasses
from ckpt_runtime.operators.operator import OperatorContext
from ckpt_runtime.state.columns import plain
from ckpt_runtime.state.errors import StateSchemaError

T = TypeVar("T")

STATE_VERSION = 2
"""Version 1 (not written into items) kept offset ranges, not planned partitions, and encoded messages differently."""


def versioned(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items with the version, as they are stored."""
    return [{"version": STATE_VERSION, **item} for item in items]


def restored_items(context: OperatorContext, name: str, schema: type[T], version: int = STATE_VERSION) -> tuple[T, ...]:
    """The restored items. Raises StateSchemaError for those of another version, CorruptStateError for damaged ones."""
    uid = context.uid
    for item in context.operator_state.restored(name, dict[str, Any]):
        found = item.get("version", 1)
        if found != version:
            raise StateSchemaError(
                f"operator {uid!r}: the snapshot holds state of version {found}, and this engine reads version "
                f"{version}; finish the job with the engine that wrote it, or start it without that snapshot"
            )
    return context.operator_state.restored(name, schema)


def values_of(source: type, *helpers: Any) -> TaggedValues:
    """Returns the codec for the classes around a ``DataSource`` class and the objects that it made (readers, writers).

    Call it after these objects are made and before they are used, so that all workers of a job know the same classes.
    """
    from pyspark.sql.datasource import InputPartition, WriterCommitMessage

    return TaggedValues(PlanClasses((source, *map(type, helpers)), (InputPartition, WriterCommitMessage)))


BATCH_ROWS = 8192
_RECORDS = "tuples, lists, Row or pyarrow.RecordBatch"


def struct_type(schema: pa.Schema) -> Any:
    """The PySpark ``StructType`` of an Arrow schema. Raises PySpark's error for types that PySpark lacks."""
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(schema)


def records_to_batches(records: Iterable[Any], schema: pa.Schema, reader: str) -> Iterator[pa.RecordBatch]:
    """Converts the result of a reader's ``read`` to batches of ``schema``.

    Tuples and lists are positional, named ``Row`` objects go by name, record batches must have exactly the schema.
    ``reader`` is named in messages. Raises TypeError or ValueError for rows that do not fit the schema.
    """
    if not isinstance(records, Iterable):
        raise TypeError(f"{reader} returned {type(records).__name__}, expected an iterator of {_RECORDS}")
    iterator = iter(records)
    begin = list(islice(iterator, 1))
    iterator = chain(begin, iterator)
    if begin and isinstance(begin[0], pa.RecordBatch):
        yield from _checked_batches(iterator, schema, reader)
        return
    struct = struct_type(schema)
    while rows := list(islice(iterator, BATCH_ROWS)):
        yield from _convert([_positional(row, schema.names, reader) for row in rows], struct, schema)


def spark_schema(struct: Any) -> pa.Schema:
    """Returns the Arrow schema of a ``StructType``: Spark has one Arrow type for each of its own types."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema: pa.Schema = to_arrow_schema(struct, timezone="UTC")
    return schema


def batch_of_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Converts a batch to the same values in Spark's types.

    A stream may have other types: those of its files, such as large and dictionary-encoded strings. Nanoseconds are
    truncated, as when Spark takes rows from pandas.
    """
    columns = [
        column if column.type == field.type else plain(column).cast(field.type, safe=False)
        for column, field in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def batch_to_rows(batch: pa.RecordBatch, struct: Any) -> list[Any]:
    """A batch in Spark's types as PySpark ``Row`` objects."""
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    rows: list[Any] = ArrowTableToRowsConversion.convert(pa.Table.from_batches([batch]), struct)
    return rows


def _convert(rows: list[Any], struct: Any, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from pyspark.sql.conversion import LocalDataToArrowConversion

    table = LocalDataToArrowConversion.convert(rows, struct, use_large_var_types=False)
    yield from table.cast(schema).to_batches()


def _checked_batches(batches: Iterable[Any], schema: pa.Schema, reader: str) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise TypeError(f"{reader} mixes record batches with {type(batch).__name__}")
        if not batch.schema.equals(schema):
            raise ValueError(f"{reader} yields batches of ({_brief(batch.schema)}), but ({_brief(schema)}) is declared")
        if batch.num_rows:
            yield batch


def _positional(row: Any, names: list[str], reader: str) -> tuple[Any, ...]:
    if not isinstance(row, tuple | list):
        raise TypeError(f"{reader} yields {type(row).__name__}; allowed are {_RECORDS}")
    fields = getattr(row, "__fields__", None)
    if len(row) != len(names) or (fields is not None and set(fields) != set(names)):
        found = f"fields {fields}" if fields is not None else f"{len(row)} values"
        raise ValueError(f"{reader} yields a row with {found}, but the columns {names} are declared")
    if fields is None:
        return tuple(row)
    by_name: Any = row
    return tuple(by_name[name] for name in names)


def _brief(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema)
