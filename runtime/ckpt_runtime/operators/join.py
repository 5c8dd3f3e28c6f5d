"""Joins two streams by key and, with bounds, by event time, on the conventions of Spark's stream-stream joins.

A pair is emitted as soon as both rows have arrived: pairs are ordered by the row that completes them, then by the
arrival of its partners. Late rows are dropped. With time bounds, a row is removed from state when the watermark has
passed everything that it could match, and an outer join then emits it with nulls if it has no match. Without bounds
(inner only) every row that is not late is kept forever. Never blocks.

Nulls are treated as in Spark. An outer join keeps rows whose key is null on the sides whose rows it emits alone: two of
them match in a full outer join. On other sides they are dropped. With bounds, a row without event time is dropped:
Spark keeps it for ever, and it matches nothing.

The emitted watermark is delayed by the greater bound, so that no result row is late by the event time of either side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Expression, moved
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.graph.output_schemas import join_bounds, join_output_schema, shared_join_keys
from ckpt_runtime.graph.specs import NO_BOUND_US, JoinSide, JoinSpec
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows, as_pair
from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import OperatorError
from ckpt_runtime.operators.operator import MAX_WATERMARK, EventTime, OperatorContext, Output
from ckpt_runtime.operators.watermark import LateRows, in_unit
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, int64_column
from ckpt_runtime.state.states import KeyedRowBuffer, RowBufferSpec

LEFT, RIGHT = 0, 1


class JoinOutput:
    """Knows the origin of each result column. ``needed`` lists the columns of each side that a joined row uses."""

    def __init__(self, spec: JoinSpec) -> None:
        self.schema = join_output_schema(spec)
        self._sources = _sources(spec)
        self.needed = tuple([index for side, index, _ in self._sources if side == wanted] for wanted in (LEFT, RIGHT))

    def joined(self, left: Sequence[pa.Array], right: Sequence[pa.Array]) -> pa.RecordBatch:
        """Rows of the needed columns of both sides."""
        columns = (iter(left), iter(right))
        arrays = [next(columns[side]) for side, _, _ in self._sources]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def unmatched(self, side: int, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Result rows for unmatched rows of one side, given with all its columns; the other side's columns are null."""
        rows = len(columns[0])
        arrays = []
        for field, (source, index, other_index) in zip(self.schema, self._sources, strict=True):
            own = index if source == side else other_index
            arrays.append(pa.nulls(rows, field.type) if own is None else columns[own])
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _sources(spec: JoinSpec) -> list[tuple[int, int, int | None]]:
    """Returns side and position of each result column, and for a shared key also its position on the other side."""
    shared = shared_join_keys(spec)
    first = RIGHT if spec.how == "right_outer" else LEFT
    names = [side.schema.names for side in spec.sides]
    sources: list[tuple[int, int, int | None]] = [
        (first, names[first].index(key), names[1 - first].index(key)) for key in shared
    ]
    for side in (LEFT,) if spec.how == "left_semi" else (LEFT, RIGHT):
        sources += [(side, index, None) for index, name in enumerate(names[side]) if name not in shared]
    return sources


STATE_NAMES = ("left", "right")
WATERMARK = "watermark"
_MIN = -(1 << 63)
_NO_TIMES: AnyArray = np.empty(0, dtype=np.int64)


