"""Hosts a PySpark ``StatefulProcessor`` in row mode, without a JVM.

As in Spark: one ``handleInputRows`` call per key and buffer with Rows that carry all columns; then the timers that
are due, ascending, still listed during their callback, whose key is a Row; ``init`` before and ``close`` after
everything. Other than in Spark: ``init`` runs once per attempt, keys come in order of appearance, and what Spark
silently turns into null raises. Each attempt works on its own copy of the processor. User code may block, so it needs
a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from ckpt_runtime.checkpoint.state_handles import OperatorStateMode
from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators.errors import OperatorError, ProcessorUsageError, UserFunctionError
from ckpt_runtime.operators.late_rows import LateRows
from ckpt_runtime.operators.operator import MAX_WATERMARK, Operator, OperatorContext, Output
from ckpt_runtime.operators.processor_handle import HostedHandle
from ckpt_runtime.operators.processor_states import KeyCursor
from ckpt_runtime.operators.rows import Key, RowGroups, RowsToBatch, row_class
from ckpt_runtime.state.columns import decoded_type

OUTPUT_ROWS = 8_192
PENDING_ROWS = 512
WATERMARK = "watermark"
TIME_MODES = ("none", "processingtime", "eventtime")


class StatefulProcessorOperator(Operator):
    """Built from a :class:`ProcessSpec`.

    ``init`` runs in ``open`` when the key's schema is known (from ``input_schema`` or the restored snapshot), otherwise
    with the first batch. In event time, rows at or before the watermark are dropped before user code sees them; the
    watermark starts at 0 and is state, so that a restore neither fires a timer again nor lets late rows in.
    """

    def __init__(self, spec: ProcessSpec, input_schema: pa.Schema | None = None) -> None:
        self._spec = spec
        self._input_schema = input_schema
        self._time_mode = spec.time_mode.lower()
        if self._time_mode not in TIME_MODES:
            raise ProcessorUsageError(f"timeMode {spec.time_mode!r}, allowed are None, ProcessingTime and EventTime")
        self._processor = _own_copy(spec.processor)
        self._cursor = KeyCursor()
        self._handle: HostedHandle | None = None
        self._groups = RowGroups(spec.keys)
        self._key_class = row_class(spec.keys)
        self._pending: list[Any] = []
        self._watermark = 0
        self._watermark_to_keep = 0
        eventtime = self._time_mode == "eventtime"
        self._late_rows = LateRows(spec.event_time_column) if eventtime and spec.event_time_column else None
        self._opened_user_code = False

    @staticmethod
    def output_schema(spec: ProcessSpec, input_schema: pa.Schema) -> pa.Schema:  # noqa: ARG004 (the common form)
        """The declared one."""
        return spec.output_schema

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.keyed_state is None:
            raise OperatorError(f"operator {context.uid!r} hosts a StatefulProcessor but has no keyed state")
        self._results = RowsToBatch(context.uid, self._spec.output_schema)
        self._watermark = self._watermark_to_keep = min(context.operator_state.restored(WATERMARK), default=0)
        if self._input_schema is not None:
            self._initialise(self._key_schema(self._input_schema))
        elif (key_schema := context.keyed_state.restored_key_schema()) is not None:
            self._initialise(key_schema)

    def _key_schema(self, input_schema: pa.Schema) -> pa.Schema:
        fields = [input_schema.field(name) for name in self._spec.keys]
        return pa.schema([pa.field(field.name, decoded_type(field.type)) for field in fields])

    def _initialise(self, key_schema: pa.Schema) -> None:
        backend = self.context.keyed_state
        assert backend is not None
        now_ms = self.context.now_ms
        handle = HostedHandle(self.context.uid, backend, key_schema, self._cursor, self._time_mode, now_ms)
        self._opened_user_code = True
        with self._user_code("init", None):
            self._processor.init(handle)
        handle.end_of_init()
        self._handle = handle
        self._ask_for_next_timer()

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._handle is None:
            self._initialise(self._key_schema(batch.schema))
        if self._late_rows is not None:
            batch = self._late_rows.removed(batch, self._watermark)
            self.late_rows_dropped = self._late_rows.dropped
        now = self.context.now_ms()
        self._handle_rows(batch, self._timer_values(now))
        self._fire(now)
        self._flush()
        assert self.context.keyed_state is not None
        self.context.keyed_state.maintain()

    def _handle_rows(self, batch: pa.RecordBatch, timer_values: TimerValues) -> None:
        cursor, pending = self._cursor, self._pending
        handle_input_rows: Callable[..., Any] = self._processor.handleInputRows
        key: Key | None = None
        try:
            for key, rows in self._groups.of(batch):
                cursor.key = key
                result = handle_input_rows(key, iter(rows), timer_values)
                try:
                    results = iter(result)
                except TypeError:
                    raise self._not_iterable("handleInputRows", result) from None
                pending.extend(results)
                if len(pending) >= PENDING_ROWS:
                    self._collect_pending()
        except Exception as error:
            error.add_note(f"in handleInputRows of operator {self.context.uid!r}, key {key!r}")
            raise
        finally:
            cursor.key = None
        self._collect_pending()

    def _not_iterable(self, method: str, result: Any) -> UserFunctionError:
        return UserFunctionError(
            f"{method} of operator {self.context.uid!r} returned {type(result).__name__}, "
            "it must return an iterator of pyspark.sql.Row"
        )

    def _collect_pending(self) -> None:
        self._results.add(self._pending)
        self._pending.clear()
        if self._results.rows >= OUTPUT_ROWS:
            self._flush()

    def process_watermark(self, timestamp_ms: int) -> None:
        self._watermark = max(self._watermark, timestamp_ms)
        if timestamp_ms != MAX_WATERMARK:
            self._watermark_to_keep = self._watermark
        if self._time_mode == "eventtime" and self._handle is not None:
            self._fire(self.context.now_ms())
            self._flush()
        self.output.emit_watermark(timestamp_ms)

    def snapshot(self, checkpoint_id: int) -> None:
        """Keeps the watermark, but not the one of the end of data: a job started from a drained savepoint goes on."""
        if self._time_mode == "eventtime":
            watermarks = [self._watermark_to_keep]
            self.context.operator_state.put(WATERMARK, watermarks, OperatorStateMode.UNION)

    def on_processing_time(self, now_ms: int) -> None:
        if self._time_mode == "processingtime" and self._handle is not None:
            self._fire(now_ms)
            self._flush()

    def close(self) -> None:
        """Calls the processor's ``close`` if its ``init`` was called."""
        if self._opened_user_code:
            self._opened_user_code = False
            with self._user_code("close", None):
                self._processor.close()

    def _timer_values(self, now_ms: int) -> TimerValues:
        if self._time_mode == "none":
            return TimerValues(-1, -1)
        return TimerValues(now_ms, self._watermark if self._time_mode == "eventtime" else -1)

    def _fire(self, now_ms: int) -> None:
        """Fires due timers, also those which callbacks register as due; at the end of all time one round only."""
        timers = self._handle.timers if self._handle is not None else None
        if timers is None:
            return
        until = now_ms if self._time_mode == "processingtime" else self._watermark
        timer_values = self._timer_values(now_ms)
        while due := timers.due(until):
            for time, key in due:
                if time in timers.times_of(key):
                    self._fire_one(time, key, timer_values)
                    timers.delete(key, time)
            if until == MAX_WATERMARK:
                break
        self._ask_for_next_timer()

    def _fire_one(self, time: int, key: Key, timer_values: TimerValues) -> None:
        self._cursor.key = key
        key_row = tuple.__new__(self._key_class, key)
        with self._user_code("handleExpiredTimer", key):
            result: Any = self._processor.handleExpiredTimer(key_row, timer_values, ExpiredTimerInfo(time))
            try:
                results = iter(result)
            except TypeError:
                raise self._not_iterable("handleExpiredTimer", result) from None
            self._pending.extend(results)
            self._collect_pending()

    def _ask_for_next_timer(self) -> None:
        if self._time_mode == "processingtime" and self._handle is not None and self._handle.timers is not None:
            time = self._handle.timers.next_time()
            if time is not None:
                self.context.set_timer(time)

    def _flush(self) -> None:
        if self._results.rows:
            self.output.emit(self._results.build())

    @contextmanager
    def _user_code(self, method: str, key: Key | None) -> Iterator[None]:
        """Says where in user code an error came from, and ends the key's turn."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in {method} of operator {self.context.uid!r}" + ("" if key is None else f", key {key!r}"))
            raise
        finally:
            self._cursor.key = None


def _own_copy(processor: Any) -> StatefulProcessor:
    """An instance of one's own, as Spark's workers have: a restarted attempt must not see what an earlier one left."""
    if isinstance(processor, type):
        processor = processor()
    if not isinstance(processor, StatefulProcessor):
        raise ProcessorUsageError(f"{processor!r} is not a pyspark StatefulProcessor")
    copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(processor))
    return copy
