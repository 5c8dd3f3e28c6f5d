"""Runs the public sink protocol (``ckpt_runtime.sinks``): in each subtask, and with one committer after them.

* A commit follows the completion of its checkpoint, or of a later one. After a restore it is repeated.
* Output that was prepared for an aborted checkpoint is covered by the next one. It is aborted only when the operator
  closes and no restore can use it any longer.
* Every subtask stores the sink's id, so that the copy of any subtask suffices after rescaling.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec
import pyarrow as pa
from msgspec.structs import replace as changed

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.checkpoint.sink_state import MESSAGES, NEXT_BATCH, PENDING, SINK_ID
from ckpt_runtime.connectors.datasource_rows import restored_items, versioned
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.formats import COMMITTABLE_SCHEMA
from ckpt_runtime.graph.schema import DocumentError, NonNegative, malformed
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.sinks import BadRowError, CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction
from ckpt_runtime.state.errors import CorruptStateError

CHECK_EVERY_MS = 500
"""How often a failure in the background is looked for."""
_MAX_SHOWN_CHARS = 500
_LOG = logging.getLogger(__name__)

C = TypeVar("C")


class _StoredPending(msgspec.Struct, Generic[C]):
    """The stored form of the committables of a commit that has not been made, of the sink's type ``C``.

    Earlier releases stored each ``committable`` by itself.
    """

    checkpoint: NonNegative
    writer: str
    committables: tuple[C, ...] = ()
    committable: C | msgspec.UnsetType = msgspec.UNSET


class _StoredMessages(msgspec.Struct):
    """The stored form: a text for each writing subtask, or None for a subtask that wrote nothing.

    Versions before batch ids used the checkpoint's id as that of the batch.
    """

    checkpoint: NonNegative
    messages: tuple[tuple[NonNegative, str | None], ...]
    writer: str | None = None
    batch: NonNegative | None = None


def sink_context(context: OperatorContext) -> SinkContext:
    """Returns the context of a sink in this subtask. Raises ValueError for an operator deployed without a sink's id."""
    if context.sink is None:
        raise ValueError(f"sink {context.uid!r} was deployed without its id")
    return SinkContext(
        sink_id=context.sink.sink_id,
        job_id=context.job_id,
        uid=context.uid,
        subtask_index=context.subtask_index,
        parallelism=context.parallelism,
        attempt=context.attempt,
        restored_checkpoint_id=context.restored_checkpoint_id,
        ended_jobs=context.sink.ended_jobs,
        savepoint_id=context.sink.savepoint_id,
        spark_url=context.spark_url,
    )


class _WriterOperator(LeavesOutBadRows):
    """Passes the rows of a subtask to the sink's writer.

    ``table`` is the schema in output mode complete: the end of a range ends a result table, which may have no rows.
    """

    caught_for_bad_rows = BadRowError

    def __init__(self, sink: Sink, table: pa.Schema | None = None) -> None:
        self._sink = sink
        self._table = table
        self._writer: SinkWriter | None = None
        self._check_requested = False

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._place = sink_context(context)
        self._checkpoint_id = context.restored_checkpoint_id or 0

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._writer is None:
            self._writer = self._sink.open_writer(
                batch.schema, replace(self._place, last_checkpoint_id=self._checkpoint_id)
            )
        if not self._check_requested and type(self._writer).check is not SinkWriter.check:
            self._check_requested = True
            self.context.set_timer(self.context.now_ms() + CHECK_EVERY_MS)
        for _ in self._parts(batch, self._writer.write):
            pass  # a part of the batch is written

    def process_end_of_range(self) -> None:
        """Drops it: a sink has no output. An empty result table is written, too, since it replaces the previous one."""
        if self._table is not None:
            self.process_batch(pa.RecordBatch.from_pylist([], self._table), 0)

    def on_processing_time(self, now_ms: int) -> None:
        """Raises a failure of the writer's background work even if the next row or barrier is hours away."""
        if self._writer is not None and self._check_requested:
            self._writer.check()
            self.context.set_timer(now_ms + CHECK_EVERY_MS)

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: a sink has no output, and committables have no event time."""

    def process_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        """Drops it as well."""

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()

    def _prepared(self, checkpoint_id: int) -> Sequence[Any]:
        self._check_requested = False
        self._checkpoint_id = checkpoint_id
        return () if self._writer is None else self._writer.prepare_commit(checkpoint_id)

    def _store_id(self) -> None:
        self.context.operator_state.put(SINK_ID, [self._place.sink_id], OperatorStateMode.SPLIT)


class PreparingSinkOperator(_WriterOperator):
    """The writers of a sink with one committer: sends committables to it in front of the barrier."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._sink.clean_up(self._place)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        super().prepare_snapshot(checkpoint_id)
        rows = [
            {
                "checkpoint_id": checkpoint_id,
                "subtask": self.context.subtask_index,
                "message": self._sink.encode(committable),
            }
            for committable in self._prepared(checkpoint_id)
        ]
        if rows:
            self.output.emit(pa.RecordBatch.from_pylist(rows, schema=COMMITTABLE_SCHEMA))

    def snapshot(self, checkpoint_id: int) -> None:
        self._store_id()


