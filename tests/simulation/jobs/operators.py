"""Small deterministic operators behind the real interfaces. Each checks what it gets: order, losses, repetitions.

A keyed operator keeps in its state which rows it has seen, so that a row which is lost or comes twice is found when it
happens, across restores as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, SourceOperator, SourceStatus
from tests.simulation.jobs.rows import (
    WINDOW_MS,
    Row,
    SourceRows,
    batch_of,
    bit_of,
    copy_of,
    flat_mapped,
    number_of,
    pair_id,
    row_id,
    rows_of,
    source_of,
    window_id,
)
from tests.simulation.schedules.violation import Violation

_KEY = pa.schema([("key", pa.int64())])
_SEEN = pa.schema([("seen0", pa.int64()), ("seen1", pa.int64())])


class Surroundings(Protocol):
    """What operators need of the simulated world."""

    def spend(self, millis: float) -> None:
        """Time passes while an operator works."""

    def chance(self, kind: str, probability: float) -> bool: ...

    def broadcast_ended(self, rows: list[int]) -> None:
        """A subtask's copy of the broadcast rows at the end of data."""

    def commit(self, transaction: str, checkpoint_id: int, rows: list[Row]) -> None: ...


class SimulatedError(RuntimeError):
    """What an operator raises for an injected failure."""


@dataclass(slots=True)
class Probe:
    """What one subtask has processed, in order, as (gate, row id, key); and how much of it at each snapshot."""

    name: str
    processed: list[tuple[int, int, int]] = field(default_factory=list)
    cuts: dict[int, int] = field(default_factory=dict)
    fails: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where an operator sits. ``probe`` is None unless it heads a chain with inputs.

    ``waits``: it requires a final checkpoint, as sinks always do.
    """

    world: Surroundings
    sources: tuple[SourceRows, ...]
    ordered: tuple[bool, ...] = ()
    cost_ms: float = 0.0
    probe: Probe | None = None
    source: int = 0
    waits: bool = False


class SimulatedOperator(Operator):
    """Passes rows on."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.requires_final_checkpoint = place.waits
        self._last: dict[tuple[int, int, int, int], tuple[int, int]] = {}

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        rows = rows_of(batch)
        place = self._place
        if place.probe is not None:
            if place.probe.fails:
                raise SimulatedError(place.probe.name)
            place.probe.processed += [(input_index, row[0], row[1]) for row in rows]
            if place.ordered[input_index]:
                self._check_order(rows, input_index)
        if place.cost_ms:
            place.world.spend(place.cost_ms * len(rows))
        self.handle(rows, input_index)

    def _check_order(self, rows: list[Row], gate: int) -> None:
        """Rows of one split and key come in their order, each once, between two restores."""
        for identity, key, _, _ in rows:
            source, number = source_of(identity), number_of(identity)
            position = (number, copy_of(identity))
            flow = (gate, source, number % self._place.sources[source].splits, key)
            if self._last.get(flow, (-1, 0)) >= position:
                raise Violation(f"{self.context.uid}: row {position} after {self._last[flow]} of {flow}")
            self._last[flow] = position

    def handle(self, rows: list[Row], gate: int) -> None:
        self.emit(rows)

    def emit(self, rows: list[Row]) -> None:
        if rows:
            self.output.emit(batch_of(rows))

    def snapshot(self, checkpoint_id: int) -> None:
        if self._place.probe is not None:
            self._place.probe.cuts[checkpoint_id] = len(self._place.probe.processed)


class FlatMapOperator(SimulatedOperator):
    """None, one or two copies of each row."""

    def handle(self, rows: list[Row], gate: int) -> None:
        self.emit([out for row in rows for out in flat_mapped(row)])


