"""Reads the partitions that the enumerator of a PySpark stream reader planned and sent to this subtask, step by step.

Memory stays bounded, and the subtask serves its mailbox between two buffers. A checkpoint may come between two
partitions, and with option ``orderedReads`` between two buffers of one: what is left to read is the state. PySpark
promises that offsets can be read again, but not in which order rows come within a partition, and not after ``commit``
has covered them: for a reader with its own ``commit``, checkpoints are taken only when everything sent has been read.
The same holds for rows that came instead of partitions. Never plans and never commits anything itself.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader

from ckpt_runtime.connectors.datasource_rows import records_to_batches, struct_type
from ckpt_runtime.connectors.datasource_values import restored_items, values_of, versioned
from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.formats import described_data_source, ordered_reads
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import RangeReaderSpec
from ckpt_runtime.operators.operator import MAX_WATERMARK, Operator, OperatorContext, Output, WaitingInput
from ckpt_runtime.operators.task_context import new_task, running

_SPLITS = "splits"
_SPLITS_OF_VERSION_1 = "shares"

_TAKE_EVERY_MS = 10
_LEAST_TAKE_MS = 20
_GREATEST_TAKE_MS = 2_000


class ReplayError(RuntimeError):
    """A reader returned other rows for a partition than before the restore."""


@dataclass(slots=True)
class Split:
    """A partition that is not read to its end; ``rows`` of it were emitted, the last one with the given digest.

    ``sequence`` tells the order among all, ``number`` the place within its range. ``partition`` is the user's object as
    a tagged text. Self-contained: any subtask can continue with it.
    """

    sequence: NonNegative
    number: NonNegative
    partition: str
    rows: NonNegative = 0
    digest: str = ""

    @property
    def range_start(self) -> int:
        """The sequence number with which its range begins."""
        return self.sequence - self.number


class _Carried:
    """Rows that came instead of partitions: all rows of their range."""

    def __init__(self, range_start: int, stream: bytes) -> None:
        self.range_start = range_start
        self.batches: Iterator[pa.RecordBatch] = iter(pa.ipc.open_stream(stream))


class _Reader:
    """The user's reader in this subtask in its initial state, and the codec of its partitions."""

    def __init__(self, instance: Any, schema: pa.Schema) -> None:
        self._made = instance.streamReader(struct_type(schema))
        self.values: TaggedValues = values_of(type(instance), self._made)
        self.commits = type(self._made).commit is not DataSourceStreamReader.commit

    def for_one_partition(self) -> Any:
        """Returns a copy, as each Spark task has one, so that what ``read`` leaves in it reaches no other partition.

        A reader that cannot be copied, and that Spark could not send to its tasks either, reads all partitions.
        """
        try:
            return deepcopy(self._made)
        except Exception:
            return self._made