class CommittingSinkOperator(_WriterOperator):
    """A sink whose subtasks each commit their prepared output. The pending committables are list state.

    They are split among the restored subtasks at any parallelism; each commits its own and together they cover the
    snapshot. (Union state would give all of them to each subtask, but then no checkpoint can be taken once some
    subtasks have ended.) What belongs to one commit stays together: a target that remembers the ids of transactions
    takes each of them once.
    """

    def __init__(self, sink: Sink, table: pa.Schema | None = None) -> None:
        super().__init__(sink, table)
        self._pending: list[tuple[Transaction, Any]] = []
        self._taken: set[int] = set()
        self._committer: SinkCommitter | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        """Commits the output that the restored snapshot covers, and removes other output."""
        super().open(context, output)
        self._taken = {context.restored_checkpoint_id or 0}
        self._committer = self._sink.open_committer(None, self._place)
        restored = self._restored()
        self._pending = restored
        self._commit(restored)
        self._sink.clean_up(self._place)

    def snapshot(self, checkpoint_id: int) -> None:
        place = self._place
        transaction = Transaction(f"{place.sink_id}-{place.job_id}-{place.subtask_index}", checkpoint_id)
        self._pending += [(transaction, committable) for committable in self._prepared(checkpoint_id)]
        items = [
            {
                "checkpoint": pending.checkpoint_id,
                "writer": pending.writer_id,
                "committables": msgspec.to_builtins(committables),
            }
            for pending, committables in _grouped(self._pending)
        ]
        self.context.operator_state.put(PENDING, items, OperatorStateMode.SPLIT)
        self._store_id()
        self._taken.add(checkpoint_id)

    def notify_complete(self, checkpoint_id: int) -> None:
        # Includes committables of earlier checkpoints, whose notification may have been lost.
        self._taken = {taken for taken in self._taken if taken > checkpoint_id} | {checkpoint_id}
        self._commit([pending for pending in self._pending if pending[0].checkpoint_id <= checkpoint_id])
        assert self._committer is not None
        self._committer.completed(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        self._taken.discard(checkpoint_id)

    @property
    def has_commits_left(self) -> bool:
        return self._committer is not None and self._committer.is_busy

    def measured(self) -> OperatorMeasures:
        return changed(super().measured(), uncommitted=bool(self._pending))

    def close(self) -> None:
        try:
            super().close()
        finally:
            if self._committer is not None:
                covered = max(self._taken)
                for transaction, committables in _grouped(self._pending):
                    if transaction.checkpoint_id > covered:
                        self._committer.abort(transaction, committables)
                self._committer.close()

    def _restored(self) -> list[tuple[Transaction, Any]]:
        state, committable = self.context.operator_state, self._sink.committable
        if any("writer" not in item for item in state.restored(PENDING, dict[str, Any])):
            # Versions before the protocol stored the fields of a pending file alone.
            return [(Transaction("", 0), item) for item in state.restored(PENDING, committable)]
        stored: tuple[_StoredPending[Any], ...] = state.restored(PENDING, _StoredPending[committable])  # type: ignore[valid-type]
        return [
            (Transaction(item.writer, item.checkpoint), each)
            for item in stored
            for each in (item.committables if item.committable is msgspec.UNSET else (item.committable,))
        ]

    def _commit(self, pending: list[tuple[Transaction, Any]]) -> None:
        """Commits all, continues after errors and raises the first one: everything that can become visible does."""
        assert self._committer is not None
        errors: list[Exception] = []
        self._pending = [other for other in self._pending if other not in pending]
        for transaction, committables in _grouped(pending):
            try:
                _log(self.context, transaction, self._committer.commit(transaction, committables))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class CommitterOperator(Operator):
    """Commits the output that the writers of a sink have prepared, in the order of checkpoints; parallelism 1.

    A checkpoint with output gets the next batch id when a snapshot or a commit needs it. Ids are state, so a restored
    job repeats those of the checkpoints that it commits again.
    """

    def __init__(self, sink: Sink, schema: pa.Schema) -> None:
        self._sink = sink
        self._schema = schema
        self._messages: dict[Transaction, list[tuple[int, str | None]]] = {}
        self._next_batch = 0
        self._taken: set[int] = set()
        """The snapshots that a restore may use, as far as this operator knows."""
        self._committer: SinkCommitter | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        """Commits the output that the restored snapshot covers, even if it was committed before."""
        super().open(context, output)
        self._place = sink_context(context)
        restored = context.restored_checkpoint_id or 0
        self._taken = {restored}
        for item in restored_items(context, MESSAGES, _StoredMessages):
            batch_id = item.checkpoint if item.batch is None else item.batch
            self._messages[self._transaction(item.checkpoint, item.writer, batch_id)] = list(item.messages)
        # A sink that a version without batch ids has stored has used the ids of checkpoints so far.
        used = restored if context.sink is not None and context.sink.continues else -1
        self._next_batch = max(context.operator_state.restored(NEXT_BATCH, NonNegative), default=used + 1)
        self._commit_up_to(max((known.checkpoint_id for known in self._messages), default=0))

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for row in batch.to_pylist():
            known = self._transaction(row["checkpoint_id"])
            self._messages.setdefault(known, []).append((row["subtask"], row["message"]))

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: a committer has no output."""

    def snapshot(self, checkpoint_id: int) -> None:
        items = [
            {
                "checkpoint": known.checkpoint_id,
                "writer": known.writer_id,
                "batch": known.batch_id,
                "messages": [list(entry) for entry in self._messages[known]],
            }
            for known in self._ordered()
        ]
        self.context.operator_state.put(MESSAGES, versioned(items))
        self.context.operator_state.put(NEXT_BATCH, [self._next_batch])
        self._taken.add(checkpoint_id)

    def notify_complete(self, checkpoint_id: int) -> None:
        self._taken = {taken for taken in self._taken if taken > checkpoint_id} | {checkpoint_id}
        self._commit_up_to(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        """Keeps the checkpoint's committables for a later checkpoint."""
        self._taken.discard(checkpoint_id)

    def measured(self) -> OperatorMeasures:
        return changed(super().measured(), uncommitted=bool(self._messages))

    def close(self) -> None:
        """Aborts committables that no restore can use, in checkpoint order; tries all, then raises the first error."""
        errors: list[Exception] = []
        covered = max(self._taken, default=0)
        for known in self._ordered():
            if known.checkpoint_id > covered:
                try:
                    self._open_committer().abort(known, self._decoded(known))
                except Exception as error:
                    errors.append(error)
        self._messages.clear()
        if self._committer is not None:
            self._committer.close()
        if errors:
            raise errors[0]

    def _commit_up_to(self, checkpoint_id: int) -> None:
        """Commits in checkpoint order. After a failure, this and later checkpoints are committed after the restore."""
        for known in self._ordered():
            if known.checkpoint_id <= checkpoint_id:
                self._commit(known, self._decoded(known))
                del self._messages[known]

    def _commit(self, known: Transaction, committables: list[Any]) -> None:
        _log(self.context, known, self._open_committer().commit(known, committables))

    def _open_committer(self) -> SinkCommitter:
        if self._committer is None:
            self._committer = self._sink.open_committer(self._schema, self._place)
        return self._committer

    def _ordered(self) -> list[Transaction]:
        """All checkpoints with output, in their order, each with its batch id."""
        ordered = sorted(self._messages, key=lambda known: known.checkpoint_id)
        for index, known in enumerate(ordered):
            if known.batch_id is None:
                ordered[index] = replace(known, batch_id=self._next_batch)
                self._messages[ordered[index]] = self._messages.pop(known)
                self._next_batch += 1
        return ordered

    def _decoded(self, known: Transaction) -> list[Any]:
        """The committables of a checkpoint. Raises CorruptStateError for a text that the sink cannot decode."""
        committables: list[Any] = []
        for subtask, text in sorted(self._messages[known], key=lambda entry: entry[0]):
            try:
                with malformed():
                    committables.append(None if text is None else self._sink.decode(text))
            except DocumentError as error:
                raise CorruptStateError(
                    f"operator {self.context.uid!r}: the committables of subtask {subtask} for checkpoint "
                    f"{known.checkpoint_id} cannot be used: {error}; they are "
                    f"{printable(repr(text), _MAX_SHOWN_CHARS)}"
                ) from error
        return committables

    def _transaction(
        self, checkpoint_id: int, writer_id: str | None = None, batch_id: int | None = None
    ) -> Transaction:
        return Transaction(writer_id or f"{self._place.sink_id}-{self._place.job_id}", checkpoint_id, batch_id)


def _grouped(pending: list[tuple[Transaction, Any]]) -> list[tuple[Transaction, list[Any]]]:
    groups: dict[Transaction, list[Any]] = {}
    for transaction, committable in pending:
        groups.setdefault(transaction, []).append(committable)
    return sorted(groups.items(), key=lambda group: group[0].checkpoint_id)


def _log(context: OperatorContext, transaction: Transaction, outcome: CommitOutcome) -> None:
    if outcome is CommitOutcome.ALREADY_COMMITTED:
        _LOG.info("%s: checkpoint %d was already committed", context.uid, transaction.checkpoint_id)
