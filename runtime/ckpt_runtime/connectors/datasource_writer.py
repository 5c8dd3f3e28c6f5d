"""PySpark ``DataSource`` stream writers, unchanged and without a JVM: writers write, one committer commits.

A checkpoint takes the role of Spark's micro-batch: ``write`` is called once per subtask and checkpoint with the rows
since the last one, its message goes to the committer before the barrier, and ``commit(messages, batchId)`` follows the
completion; batch ids count commits from 0. A commit may be repeated after a failure with the same id and messages, as
in Spark. When committer and writers close, they call ``abort(messages, batchId)`` for messages that no snapshot can
cover. They do not call it when a checkpoint is aborted, because a later one covers its messages, nor while the outcome
of a checkpoint is unknown. A writer aborts its unfinished ``write``: with the message if it had returned before the
barrier, and with None if it raised or was interrupted.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import copy_context
from typing import Any, TypeAlias

import pyarrow as pa

from ckpt_runtime.connectors.datasource_rows import batch_of_spark, batch_to_rows, spark_schema, struct_type, values_of
from ckpt_runtime.connectors.tagged_values import TaggedValues
from ckpt_runtime.graph.formats import new_data_source
from ckpt_runtime.operators.task_context import HelperThread, new_task, running
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction

_NewWriter: TypeAlias = Callable[[pa.Schema], Any]
_QUEUED_BATCHES = 4
_CHECK_SECONDS = 0.2
_ABANDON_SECONDS = 10.0


class _Abandoned(Exception):
    """Raised inside the user's ``write`` when the subtask is closed in the middle of it."""


class _Epoch:
    """One call of ``write``, in its own thread, which gets the rows batch by batch."""

    def __init__(self, writer: Any, schema: pa.Schema, values: TaggedValues, context: SinkContext) -> None:
        self._writer = writer
        self._values = values
        self._struct = struct_type(schema)
        self._schema = spark_schema(self._struct)
        self._context = context
        self._queue: queue.Queue[pa.RecordBatch | _Abandoned | None] = queue.Queue(_QUEUED_BATCHES)
        self._message: str | None = None
        """The encoded result of ``write``; None until it has returned, and if it raised."""
        self._error: BaseException | None = None
        # In the subtask's context, so that log records of user code belong to the subtask.
        run = copy_context().run
        self._thread = HelperThread(target=run, args=(self._run,), name=f"write {context.uid}", daemon=True)
        self._thread.start()

    def feed(self, batch: pa.RecordBatch) -> None:
        """Hands over a batch; waits while the writer is busy. Raises what ``write`` raised.

        Once ``write`` has returned, further rows of the epoch are dropped, as in Spark.
        """
        self._put(batch)
        self.raise_error()

    def complete(self) -> str:
        """Ends the rows and returns the encoded message of ``write``; raises its error."""
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
                    # Makes room in the queue: rows that the writer has not taken yet are discarded.
                    self._queue.get_nowait()
                except queue.Empty:
                    continue
        self._thread.join(_ABANDON_SECONDS)
        return self._message

    def raise_error(self) -> None:
        """Raises the error of ``write``, if it has raised one."""
        if self._error is not None:
            raise self._error

    def _put(self, item: pa.RecordBatch | None) -> None:
        while self._thread.is_alive():
            try:
                # With a timeout: a writer that has ended in the meantime takes no further items and never wakes this
                # thread.
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


class DataSourceSink(Sink):
    """A PySpark ``DataSource`` as a sink of the engine's protocol; its committables are texts of tagged values.

    ``overwrites`` is the argument ``overwrite`` of its ``streamWriter``: true in output mode complete, as in Spark.
    """

    def __init__(self, source: type, options: Mapping[str, str], *, overwrites: bool = False) -> None:
        super().__init__(options)
        self._source = source
        self._overwrites = overwrites

    @classmethod
    def name(cls) -> str:
        return "datasource"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        return _EpochWriter(self._source, self._new_writer, schema, context)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        assert schema is not None
        return _MessageCommitter(self._source, self._new_writer, schema)

    def _new_writer(self, schema: pa.Schema) -> Any:
        """Creates a new writer for each call, as in Spark, so that calls share no state."""
        from pyspark.sql.datasource import DataSourceStreamWriter

        writer = new_data_source(self._source, self.options).streamWriter(struct_type(schema), self._overwrites)
        if not isinstance(writer, DataSourceStreamWriter):
            raise TypeError(
                f"{self._source.__name__}.streamWriter() returned {type(writer).__name__}, expected a "
                "DataSourceStreamWriter or a DataSourceStreamArrowWriter"
            )
        return writer

    def encode(self, committable: Any) -> str:
        return str(committable)

    def decode(self, text: str) -> Any:
        return text


class _EpochWriter(SinkWriter):
    """Runs the user's ``write`` once per checkpoint. Keeps no state: the committer keeps its messages."""

    def __init__(self, source: type, new_writer: _NewWriter, schema: pa.Schema, context: SinkContext) -> None:
        self._source = source
        self._new_writer = new_writer
        self._schema = schema
        self._context = context
        self._values: TaggedValues | None = None
        self._epoch: _Epoch | None = None
        self._checkpoint_id = context.last_checkpoint_id

    def write(self, batch: pa.RecordBatch) -> None:
        if self._epoch is None:
            writer = self._new_writer(batch.schema)
            if self._values is None:
                self._values = values_of(self._source, writer)
            self._schema = batch.schema
            self._epoch = _Epoch(writer, batch.schema, self._values, self._context)
        self._epoch.feed(batch)

    def check(self) -> None:
        if self._epoch is not None:
            self._epoch.raise_error()

    def prepare_commit(self, checkpoint_id: int) -> Sequence[str]:
        """Ends the epoch and returns its message; an epoch without rows has none."""
        message = None if self._epoch is None else self._epoch.complete()
        self._checkpoint_id = checkpoint_id
        self._epoch = None
        return () if message is None else (message,)

    def close(self) -> None:
        """Aborts a ``write`` that no barrier has ended (returned, raised or running), since no snapshot covers it.

        A subtask does not know the number of commits, which is never greater than that of checkpoints. So the batch id
        is that of the last barrier plus one: greater than those of all committed batches.
        """
        if self._epoch is None:
            return
        message = self._epoch.abandon()
        self._epoch = None
        assert self._values is not None
        carried = None if message is None else self._values.decode(message)
        self._new_writer(self._schema).abort([carried], self._checkpoint_id + 1)


class _MessageCommitter(SinkCommitter):
    """Calls the user's ``commit`` and ``abort`` with the messages of a checkpoint."""

    def __init__(self, source: type, new_writer: _NewWriter, schema: pa.Schema) -> None:
        self._source = source
        self._new_writer = new_writer
        self._schema = schema
        self._values: TaggedValues | None = None

    def commit(self, transaction: Transaction, committables: Sequence[Any]) -> CommitOutcome:
        writer = self._new_writer(self._schema)
        writer.commit(self._decoded(committables, writer), transaction.batch_id)
        return CommitOutcome.COMMITTED

    def abort(self, transaction: Transaction, committables: Sequence[Any]) -> None:
        writer = self._new_writer(self._schema)
        writer.abort(self._decoded(committables, writer), transaction.batch_id)

    def _decoded(self, texts: Sequence[str | None], writer: Any) -> list[Any]:
        if self._values is None:
            self._values = values_of(self._source, writer)
        return [None if text is None else self._values.decode(text) for text in texts]
