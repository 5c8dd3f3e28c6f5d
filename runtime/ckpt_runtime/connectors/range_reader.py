"""Reads the offset ranges that the enumerator of a PySpark stream reader planned: each subtask its share, step by step.

Memory stays bounded, and the subtask hears its mailbox between two buffers. A barrier may come between two partitions
of a range, and with option ``orderedReads`` between two buffers of one: what is left of the ranges is the state.
PySpark promises that offsets can be read again, but not the order of rows within a partition, and nothing that its
``commit`` has covered: a reader with a ``commit`` of its own gets barriers at the ends of ranges only. So do rows that
came with their range. Never commits anything itself.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader

from ckpt_runtime.connectors.datasource_rows import records_to_batches, struct_type
from ckpt_runtime.connectors.task_context import identify_thread
from ckpt_runtime.graph.formats import new_data_source, ordered_reads, source_schema
from ckpt_runtime.graph.specs import RangeReaderSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, WaitingInput

SHARES = "shares"

_TAKE_EVERY_MS = 10
_LEAST_TAKE_MS = 20
_GREATEST_TAKE_MS = 2_000


class ReplayError(RuntimeError):
    """A reader gave something else for a partition or range than before the restore."""


@dataclass(slots=True)
class Share:
    """Partitions ``number``, ``number + of``, … of a range; ``rows`` of the first are out, the last with that digest.

    ``partitions`` is how many the range has, None until it was planned. Self-contained: any subtask can go on with it.
    """

    sequence: int
    start: dict[str, Any]
    end: dict[str, Any]
    number: int
    of: int
    rows: int = 0
    digest: str = ""
    partitions: int | None = None


class _Carried:
    """Rows that came with their range."""

    def __init__(self, stream: bytes) -> None:
        self.batches: Iterator[pa.RecordBatch] = iter(pa.ipc.open_stream(stream))


class RangeReaderOperator(Operator):
    """Built from a :class:`RangeReaderSpec`. Takes the next range when it has read the one before.

    It asks for the next step with a timer that is always due; a subtask looks at its input only when none is. While a
    range may be interrupted it also takes ranges that stand before a barrier, and some from time to time, since a
    barrier behind them may not have been sent yet for want of credit. A watermark (the one of the end of data) goes on
    when everything pending is read.
    """

    def __init__(self, spec: RangeReaderSpec) -> None:
        assert isinstance(spec.format, type)
        self._source = spec.format
        self._options = spec.options
        self._ordered = ordered_reads(spec.options)
        self._schema = source_schema(spec.format, spec.options, spec.schema)
        self._name = spec.format.__name__
        self._reader: Any = None
        self._pending: deque[Share | _Carried] = deque()
        self._plan: list[Any] | None = None
        self._open: Iterator[pa.RecordBatch] | None = None
        self._last: pa.RecordBatch | None = None
        self._take_after_ms = 0
        self._watermark: int | None = None

    @property
    def has_work_left(self) -> bool:
        return bool(self._pending)

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        identify_thread(context.subtask_index, context.parallelism, context.attempt)
        shares = [Share(**item) for item in context.operator_state.restored(SHARES)]
        shares.sort(key=lambda share: (share.sequence, share.number))
        self._pending.extend(shares)
        self._ask_for_next_step()

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        index, parallelism = self.context.subtask_index, self.context.parallelism
        for row in batch.to_pylist():
            if row["rows"] is None:
                start, end = json.loads(row["start"]), json.loads(row["end"])
                self._pending.append(Share(row["sequence"], start, end, index, parallelism))
            elif row["sequence"] % parallelism == index:
                self._pending.append(_Carried(row["rows"]))
        pause = min(max(len(self._pending) * _TAKE_EVERY_MS, _LEAST_TAKE_MS), _GREATEST_TAKE_MS)
        self._take_after_ms = self.context.now_ms() + pause
        self._ask_for_next_step()

    def process_watermark(self, timestamp_ms: int) -> None:
        self._watermark = timestamp_ms
        self._pass_watermark_on()

    def on_processing_time(self, now_ms: int) -> None:
        """One step: at most one batch."""
        if self._pending:
            self._step()
            self._pass_watermark_on()
        self._ask_for_next_step()

    def snapshot(self, checkpoint_id: int) -> None:
        shares = [share for share in self._pending if isinstance(share, Share)]
        if len(shares) < len(self._pending):
            raise RuntimeError(f"operator {self.context.uid!r}: a barrier overtook rows that came with their range")
        if shares and self._last is not None:
            shares[0].digest = _digest_of_last_row(self._last)
        self.context.operator_state.put(SHARES, [asdict(share) for share in shares])
        self._ask_for_next_step()

    def close(self) -> None:
        self._pending.clear()
        self._close_partition()

    def _pass_watermark_on(self) -> None:
        if self._watermark is not None and not self._pending:
            watermark, self._watermark = self._watermark, None
            self.output.emit_watermark(watermark)

    def _ask_for_next_step(self) -> None:
        if self._pending:
            self.context.set_timer(self.context.now_ms() + 1 if self._may_take_input() else 0)

    def _may_take_input(self) -> bool:
        """Whether the subtask may look at its input before everything pending is read."""
        if not all(isinstance(share, Share) for share in self._pending) or not self._can_be_interrupted():
            return False
        if self._open is not None and not self._ordered:
            return False
        waiting = self.context.waiting_input()
        if waiting is WaitingInput.ROWS:
            return self.context.now_ms() >= self._take_after_ms
        return waiting is WaitingInput.BARRIER

    def _can_be_interrupted(self) -> bool:
        """A reader's ``commit(end)`` says that nothing up to ``end`` is read again: then ranges are read as a whole."""
        return type(self._stream_reader()).commit is DataSourceStreamReader.commit

    def _stream_reader(self) -> Any:
        if self._reader is None:
            self._reader = new_data_source(self._source, self._options).streamReader(struct_type(self._schema))
        return self._reader

    def _step(self) -> None:
        """Emits one batch, or goes on to the next partition or range."""
        current = self._pending[0]
        if isinstance(current, _Carried):
            batch = next(current.batches, None)
            if batch is None:
                self._pending.popleft()
            else:
                self.output.emit(batch)
            return
        if self._plan is None:
            self._plan = self._planned(current)
        if current.number >= len(self._plan):
            self._pending.popleft()
            self._plan = None
            return
        if self._open is None:
            self._open = self._read(self._plan[current.number], current)
        batch = next(self._open, None)
        if batch is None:
            self._close_partition()
            current.number += current.of
            current.rows, current.digest = 0, ""
            return
        current.rows += batch.num_rows
        self._last = batch
        self.output.emit(batch)

    def _planned(self, share: Share) -> list[Any]:
        partitions = list(self._stream_reader().partitions(share.start, share.end))
        if share.partitions not in (None, len(partitions)):
            raise ReplayError(
                f"{self._name}: partitions({share.start}, {share.end}) gave {len(partitions)} partitions and not "
                f"{share.partitions} as before the restore; it must depend on its arguments only"
            )
        share.partitions = len(partitions)
        return partitions

    def _read(self, partition: Any, share: Share) -> Iterator[pa.RecordBatch]:
        """The batches of a partition behind the rows that are out already."""
        reader = self._stream_reader()
        batches = records_to_batches(reader.read(partition), self._schema, f"{type(reader).__name__}.read")
        return self._skipped(batches, share) if share.rows else batches

    def _skipped(self, batches: Iterator[pa.RecordBatch], share: Share) -> Iterator[pa.RecordBatch]:
        left = share.rows
        for batch in batches:
            if batch.num_rows < left:
                left -= batch.num_rows
                continue
            if _digest_of_last_row(batch.slice(0, left)) != share.digest:
                break
            self._last = batch.slice(0, left)
            if left < batch.num_rows:
                yield batch.slice(left)
            yield from batches
            return
        raise ReplayError(
            f"{self._name}: partition {share.number} of range {share.start} to {share.end} does not give the "
            f"{share.rows} rows again, in their order, that it gave before the restore; a reader with option "
            "orderedReads must"
        )

    def _close_partition(self) -> None:
        opened, self._open, self._last = self._open, None, None
        close = getattr(opened, "close", None)
        if close is not None:
            close()


def _digest_of_last_row(batch: pa.RecordBatch) -> str:
    (row,) = batch.slice(batch.num_rows - 1).to_pylist()
    return hashlib.sha256(repr(list(row.values())).encode()).hexdigest()[:16]
