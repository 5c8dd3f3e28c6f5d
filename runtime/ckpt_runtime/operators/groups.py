"""Aggregates rows by key, with Spark's output modes.

``append`` emits the row of a group once, when the watermark has reached its end; ``update`` emits the current row of
each group of a batch. Rows of groups that have ended are dropped as late. ``complete`` emits the current rows of the
groups that have changed, in large batches, for the operator that keeps the whole result (``result_table.py``); groups
never end. Never blocks.

Before the shuffle, :class:`Combiner` aggregates each batch, if the result does not depend on that. It makes
partial rows: the keys of a group, the columns that each aggregate stores, and the number of rows. They have the form of
rows in state, and are combined with them as rows of state are combined with each other. Where combining does not pay,
rows are sent as they are. So channels carry rows of both forms in any order, and so does in-flight data.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.dictionaries import BatchDecoder
from ckpt_runtime.graph.specs import REMOVED, GroupSpec
from ckpt_runtime.operators.aggregates.accumulator import GroupAccumulator, Rows, joined
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import OperatorError, output_schema_error
from ckpt_runtime.operators.group_state import GROUPS, GroupStateOperator
from ckpt_runtime.operators.operator import OperatorContext, Output
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import NO_BITMAP, AnyArray, arrow_from_numpy, plain
from ckpt_runtime.state.hashing import hash_columns, key_groups_of, variable_bytes
from ckpt_runtime.state.kernels import group_kernels as kernels
from ckpt_runtime.state.schema_evolution import evolve
from ckpt_runtime.state.stored_rows import fixed_key, is_fixed

PARTIAL_ROWS = "$rows"
"""The last column of partial rows: how many rows each stands for."""
RUNNING, RESULTS = "aggregates", "results"
"""The names of the states of running aggregates, and of groups in output mode complete."""
_NO_GROUPS: AnyArray = read_only(np.empty(0, dtype=np.uint32))
_MOST_GROUPS = 0.5
"""The greatest share of groups in the rows of a batch for which combining pays."""
_LONGEST_PAUSE = 63
"""Maximum number of batches between two attempts to combine."""


class GroupOperator(GroupStateOperator):
    """Built from a :class:`GroupSpec`."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec.schema, spec.keys, spec.event_time)
        self.state_operator = "stateStoreSave" if spec.session is None else "sessionWindowStateStoreSaveExec"
        self._spec = spec
        self._aggregates = GroupAggregates(spec)
        self._partial = self._aggregates.partial_schema
        self.waits = spec.mode != "update"
        self.state_name = RESULTS if spec.mode == "complete" else GROUPS
        self._output_schema = spec.output_schema
        self._has_no_row = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        check_form(context, self.state_name)
        if self._spec.total and context.restored_checkpoint_id is None:
            assert context.keyed_state is not None
            hashes = hash_columns(row_of_none(self._spec, self._output_schema), self._keys)
            [group] = key_groups_of(hashes, context.keyed_state.max_parallelism)
            self._has_no_row = group in context.keyed_state.key_groups

    @property
    def stored_schema(self) -> pa.Schema:
        keys = [self._schema.field(name) for name in (*(self._spec.session or ()), *self._keys)]
        return pa.schema([*keys, *self._aggregates.stored])

    def shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        partial = self._aggregates.is_partial(batch.schema)
        if not partial or batch.schema.equals(self._partial):
            return conformed(batch, self._partial if partial else self._schema, self.context.uid)
        if not self._aggregates.takes_partial(batch.schema):
            raise output_schema_error(self.context.uid, batch.schema, self._partial)
        return evolve("in-flight data", batch, self._partial)

    def rows_in(self, batch: pa.RecordBatch) -> int:
        if not self._aggregates.is_partial(batch.schema):
            return int(batch.num_rows)
        return int(pc.sum(batch.column(PARTIAL_ROWS)).as_py() or 0)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        super().prepare_snapshot(checkpoint_id)
        self._emit_total_of_none()

    def finish(self) -> None:
        super().finish()
        self._emit_total_of_none()

    def _emit_total_of_none(self) -> None:
        """Emits the total of no rows once, with the first checkpoint or at the end, if no row has come until then."""
        if self._has_no_row:
            self._has_no_row = False
            self.output.emit(row_of_none(self._spec, self._output_schema))

    def add(self, batch: pa.RecordBatch) -> None:
        self._has_no_row = False
        keys = [normal_key(batch.column(name)) for name in self._keys]
        groups, slots, firsts = self.numbered(keys)
        rows = self._buffer.consume(slots)
        stored_before = np.flatnonzero(rows >= 0)
        known = Rows(
            read_only(stored_before.astype(np.uint32)),
            self._buffer.take(rows[stored_before], range(len(keys), len(self._row_schema) - 1)),
        )
        grouped = [key.take(pa.array(firsts)) for key in keys]
        if self._aggregates.is_partial(batch.schema):
            stored = self._aggregates.merged(len(slots), known, Rows(groups, batch.columns[len(keys) : -1]))
        else:
            stored = self._aggregates.combined(len(slots), known, Rows(groups, batch.columns))
        at = self._keys.index(self._spec.event_time) if self._spec.event_time else None
        self.store([*grouped, *stored], None if at is None else grouped[at], slots)
        if self._spec.mode != "append":
            self._emit([*grouped, *stored])

    def _emit(self, columns: list[pa.Array]) -> None:
        start = len(self._spec.session or ()) + len(self._keys)
        arrays = [*columns[:start], *self._aggregates.results(columns[start:])]
        if REMOVED in self._output_schema.names:
            arrays.append(pa.repeat(pa.scalar(False), len(arrays[0])))
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._output_schema))

    def ended(self, columns: list[pa.Array]) -> None:
        if self._spec.mode == "append":
            self._emit(columns)