class _Keyed(SimulatedOperator):
    """Remembers per key which rows it has seen."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        assert context.keyed_state is not None
        self._state = context.keyed_state
        self._seen = [self._state.value_state(f"seen{gate}", _KEY, _SEEN) for gate in range(len(self._place.ordered))]

    def see(self, row: Row, gate: int) -> int:
        """Notes a row; returns how many of its key had come before. Raises Violation for one that has come before."""
        identity, key, _, _ = row
        masks = self._seen[gate].get((key,)) or (0, 0)
        bit, copy = bit_of(identity), copy_of(identity)
        if masks[copy] >> bit & 1:
            raise Violation(f"{self.context.uid}: row {identity} of key {key} came twice")
        self._seen[gate].put((key,), (masks[0] | (1 << bit if not copy else 0), masks[1] | (1 << bit if copy else 0)))
        return int(masks[0].bit_count() + masks[1].bit_count())


class CountOperator(_Keyed):
    """How many rows of the key have come, over all gates: one row out for each row in."""

    def handle(self, rows: list[Row], gate: int) -> None:
        out = []
        for row in rows:
            before = self.see(row, gate)
            for other in range(len(self._seen)):
                if other != gate:
                    masks = self._seen[other].get((row[1],)) or (0, 0)
                    before += masks[0].bit_count() + masks[1].bit_count()
            out.append((row[0], row[1], row[2], before + 1))
        self.emit(out)


class JoinOperator(_Keyed):
    """All pairs of equal keys; each when its second row comes."""

    def handle(self, rows: list[Row], gate: int) -> None:
        out = []
        for row in rows:
            self.see(row, gate)
            masks = self._seen[1 - gate].get((row[1],)) or (0, 0)
            source = self._place.sources[1 - gate]
            for copy in (0, 1):
                mask = masks[copy] >> source.source * 31
                while mask:
                    number = (mask & -mask).bit_length() - 1
                    mask &= mask - 1
                    other = row_id(source.source, number, copy)
                    pair = (row[0], other) if gate == 0 else (other, row[0])
                    out.append((pair_id(*pair), row[1], max(row[2], source.ts(number)), 0))
        self.emit(out)


class WindowOperator(_Keyed):
    """Counts by event-time window and key. No row may ever be late: sources send watermarks behind their rows."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        integer = pa.schema([("n", pa.int64())])
        self._counts = self._state.map_state("counts", _KEY, integer, integer)
        self._timers = self._state.timers("windows", _KEY)
        self._watermark = -1

    def handle(self, rows: list[Row], gate: int) -> None:
        for row in rows:
            identity, key, ts, _ = row
            if ts <= self._watermark:
                raise Violation(
                    f"{self.context.uid}: row {identity} of time {ts} is behind watermark {self._watermark}"
                )
            self.see(row, gate)
            window = ts // WINDOW_MS
            known = self._counts.get_value((key,), (window,))
            self._counts.put((key,), (window,), (1 if known is None else known[0] + 1,))
            self._timers.register((key,), (window + 1) * WINDOW_MS - 1)

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms <= self._watermark:
            raise Violation(f"{self.context.uid}: watermark {timestamp_ms} after {self._watermark}")
        self._watermark = timestamp_ms
        out = []
        for time, key in self._timers.due(timestamp_ms):
            self._timers.delete(key, time)
            window = time // WINDOW_MS
            count = self._counts.get_value(key, (window,))
            assert count is not None
            self._counts.remove(key, (window,))
            out.append((window_id(window), key[0], time, count[0]))
        self.emit(out)
        self.output.emit_watermark(timestamp_ms)


