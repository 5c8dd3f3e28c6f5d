"""Reads the partitions that the enumerator of a PySpark stream reader planned and sent to this subtask, step by step.

Memory stays bounded, and the subtask serves its mailbox between two buffers. A checkpoint may be taken between two
partitions, and with option ``orderedReads`` between two buffers of one: the state is the unread rest. PySpark
guarantees that offsets can be read again, but neither the order of rows within a partition, nor that offsets can be
read after ``commit`` has covered them: for a reader with its own ``commit``, checkpoints are taken only when everything
sent has been read. The same holds for rows that were sent instead of partitions. Never plans and never commits anything
itself.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader

from ckpt_runtime.connectors.datasource_rows import (
    records_to_batches,
    restored_items,
    struct_type,
    values_of,
    versioned,
)
from ckpt_runtime.connectors.split_host import UNREAD_PARTITIONS, SplitHost
from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.formats import described_data_source, ordered_reads
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import RangeReaderSpec
from ckpt_runtime.operators.operator import OperatorContext, Output
from ckpt_runtime.operators.task_context import copy_for_task, new_task, running


class ReplayError(RuntimeError):
    """After a restore, a reader returned different rows for a partition than before."""


@dataclass(slots=True)
class Split:
    """A partition that has not been read to its end; ``rows`` of it were emitted, the last one with the given digest.

    ``sequence`` is its position among all partitions, ``number`` that within its range. ``partition`` is the user's
    object as a tagged text. Self-contained: any subtask can continue with it.
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
    """Rows that were sent instead of partitions: all rows of their range."""

    def __init__(self, range_start: int, stream: bytes) -> None:
        self.range_start = range_start
        self.batches: Iterator[pa.RecordBatch] = iter(pa.ipc.open_stream(stream))


class _Reader:
    """The user's reader in this subtask in its initial state, and the codec of its partitions."""

    def __init__(self, instance: Any, schema: pa.Schema) -> None:
        self.made = instance.streamReader(struct_type(schema))
        self.values: TaggedValues = values_of(type(instance), self.made)
        self.commits = type(self.made).commit is not DataSourceStreamReader.commit


class RangeReaderOperator(SplitHost):
    """Built from a :class:`RangeReaderSpec`."""

    def __init__(self, spec: RangeReaderSpec) -> None:
        assert isinstance(spec.format, type)
        super().__init__(in_calls=spec.in_calls)
        self._ordered = ordered_reads(spec.options)
        self._instance, self._schema = described_data_source(spec.format, spec.options, spec.schema, spec.reported)
        self._name = spec.format.__name__
        self._user: _Reader | None = None
        self._pending: deque[Split | _Carried] = deque()
        self._carried = 0
        self._open: Iterator[pa.RecordBatch] | None = None
        self._last: pa.RecordBatch | None = None

    @property
    def has_work_left(self) -> bool:
        return bool(self._pending)

    @property
    def reads(self) -> bool:
        return bool(self._pending)

    @property
    def unread_range(self) -> int | None:
        return self._pending[0].range_start if self._pending else None

    @property
    def holds_checkpoints_back(self) -> bool:
        return self._has_to_go_on or super().holds_checkpoints_back

    @property
    def _has_to_go_on(self) -> bool:
        """True within a partition of unknown row order, rows sent instead, or a range that must be read whole."""
        if not self._pending:
            return False
        if self._carried or self._of_user().commits:
            return True
        return self._open is not None and not self._ordered

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        splits = sorted(restored_items(context, UNREAD_PARTITIONS, Split), key=lambda split: split.sequence)
        self._pending.extend(splits)
        if splits:
            self.continue_in_range(splits[0].range_start)
        self.ask_for_next_step()

    def take(self, row: dict[str, Any]) -> None:
        if row["rows"] is None:
            self._pending.append(Split(row["sequence"], row["number"], row["partition"]))
        else:
            self._pending.append(_Carried(row["sequence"], row["rows"]))
            self._carried += 1

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        if self._has_to_go_on:
            raise RuntimeError(
                f"operator {self.context.uid!r}: checkpoint {checkpoint_id} arrived within a range "
                "that has to be complete"
            )
        splits = [split for split in self._pending if isinstance(split, Split)]
        if splits and self._last is not None:
            splits[0].digest = _digest_of_last_row(self._last)
        self.context.operator_state.put(UNREAD_PARTITIONS, versioned(asdict(split) for split in splits))
        self.ask_for_next_step()

    def close(self) -> None:
        self._pending.clear()
        self._carried = 0
        self._close_partition()

    def _of_user(self) -> _Reader:
        if self._user is None:
            self._user = _Reader(self._instance, self._schema)
        return self._user

    def read_step(self) -> int | None:
        """Emits one batch, or ends a partition."""
        current = self._pending[0]
        if isinstance(current, _Carried):
            batch = next(current.batches, None)
            if batch is None:
                self._pending.popleft()
                self._carried -= 1
            else:
                self.output.emit(batch)
            return None
        if self._open is None:
            self._task = new_task(current.number, self.context.attempt)
        with running(self._task):
            if self._open is None:
                self._open = self._read(current)
            batch = next(self._open, None)
        if batch is None:
            self._close_partition()
            self._pending.popleft()
            return None
        if self._ordered:
            current.rows += batch.num_rows
            self._last = batch
        self.output.emit(batch)
        return None

    def _read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Reads the batches of a partition after the rows that were emitted already."""
        user = self._of_user()
        partition = user.values.decode(split.partition)
        reader = copy_for_task(user.made)
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
            f"{self._name}: partition {split.partition[:200]} does not give the {split.rows} rows that it gave before "
            "the restore in the same order again; option orderedReads, with which the job ran, requires it"
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