class JoinOperator(LeavesOutBadRows):
    """Built from a :class:`JoinSpec`; gates of the left side come first. The watermark is part of the state."""

    requires_final_checkpoint = False
    state_operator = "symmetricHashJoin"

    def __init__(self, spec: JoinSpec) -> None:
        self._spec = spec
        self._result = JoinOutput(spec)
        self._sides = tuple(
            _Side(spec, side, outer)
            for side, outer in (
                (LEFT, spec.how in ("left_outer", "full_outer")),
                (RIGHT, spec.how in ("right_outer", "full_outer")),
            )
        )
        self._semi = spec.how == "left_semi"
        self._watermark = self._watermark_to_keep = 0
        lower, upper = spec.within_ms or (0, 0)
        kept = [each // 1000 for each in spec.kept_us]
        bounds = ((-lower, kept[0]), (upper, kept[1]))
        self._held_back_ms = max(0, *(bound + more for bound, more in bounds if bound < NO_BOUND_US // 1000))
        self._condition = None if spec.condition is None else _PairCondition(spec.condition, spec)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.keyed_state is None:
            raise OperatorError(f"operator {context.uid!r} joins by key but has no keyed state")
        # Event time begins at 1970, as in Spark: an earlier row is late. A savepoint may hold an earlier watermark.
        self._ends_with_data = Configuration(context.configuration).get(ExecutionOptions.EVENT_TIME_ENDS)
        restored = min(context.operator_state.restored(WATERMARK, EventTime), default=0)
        self._watermark = self._watermark_to_keep = max(0, restored)
        self._buffers = context.keyed_state.row_buffers([side.buffer_spec for side in self._sides])
        for side, buffer in zip(self._sides, self._buffers.sides, strict=True):
            side.buffer = buffer

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        number = self._spec.side_of_gate(input_index)
        side = self._sides[number]
        batch = conformed(batch, side.spec.schema, self.context.uid)
        if side.late_rows is not None:
            batch = side.late_rows.removed(batch, self._watermark)
            self.late_rows_dropped = sum(s.late_rows.dropped for s in self._sides if s.late_rows is not None)
        batch = self._that_can_match(side, batch)
        if not batch.num_rows:
            return
        slots = self._buffers.slots_of([batch.column(key) for key in side.spec.keys])
        found = np.zeros(batch.num_rows, dtype=np.uint8)
        for joined in self._matches(number, batch, slots, found):
            self.output.emit(joined)
        self._keep(side, batch, slots, found)
        self._buffers.compact_if_due()

    def _that_can_match(self, side: _Side, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows that have event time, and a key unless the side's rows are emitted alone."""
        nullable = [column for column in map(batch.column, side.match_columns) if column.null_count]
        if not nullable:
            return batch
        valid = pc.is_valid(nullable[0])
        for column in nullable[1:]:
            valid = pc.and_(valid, pc.is_valid(column))
        return batch.filter(valid)

    def _matches(
        self, number: int, batch: pa.RecordBatch, slots: AnyArray, found: AnyArray
    ) -> Iterator[pa.RecordBatch]:
        """Returns the result rows that ``batch`` completes; sets ``found`` for those of its rows that have a match."""
        side, other = self._sides[number], self._sides[1 - number]
        times = side.times_of(batch)
        if self._condition is not None:
            yield from self._accepted(self._condition, number, batch, slots, found)
            return
        if self._semi and number == LEFT:
            other.buffer.mark_found(slots, times, *side.bounds, found)
            if found.any():
                matched = batch.filter(_mask(found))
                yield self._result.joined([matched.column(index) for index in self._result.needed[LEFT]], ())
            return
        for probes, rows in other.buffer.matches(slots, times, *side.bounds, found):
            stored = other.buffer.take(rows, self._result.needed[1 - number])
            if self._semi:
                yield self._result.joined(stored, ())
                continue
            yield self._joined(number, batch, probes, stored)

    def _joined(self, number: int, batch: pa.RecordBatch, probes: AnyArray, stored: list[pa.Array]) -> pa.RecordBatch:
        """Pairs of rows of the batch and of ``stored`` rows of the other side."""
        mine = [batch.column(index) for index in self._result.needed[number]]
        if len(probes) != batch.num_rows or not np.array_equal(probes, np.arange(len(probes))):
            indices = arrow_from_numpy(pa.int32(), probes)
            mine = [pc.take(column, indices, boundscheck=False) for column in mine]
        return self._result.joined(mine, stored) if number == LEFT else self._result.joined(stored, mine)

    def _accepted(
        self, condition: _PairCondition, number: int, batch: pa.RecordBatch, slots: AnyArray, found: AnyArray
    ) -> Iterator[pa.RecordBatch]:
        """Like :meth:`_matches`, for pairs for which a further condition has to hold."""
        side, other = self._sides[number], self._sides[1 - number]
        for probes, rows in other.buffer.candidates(slots, side.times_of(batch), *side.bounds):
            holds = self._holding(condition, number, batch, probes, rows)
            if not holds.any():
                continue
            found[probes[holds]] = 1
            lived = other.buffer.accept(rows[holds])
            if not self._semi:
                stored = other.buffer.take(rows[holds], self._result.needed[1 - number])
                yield self._joined(number, batch, probes[holds], stored)
            elif number == RIGHT and len(lived):
                yield self._result.joined(other.buffer.take(lived, self._result.needed[LEFT]), ())
        if self._semi and number == LEFT and found.any():
            matched = batch.filter(_mask(found))
            yield self._result.joined([matched.column(index) for index in self._result.needed[LEFT]], ())

    def _holding(
        self, condition: _PairCondition, number: int, batch: pa.RecordBatch, probes: AnyArray, rows: AnyArray
    ) -> AnyArray:
        """For which pairs of rows of the batch and of stored rows the condition holds."""
        buffer, schema = self._sides[1 - number].buffer, self._sides[1 - number].spec.schema
        mine = [batch.column(at).take(pa.array(probes)) for at in condition.needed[number]]
        theirs = buffer.take(rows, condition.needed[1 - number])
        both = [*mine, *theirs] if number == LEFT else [*theirs, *mine]
        moment = self.context.now_ms() * 1000

        def holds(first: int, last: int) -> AnyArray:
            columns = [column.slice(first, last - first) for column in both]
            return condition.holds(Frame(columns, last - first, moment=moment))

        def pair(at: int) -> pa.RecordBatch:
            stored = pa.RecordBatch.from_arrays(buffer.take(rows[at : at + 1], range(len(schema))), schema=schema)
            arrived = batch.slice(int(probes[at]), 1)
            return as_pair(STATE_NAMES, (arrived, stored) if number == LEFT else (stored, arrived))

        return self._where(len(rows), holds, pair)

    def _keep(self, side: _Side, batch: pa.RecordBatch, slots: AnyArray, found: AnyArray) -> None:
        """Adds rows that can still match to the state. An outer join emits the other rows if they have no match."""
        keep: AnyArray | None = None
        if self._spec.within_ms is not None:
            keep = side.times_of(batch) > side.last_ended(self._watermark)
            if side.outer and not keep.all():
                self._emit_unmatched(side, batch.filter(pa.array(~keep & (found == 0))))
        if not side.buffer.spec.keeps_matched:
            unmatched = found == 0
            keep = unmatched if keep is None else keep & unmatched
        if keep is not None and not keep.all():
            batch, slots, found = batch.filter(pa.array(keep)), slots[keep], found[keep]
        if batch.num_rows:
            side.buffer.append(batch, slots, found)
            self.rows_updated += batch.num_rows

    def _emit_unmatched(self, side: _Side, batch: pa.RecordBatch) -> None:
        if side.outer and batch.num_rows:
            self.output.emit(self._result.unmatched(side.number, batch.columns))

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK and not self._ends_with_data:
            self.output.emit_watermark(timestamp_ms)
            return
        self._watermark = max(self._watermark, timestamp_ms)
        if timestamp_ms != MAX_WATERMARK:
            self._watermark_to_keep = self._watermark
        if self._spec.within_ms is not None:
            for side in self._sides:
                self._forget(side, side.last_ended(self._watermark))
            self._buffers.compact_if_due()
        at_end = timestamp_ms == MAX_WATERMARK
        self.output.emit_watermark(timestamp_ms if at_end else timestamp_ms - self._held_back_ms)

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self.output.emit_coming_watermark(timestamp_ms - self._held_back_ms, batch)

    def _forget(self, side: _Side, bound: int) -> None:
        before = len(side.buffer)
        for rows in side.buffer.expired(bound):
            if side.outer and len(rows):
                columns = side.buffer.take(rows, range(len(side.spec.schema)))
                self.output.emit(self._result.unmatched(side.number, columns))
        self.rows_removed += before - len(side.buffer)

    def measured(self) -> OperatorMeasures:
        buffers = [side.buffer for side in self._sides]
        rows, size = sum(map(len, buffers)), sum(buffer.nbytes for buffer in buffers)
        return replace(super().measured(), stored_rows=rows, stored_bytes=size, watermark=self._watermark_to_keep)

    def snapshot(self, checkpoint_id: int) -> None:
        """Keeps the watermark, except MAX_WATERMARK: a job started from a drained savepoint continues with new data."""
        self.context.operator_state.put(WATERMARK, [self._watermark_to_keep], OperatorStateMode.UNION)


class _PairCondition:
    """A condition on pairs of rows. ``needed`` lists the columns of each side that it reads."""

    def __init__(self, condition: Expression, spec: JoinSpec) -> None:
        width = len(spec.left.schema)
        places = sorted(columns_of([condition]))
        self.needed = ([at for at in places if at < width], [at - width for at in places if at >= width])
        self._holds = compile_expression(moved(condition, places.index))

    def holds(self, pairs: Frame) -> AnyArray:
        """Whether the condition is true, for pairs of the needed columns of both sides."""
        return np.asarray(pc.fill_null(evaluate(self._holds, pairs, pa.bool_()), False))


class _Side:
    """One side and its rows. ``bounds`` limit the other side's event time minus this side's, in this side's unit."""

    buffer: KeyedRowBuffer

    def __init__(self, spec: JoinSpec, number: int, outer: bool) -> None:
        self.spec: JoinSide = spec.sides[number]
        self.number = number
        self.outer = outer
        self.bounds = (0, 0)
        self._kept = 0
        late_by = self.spec.event_time if self.spec.late_by is None else self.spec.late_by
        self.late_rows = LateRows(late_by) if late_by else None
        self.match_columns = [] if outer else list(self.spec.keys)
        self._unit = ""
        event_time = None
        if spec.within_ms is not None:
            event_time = self.spec.event_time
            assert event_time is not None
            lower, upper = join_bounds(spec)
            self.bounds = (lower, upper) if number == LEFT else (-upper, -lower)
            self.match_columns.append(event_time)
            self._unit = self.spec.schema.field(event_time).type.unit
            self._kept = in_unit(spec.kept_us[1 - number], self._unit) // 1000
        keeps_matched = spec.how != "left_semi" or number == RIGHT
        self.buffer_spec = RowBufferSpec(
            STATE_NAMES[number], self.spec.schema, self.spec.keys, event_time, keeps_matched
        )

    def times_of(self, batch: pa.RecordBatch) -> AnyArray:
        """Event times in their own unit; empty without time bounds."""
        event_time = self.buffer_spec.event_time
        return _NO_TIMES if event_time is None else int64_column(batch.column(event_time)).values

    def last_ended(self, watermark_ms: int) -> int:
        """The latest event time, in its own unit, whose rows are removed: they match no row after the watermark."""
        if watermark_ms == MAX_WATERMARK:
            return MAX_WATERMARK
        return min(max(in_unit(watermark_ms, self._unit) - self.bounds[1] - self._kept, _MIN), MAX_WATERMARK)


def _mask(found: AnyArray) -> pa.Array:
    return pa.array(found.astype(bool))
