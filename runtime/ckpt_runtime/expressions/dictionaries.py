"""Dictionary-encoded columns: decoding them, and evaluating an expression once for each value of a dictionary.

A column of text may come as a dictionary and positions in it. :class:`OverDictionary` evaluates an expression that
reads one such column over the dictionary. It remembers the results of one dictionary, so that a dictionary which comes
with each batch costs nothing but the positions. If a value causes an error, which may be one that no row has, or if a
new dictionary has more values than there are rows, the rows themselves are evaluated. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.types import EvaluationError

Value: TypeAlias = "pa.Array | pa.Scalar"

_MOST_VALUES = 1 << 16
"""A dictionary with more values than that, and than a batch has rows, is not evaluated: barriers would have to wait."""


@cache
def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without dictionaries at any depth; an equal one when it has none."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    children = [kind.field(index) for index in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    plain = [child.with_type(plain_type(child.type)) for child in children]
    if all(new.type == old.type for new, old in zip(plain, children, strict=True)):
        return kind
    if pa.types.is_struct(kind):
        return pa.struct(plain)
    if pa.types.is_map(kind):
        entries = plain[0].type
        mapping: pa.DataType = pa.map_(entries.field(0), entries.field(1), kind.keys_sorted)
        return mapping
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain[0], kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(plain[0])
    return pa.list_(plain[0]) if pa.types.is_list(kind) else kind


def decoded(column: pa.Array) -> pa.Array:
    """The column without dictionaries at any depth."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return decoded(column.dictionary_decode())
    if kind.num_fields == 0:
        return column
    plain = plain_type(kind)
    return column if plain == kind else column.cast(plain)


class OverDictionary:
    """Evaluates an expression that reads one column, which ``read`` returns as it is encoded."""

    def __init__(
        self,
        read: Callable[[Any], pa.Array],
        over_rows: Callable[[Any], Value],
        over_values: Callable[[pa.Array], Value],
    ) -> None:
        self._read = read
        self._over_rows = over_rows
        self._over_values = over_values
        self._dictionary: pa.Array | None = None
        self._place: tuple[int, ...] = ()
        self._failed = False
        self._results: pa.Array | None = None
        """One result for each value of the remembered dictionary, and one for null; None if there are none."""

    def __call__(self, frame: Any) -> Value:
        encoded = self.encoded(frame)
        return decoded(encoded) if isinstance(encoded, pa.DictionaryArray) else encoded

    def encoded(self, frame: Any) -> Value:
        """The values for a frame's rows, as a dictionary if they are text."""
        column = self._read(frame)
        if not isinstance(column, pa.DictionaryArray):
            return self._over_rows(frame)
        results = self._results_for(column.dictionary, len(column))
        if results is None:
            return self._over_rows(frame)
        indices = column.indices
        if not indices.null_count or not results[-1].is_valid:
            results = results.slice(0, len(results) - 1)
        else:
            indices = pc.fill_null(indices.cast(pa.int64()), len(results) - 1)
        if pa.types.is_string(results.type) and not results.null_count:
            return pa.DictionaryArray.from_arrays(indices, results, safe=False)
        return results.take(indices)

    def _results_for(self, dictionary: pa.Array, rows: int) -> pa.Array | None:
        buffers = [0 if buffer is None else buffer.address for buffer in dictionary.buffers()]
        place = (len(dictionary), dictionary.offset, *buffers)
        if place == self._place:
            if self._results is not None or self._failed:
                return self._results
        else:
            # The remembered dictionary keeps its memory in use: another one is at another place.
            self._dictionary, self._place, self._results, self._failed = dictionary, place, None, False
            if len(dictionary) > rows:
                return None
        if len(dictionary) > max(rows, _MOST_VALUES):
            return None
        with_null = pa.concat_arrays([dictionary, pa.nulls(1, dictionary.type)])
        try:
            results = self._over_values(with_null)
        except (EvaluationError, pa.ArrowException):
            self._failed = True
            return None
        self._results = pa.repeat(results, len(with_null)) if isinstance(results, pa.Scalar) else results
        return self._results


class OneColumn(Sequence[pa.Array]):
    """Columns of which an expression reads one, or one field of one: each has the same values."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return self._values

    def field(self, index: int, ordinal: int) -> pa.Array:
        return self._values


def _schema_without_dictionaries(schema: pa.Schema) -> pa.Schema | None:
    """The schema with plain types in place of dictionary encodings at any depth; None when there are none."""
    kinds = [plain_type(field.type) for field in schema]
    # Compared by value, because Arrow makes a new object each time the type of a field is read.
    if all(kind == field.type for kind, field in zip(kinds, schema, strict=True)):
        return None
    fields = [field.with_type(kind) for kind, field in zip(kinds, schema, strict=True)]
    return pa.schema(fields, schema.metadata)


class BatchDecoder:
    """Decodes dictionaries at any depth in batches. Those of one schema object cost one comparison."""

    __slots__ = ("_checked", "_plain")

    def __init__(self) -> None:
        self._checked: pa.Schema | None = None
        self._plain: pa.Schema | None = None

    def decoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = batch.schema
        if schema is not self._checked and (self._checked is None or not schema.equals(self._checked)):
            self._checked, self._plain = schema, _schema_without_dictionaries(schema)
        return batch if self._plain is None else _decoded(batch, self._plain)


def _decoded(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = []
    for column, field in zip(batch.columns, schema, strict=True):
        decoded = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        columns.append(decoded if decoded.type == field.type else decoded.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