class RangeReaderOperator(Operator):
    """Built from a :class:`RangeReaderSpec`. Takes further partitions after it has read the pending ones.

    It asks for the next step with a timer that is always due; a subtask looks at its input only when none is. While
    reading may be interrupted it also takes partitions that precede a barrier, and some from time to time, since a
    barrier behind them may not have been sent yet for lack of credit. MAX_WATERMARK is forwarded when everything
    pending is read. Any other watermark is the enumerator's: everything below that sequence number was sent. It, or
    the first partition of a later range, shows that this subtask has got all of its partitions of a range.
    """

    requires_final_checkpoint = False

    def __init__(self, spec: RangeReaderSpec) -> None:
        assert isinstance(spec.format, type)
        self._ordered = ordered_reads(spec.options)
        self._instance, self._schema = described_data_source(spec.format, spec.options, spec.schema, spec.told)
        self._name = spec.format.__name__
        self._user: _Reader | None = None
        self._pending: deque[Split | _Carried] = deque()
        self._carried = 0
        self._open: Iterator[pa.RecordBatch] | None = None
        self._last: pa.RecordBatch | None = None
        self._taken = 0
        self._take_after_ms = 0.0
        self._ends = False
        self._dealt_out = 0
        self._passed = 0

    @property
    def has_work_left(self) -> bool:
        return bool(self._pending)

    @property
    def holds_checkpoints_back(self) -> bool:
        """True inside a partition of unknown row order, rows that came instead, or a range that must be read whole."""
        if not self._pending:
            return False
        if self._carried or self._of_user().commits:
            return True
        return self._open is not None and not self._ordered

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        items = (item for name in (_SPLITS, _SPLITS_OF_VERSION_1) for item in restored_items(context, name, Split))
        splits = sorted(items, key=lambda split: split.sequence)
        self._pending.extend(splits)
        if splits:
            # Rows of that range may have been emitted already, so it has not just begun.
            self._passed = splits[0].range_start
        self._ask_for_next_step()

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if not self._pending:
            self._taken = 0
        for row in batch.to_pylist():
            if row["rows"] is None:
                self._pending.append(Split(row["sequence"], row["number"], row["partition"]))
            else:
                self._pending.append(_Carried(row["sequence"], row["rows"]))
                self._carried += 1
        self._taken += 1
        pause = min(max(self._taken * _TAKE_EVERY_MS, _LEAST_TAKE_MS), _GREATEST_TAKE_MS)
        self._take_after_ms = self.context.monotonic_ms() + pause
        self._pass_ends_on()
        self._ask_for_next_step()

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK:
            self._ends = True
        else:
            self._dealt_out = max(self._dealt_out, timestamp_ms)
        self._pass_ends_on()

    def on_processing_time(self, now_ms: int) -> None:
        """Does one step, which emits at most one batch."""
        if self._pending:
            self._step()
            self._pass_ends_on()
        self._ask_for_next_step()

    def snapshot(self, checkpoint_id: int) -> None:
        if self.holds_checkpoints_back:
            raise RuntimeError(f"operator {self.context.uid!r}: checkpoint {checkpoint_id} came where none may")
        splits = [split for split in self._pending if isinstance(split, Split)]
        if splits and self._last is not None:
            splits[0].digest = _digest_of_last_row(self._last)
        self.context.operator_state.put(_SPLITS, versioned(asdict(split) for split in splits))
        self._ask_for_next_step()

    def close(self) -> None:
        self._pending.clear()
        self._carried = 0
        self._close_partition()

    def _pass_ends_on(self) -> None:
        """Forwards the end of ranges whose partitions sent here are read, and the end of data."""
        read_up_to = self._pending[0].range_start if self._pending else self._dealt_out
        if read_up_to > self._passed:
            self._passed = read_up_to
            self.output.emit_end_of_range()
        if self._ends and not self._pending:
            self._ends = False
            self.output.emit_watermark(MAX_WATERMARK)

    def _ask_for_next_step(self) -> None:
        if self._pending:
            # A timer that is due goes before the input; one of the next millisecond lets the subtask look there first.
            self.context.set_timer(self.context.now_ms() + 1 if self._may_take_input() else 0)

    def _may_take_input(self) -> bool:
        """Whether the subtask may look at its input before everything pending is read."""
        if self.holds_checkpoints_back:
            return False
        waiting = self.context.waiting_input()
        if waiting is WaitingInput.ROWS:
            return self.context.monotonic_ms() >= self._take_after_ms
        return waiting is WaitingInput.BARRIER

    def _of_user(self) -> _Reader:
        if self._user is None:
            self._user = _Reader(self._instance, self._schema)
        return self._user

    def _step(self) -> None:
        """Emits one batch, or ends a partition."""
        current = self._pending[0]
        if isinstance(current, _Carried):
            batch = next(current.batches, None)
            if batch is None:
                self._pending.popleft()
                self._carried -= 1
            else:
                self.output.emit(batch)
            return
        if self._open is None:
            self._task = new_task(current.number, self.context.attempt)
        with running(self._task):
            if self._open is None:
                self._open = self._read(current)
            batch = next(self._open, None)
        if batch is None:
            self._close_partition()
            self._pending.popleft()
            return
        if self._ordered:
            current.rows += batch.num_rows
            self._last = batch
        self.output.emit(batch)

    def _read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Reads the batches of a partition after the rows that were emitted already."""
        user = self._of_user()
        partition = user.values.decode(split.partition)
        reader = user.for_one_partition()
        batches = records_to_batches(reader.read(partition), self._schema, f"{type(reader).__name__}.read")
        return self._skipped(batches, split) if split.rows else batches

    def _skipped(self, batches: Iterator[pa.RecordBatch], split: Split) -> Iterator[pa.RecordBatch]:
        left = split.rows
        for batch in batches:
            if batch.num_rows < left:
                left -= batch.num_rows
                continue
            if _digest_of_last_row(batch.slice(0, left)) != split.digest:
                break
            self._last = batch.slice(0, left)
            if left < batch.num_rows:
                yield batch.slice(left)
            yield from batches
            return
        raise ReplayError(
            f"{self._name}: partition {split.partition[:200]} does not give the {split.rows} rows again, in their "
            "order, that it gave before the restore; with option orderedReads, which the job had, it must"
        )

    def _close_partition(self) -> None:
        opened, self._open, self._last = self._open, None, None
        close = getattr(opened, "close", None)
        if close is not None:
            with running(self._task):
                close()


def _digest_of_last_row(batch: pa.RecordBatch) -> str:
    (row,) = batch.slice(batch.num_rows - 1).to_pylist()
    return hashlib.sha256(repr(list(row.values())).encode()).hexdigest()[:16]
