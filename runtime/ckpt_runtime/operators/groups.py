"""Aggregates rows by key, with Spark's output modes.

``append`` emits the row of a group once, when the watermark has reached its end; ``update`` emits the current row of
each group of a batch. Rows of groups that have ended are dropped as late. ``complete`` emits the current rows of the
groups that have changed, in large batches, for the operator that keeps the whole result (``result_table.py``); groups
never end. Never blocks.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.specs import REMOVED, GroupSpec
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from ckpt_runtime.operators.group_state import GroupStateOperator
from ckpt_runtime.state.columns import plain
from ckpt_runtime.state.kernels.compiler import read_only


class GroupOperator(GroupStateOperator):
    """Built from a :class:`GroupSpec`."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec.schema, spec.keys, spec.event_time)
        self._spec = spec
        self._aggregates = [_Aggregate(spec, index) for index in range(len(spec.aggregates))]
        self.waits = spec.mode != "update"
        self._output_schema = spec.output_schema

    @property
    def stored_schema(self) -> pa.Schema:
        keys = [self._schema.field(name) for name in (*(self._spec.session or ()), *self._keys)]
        return pa.schema([*keys, *(field for each in self._aggregates for field in each.accumulator.stored)])

    def add(self, batch: pa.RecordBatch) -> None:
        keys = [normal_key(batch.column(name)) for name in self._keys]
        groups, slots, firsts = self.numbered(keys)
        old = self.taken(slots)
        grouped = [key.take(pa.array(firsts)) for key in keys]
        stored = self.combined(len(slots), Rows(old.groups, old.columns[len(keys) :]), Rows(groups, batch.columns))
        at = self._keys.index(self._spec.event_time) if self._spec.event_time else None
        self.store([*grouped, *stored], None if at is None else grouped[at], slots)
        if self._spec.mode != "append":
            self._emit([*grouped, *stored])

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        """The stored columns of all aggregates. ``old`` has stored columns, ``new`` the columns of the input."""
        stored: list[pa.Array] = []
        for each in self._aggregates:
            start = len(stored)
            own = old.columns[start : start + len(each.accumulator.stored)]
            stored += each.accumulator.combined(groups, Rows(old.groups, own), each.arguments(new))
        return stored

    def _emit(self, columns: list[pa.Array]) -> None:
        """Emits the results of stored columns."""
        start = len(self._spec.session or ()) + len(self._keys)
        arrays = columns[:start]
        for each in self._aggregates:
            end = start + len(each.accumulator.stored)
            arrays.append(each.accumulator.result(columns[start:end]))
            start = end
        if REMOVED in self._output_schema.names:
            arrays.append(pa.repeat(pa.scalar(False), len(arrays[0])))
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._output_schema))

    def ended(self, columns: list[pa.Array]) -> None:
        if self._spec.mode == "append":
            self._emit(columns)


class _Aggregate:
    """An accumulator and where its arguments are."""

    def __init__(self, spec: GroupSpec, index: int) -> None:
        aggregate = spec.aggregates[index]
        self.accumulator: GroupAccumulator = accumulator_for(aggregate, spec.schema)
        positions = [spec.schema.get_field_index(name) for name in aggregate.columns]
        self._condition = positions.pop() if aggregate.filtered else None
        self._positions = positions

    def arguments(self, new: Rows) -> Rows:
        """The rows that the aggregate's condition admits, and the argument values of these rows."""
        columns = [new.columns[position] for position in self._positions]
        if self._condition is None:
            return Rows(new.groups, columns)
        mask = pc.fill_null(plain(new.columns[self._condition]), False)
        return Rows(read_only(new.groups[np.asarray(mask)]), [plain(column).filter(mask) for column in columns])


def normal_key(key: pa.Array) -> pa.Array:
    """A key column as Spark groups it: decoded, with 0.0 for -0.0."""
    key = plain(key)
    return pc.add(key, pa.scalar(0.0, key.type)) if pa.types.is_floating(key.type) else key