def check_form(context: OperatorContext, name: str) -> None:
    """Refuses a snapshot with the state of an aggregation in another form: the operator would start without it."""
    state = context.keyed_state
    assert state is not None
    if other := next((each for each in (RUNNING, GROUPS, RESULTS) if each != name and state.is_restored(each)), None):
        raise OperatorError(
            f"operator {context.uid!r} cannot continue: the snapshot has its state as {other!r}, and it keeps it as "
            f"{name!r} now, because its output mode has changed from or to complete, or its first aggregate other than "
            "count, sum, avg, min and max was added or its last one removed; undo that, or start without the snapshot"
        )


class GroupAggregates:
    """All aggregates of a grouping: from rows to the columns that are stored, and from these to results."""

    def __init__(self, spec: GroupSpec) -> None:
        self._schema = spec.schema
        self._aggregates = [_Aggregate(spec, index) for index in range(len(spec.aggregates))]
        self.stored = [field for each in self._aggregates for field in each.accumulator.stored]
        keys = [spec.schema.field(name) for name in spec.keys]
        self.partial_schema = pa.schema([*keys, *self.stored, pa.field(PARTIAL_ROWS, pa.int64())])
        self._no_rows = Rows(_NO_GROUPS, [pa.nulls(0, kind) for kind in spec.schema.types])
        self._nothing_stored = Rows(_NO_GROUPS, [pa.nulls(0, field.type) for field in self.stored])

    @property
    def combine(self) -> bool:
        """Whether all of them may be computed in parts."""
        return PARTIAL_ROWS not in self._schema.names and all(each.accumulator.combines for each in self._aggregates)

    def is_partial(self, schema: pa.Schema) -> bool:
        """Whether a batch of this schema has partial rows, not rows of the input."""
        return PARTIAL_ROWS in schema.names[-1:] and PARTIAL_ROWS not in self._schema.names

    def takes_partial(self, schema: pa.Schema) -> bool:
        """Whether partial rows of this schema can be combined.

        Like rows in state, they may lack aggregates that were added since, and have some that were removed.
        """
        if not self.is_partial(schema):
            return False
        keys = len(self.partial_schema) - len(self.stored) - 1
        given, wanted = ([(field.name, field.type) for field in each] for each in (schema, self.partial_schema))
        kinds = dict(given)
        return given[:keys] == wanted[:keys] and all(kinds.get(name, kind) == kind for name, kind in wanted[keys:])

    def combined(self, groups: int, old: Rows, new: Rows) -> list[pa.Array]:
        """The stored columns. ``old`` has stored columns, ``new`` the columns of the input."""
        stored: list[pa.Array] = []
        for each in self._aggregates:
            start = len(stored)
            own = old.columns[start : start + len(each.accumulator.stored)]
            stored += each.accumulator.combined(groups, Rows(old.groups, own), each.arguments(new))
        return stored

    def merged(self, groups: int, old: Rows, partial: Rows) -> list[pa.Array]:
        """The stored columns. Both ``old`` and ``partial`` have stored columns."""
        pairs = zip(old.columns, partial.columns, strict=True)
        columns = [pa.concat_arrays(list(pair)) if len(old.groups) else pair[1] for pair in pairs]
        return self.combined(groups, Rows(joined(old.groups, partial.groups), columns), self._no_rows)

    def of_rows(self, groups: int, new: Rows) -> list[pa.Array]:
        """The stored columns of the first rows."""
        return self.combined(groups, self._nothing_stored, new)

    def results(self, stored: list[pa.Array]) -> list[pa.Array]:
        arrays: list[pa.Array] = []
        start = 0
        for each in self._aggregates:
            end = start + len(each.accumulator.stored)
            arrays.append(each.accumulator.result(stored[start:end]))
            start = end
        return arrays


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


