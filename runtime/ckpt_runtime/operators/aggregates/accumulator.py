"""The interface of accumulators. They hold no values themselves: state keeps these as columns, one row per group.

For each batch it gets the stored columns of the batch's groups and the new rows, and returns the columns to store. A
group may have several stored rows: those of merged sessions. A stored null means that the aggregate did not exist when
the row was stored, and counts as no rows.

Values are ranked by Spark's order. Arrow orders plain values only: structs are compared field by field, arrays element
by element and then by length. Inside of both, null is less than every value, NaN is the greatest number, and 0.0 equals
-0.0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.errors import OperatorError
from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, plain
from ckpt_runtime.state.stored_rows import fixed_array


class AggregateFailedError(OperatorError):
    """An aggregate has no result for some rows, and Spark's ANSI mode makes that an error."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with the number of the group that each belongs to (uint32)."""

    groups: AnyArray
    columns: list[pa.Array]


class GroupAccumulator(ABC):
    """One aggregate. ``inputs`` are the types of its arguments, without the condition.

    ``stored`` are its columns in state: by default one of the result's type.
    """

    combines = False
    """Whether rows may be aggregated in parts, and the stored columns of the parts combined, with the same result.

    The parts may come in any order. The state of a group must not be larger than a few of its rows.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        self.aggregate = aggregate
        self.inputs = inputs
        self.stored: list[pa.Field] = [self.field("", aggregate.result)]

    @abstractmethod
    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        """Returns the columns of :attr:`stored` for ``groups`` groups.

        ``old`` has stored columns, ``new`` has arguments, later rows after earlier ones.
        """

    def result(self, stored: list[pa.Array]) -> pa.Array:
        """Returns the results for rows of stored columns, which may have any length: by default the first column."""
        return stored[0]

    def field(self, part: str, kind: pa.DataType) -> pa.Field:
        """A stored column."""
        return pa.field(f"{self.aggregate.name}#{part}" if part else self.aggregate.name, kind)


def array_of(kind: pa.DataType, numbers: AnyArray, has: AnyArray | None = None) -> pa.Array:
    """An array of a fixed-width type from 64-bit numbers; null where ``has`` is zero."""
    bits = numbers.view(np.int64) if numbers.dtype == np.float64 else numbers
    return fixed_array(kind, bits, has)


def integers(column: pa.Array) -> columns.FixedColumn:
    """Integers, booleans and times as 64-bit integers."""
    return columns.int64_column(columns.plain(column))


def floats(column: pa.Array) -> columns.FixedColumn:
    """Numbers as 64-bit floats."""
    return columns.float64_column(columns.plain(column))


def filled(column: pa.Array) -> AnyArray:
    """A stored column of float64 with zeros for nulls."""
    return read_only(floats(pc.fill_null(column, 0.0) if column.null_count else column).values)


def taken(parts: list[pa.Array], rows: AnyArray) -> pa.Array:
    """The values at these positions of the concatenated parts; null for position -1."""
    whole = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
    missing = rows < 0
    places = pa.array(rows, mask=missing) if missing.any() else columns.arrow_from_numpy(pa.int64(), rows)
    return pc.take(whole, places)


def joined(old: AnyArray, new: AnyArray) -> AnyArray:
    """Group numbers of old rows, then of new ones."""
    return read_only(np.concatenate([old, new]) if len(old) else new)


def ranks(values: pa.Array) -> AnyArray:
    """Returns a number for each value, so that numbers compare as the values do. Nulls get numbers without meaning."""
    values = plain(values)
    kind = values.type
    if pa.types.is_struct(kind):
        return _of_structs(values)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _of_lists(values)
    if pa.types.is_null(kind):
        return np.zeros(len(values), dtype=np.int64)
    if pa.types.is_floating(kind):
        values = pc.add(values, pa.scalar(0.0, kind))
    result: AnyArray = pc.rank(values, sort_keys="ascending", tiebreaker="dense").cast(pa.int64()).to_numpy()
    return result


def _nulls_first(values: pa.Array) -> AnyArray:
    """Ranks whose least number, 0, is that of nulls alone."""
    found = ranks(values) + 1
    if values.null_count:
        found[np.asarray(values.is_null())] = 0
    return found


def _refined(order: AnyArray, next_order: AnyArray) -> AnyArray:
    """Returns ranks by ``order``, and by ``next_order`` where that is equal."""
    width = int(next_order.max()) + 1
    result: AnyArray = np.unique(order * width + next_order, return_inverse=True)[1].astype(np.int64)
    return result


def _of_structs(values: pa.Array) -> AnyArray:
    order = np.zeros(len(values), dtype=np.int64)
    if len(values):
        for field in values.flatten():
            order = _refined(order, _nulls_first(field))
    return order


def _of_lists(values: pa.Array) -> AnyArray:
    lengths = np.asarray(pc.fill_null(pc.list_value_length(values), 0), dtype=np.int64)
    order = np.zeros(len(values), dtype=np.int64)
    if not len(values) or not lengths.max():
        return order
    elements = _nulls_first(pc.list_flatten(values)) + 1
    starts = np.cumsum(lengths) - lengths
    for place in range(int(lengths.max())):
        reaches = lengths > place
        element = np.zeros(len(values), dtype=np.int64)  # the end of an array is less than every element
        element[reaches] = elements[starts[reaches] + place]
        order = _refined(order, element)
    return order
