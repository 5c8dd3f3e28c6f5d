"""PySpark ``DataSource`` stream writers, unchanged and without a JVM: writers write, one committer commits.

A checkpoint takes the role of Spark's micro-batch: ``write`` is called once per subtask and checkpoint with the rows
since the last one, its message goes to the committer before the barrier, and
``commit(messages, batchId=checkpoint id)`` follows the completion. A commit may be repeated after a failure
with the same id and messages, as in Spark.
When committer and writers close, they call ``abort(messages, batchId)`` for messages that no snapshot can cover: not at
an aborted checkpoint, which a later one covers, and not while the outcome of a checkpoint is unknown. A writer aborts
its unfinished ``write``: with the message if it had returned before the barrier came, and with None if it raised or
was interrupted.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextvars import copy_context
from typing import Any

import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.connectors.datasource_rows import batch_of_spark, batch_to_rows, spark_schema, struct_type
from ckpt_runtime.connectors.datasource_values import restored_items, values_of, versioned
from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.formats import COMMITTABLE_SCHEMA, new_data_source
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import CommitterSpec, SinkSpec
from ckpt_runtime.operators.helper_thread import HelperThread
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.operators.task_context import new_task, running

_MESSAGES = "messages"
_QUEUED_BATCHES = 4
_CHECK_SECONDS = 0.2
_ABANDON_SECONDS = 10.0
_LOOK_EVERY_MS = 500
"""Interval of the check for a failed ``write`` while neither rows nor a barrier come."""


class _Abandoned(Exception):
    """Raised inside the user's ``write`` when the subtask is closed in the middle of it."""


class _Epoch:
    """One call of ``write``, in its own thread, which gets the rows batch by batch."""

    def __init__(self, writer: Any, schema: pa.Schema, values: TaggedValues, context: OperatorContext) -> None:
        self._writer = writer
        self._values = values
        self._struct = struct_type(schema)
        self._schema = spark_schema(self._struct)
        self._context = context
        self._queue: queue.Queue[pa.RecordBatch | _Abandoned | None] = queue.Queue(_QUEUED_BATCHES)
        self._message: str | None = None
        """The encoded result of ``write``; None before it has returned, and when it raised."""
        self._error: BaseException | None = None
        # In the subtask's context, so that log records of user code belong to the subtask.
        run = copy_context().run
        self._thread = HelperThread(target=run, args=(self._run,), name=f"write {context.name}", daemon=True)
        self._thread.start()

    def feed(self, batch: pa.RecordBatch) -> None:
        """Hands over a batch; waits while the writer is busy. Raises what ``write`` raised.

        Once ``write`` has returned, further rows of the epoch are dropped, as in Spark.
        """
        self._put(batch)
        self.raise_error()

    def complete(self) -> str:
        """Ends the rows and returns the encoded message of ``write``; raises what it raised."""
        self._put(None)
        self._thread.join()
        self.raise_error()
        assert self._message is not None
        return self._message

    def abandon(self) -> str | None:
        """Makes ``write`` fail, and waits a moment for it. Returns its message if it had returned before."""
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(_Abandoned())
                break
            except queue.Full:
                try:
                    # Makes room: rows that the writer has not taken yet are discarded.
                    self._queue.get_nowait()
                except queue.Empty:
                    continue
        self._thread.join(_ABANDON_SECONDS)
        return self._message

    def raise_error(self) -> None:
        """Raises what ``write`` has raised so far."""
        if self._error is not None:
            raise self._error

    def _put(self, item: pa.RecordBatch | None) -> None:
        while self._thread.is_alive():
            try:
                # With a timeout: a writer that has ended meanwhile takes no more items and never wakes this thread.
                self._queue.put(item, timeout=_CHECK_SECONDS)
                return
            except queue.Full:
                continue

    def _run(self) -> None:
        try:
            with running(new_task(self._context.subtask_index, self._context.attempt)):
                self._message = self._encoded(self._writer.write(self._input()))
        except BaseException as error:
            self._error = error

    def _encoded(self, message: Any) -> str:
        """Encodes a message. Raises what Spark raises for a value, such as None, that is not a message."""
        from pyspark.errors import PySparkRuntimeError
        from pyspark.sql.datasource import WriterCommitMessage

        if not isinstance(message, WriterCommitMessage):
            expected = "'WriterCommitMessage' as the return type of the `write` method"
            raise PySparkRuntimeError(
                errorClass="DATA_SOURCE_TYPE_MISMATCH",
                messageParameters={"expected": expected, "actual": type(message).__name__},
            )
        return self._values.encode(message, "commit message")

    def _input(self) -> Iterator[Any]:
        from pyspark.sql.datasource import DataSourceStreamArrowWriter

        as_arrow = isinstance(self._writer, DataSourceStreamArrowWriter)
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Abandoned):
                raise item
            batch = batch_of_spark(item, self._schema)
            if as_arrow:
                yield batch
            else:
                yield from batch_to_rows(batch, self._struct)


