"""Event time: emits a watermark that trails the greatest timestamp seen, and drops rows that it has passed.

Behind a PySpark stream reader it advances when a range ends: the order of rows within a range has no meaning, as in
Spark, and a row must not make later rows of the same range late. Where one range follows another without a pause, the
time that a range has reached takes effect behind the next one, whose rows are compared with the time before, as in
Spark: it is announced as the coming watermark. At the end of data, nothing is left to wait for.

Upstream watermarks except MAX_WATERMARK are dropped, as event time starts here. The last watermark is state and is
emitted again after a restore: perhaps only in-flight data follows it (FLIP-76), and event time must not stop until rows
with newer timestamps arrive.

Late rows, whose event time the watermark has reached, are dropped before they touch state, as in Spark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Struct
from msgspec.structs import replace

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.checkpoint.measures import EventTimes, OperatorMeasures
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import WatermarkSpec
from ckpt_runtime.operators.operator import (
    IDLE_WATERMARK,
    MAX_WATERMARK,
    UNNUMBERED,
    EventTime,
    Operator,
    OperatorContext,
    Output,
)

_MAX = (1 << 63) - 1


class LateRows:
    """Removes late rows from batches by a timestamp column and counts them; rows without event time are kept.

    A column of windows, which are structs of ``start`` and ``end``, counts by their ends, as in Spark. ``rows_in`` is
    the number of rows that a batch represents, by default its own number of rows.
    """

    def __init__(self, column: str, rows_in: Callable[[pa.RecordBatch], int] = len) -> None:
        self._column = column
        self._rows_in = rows_in
        self.dropped = 0

    def removed(self, batch: pa.RecordBatch, watermark_ms: int) -> pa.RecordBatch:
        """The rows whose event time is after the watermark."""
        column = batch.column(self._column)
        if pa.types.is_struct(column.type):
            column = pc.struct_field(column, "end")
        times = column.cast(pa.int64())
        bound = in_unit(watermark_ms, column.type.unit)
        earliest = pc.min(times).as_py()
        if earliest is None or earliest > bound:
            return batch
        on_time = batch.filter(pc.fill_null(pc.greater(times, bound), True))
        self.dropped += self._rows_in(batch) - self._rows_in(on_time)
        return on_time


def in_unit(watermark_ms: int, unit: str) -> int:
    """The latest 64-bit value of the unit that is at or before the watermark."""
    if unit == "s":
        return watermark_ms // 1000
    return max(min(watermark_ms * {"ms": 1, "us": 1000, "ns": 1_000_000}[unit], _MAX), -_MAX)


_STATE = "watermark"


class _Last(Struct):
    """The stored form; ``next_ms`` is held until the end of a range, ``coming_ms`` was announced behind ``batch``."""

    parallelism: int
    ms: EventTime | None
    next_ms: EventTime | None = None
    coming_ms: EventTime | None = None
    batch: NonNegative = 0
    upto: NonNegative = 0


def _latest(times: Iterable[int | None]) -> int | None:
    return max((time for time in times if time is not None), default=None)


_PER_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


_LEAST_LOOKS = 4
"""How often an operator looks for rows before it is idle, or more often if a look would be rarer than once a minute.
Where it could not run, no look took place: a subtask that is back-pressured does not become idle by that."""
_MOST_LOOK_MS = 60_000


class WatermarkOperator(Operator):
    """Built from a :class:`WatermarkSpec`. Rows pass unchanged and before the watermark that they cause.

    With ``pipeline.source.idle-timeout`` it notifies its consumers when no row has arrived for that time. The last
    watermark is sent again with the next row.

    State: one item ``{"ms": last watermark, "next_ms": the one of all rows so far, "coming_ms": the one of all rows up
    to split "upto" and range "batch", "parallelism": of the operator}``. Where ranges are batches, each subtask
    continues with the times of all (UNION). Elsewhere there is none before the first row, and an operator starts
    without a watermark at another parallelism: rows may be from a slower subtask and must not be late because of that.
    MAX_WATERMARK is not kept: a job that is started from a drained savepoint continues with new data.
    """

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: WatermarkSpec) -> None:
        self._column = spec.column
        self._delay_ms = spec.delay_ms
        self._by_ranges = spec.by_ranges
        self._by_batches = spec.by_batches
        self._united = spec.united and spec.by_batches
        self._keeps_last = spec.keeps_last and spec.by_batches
        self._next: int | None = None
        self._coming: int | None = None
        self._ended = (0, 0)
        self._emitted: int | None = None
        self._to_keep: int | None = None
        self._look_ms = 0
        self._most_looks = 0
        self._looks = 0
        self._idle = False
        self._times: EventTimes | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        restored = context.operator_state.restored(_STATE, _Last)
        if self._by_batches:
            self._continue_in_batch(restored)
        for last in () if self._by_batches else restored:
            if last.parallelism == context.parallelism:
                self._next = last.next_ms
                for reached in (last.ms, last.coming_ms):
                    if reached is not None:
                        self._advance(reached)
        if not self._by_ranges:
            self._catch_up()
        timeout_ms = Configuration(context.configuration).get(PipelineOptions.IDLE_TIMEOUT)
        if timeout_ms:
            self._look_ms = min(max(1, -(-timeout_ms // _LEAST_LOOKS)), _MOST_LOOK_MS)
            self._most_looks = -(-timeout_ms // self._look_ms)
            context.set_timer(context.now_ms() + self._look_ms)

    def _continue_in_batch(self, restored: Sequence[_Last]) -> None:
        """Continues where the slowest subtask was. The times of a batch are those of all rows that any of them read."""
        self._ended = min(((last.upto, last.batch) for last in restored), default=(0, 0))
        ahead = [(last.upto, last.batch) > self._ended for last in restored]
        self._next = _latest(last.next_ms for last in restored)
        self._coming = _latest(
            last.ms if is_ahead else last.coming_ms for last, is_ahead in zip(restored, ahead, strict=True)
        )
        reached = _latest(last.ms for last, is_ahead in zip(restored, ahead, strict=True) if not is_ahead)
        if reached is not None:
            self._advance(reached)
        if self._coming is not None:
            # Its source says again which range was the last one.
            self.output.emit_coming_watermark(self._coming, UNNUMBERED)

    def on_processing_time(self, now_ms: int) -> None:
        """Checks whether rows have arrived since the last check."""
        if not self._look_ms:
            return
        self._looks = 0 if self.context.chain_time.held else self._looks + 1
        if self._looks > self._most_looks and not self._idle:
            self._idle = True
            self.output.emit_watermark(IDLE_WATERMARK)
        self.context.set_timer(now_ms + self._look_ms)

    def snapshot(self, checkpoint_id: int) -> None:
        last = {"ms": self._to_keep, "parallelism": self.context.parallelism, "next_ms": self._next}
        if self._by_batches:
            last |= {"coming_ms": self._coming, "upto": self._ended[0], "batch": self._ended[1]}
            self.context.operator_state.put(_STATE, [last], OperatorStateMode.UNION)
        else:
            self.context.operator_state.put(_STATE, [] if self._to_keep is None and self._next is None else [last])

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._looks = 0
        if self._idle:
            self._idle = False
            if self._emitted is not None:
                self.output.emit_watermark(self._emitted)
        self.output.emit(batch)
        column = batch.column(self._column)
        numbers = column.cast(pa.int64())
        least, greatest = pc.min_max(numbers).as_py().values()
        if greatest is None:
            return
        # Rounded down, since rounding up would make rows of the same millisecond late.
        multiply, divide = _PER_MS[column.type.unit]
        rows = len(numbers) - numbers.null_count
        if (greatest - least) * rows <= _MAX:
            total = least * rows + pc.sum(pc.subtract(numbers, least)).as_py()
        else:
            total = pc.sum(numbers.cast(pa.float64(), safe=False)).as_py()
        total = total * multiply / divide
        times = EventTimes(least * multiply // divide, greatest * multiply // divide, total, rows)
        self._times = times if self._times is None else self._times.and_(times)
        reached = greatest * multiply // divide - self._delay_ms
        self._next = reached if self._next is None else max(self._next, reached)
        chain = self.context.chain_time
        chain.reached_ms = reached if chain.reached_ms is None else max(chain.reached_ms, reached)
        if not self._by_ranges:
            self._catch_up()

    def measured(self) -> OperatorMeasures:
        times, self._times = self._times, None
        return replace(super().measured(), event_times=times, watermark=self._to_keep)

    def process_end_of_range(self) -> None:
        if self._united:
            return
        if not self._by_batches:
            self._catch_up()
        else:
            self._end_batch(self.context.chain_time.upto, self.context.chain_time.batch)
        super().process_end_of_range()

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """Ends a batch where streams meet: all rows of it have arrived. The time is dropped, like a watermark."""
        if self._united and batch != UNNUMBERED:
            if batch == 0:
                self._ended = (0, 0)  # a run begins, and with it the numbers
            self._end_batch(0, batch)

    def _end_batch(self, upto: int, batch: int) -> None:
        if (upto, batch) > self._ended:
            if self._coming is not None:
                self._advance(self._coming)
            self._coming, self._ended = self._next or 0, (upto, batch)
        self.output.emit_coming_watermark(self._coming or 0, batch)

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK:
            # The end of data ends the last range too. Without a row, event time is at its beginning.
            if not self._keeps_last:
                self._catch_up()
            if self._emitted is None:
                self._advance(0)
            self._advance(timestamp_ms)

    def _catch_up(self) -> None:
        if self._next is not None:
            self._advance(self._next)

    def _advance(self, timestamp_ms: int) -> None:
        if self._emitted is None or timestamp_ms > self._emitted:
            self._emitted = timestamp_ms
            if timestamp_ms != MAX_WATERMARK:
                self._to_keep = timestamp_ms
            self.output.emit_watermark(timestamp_ms)
