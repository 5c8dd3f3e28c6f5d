"""The interface of accumulators. They hold no values themselves: state keeps these as columns, one row per group.

For each batch it gets the stored columns of the batch's groups and the new rows, and returns the columns to store. A
group may have several stored rows: those of merged sessions. A stored null means that the aggregate did not exist when
the row was stored, and counts as no rows.
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
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.stored_rows import fixed_array


class AggregateFailedError(OperatorError):
    """An aggregate has no result for some rows, and Spark's ANSI mode makes that an error."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows with the number of the group that each belongs to (uint32)."""

    groups: AnyArray
    columns: list[pa.Array]


class GroupAccumulator(ABC):
    """One aggregate. ``inputs`` are the types of its arguments, without the condition."""

    stored: list[pa.Field]

    combines = False
    """Whether rows may be aggregated in parts, and the stored columns of the parts combined, with the same result.

    The parts may come in any order. The state of a group must not be larger than a few of its rows.
    """

    def __init__(self, aggregate: GroupAggregate, inputs: list[pa.DataType]) -> None:
        self.aggregate = aggregate
        self.inputs = inputs

    @abstractmethod
    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        """Returns the columns of :attr:`stored` for ``groups`` groups.

        ``old`` has stored columns, ``new`` has arguments, later rows after earlier ones.
        """

    @abstractmethod
    def result(self, stored: list[pa.Array]) -> pa.Array:
        """Returns the results for rows of stored columns, which may have any length."""

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
