"""Batches to PySpark ``Row`` values grouped by key, and rows back to batches: the hot path of row-mode user code.

Input rows are instances of a ``Row`` subclass made per schema, whose field names belong to the class and whose fields
are C-level descriptors: a row costs one tuple, and reading a field a small part of ``Row.__getattr__``. Rows
are made group by group and results are split into columns soon, so that few objects are alive when the garbage
collector runs. Does not import pandas.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.types import Row

from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.state import columns, values
from ckpt_runtime.state.states import Key


@lru_cache(256)
def row_class(names: tuple[str, ...]) -> type[Row]:
    """A ``Row`` whose instances all have these fields. Names that ``Row`` itself uses (``count``) stay its methods."""
    # A named tuple's fields read the tuple itself; an itemgetter would call Row.__getitem__, which is Python.
    places = [f"f{position}" for position in range(len(names))]
    getters = map(partial(getattr, namedtuple("Fields", places)), places)
    fields = list(zip(names, getters, strict=True))
    members: dict[str, Any] = {name: getter for name, getter in reversed(fields) if not hasattr(Row, name)}
    return type("Row", (Row,), {**members, "__fields__": list(names), "__doc__": Row.__doc__})


class RowGroups:
    """Groups the rows of batches by key columns. User code gets timestamps in a time zone, as Spark gives them.

    The last ``hidden`` columns of a batch are not part of its rows.
    """

    def __init__(self, keys: Sequence[str], zone: str = "UTC", hidden: int = 0) -> None:
        self._keys = tuple(keys)
        self._zone = zone
        self._hidden = hidden
        self._schema: pa.Schema | None = None
        self._floating_key = False
        self._zoned: tuple[pa.Schema, list[pa.DataType]] | None = None

    def of(self, batch: pa.RecordBatch, prefetch: Callable[[Iterable[Key]], None]) -> Iterator[tuple[Key, list[Row]]]:
        """Yields each key with its rows (all columns that are not hidden, in order), in order of first appearance of
        the keys. Passes all keys to ``prefetch`` beforehand."""
        ids, numbers = self._numbered(batch)
        prefetch(ids)
        if self._hidden:
            batch = batch.select(range(batch.num_columns - self._hidden))
        if len(ids) == len(numbers):
            return self._grouped(ids, repeat(1), batch)
        batch, sizes = adjacent(batch, numbers, len(ids))
        return self._grouped(ids, sizes.tolist(), batch)

    def together(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[int]] | None:
        """The batch in the order of :meth:`of`, and where each key's rows end; None when each row has its own key."""
        ids, numbers = self._numbered(batch)
        if len(ids) == len(numbers):
            return None
        batch, sizes = adjacent(batch, numbers, len(ids))
        ends: list[int] = np.cumsum(sizes).tolist()
        return batch, ends

    def whole(self, keys: pa.RecordBatch) -> Iterator[Key]:
        """Yields nested keys as user code gets them."""
        return zip(*map(values.from_arrow, self.in_zone(keys)), strict=True)

    def beside(self, keys: pa.RecordBatch, rows: pa.RecordBatch) -> Iterator[tuple[Key, list[Any]]]:
        """Yields as :meth:`of`, for rows whose keys are the columns of another batch."""
        ids, numbers = self._numbered(keys)
        rows, sizes = adjacent(rows, numbers, len(ids))
        values.check_readable(rows.schema, "initial state of a StatefulProcessor")
        return self._grouped(ids, sizes.tolist(), rows)

    def _numbered(self, batch: pa.RecordBatch) -> tuple[dict[Key, int], list[int]]:
        """The keys with their numbers, and the number of each row's key."""
        if self._schema is None or not batch.schema.equals(self._schema):
            self._adapt(batch.schema)
        ids: dict[Key, int] = {}
        keys: Iterator[Key] = zip(*(values.from_arrow(batch.column(name)) for name in self._keys), strict=True)
        if self._floating_key:
            keys = map(values.canonical_key, keys)
        return ids, [ids.setdefault(key, len(ids)) for key in keys]

    def _adapt(self, schema: pa.Schema) -> None:
        values.check_readable(schema, "input of a StatefulProcessor")
        self._schema = schema
        self._floating_key = any(pa.types.is_floating(schema.field(name).type) for name in self._keys)

    def given(self, key: Key) -> Key:
        """Returns the key as user code gets it."""
        if self._zone == "UTC":
            return key
        zone = pa.lib.string_to_tzinfo(self._zone)
        return tuple(part.astimezone(zone) if getattr(part, "tzinfo", None) is not None else part for part in key)

    def in_zone(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns of a batch, with their timestamps in the time zone; nested ones too."""
        if self._zone == "UTC":
            return list(batch.columns)
        if self._zoned is None or not batch.schema.equals(self._zoned[0]):
            from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

            schema = pa.schema(zip(batch.schema.names, map(columns.decoded_type, batch.schema.types), strict=True))
            self._zoned = batch.schema, to_arrow_schema(from_arrow_schema(schema), timezone=self._zone).types
        return [columns.in_type(column, kind) for column, kind in zip(batch.columns, self._zoned[1], strict=True)]

    def _grouped(
        self, ids: Iterable[Key], sizes: Iterable[int], batch: pa.RecordBatch
    ) -> Iterator[tuple[Key, list[Any]]]:
        """Yields each key with its rows, which are adjacent in the batch: as many as ``sizes`` says."""
        cells = zip(*map(values.from_arrow, self.in_zone(batch)), strict=True)
        rows = map(partial(tuple.__new__, row_class(tuple(batch.schema.names))), cells)
        for key, size in zip(ids, sizes, strict=False):
            yield key, [next(rows)] if size == 1 else list(islice(rows, size))


def adjacent(batch: pa.RecordBatch, numbers: list[int], groups: int) -> tuple[pa.RecordBatch, columns.AnyArray]:
    """The batch ordered by the group of each row, and the sizes of the groups."""
    group_of_row = np.array(numbers, dtype=np.int32)
    if (group_of_row[1:] < group_of_row[:-1]).any():
        order = np.argsort(group_of_row, kind="stable")
        batch = batch.take(columns.arrow_from_numpy(pa.int64(), order))
    return batch, np.bincount(group_of_row, minlength=groups)


class RowsToBatch:
    """Collects rows into columns of one schema, matching fields by name as Spark does: extra fields are dropped,
    missing ones are null."""

    def __init__(self, uid: str, schema: pa.Schema) -> None:
        values.check_supported(schema, f"output of operator {uid!r}")
        self._uid = uid
        self._schema = schema
        self._names = tuple(schema.names)
        self._columns: list[list[Any]] = [[] for _ in schema]
        self.rows = 0

    def add(self, rows: list[Any]) -> None:
        """Splits rows into columns. Raises UserFunctionError for a value that is not a Row with field names."""
        if not rows:
            return
        aligned = self._all_aligned(rows)
        for column, cells in zip(
            self._columns, zip(*(rows if aligned else map(self._align, rows)), strict=True), strict=True
        ):
            column.extend(cells)
        self.rows += len(rows)

    def _all_aligned(self, rows: list[Any]) -> bool:
        """Whether all rows have the schema's fields in its order; rows of one template share the object compared."""
        names = self._names
        accepted: Any = None
        for row in rows:
            try:
                fields = row.__fields__
            except AttributeError:
                raise self._not_a_row(row) from None
            if fields is not accepted:
                if tuple(fields) != names or len(row) != len(names):
                    return False
                accepted = fields
        return True

    def _align(self, row: Any) -> tuple[Any, ...]:
        fields = getattr(row, "__fields__", None)
        if fields is None or len(fields) != len(row):
            raise self._not_a_row(row)
        by_name = dict(zip(fields, row, strict=True))
        return tuple(by_name.get(name) for name in self._names)

    def _not_a_row(self, row: Any) -> UserFunctionError:
        return UserFunctionError(
            f"operator {self._uid!r} returned a {type(row).__name__} ({row!r}), it must return pyspark.sql.Row with "
            f"the named fields {self._names}"
        )

    def build(self) -> pa.RecordBatch:
        """Returns a batch of all collected rows, and clears the collection. Raises OutputSchemaError."""
        taken, self._columns = self._columns, [[] for _ in self._schema]
        self.rows = 0
        arrays = [self._array(field, column) for field, column in zip(self._schema, taken, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, field: pa.Field, column: list[Any]) -> pa.Array:
        try:
            array = values.to_arrow(column, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError) as error:
            raise OutputSchemaError(
                f"operator {self._uid!r}, output field {field.name!r}: a value does not fit {field.type}: {error}"
            ) from error
        if array.null_count and not field.nullable:
            raise OutputSchemaError(f"operator {self._uid!r}, output field {field.name!r}: null is not allowed")
        return array
