"""Runs a source of the public protocol (``ckpt_runtime/sources.py``): one enumerator in front of the readers.

The enumerator sends each split to one reader as data, in front of the barrier of the checkpoint that counts it as sent.
Each discovered split is therefore in the state of exactly one reader until it has ended. A restore at any parallelism
distributes the readers' splits with their positions. A checkpoint may be taken between any two batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace

from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.pipeline_options import BadRowsMode, ExecutionOptions, PipelineOptions
from ckpt_runtime.connectors.datasource_rows import restored_items
from ckpt_runtime.connectors.split_host import (
    ENDED_SPLITS,
    ENUMERATOR,
    OPEN_SPLITS,
    STEP_MS,
    RangeEnumerator,
    Reposition,
    SplitHost,
)
from ckpt_runtime.connectors.splits import Pacer
from ckpt_runtime.graph.bad_rows import reader_policy
from ckpt_runtime.graph.event_time import Alignment, alignment_of
from ckpt_runtime.graph.formats import SPLIT_SCHEMA, available_now
from ckpt_runtime.graph.schema import NonNegative, decoded
from ckpt_runtime.graph.specs import READER_SUFFIX, EnumeratorSpec, RangeReaderSpec, UserFunction
from ckpt_runtime.operators.bad_rows import BadRows
from ckpt_runtime.operators.operator import EventTime, OperatorContext, Output, RowOrigins
from ckpt_runtime.operators.slice_size import SliceSize
from ckpt_runtime.scheduler.watermark_alignment import Progress, SplitAlignment
from ckpt_runtime.sources import BadRow, Source, Split, SplitEnumerator, SplitReader

_VERSION = 1


S = TypeVar("S")
D = TypeVar("D")
P = TypeVar("P")


class _StoredSplit(Struct, Generic[D]):
    """The stored form of a split whose description has type ``D``."""

    id: str
    description: D
    bounded: bool = True

    @property
    def split(self) -> Split:
        return Split(self.id, self.description, self.bounded)


class _StoredOpenSplit(Struct, Generic[D, P]):
    """The stored form of a split that is being read, with a position of type ``P``, None at its beginning.

    ``event_time`` is the event time that the rows of an aligned source had reached.
    """

    split: _StoredSplit[D]
    position: P | None
    range_start: NonNegative
    event_time: EventTime | None = None


class _StoredReposition(Reposition, Generic[D, P]):
    """Has the splits, too, that the readers had in the snapshot."""

    reading: list[_StoredOpenSplit[D, P]]


class _StoredEnumerator(Struct, Generic[S, D, P]):
    """The stored form for a source whose enumerators have states of type ``S``.

    ``start_positions`` are the kinds of positions that the source takes; None in snapshots of earlier releases.
    """

    state: S
    splits: NonNegative
    ended_in: str | None
    start_positions: list[str] | None = None
    ranges: NonNegative = 0
    reposition: _StoredReposition[D, P] | None = None


class _StoredEndedSplit(Struct, Generic[D]):
    """The stored form of a split whose end no completed checkpoint covers yet."""

    split: _StoredSplit[D]


_HELD_MS = 50
_FIRST_ROWS, _MOST_ROWS = 1024, 32_768
_SLICE_MS = 10.0
_SHORT_MS = 200.0
_COUNT_EVERY_MS = 200


class SplitEnumeratorOperator(RangeEnumerator):
    """Sends the splits that an enumerator finds; parallelism 1."""

    requires_final_checkpoint = False

    def __init__(self, spec: EnumeratorSpec, source: Source, schema: pa.Schema) -> None:
        super().__init__(spec)
        self._source = source
        self._schema = schema
        self._bounded = available_now(spec.options) or source.is_bounded
        self._program = spec.program
        self._enumerator: SplitEnumerator | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        state = None
        source = self._source
        _connect(source, self._program, context)
        stored = _StoredEnumerator[source.state_type, source.description_type, source.position_type]  # type: ignore[name-defined]
        for item in restored_items(context, ENUMERATOR, stored, _VERSION):
            state = item.state
            self.continue_behind(item.splits, item.ranges, item.ended_in)
            if item.reposition is not None:
                state, self._ended = self._repositioned(state, item.reposition), False
        self._enumerator = self._source.open_enumerator(self._schema, state, bounded=self._bounded)

    def send_range(self) -> bool:
        assert self._enumerator is not None
        found = self._enumerator.discover()
        if found:
            self.output.emit(pa.RecordBatch.from_pylist(list(self._rows_of(found)), schema=SPLIT_SCHEMA))
            self._splits += len(found)
            self.end_range()
        self._ended = self._bounded and not found
        return bool(found)

    def idle_ms(self) -> int:
        assert self._enumerator is not None
        return min(self._enumerator.idle_ms, STEP_MS) if self.waits else self._enumerator.idle_ms

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        assert self._enumerator is not None
        item = {
            "version": _VERSION,
            "state": self._enumerator.snapshot(),
            "splits": self._splits,
            "ranges": self.ranges_with_data,
            "ended_in": self.ended_in,
            "start_positions": sorted(self._source.start_positions),
        }
        self.context.operator_state.put(ENUMERATOR, [item])

    def close(self) -> None:
        if self._enumerator is not None:
            self._enumerator.close()

    def _repositioned(self, state: Any, given: _StoredReposition[Any, Any]) -> Any:
        """The state of an enumerator that continues where a user has set it. Raises ValueError."""
        self.check_position(given.position, self._source.start_positions)
        reading = [(opened.split.split, opened.position) for opened in given.reading]
        try:
            return self._source.repositioned(self._schema, state, reading, given.position)
        except ValueError as error:
            raise ValueError(f"source {self.context.uid!r} cannot continue from the given position: {error}") from error

    def _rows_of(self, splits: Iterable[Split]) -> Iterable[dict[str, Any]]:
        for number, split in enumerate(splits):
            text = json.dumps({"id": split.id, "description": split.description, "bounded": split.bounded})
            yield {"sequence": self._splits + number, "number": number, "partition": text, "rows": None}


@dataclass(slots=True)
class _OpenSplit:
    """A split that is being read: its position, and the sequence number with which its range begins."""

    split: Split
    position: Any
    range_start: int


class SplitReaderOperator(SplitHost):
    """Reads the splits that were sent to this subtask. The batch size adapts to the time that rows take to process."""

    def __init__(self, spec: RangeReaderSpec, source: Source, schema: pa.Schema) -> None:
        super().__init__(in_calls=spec.in_calls)
        self._source = source
        self._schema = schema
        self._acknowledges = spec.acknowledges and source.acknowledges
        self._policy = reader_policy(spec.options)
        self._options = spec.options
        self._alignment: _Alignment | None = None
        self._bad_rows: BadRows | None = None
        self._gives_origins = False
        self._program = spec.program
        self.requires_final_checkpoint = self._acknowledges
        self._reader: SplitReader | None = None
        self._open: dict[str, _OpenSplit] = {}
        self._ended: list[Split] = []
        self._covered: dict[int, tuple[dict[str, Any], list[Split]]] = {}
        self._size = SliceSize(_FIRST_ROWS, _MOST_ROWS, _SLICE_MS)
        self._in_range = False
        self._pacer: Pacer | None = None
        self._paused = False
        self._counted_at: float | None = None

    @property
    def has_work_left(self) -> bool:
        """Whether bounded splits remain to be read. Unbounded ones keep their positions when the job is drained."""
        return any(opened.split.bounded for opened in self._open.values())

    @property
    def reads(self) -> bool:
        return bool(self._open) or (self._alignment is not None and not self._alignment.splits.is_settled)

    @property
    def unread_range(self) -> int | None:
        return min((opened.range_start for opened in self._open.values() if opened.split.bounded), default=None)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        configuration = Configuration(context.configuration)
        self._gives_origins = configuration.get(ExecutionOptions.BAD_ROWS_MODE) is BadRowsMode.DEAD_LETTER
        rates = configuration.get(PipelineOptions.SOURCE_RATES) or {}
        self._set_rate({uid: float(rate) for uid, rate in rates.items()})
        _connect(self._source, self._program, context)
        self._bad_rows = BadRows.of(context, ValueError, self._policy)
        self._source.reports_bad = self._bad_rows is not None
        self._reader = self._source.open_reader(
            self._schema, subtask=context.subtask_index, parallelism=context.parallelism
        )
        wanted = alignment_of(self._options)
        self._alignment = None if wanted is None else _Alignment(context, wanted, self._reader)
        description = self._source.description_type
        stored_open = _StoredOpenSplit[description, self._source.position_type]  # type: ignore[valid-type, name-defined]
        stored_ended = _StoredEndedSplit[description]  # type: ignore[valid-type]
        for item in sorted(
            restored_items(context, OPEN_SPLITS, stored_open, _VERSION), key=lambda item: item.range_start
        ):
            self._add(item.split.split, item.position, item.range_start, item.event_time)
        if self.unread_range is not None:
            self.continue_in_range(self.unread_range)
        ended = [item.split.split for item in restored_items(context, ENDED_SPLITS, stored_ended, _VERSION)]
        if ended and self._acknowledges:
            self._reader.completed({}, ended)
        self.ask_for_next_step()

    def take(self, row: dict[str, Any]) -> None:
        self._add(decoded(row["partition"].encode(), Split), None, row["sequence"] - row["number"])

    def read_step(self) -> int | None:
        assert self._reader is not None
        if (wait_ms := self._pause_ms()) is not None:
            self._count_pending(now=False)
            return wait_ms
        rows = self._reader.read(self._most_rows())
        if self._pacer is not None and rows is not None:
            self._pacer.spend(len(rows.bad) + (0 if rows.batch is None else rows.batch.num_rows))
        self._count_pending(now=rows is None or rows.ended)
        if rows is None:
            self.looks += 1
            if not self._reader.holds_event_time:
                if self._in_range and not self.has_work_left:
                    self._in_range = False
                    self.output.emit_end_of_range()
                self._reader.begin_range()
            return self._reader.idle_ms
        self._in_range = True
        opened = self._open[rows.split_id]
        opened.position = rows.position
        if rows.ended:
            del self._open[rows.split_id]
            if self._acknowledges:
                self._ended.append(opened.split)
        if rows.batch is not None and rows.batch.num_rows:
            if rows.origin is not None and self._gives_origins:
                numbers = np.arange(rows.batch.num_rows)
                self.context.chain_time.origins = RowOrigins(rows.batch, numbers, rows.origin)
            self._emit(rows.batch)
            self.context.chain_time.origins = None
        if self._alignment is not None:
            self._alignment.took(opened.split, ended=rows.ended)
        if rows.bad:
            self._leave_out(rows.bad)
        return None

    def _most_rows(self) -> int:
        most = self._size.rows
        return most if self._pacer is None else min(most, self._pacer.allowance())

    def _pause_ms(self) -> int | None:
        """How long it has to wait for its rate, or because it is ahead of other sources; None if it may read."""
        if self._pacer is not None and (self._paused or self._most_rows() < 1):
            if self._alignment is not None:
                self._alignment.report_if_due()
            return self._pacer.idle_ms()
        if self._alignment is not None:
            holds = self._alignment.holds_reader()
            self.alignment_drift_ms = self._alignment.splits.drift_ms
            if holds or not self._open:
                return _HELD_MS
        return None

    def snapshot(self, checkpoint_id: int) -> None:
        store = self.context.operator_state
        store.put(OPEN_SPLITS, [self._open_item(opened) for opened in self._open.values()])
        store.put(ENDED_SPLITS, [{"version": _VERSION, "split": _item_of(split)} for split in self._ended])
        if self._acknowledges:
            positions = {split_id: opened.position for split_id, opened in self._open.items()}
            self._covered[checkpoint_id] = (positions, list(self._ended))
        super().snapshot(checkpoint_id)
        self.ask_for_next_step()

    def measured(self) -> OperatorMeasures:
        if self._reader is None:
            return super().measured()
        found = (*(self._reader.offsets() or ({}, {})), self._reader.begun())
        reached, latest, begun = ({topic: dict(parts) for topic, parts in each.items()} for each in found)
        return replace(super().measured(), reached=reached, latest=latest, begun=begun)

    def notify_complete(self, checkpoint_id: int) -> None:
        covered = [known for known in self._covered if known <= checkpoint_id]
        if not covered:
            return
        assert self._reader is not None
        positions, ended = self._covered[max(covered)]
        for known in covered:
            del self._covered[known]
        self._reader.completed(positions, ended)
        self._ended = [split for split in self._ended if split not in ended]

    def close(self) -> None:
        self._open.clear()
        if self._reader is not None:
            self._reader.close()

    def limit(self, rates: Mapping[str, float]) -> None:
        self._set_rate(rates)
        self.ask_for_next_step()

    def _set_rate(self, rates: Mapping[str, float]) -> None:
        rate = rates.get(self.context.uid.removesuffix(READER_SUFFIX))
        self._paused = rate == 0
        self._pacer = None if rate is None else Pacer(rate / self.context.parallelism, self.context.monotonic_ms)

    def align(self, minimum: int) -> None:
        if self._alignment is not None:
            self._alignment.splits.align(minimum)
            self.alignment_drift_ms = self._alignment.splits.drift_ms
            self.ask_for_next_step()

    def _open_item(self, opened: _OpenSplit) -> dict[str, Any]:
        item = {"split": _item_of(opened.split), "position": opened.position, "range_start": opened.range_start}
        if self._alignment is not None:
            item["event_time"] = self._alignment.splits.event_time_of(opened.split.id)
        return {"version": _VERSION, **item}

    def _add(self, split: Split, position: Any, range_start: int, event_time: int | None = None) -> None:
        assert self._reader is not None
        if split.id in self._open:
            raise ValueError(f"source {self.context.uid!r}: split {split.id!r} was found again while it is being read")
        self._open[split.id] = _OpenSplit(split, position, range_start)
        self._reader.add(split, position)
        if self._alignment is not None:
            self._alignment.splits.add(split.id, event_time, bounded=split.bounded)

    def _count_pending(self, *, now: bool) -> None:
        """Asks the reader periodically for the number of pending rows, and always when few are left."""
        at = self.context.monotonic_ms()
        if now or self._counted_at is None or at - self._counted_at >= _COUNT_EVERY_MS:
            assert self._reader is not None
            self._counted_at, self.pending_rows = at, self._reader.backlog()

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        if self._bad_rows is not None:
            self._bad_rows.barrier(checkpoint_id)

    def finish(self) -> None:
        if self._bad_rows is not None:
            self._bad_rows.flush()

    def _leave_out(self, bad: Sequence[BadRow]) -> None:
        """Counts and keeps bad rows. Raises ValueError if they have to fail the job."""
        if self._bad_rows is None:
            first = bad[0]
            raise ValueError(f"source {self.context.uid!r}: bad row at {first.position}: {first.reason}")
        self._bad_rows.take_unread(bad)
        self.bad_rows_dropped = self._bad_rows.dropped

    def _emit(self, batch: pa.RecordBatch) -> None:
        """Emits a batch. No barrier or mail is processed until the operators of the chain have processed all of it."""
        before = self.context.monotonic_ms()
        self.output.emit(batch)
        took_ms = self.context.monotonic_ms() - before
        # A short batch, such as a small file, shows what a call costs and not what rows do.
        if batch.num_rows >= self._size.rows or took_ms > _SHORT_MS:
            self._size.took(batch.num_rows, took_ms)


class _Alignment:
    """Makes a reader wait with splits that are ahead of others, and reports the progress of the reader."""

    def __init__(self, context: OperatorContext, wanted: Alignment, reader: SplitReader) -> None:
        idle_ms = wanted.idle_timeout_ms
        if idle_ms is None:
            idle_ms = Configuration(context.configuration).get(PipelineOptions.IDLE_TIMEOUT)
        self.splits = SplitAlignment(wanted.max_drift_ms, idle_ms, each=reader.pauses_splits)
        self._context = context
        self._reader = reader
        self._update_ms = wanted.update_interval_ms
        self._held: frozenset[str] = frozenset()
        self._reported: Progress | None = None
        self._report_at = 0.0

    def holds_reader(self) -> bool:
        """Called before each look for rows. Pauses splits; True if the reader has to wait as a whole."""
        now = self._context.monotonic_ms()
        self.splits.looked(now)
        before, self._held = self._held, self.splits.held
        if self._reader.pauses_splits and self._held != before:
            self._reader.pause(self._held)
        self._context.chain_time.held = bool(self._held)
        # The others have to know at once that this subtask will not advance, because they may wait for it.
        if (self._held != before and self.splits.holds_all) or self.splits.is_settled:
            self._report()
        self.report_if_due()
        return bool(self._held) and not self._reader.pauses_splits

    def took(self, split: Split, *, ended: bool) -> None:
        """Rows have passed the operators of the chain, of which ``withWatermark`` has recorded their event time."""
        chain = self._context.chain_time
        self.splits.advance(split.id, chain.reached_ms)
        chain.reached_ms = None
        if ended:
            self.splits.remove(split.id, bounded=split.bounded)

    def report_if_due(self) -> None:
        """Sends the progress to the driver if it has changed, and the interval since the last time is over."""
        if self._context.monotonic_ms() >= self._report_at:
            self._report()

    def _report(self) -> None:
        progress = self.splits.progress
        if progress != self._reported:
            self._reported = progress
            self._report_at = self._context.monotonic_ms() + self._update_ms
            self._context.report_progress(progress)


def _connect(source: Source, program: UserFunction | None, context: OperatorContext) -> None:
    """Lets a source of a PySpark program reach the session's own Spark, with a session for this subtask."""
    if program is None:
        return
    place = f"{context.uid}/{context.subtask_index}"

    def session() -> Any:
        # Most sources have no use for Spark, whose client takes a second to import.
        from ckpt_runtime.frontend.live_session import session_of_query

        assert context.spark_url is not None
        return session_of_query(program.session, context.spark_url(), context.job_id, place, program.configuration)

    source.spark = lru_cache(session)


def _item_of(split: Split) -> dict[str, Any]:
    return {"id": split.id, "description": split.description, "bounded": split.bounded}