def row_of_none(spec: GroupSpec, schema: pa.Schema) -> pa.RecordBatch:
    """The result of aggregates over no rows: a count of 0, a sum of null.

    Aggregates over a row of nulls give the same result, except for a count of rows.
    """
    one, none = (read_only(np.zeros(rows, dtype=np.uint32)) for rows in (1, 0))
    arrays = [pa.array([0], schema.field(name).type) for name in spec.keys]
    for aggregate in spec.aggregates:
        if not aggregate.columns:
            arrays.append(pa.array([0], aggregate.result))
            continue
        accumulator = accumulator_for(aggregate, spec.schema)
        given = aggregate.columns[:-1] if aggregate.filtered else aggregate.columns
        old = Rows(none, [pa.nulls(0, field.type) for field in accumulator.stored])
        new = Rows(one, [pa.nulls(1, spec.schema.field(name).type) for name in given])
        arrays.append(accumulator.result(accumulator.combined(1, old, new)))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def normal_key(key: pa.Array) -> pa.Array:
    """A key column as Spark groups it: decoded, with 0.0 for -0.0."""
    key = plain(key)
    return pc.add(key, pa.scalar(0.0, key.type)) if pa.types.is_floating(key.type) else key


class Combiner:
    """Aggregates each batch in front of the shuffle. Make one for specs of which :meth:`combines` is true.

    A batch with many groups stays as it is, and so do the next batches: to count groups would not pay. How many batches
    grows with each attempt that finds many groups.
    """

    def __init__(self, spec: GroupSpec) -> None:
        self._keys = spec.keys
        self._aggregates = GroupAggregates(spec)
        self._schema = self._aggregates.partial_schema
        self._pause = self._paused = 0
        self._decoder = BatchDecoder()

    @staticmethod
    def combines(spec: GroupSpec) -> bool:
        """Whether the results do not depend on rows being aggregated in parts."""
        return spec.session is None and GroupAggregates(spec).combine

    def combined(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The partial rows of a batch, in the order in which their first rows come, or the batch itself, decoded."""
        found = None
        if self._paused:
            self._paused -= 1
        elif batch.num_rows > 1:
            found = self._numbered(batch)
            self._pause = 0 if found else min(2 * self._pause + 1, _LONGEST_PAUSE)
            self._paused = self._pause
        if found is None:
            return self._decoder.decoded(batch)
        groups, firsts = found
        counts = np.zeros(len(firsts), dtype=np.int64)
        kernels.count_rows(read_only(groups), NO_BITMAP, 0, counts)
        rows = pa.array(firsts)
        keys = [plain(batch.column(name).take(rows)) for name in self._keys]
        stored = self._aggregates.of_rows(len(counts), Rows(read_only(groups), batch.columns))
        return pa.RecordBatch.from_arrays([*keys, *stored, arrow_from_numpy(pa.int64(), counts)], schema=self._schema)

    def _numbered(self, batch: pa.RecordBatch) -> tuple[AnyArray, AnyArray] | None:
        """The number of each row's group and the first row of each; None for too many groups.

        Groups are found by the hash of their keys, and then compared with them. If keys differ that have one hash, the
        batch counts as one of too many groups.
        """
        rows = batch.num_rows
        most = int(rows * _MOST_GROUPS)
        table = np.zeros(1 << (2 * most + 1).bit_length(), dtype=np.uint32)
        groups, firsts = np.empty(rows, dtype=np.uint32), np.empty(most, dtype=np.uint32)
        found = kernels.number_hashes(read_only(hash_columns(batch, self._keys)), most, table, groups, firsts)
        if found < 0:
            return None
        firsts = firsts[:found]
        numbers = read_only(groups), read_only(firsts)
        same = True
        for name in self._keys:
            column = batch.column(name)
            # Values of a dictionary are distinct. If they are not, equal ones count as keys that share a hash.
            whole = isinstance(column, pa.DictionaryArray) and not column.dictionary.null_count
            column = column.indices if whole else plain(column)
            if is_fixed(column.type):
                fixed = fixed_key(column)
                same = kernels.equal_fixed(*numbers, fixed.values, fixed.bitmap, fixed.bit_offset)
            elif not pa.types.is_null(column.type):
                var = variable_bytes(column, name)
                same = kernels.equal_bytes(*numbers, var.offsets, var.data, var.bitmap, var.bit_offset)
            if not same:
                break
        return (groups, firsts) if same else None
