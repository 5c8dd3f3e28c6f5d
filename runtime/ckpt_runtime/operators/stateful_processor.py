"""Hosts a PySpark ``StatefulProcessor``, of rows or of pandas frames, without a JVM.

As in Spark: one ``handleInputRows`` call per key and trigger with all columns of its rows; then the timers that
are due, ascending, each still listed during its callback, whose key is a Row; ``init`` before and ``close`` after
everything. An option determines the rows that a trigger covers: an input buffer (the default), all rows between two
checkpoints, or all rows of an interval. Other than in Spark: ``init`` runs once per attempt, keys come in order of
appearance, and what Spark silently turns into null raises. Each attempt works on its own copy of the processor. User
code may block, so it needs a thread of its own.

Rows that wait for the trigger are keyed state: part of every checkpoint, and rescaled with their keys.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, StatefulProcessor, TimerValues

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import ExecutionOptions, ProcessorTrigger
from ckpt_runtime.frontend.static_tables import read_table
from ckpt_runtime.graph.specs import BYTES_OPTION, ZONE_OPTION, ProcessSpec, most_rows
from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import LateResultError, OperatorError, ProcessorUsageError, UserFunctionError
from ckpt_runtime.operators.frames import FrameGroups, FramesToBatch
from ckpt_runtime.operators.nested_keys import NestedKeys, without_zones
from ckpt_runtime.operators.operator import (
    MAX_WATERMARK,
    UNNUMBERED,
    EventTime,
    Operator,
    OperatorContext,
    Output,
)
from ckpt_runtime.operators.processor_handle import HostedHandle
from ckpt_runtime.operators.processor_states import KeyCursor
from ckpt_runtime.operators.rows import RowGroups, RowsToBatch, row_class
from ckpt_runtime.operators.task_context import new_task, running
from ckpt_runtime.operators.watermark import LateRows, in_unit
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.columns import decoded_type
from ckpt_runtime.state.hashing import hash_columns, key_groups_of
from ckpt_runtime.state.states import Key, RowBufferSpec

GATHERED = "$rows"
PART_ROWS = 4_096


class GatheredRows:
    """Rows of ``schema`` by ``keys``, in order of arrival. Restored rows are present from the start."""

    def __init__(self, backend: KeyedStateBackend, uid: str, schema: pa.Schema, keys: Sequence[str]) -> None:
        self._uid = uid
        self._schema = schema
        self._keys = tuple(keys)
        self._groups = RowGroups(keys)
        self._buffers = backend.row_buffers([RowBufferSpec(GATHERED, schema, self._keys)])

    @property
    def is_empty(self) -> bool:
        return not len(self._buffers.sides[0])

    def add(self, batch: pa.RecordBatch) -> None:
        batch = conformed(batch, self._schema, self._uid)
        slots = self._buffers.slots_of([batch.column(key) for key in self._keys])
        self._buffers.sides[0].append(batch, slots, np.zeros(batch.num_rows, dtype=np.uint8))
        self._buffers.compact_if_due()

    def take(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows in parts that do not split a key; the store is empty from the first part on."""
        for rows in self._buffers.take_all():
            together = self._groups.together(rows)
            batch, ends = (rows, range(1, rows.num_rows + 1)) if together is None else together
            start = 0
            for end in ends:
                if end - start >= PART_ROWS or end == batch.num_rows:
                    yield batch.slice(start, end - start)
                    start = end


class Results(Protocol):
    """Collects what user code gives, as batches of the output schema."""

    rows: int

    def add(self, given: list[Any]) -> None: ...

    def build(self) -> pa.RecordBatch:
        """Returns a batch of all collected rows, and clears the collection."""


OUTPUT_ROWS = 8_192
PENDING_ROWS = 512
MOST_CALLBACKS = 1_000
WATERMARK, COMING_WATERMARK, TIME_MODE = "watermark", "coming-watermark", "time-mode"
TIME_MODES = ("none", "processingtime", "eventtime")