class EnrichOperator(SimulatedOperator):
    """Passes the rows of gate 0 on and keeps those of gate 1, which every subtask gets, as broadcast state."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._table: list[int] = list(context.operator_state.restored("table", int))

    def handle(self, rows: list[Row], gate: int) -> None:
        if gate == 0:
            self.emit(rows)
            return
        for row in rows:
            if row[0] in self._table:
                raise Violation(f"{self.context.uid}: broadcast row {row[0]} came twice")
            self._table.append(row[0])

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        self.context.operator_state.put("table", list(self._table), OperatorStateMode.BROADCAST)

    def finish(self) -> None:
        self._place.world.broadcast_ended(self._table)


class SinkOperator(SimulatedOperator):
    """Two-phase commit: rows between two barriers are one transaction, committed when a checkpoint covers it.

    One that ``waits`` opens transactions behind ``finish`` as well, of which the last ones never get any rows.
    """

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self.requires_final_checkpoint = True
        self._rows: list[Row] = []
        self._pending: list[tuple[str, int, list[Row]]] = []
        for name, checkpoint_id, rows in context.operator_state.restored("pending", tuple[str, int, list[Any]]):
            self._place.world.commit(name, checkpoint_id, [tuple(row) for row in rows])

    def handle(self, rows: list[Row], gate: int) -> None:
        self._rows += rows

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        context = self.context
        if self._rows or self._place.waits:
            name = f"{context.job_id[-4:]}/{context.subtask_index}/{context.attempt}/{checkpoint_id}"
            self._pending.append((name, checkpoint_id, self._rows))
            self._rows = []
        items = [[name, number, [list(row) for row in rows]] for name, number, rows in self._pending]
        context.operator_state.put("pending", items)

    def notify_complete(self, checkpoint_id: int) -> None:
        for name, number, rows in self._pending:
            if number <= checkpoint_id:
                self._place.world.commit(name, number, rows)
        self._pending = [pending for pending in self._pending if pending[1] > checkpoint_id]


class RowSource(SourceOperator):
    """Reads its splits in turn; positions are list state. A watermark trails the slowest of its splits."""

    def __init__(self, place: Place, batch_rows: int) -> None:
        self._place = place
        self.requires_final_checkpoint = place.waits
        self._batch_rows = batch_rows
        self._rows = place.sources[place.source]

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.restored_checkpoint_id is None:
            mine = range(context.subtask_index, self._rows.splits, context.parallelism)
            self._positions: dict[int, int] = dict.fromkeys(mine, 0)
        else:
            self._positions = dict(context.operator_state.restored("splits", tuple[Any, Any]))
        self._turn = 0
        self._watermark = -1
        self._emit_watermark()

    def poll(self) -> SourceStatus:
        left = [split for split, position in self._positions.items() if position < self._length(split)]
        if not left:
            return SourceStatus.END_OF_INPUT
        if self._place.world.chance("source idle", 0.04):
            return SourceStatus.NOTHING_AVAILABLE
        self._turn += 1
        split = left[self._turn % len(left)]
        first = self._positions[split]
        last = min(first + min(self._batch_rows, self.most_rows), self._length(split))
        rows = [self._rows.row(split + position * self._rows.splits) for position in range(first, last)]
        self._positions[split] = last
        self.output.emit(batch_of(rows))
        if self._turn % 2 == 0:
            self._emit_watermark()
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return 3

    def _length(self, split: int) -> int:
        return len(range(split, self._rows.rows, self._rows.splits))

    def _emit_watermark(self) -> None:
        """Nothing at or below it comes any more from this subtask's splits."""
        reached = [
            self._rows.ts(split + (position - 1) * self._rows.splits) if position else -1
            for split, position in self._positions.items()
            if position < self._length(split)
        ]
        if reached and min(reached) > self._watermark:
            self._watermark = min(reached)
            self.output.emit_watermark(self._watermark)

    def snapshot(self, checkpoint_id: int) -> None:
        items: list[Any] = [[split, position] for split, position in self._positions.items()]
        self.context.operator_state.put("splits", items)


OPERATORS: dict[str, type[SimulatedOperator]] = {
    "map": SimulatedOperator,
    "flatmap": FlatMapOperator,
    "count": CountOperator,
    "join": JoinOperator,
    "window": WindowOperator,
    "enrich": EnrichOperator,
    "sink": SinkOperator,
}