class StreamWriterOperator(Operator):
    """Runs the user's writer in each subtask. Keeps no state: the committer keeps its messages."""

    def __init__(self, spec: SinkSpec) -> None:
        assert isinstance(spec.format, type)
        self._source = spec.format
        self._options = spec.options
        self._epoch: _Epoch | None = None
        self._schema: pa.Schema | None = None
        self._values: TaggedValues | None = None
        self._checkpoint_id = 0
        """The last checkpoint whose barrier has come, or the restored one."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._checkpoint_id = context.restored_checkpoint_id or 0

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._epoch is None:
            writer = _new_writer(self._source, self._options, batch.schema)
            if self._values is None:
                self._values = values_of(self._source, writer)
            self._schema = batch.schema
            self._epoch = _Epoch(writer, batch.schema, self._values, self.context)
            self._look_later()
        self._epoch.feed(batch)

    def on_processing_time(self, now_ms: int) -> None:
        """Reports a failed ``write`` even if the next row or barrier is hours away."""
        if self._epoch is not None:
            self._epoch.raise_error()
            self._look_later()

    def _look_later(self) -> None:
        self.context.set_timer(self.context.now_ms() + _LOOK_EVERY_MS)

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: the rows sent downstream are committables, which have no event time."""

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        """Ends the epoch and sends its message in front of the barrier; an epoch without rows has none."""
        message = None if self._epoch is None else self._epoch.complete()
        self._checkpoint_id = checkpoint_id
        if message is None:
            return
        self._epoch = None
        row = {"checkpoint_id": checkpoint_id, "subtask": self.context.subtask_index, "message": message}
        self.output.emit(pa.RecordBatch.from_pylist([row], schema=COMMITTABLE_SCHEMA))

    def close(self) -> None:
        """Aborts a ``write`` that no barrier has ended (returned, raised or running), since no snapshot covers it.

        The batch id is that of the last barrier plus one: no checkpoint of this attempt completes from there on.
        """
        if self._epoch is None:
            return
        message = self._epoch.abandon()
        self._epoch = None
        assert self._schema is not None
        assert self._values is not None
        carried = None if message is None else self._values.decode(message)
        _new_writer(self._source, self._options, self._schema).abort([carried], self._checkpoint_id + 1)


class _Messages(Struct):
    """The stored form: a message of each subtask, tagged, or None for a subtask that wrote nothing."""

    checkpoint: NonNegative
    messages: tuple[tuple[NonNegative, str | None], ...]


class CommitterOperator(Operator):
    """Commits what the writers prepared; parallelism 1."""

    def __init__(self, spec: CommitterSpec) -> None:
        assert isinstance(spec.format, type)
        assert spec.schema is not None
        self._source = spec.format
        self._options = spec.options
        self._schema = spec.schema
        self._messages: dict[int, list[tuple[int, str | None]]] = {}
        self._values: TaggedValues | None = None
        self._taken: set[int] = set()
        """Snapshots that a restore may use, as far as this operator knows."""

    def open(self, context: OperatorContext, output: Output) -> None:
        """Commits what the restored snapshot covers, even if it was committed before."""
        super().open(context, output)
        self._taken = {context.restored_checkpoint_id or 0}
        for item in restored_items(context, _MESSAGES, _Messages):
            self._messages[item.checkpoint] = list(item.messages)
        self._commit_up_to(max(self._messages, default=0))

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for row in batch.to_pylist():
            self._messages.setdefault(row["checkpoint_id"], []).append((row["subtask"], row["message"]))

    def process_watermark(self, timestamp_ms: int) -> None:
        """Drops the watermark: a committer has no output."""

    def snapshot(self, checkpoint_id: int) -> None:
        items = [
            {"checkpoint": known, "messages": [list(entry) for entry in messages]}
            for known, messages in sorted(self._messages.items())
        ]
        self.context.operator_state.put(_MESSAGES, versioned(items))
        self._taken.add(checkpoint_id)

    def notify_complete(self, checkpoint_id: int) -> None:
        self._commit_up_to(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        """Keeps the checkpoint's messages for a later checkpoint."""
        self._taken.discard(checkpoint_id)

    def close(self) -> None:
        """Aborts messages that no restore can use, in checkpoint order; tries all, then raises the first error."""
        errors: list[Exception] = []
        covered = max(self._taken, default=0)
        for known in sorted(known for known in self._messages if known > covered):
            try:
                writer = self._writer()
                writer.abort(self._decoded(known, writer), known)
            except Exception as error:
                errors.append(error)
        self._messages.clear()
        if errors:
            raise errors[0]

    def _commit_up_to(self, checkpoint_id: int) -> None:
        """Commits in checkpoint order; after a failure this and later checkpoints are committed after the restore."""
        for known in sorted(known for known in self._messages if known <= checkpoint_id):
            writer = self._writer()
            writer.commit(self._decoded(known, writer), known)
            del self._messages[known]

    def _decoded(self, checkpoint_id: int, writer: Any) -> list[Any]:
        if self._values is None:
            self._values = values_of(self._source, writer)
        texts = [text for _, text in sorted(self._messages[checkpoint_id], key=_subtask)]
        return [None if text is None else self._values.decode(text) for text in texts]

    def _writer(self) -> Any:
        return _new_writer(self._source, self._options, self._schema)


def _subtask(entry: tuple[int, str | None]) -> int:
    return entry[0]


def _new_writer(source: type, options: Mapping[str, str], schema: pa.Schema) -> Any:
    """Creates a new writer for each call, as in Spark, so that calls share no state."""
    from pyspark.sql.datasource import DataSourceStreamWriter

    writer = new_data_source(source, options).streamWriter(struct_type(schema), False)
    if not isinstance(writer, DataSourceStreamWriter):
        raise TypeError(
            f"{source.__name__}.streamWriter() returned {type(writer).__name__}, expected a DataSourceStreamWriter or "
            "a DataSourceStreamArrowWriter"
        )
    return writer