class StatefulProcessorOperator(Operator):
    """Built from a :class:`ProcessSpec`.

    ``init`` runs in ``open`` when the key's schema is known (from ``input_schema`` or the restored snapshot), otherwise
    with the first batch. In event time, rows at or before the watermark are dropped before user code sees them; the
    watermark starts at 0 and is state, so that a restore neither fires a timer again nor lets late rows in. While rows
    are gathered for a trigger, watermarks and timers wait for them.
    """

    def __init__(self, spec: ProcessSpec, input_schema: pa.Schema | None = None) -> None:
        self._spec = spec
        self._input_schema = input_schema
        self._time_mode = spec.time_mode.lower()
        if self._time_mode not in TIME_MODES:
            raise ProcessorUsageError(f"timeMode {spec.time_mode!r}, allowed are None, ProcessingTime and EventTime")
        self._processor = _own_copy(spec.processor)
        self.requires_final_checkpoint = getattr(self._processor, "requires_final_checkpoint", False) is True
        self._cursor = KeyCursor()
        self._handle: HostedHandle | None = None
        self._zone = spec.settings.get(ZONE_OPTION, "UTC")
        self._nested = NestedKeys(spec.nested_keys) if spec.nested_keys else None
        self._whole: Mapping[Key, Key] = {}
        self._groups = self._new_groups()
        # A frame holds many rows, so it is taken apart at once.
        self._most_pending = 1 if spec.in_pandas else PENDING_ROWS
        self._key_class = row_class(spec.keys if self._nested is None else self._nested.names)
        self._pending: list[Any] = []
        self._watermark = 0
        self._watermark_to_keep = 0
        eventtime = self._time_mode == "eventtime"
        self._late_rows = LateRows(spec.event_time_column) if eventtime and spec.event_time_column else None
        self._opened_user_code = False
        self._now = self._now_of_rows = 0
        self._trigger = ProcessorTrigger.BUFFER
        self._interval_ms = 0
        self._gathered: GatheredRows | None = None
        self._due_ms: int | None = None
        self._coming = 0
        self._watermark_behind: int | None = None
        self._coming_behind: tuple[int, int] | None = None
        self._sent_watermark = 0
        self._in_batches = False
        """Whether rows come in Spark's batches, each with a coming watermark at its end."""
        self._fired = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.keyed_state is None:
            raise OperatorError(f"operator {context.uid!r} hosts a StatefulProcessor but has no keyed state")
        self._backend = context.keyed_state
        self._results = self._new_results()
        before = context.operator_state.restored(TIME_MODE, str)
        if set(before) - {self._time_mode}:
            raise ProcessorUsageError(
                f"operator {context.uid!r}: timeMode {self._spec.time_mode} cannot follow {before[0]}, because timers "
                "in the snapshot have times of that kind; keep the time mode, or start without the snapshot"
            )
        restored = context.operator_state.restored(WATERMARK, EventTime)
        self._watermark = self._watermark_to_keep = min(restored, default=0)
        self._sent_watermark = self._watermark
        self._coming = min(context.operator_state.restored(COMING_WATERMARK, EventTime), default=0)
        self._in_batches = self._coming > 0
        configuration = Configuration(context.configuration)
        self._trigger = configuration.get(ExecutionOptions.PROCESSOR_TRIGGER)
        self._interval_ms = configuration.get(ExecutionOptions.PROCESSOR_TRIGGER_INTERVAL)
        self._fires_at_end = configuration.get(ExecutionOptions.EVENT_TIME_ENDS)
        self._now = context.now_ms()
        self._task = new_task(context.subtask_index, context.attempt)
        if self._input_schema is not None:
            self._initialise(self._key_schema(self._input_schema))
            self._gather(self._input_schema)
        elif (key_schema := self._backend.restored_key_schema()) is not None:
            self._initialise(key_schema)

    def _new_results(self) -> Results:
        if self._spec.in_pandas:
            return FramesToBatch(self.context.uid, self._spec.output_schema, self._cursor, self._spec.settings)
        return RowsToBatch(self.context.uid, self._spec.output_schema)

    def _key_schema(self, input_schema: pa.Schema) -> pa.Schema:
        decoded = _decoded(input_schema)
        return pa.schema([pa.field(name, decoded.field(name).type) for name in self._spec.keys])

    def _initialise(self, key_schema: pa.Schema) -> None:
        handle = HostedHandle(
            self.context.uid, self._backend, key_schema, self._cursor, self._time_mode, now_ms=lambda: self._now
        )
        zoned = [pa.types.is_timestamp(field.type) and field.type.tz is not None for field in key_schema]
        self._zoned_keys = zoned if any(zoned) else None
        self._opened_user_code = True
        with self._user_code("init", None):
            self._processor.init(handle)
        handle.end_of_init()
        self._handle = handle
        # A snapshot contains the current form of the initial state.
        if self._spec.initial_state is not None and self.context.restored_checkpoint_id is None:
            self._take_initial_state(self._spec.initial_state)
        self._ask_for_next_timer()

    def _new_groups(self) -> RowGroups:
        spec = self._spec
        hidden = 0 if self._nested is None else self._nested.hidden
        if spec.in_pandas:
            size = spec.settings.get(BYTES_OPTION)
            most_bytes = None if size is None else int(size)
            return FrameGroups(spec.keys, most_rows(spec.settings), self._zone, hidden, most_bytes=most_bytes)
        return RowGroups(spec.keys, self._zone, hidden)

    def _prefetch(self, keys: Iterable[Key]) -> None:
        """Prepares for calls with rows of these keys: their state, and the nested ones as user code gets them."""
        self._backend.prefetch(keys)
        if self._nested is not None:
            self._whole = dict(zip(keys, self._groups.whole(self._nested.whole(keys)), strict=True))

    def _nested_key(self, key: Key) -> Key:
        return self._whole[key]

    def _take_initial_state(self, path: str) -> None:
        """Calls ``handleInitialState`` with the rows of the keys that this subtask owns, before there is a checkpoint.

        An attempt that ends before its first checkpoint loses its state, and the next one takes the rows again.
        """
        width = len(self._spec.nested_keys or self._spec.keys)
        for batch in read_table(path).combine_chunks().to_batches():
            columns = batch.columns[:width]
            if self._nested is not None:
                columns = self._nested.flat(columns, batch.num_rows)
            keys = pa.RecordBatch.from_arrays(columns, list(self._spec.keys))
            groups = key_groups_of(hash_columns(keys, self._spec.keys), self._backend.max_parallelism)
            own = pa.array((groups >= self._backend.key_groups.first) & (groups <= self._backend.key_groups.last))
            rows = batch.select(list(range(width, batch.num_columns)))
            by_key = self._new_groups()
            given_of = by_key.given if self._nested is None else self._nested_key
            for key, its_rows in by_key.beside(keys.filter(own), rows.filter(own)):
                self._prefetch([key])
                given = given_of(key)
                with self._user_code("handleInitialState", key):
                    self._cursor.key = key
                    for row in its_rows:
                        self._processor.handleInitialState(given, row, self._timer_values())
                self._backend.maintain()

    def _gather(self, schema: pa.Schema) -> None:
        """Starts to gather rows if the trigger needs it. Rows gathered before a restore wait for the trigger too."""
        backend = self._backend
        if self._trigger is ProcessorTrigger.BUFFER and not backend.is_restored(GATHERED):
            return
        self._gathered = GatheredRows(backend, self.context.uid, _decoded(schema), self._spec.keys)
        if self._trigger is ProcessorTrigger.BUFFER:
            self._hand_over()
            self._gathered = None
            backend.drop_state(GATHERED)
        self._ask_for_trigger()

    def together(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Sequence[int]] | None:
        """Allows a buffer to be split between keys only."""
        return self._groups.together(batch) if self._trigger is ProcessorTrigger.BUFFER else None

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if not self._opened_user_code:
            self._initialise(self._key_schema(batch.schema))
            self._gather(batch.schema)
        elif self._gathered is None and self._trigger is not ProcessorTrigger.BUFFER:
            self._gather(batch.schema)
        if self._late_rows is not None:
            batch = self._late_rows.removed(batch, self._watermark)
            self.late_rows_dropped = self._late_rows.dropped
        if self._gathered is not None:
            if batch.num_rows:
                self._gathered.add(batch)
                self._ask_for_trigger()
        else:
            self._now = self.context.now_ms()
            self._handle_rows(batch, self._timer_values())
            self._end_trigger()
        self._backend.maintain()

    def _hand_over(self) -> None:
        """Fires the trigger: hands over the gathered rows, then processes the watermarks and timers that waited."""
        self._due_ms = None
        if self._gathered is None or self._gathered.is_empty:
            return
        # All calls of a trigger see the same time, as in Spark.
        self._now = self.context.now_ms()
        for part in self._gathered.take():
            self._handle_rows(part, self._timer_values())
        self._end_trigger()

    def _end_trigger(self) -> None:
        """Applies the watermark that follows the rows, fires due timers, and sends the results, then the watermark.

        Every time mode and trigger uses this method: results left in the operator would be lost at the end of data.
        """
        watermark, self._watermark_behind = self._watermark_behind, None
        advances = watermark is not None and watermark > self._watermark
        if watermark == MAX_WATERMARK:
            self._watermark = MAX_WATERMARK if self._fires_at_end else self._watermark
        elif watermark is not None:
            self._watermark = self._watermark_to_keep = max(self._watermark, watermark)
        if self._may_fire(advances and (watermark != MAX_WATERMARK or self._fires_at_end)):
            self._fire()
        self._flush()
        if watermark is not None:
            self._sent_watermark = max(self._sent_watermark, watermark)
            self.output.emit_watermark(watermark)
        behind, self._coming_behind = self._coming_behind, None
        if behind is not None:
            self._in_batches, self._fired = True, False
            coming, batch = behind
            self._coming = max(self._coming, coming)
            self.output.emit_coming_watermark(coming, batch)

    def _may_fire(self, advances: bool) -> bool:
        """Where ranges are batches, timers of event time fire once in each of them, behind its rows, as in Spark.

        A batch ends where event time ``advances``, and where the next watermark is announced. The watermarks that are
        sent again at a restore do neither.
        """
        if self._time_mode != "eventtime" or not self._in_batches:
            return True
        if not advances and (self._coming_behind is None or self._coming_behind[1] == UNNUMBERED):
            return False
        fired, self._fired = self._fired, True
        return not fired

    @property
    def _rows_wait(self) -> bool:
        return self._gathered is not None and not self._gathered.is_empty

    def _ask_for_trigger(self) -> None:
        """Requests a trigger at the end of the current interval if there are rows."""
        if self._trigger is ProcessorTrigger.PROCESSING_TIME and self._due_ms is None and self._rows_wait:
            self._due_ms = (self.context.now_ms() // self._interval_ms + 1) * self._interval_ms
            self.context.set_timer(self._due_ms)

    def _handle_rows(self, batch: pa.RecordBatch, timer_values: TimerValues) -> None:
        self._now_of_rows = self._now
        cursor, pending = self._cursor, self._pending
        given = self._groups.given if self._nested is None else self._nested_key
        handle_input_rows: Callable[..., Any] = self._processor.handleInputRows
        key: Key | None = None
        try:
            with running(self._task):
                for key, rows in self._groups.of(batch, self._prefetch):
                    cursor.key = key
                    result = handle_input_rows(given(key), iter(rows), timer_values)
                    try:
                        results = iter(result)
                    except TypeError:
                        raise self._not_iterable("handleInputRows", result) from None
                    # Consumed at once: a generator runs user code, which has to see its own key.
                    pending.extend(results)
                    if len(pending) >= self._most_pending:
                        self._collect_pending()
        except Exception as error:
            error.add_note(f"in handleInputRows of operator {self.context.uid!r}, key {key!r}")
            raise
        finally:
            cursor.key = None
        self._collect_pending()

    def _not_iterable(self, method: str, result: Any) -> UserFunctionError:
        wanted = "pandas.DataFrame" if self._spec.in_pandas else "pyspark.sql.Row"
        return UserFunctionError(
            f"{method} of operator {self.context.uid!r} returned {type(result).__name__}, "
            f"it must return an iterator of {wanted}"
        )

    def _collect_pending(self) -> None:
        self._results.add(self._pending)
        self._pending.clear()
        if self._results.rows >= OUTPUT_ROWS:
            self._flush()

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK:
            self._hand_over()
        self._watermark_behind = timestamp_ms
        if not self._rows_wait:
            self._now = self.context.now_ms()
            self._end_trigger()

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        self._coming_behind = timestamp_ms, batch
        if not self._rows_wait:
            self._end_trigger()
        elif batch != UNNUMBERED:
            self._hand_over()  # the source may wait for this batch before it reads what ends the trigger

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Fires the trigger if checkpoints are triggers: the rows and their results precede the barrier."""
        if self._trigger is ProcessorTrigger.CHECKPOINT:
            self._hand_over()

    def finish(self) -> None:
        self._hand_over()

    def snapshot(self, checkpoint_id: int) -> None:
        """Keeps the watermark, except MAX_WATERMARK: a job started from a drained savepoint continues with new data."""
        state = self.context.operator_state
        if self._time_mode != "none":
            state.put(TIME_MODE, [self._time_mode], OperatorStateMode.UNION)
        if self._time_mode == "eventtime" or self._spec.output_event_time is not None:
            state.put(WATERMARK, [self._watermark_to_keep], OperatorStateMode.UNION)
            if self._coming:
                state.put(COMING_WATERMARK, [self._coming], OperatorStateMode.UNION)

    def on_processing_time(self, now_ms: int) -> None:
        if not self._rows_wait:
            self._now = now_ms
            self._end_trigger()
        elif self._due_ms is not None and not 0 < self._due_ms - now_ms <= self._interval_ms:
            self._hand_over()  # when the trigger is due, and when the clock was put back behind the interval
        elif self._due_ms is not None:
            self.context.set_timer(self._due_ms)

    def close(self) -> None:
        """Calls the processor's ``close`` if its ``init`` was called."""
        if self._opened_user_code:
            self._opened_user_code = False
            with self._user_code("close", None):
                self._processor.close()

    def _timer_values(self) -> TimerValues:
        """The times that user code sees: event time is that which the rows of a batch lead to, as in Spark."""
        if self._time_mode == "none":
            return TimerValues(-1, -1)
        return TimerValues(self._now, max(self._watermark, self._coming))

    def _fire(self) -> None:
        """Fires due timers, also those that one of their callbacks deletes, as in Spark.

        A due timer that a callback registers fires with the next batch. Where there are no batches it fires next, but
        after :data:`MOST_CALLBACKS` callbacks other work is done before. At MAX_WATERMARK there is one round, and a
        timer at exactly that time, which means "never", does not fire.
        """
        timers = self._handle.timers if self._handle is not None else None
        if timers is None:
            return
        if self._time_mode == "processingtime":
            until = self._now_of_rows if self._spec.timers_wait else self._now
        else:
            until = self._watermark
        timer_values = self._timer_values()
        callbacks = 0
        while callbacks < MOST_CALLBACKS and (due := timers.due(min(until, MAX_WATERMARK - 1))):
            keys = dict.fromkeys(key for _, key in due)
            self._backend.prefetch(keys)
            if self._nested is not None:
                whole = self._nested.whole(keys)
                columns = self._groups.in_zone(whole) if self._spec.in_pandas else whole.columns
                self._whole = dict(zip(keys, without_zones(columns), strict=True))
            for time, key in due:
                self._fire_one(time, key, timer_values)
                timers.delete(key, time)
            callbacks += len(due)
            if until == MAX_WATERMARK or (self._in_batches and self._time_mode == "eventtime"):
                return
        self._ask_for_next_timer(until)

    def _fire_one(self, time: int, key: Key, timer_values: TimerValues) -> None:
        self._cursor.key = key
        if self._nested is not None:
            parts = self._whole[key]
        else:
            parts = key if self._zoned_keys is None else self._without_zones(key)
        key_row = tuple.__new__(self._key_class, parts)
        with self._user_code("handleExpiredTimer", key):
            result: Any = self._processor.handleExpiredTimer(
                key=key_row, timerValues=timer_values, expiredTimerInfo=ExpiredTimerInfo(time)
            )
            try:
                results = iter(result)
            except TypeError:
                raise self._not_iterable("handleExpiredTimer", result) from None
            self._pending.extend(results)
            self._collect_pending()

    def _without_zones(self, key: Key) -> Key:
        """The key as Spark gives it to timers: timestamps without a zone, in UTC, or as in the frames of rows."""
        assert self._zoned_keys is not None
        zone = pa.lib.string_to_tzinfo(self._zone) if self._spec.in_pandas else dt.UTC
        return tuple(
            part.astimezone(zone).replace(tzinfo=None) if zoned and part is not None else part
            for part, zoned in zip(key, self._zoned_keys, strict=True)
        )

    def _ask_for_next_timer(self, until: int = -1) -> None:
        """Asks for a call at the next processing-time timer, or at once if one up to the time ``until`` had to wait."""
        if self._handle is None or self._handle.timers is None:
            return
        time = self._handle.timers.next_time()
        if time is None:
            return
        if self._time_mode == "processingtime" and not self._spec.timers_wait:
            self.context.set_timer(time)
        elif time <= until:
            self.context.set_timer(self._now)

    def _flush(self) -> None:
        if self._results.rows:
            results = self._results.build()
            if self._spec.output_event_time is not None:
                self._check_event_time(results.column(self._spec.output_event_time))
            self.output.emit(results)

    def _check_event_time(self, times: pa.Array) -> None:
        """Raises LateResultError for rows that would be late for the downstream operators, as in Spark."""
        earliest = pc.min(times.cast(pa.int64())).as_py()
        if earliest is not None and earliest <= in_unit(self._sent_watermark, times.type.unit):
            raise LateResultError(
                f"operator {self.context.uid!r} returned a row whose {self._spec.output_event_time} is "
                f"{pc.min(times)}, but the watermark after it is at {self._sent_watermark} ms since 1970: its rows "
                "must be later, or have no event time"
            )

    @contextmanager
    def _user_code(self, method: str, key: Key | None) -> Iterator[None]:
        """Adds the method and key to an error from user code, and resets the current key afterwards."""
        try:
            with running(self._task):
                yield
        except Exception as error:
            error.add_note(f"in {method} of operator {self.context.uid!r}" + ("" if key is None else f", key {key!r}"))
            raise
        finally:
            self._cursor.key = None


def _own_copy(processor: Any) -> StatefulProcessor:
    """Copies the processor, as Spark's workers do: a restarted attempt must not see leftovers of an earlier attempt."""
    if isinstance(processor, type):
        processor = processor()
    if not isinstance(processor, StatefulProcessor):
        raise ProcessorUsageError(f"{processor!r} is not a pyspark StatefulProcessor")
    copy: StatefulProcessor = cloudpickle.loads(cloudpickle.dumps(processor))
    return copy


def _decoded(schema: pa.Schema) -> pa.Schema:
    """The schema of the decoded values."""
    return pa.schema([field.with_type(decoded_type(field.type)) for field in schema])
