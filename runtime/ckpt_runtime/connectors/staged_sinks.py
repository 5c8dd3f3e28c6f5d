"""``foreachBatch`` and ``foreach``: functions of the program get the rows of each completed checkpoint.

The rows of a checkpoint are staged in hidden files, like those of a file sink. When the checkpoint has completed, the
function is called with the rows and an id; when it has returned, the files are deleted. After a failure in between, it
is called again with the same id and rows. A missing file therefore means that the function has returned: files are
deleted only then, or when no snapshot covers them.

``foreachBatch`` is called in one place, in the order of checkpoints, with a frame of the session's own Spark and the
batch id of the commit. ``foreach`` is called in each subtask, row by row, with the checkpoint's id.

Formats of Spark's batch writer are written in the same way: Spark writes the rows of a checkpoint to a hidden directory
of the attempt: next to the visible files, or next to the staged rows if the visible files are in an object store. When
Spark has returned, the directory is renamed to mark it as complete. Then each file is moved to its visible name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa

from ckpt_runtime.connectors.datasource_rows import batch_of_spark, batch_to_rows, spark_schema, struct_type
from ckpt_runtime.connectors.file_sink import FileSink, PendingFile, part_of
from ckpt_runtime.connectors.part_directory import PartDirectory
from ckpt_runtime.connectors.sink_log import SinkLog
from ckpt_runtime.frontend.batch_writers import SparkWrite
from ckpt_runtime.frontend.live_session import frame_of, session_of_query
from ckpt_runtime.graph.formats import MAX_WAITING_BATCHES
from ckpt_runtime.graph.source_formats import taken_by_spark
from ckpt_runtime.graph.specs import CommitterSpec, SinkSpec, UserFunction
from ckpt_runtime.operators.task_context import copy_for_task, new_task, running
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, Transaction
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_tree,
    exists,
    list_entries,
    list_names,
    make_directory,
    move_file,
    resolve,
    upload_file,
)

_PREFIX = "_ckpt-"


class SparkFiles:
    """The output directory of a query that uses one of Spark's file formats."""

    def __init__(self, write: SparkWrite, context: SinkContext, staged: Location) -> None:
        """``staged`` is the directory of the staged rows. Raises PlanError for a directory of Spark's own sink."""
        self._write = write
        self._context = context
        self._target = resolve(write.path)
        self._written = self._target if self._target.is_local else staged
        """Where Spark writes: it may lack a client for an object store."""
        if SinkLog(self._target):
            raise taken_by_spark(write.path)

    def publish(self, transaction: Transaction, frame: Callable[[], AbstractContextManager[Any]]) -> None:
        """Makes the rows of a checkpoint visible; ``frame`` is called only if Spark has to write them."""
        complete = self._complete(transaction)
        if not exists(complete):
            written = self._written.child(f"{complete.name}-a{self._context.attempt}")
            with frame() as rows:
                self._write.to(rows, written.url)
            move_file(written, complete)
        _move(complete, self._target)

    def finish(self, transaction: Transaction) -> None:
        """Removes the complete directory; call it after the staged rows were deleted."""
        delete_tree(self._complete(transaction))

    def clean_up(self) -> None:
        """Removes incomplete directories of attempts of this job, and of ended jobs with the same sink."""
        context = self._context
        jobs = "|".join((context.job_id, *context.ended_jobs))
        incomplete = re.compile(rf"{_PREFIX}{context.sink_id}-({jobs})-[0-9]+-a[0-9]+")
        try:
            names = list_names(self._written)
        except NotFoundError:
            return
        for name in names:
            if incomplete.fullmatch(name):
                delete_tree(self._written.child(name))

    def _complete(self, transaction: Transaction) -> Location:
        return self._written.child(f"{_PREFIX}{transaction.id}")


def _move(source: Location, target: Location) -> None:
    files, directories = list_entries(source)
    for file in files:
        name = file.location.name
        if not name.startswith(("_", ".")):
            (move_file if target.is_local else upload_file)(file.location, target.child(name))
    for directory in directories:
        place = target.child(directory.name)
        make_directory(place, private=False)
        _move(directory, place)


def staged_sink(spec: SinkSpec | CommitterSpec) -> Sink:
    """The sink of ``foreach`` or ``foreachBatch``."""
    assert spec.function is not None
    if spec.format == "foreach":
        return _ForeachSink(spec.options["path"], spec.function)
    max_waiting = int(spec.options.get(MAX_WAITING_BATCHES.key, MAX_WAITING_BATCHES.default))
    return _ForeachBatchSink(spec.options["path"], spec.function, max_waiting)


class _StagedSink(FileSink):
    def __init__(self, directory: str, function: UserFunction) -> None:
        parsed = {"path": directory, "maxRecordsPerFile": 0, "onMissing": "fail", "partitionBy": ()}
        super().__init__("foreach", {"path": directory}, parsed)
        # Private like a checkpoint, to which these rows belong.
        self.directory = PartDirectory(directory, private=True)
        self.function = function


class _ForeachBatchSink(_StagedSink):
    """``max_waiting``: how many completed checkpoints may wait for the function while rows are still taken."""

    single_committer = True

    def __init__(self, directory: str, function: UserFunction, max_waiting: int) -> None:
        super().__init__(directory, function)
        self.max_waiting = max_waiting

    def still_staged(self, committable: PendingFile) -> bool:
        """Whether the rows are still there, because the function has not returned."""
        return self.directory.has(part_of(committable).pending)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        assert schema is not None
        return _BatchCommitter(self.directory, self.function, schema, context)


class _ForeachSink(_StagedSink):
    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        self.directory.create()
        return _RowCommitter(self.directory, self.function.call, context)


class _StagedCommitter(SinkCommitter):
    """Reads staged files, and deletes them after the call."""

    def __init__(self, directory: PartDirectory) -> None:
        self._directory = directory

    def commit(self, transaction: Transaction, committables: Sequence[PendingFile]) -> CommitOutcome:
        files = sorted(committables, key=_order)
        outcome = CommitOutcome.ALREADY_COMMITTED
        if all(self._directory.has(part_of(file).pending) for file in files):
            self._call(transaction, files)
            outcome = CommitOutcome.COMMITTED
        self.abort(transaction, committables)
        return outcome

    def abort(self, transaction: Transaction, committables: Sequence[PendingFile]) -> None:
        for pending in committables:
            self._directory.discard(part_of(pending))

    def _call(self, transaction: Transaction, files: Sequence[PendingFile]) -> None:
        raise NotImplementedError

    def _read(self, file: PendingFile) -> pa.Table:
        with self._directory.open_for_reading(part_of(file).pending) as stream:
            return pa.ipc.open_file(stream).read_all()


class _BatchCommitter(_StagedCommitter):
    """Calls the function of ``foreachBatch``; connects to Spark before the first call."""

    def __init__(
        self, directory: PartDirectory, function: UserFunction, schema: pa.Schema, context: SinkContext
    ) -> None:
        super().__init__(directory)
        self._function = function
        self._schema = schema
        self._context = context
        self._session: Any = None
        write = function.call
        self._files = (
            SparkFiles(write, context, directory.location) if isinstance(write, SparkWrite) and write.path else None
        )
        if self._files is not None:
            self._files.clean_up()

    def commit(self, transaction: Transaction, committables: Sequence[PendingFile]) -> CommitOutcome:
        outcome = super().commit(transaction, committables)
        if self._files is not None:
            self._files.finish(transaction)
        return outcome

    def close(self) -> None:
        if self._files is not None:
            self._files.clean_up()

    def _call(self, transaction: Transaction, files: Sequence[PendingFile]) -> None:
        if self._files is None:
            with self._frame(transaction, files) as frame:
                self._function.call(frame, transaction.batch_id)
        else:
            self._files.publish(transaction, lambda: self._frame(transaction, files))

    def _frame(self, transaction: Transaction, files: Sequence[PendingFile]) -> AbstractContextManager[Any]:
        """The rows as a frame of the query's session, during the call."""
        from pyspark.sql.pandas.types import from_arrow_schema

        if self._session is None:
            assert self._context.spark_url is not None
            url, place, function = self._context.spark_url(), self._context, self._function
            self._session = session_of_query(function.session, url, place.job_id, place.uid, function.configuration)
        rows = pa.concat_tables([self._read(file) for file in files])
        schema = from_arrow_schema(self._schema, prefer_timestamp_ntz=True)
        return frame_of(self._session, rows, schema, f"ckpt_{transaction.id.replace('-', '_')}")


class _RowCommitter(_StagedCommitter):
    """Calls the function of ``foreach``, or ``open``, ``process`` and ``close`` of a copy of its object, as Spark does:
    an object that can be called is a function."""

    def __init__(self, directory: PartDirectory, function: Any, context: SinkContext) -> None:
        super().__init__(directory)
        self._function = function
        self._context = context

    def _call(self, transaction: Transaction, files: Sequence[PendingFile]) -> None:
        partitions: dict[int, list[PendingFile]] = {}
        for file in files:
            partitions.setdefault(part_of(file).subtask, []).append(file)
        for partition, its_files in partitions.items():
            with running(new_task(partition, self._context.attempt, transaction.checkpoint_id)):
                self._process(copy_for_task(self._function), partition, transaction.checkpoint_id, its_files)

    def _process(self, function: Any, partition: int, checkpoint_id: int, files: Sequence[PendingFile]) -> None:
        if callable(function):
            self._each(files, function)
            return
        begin, end = getattr(function, "open", None), getattr(function, "close", None)
        wanted = begin is None or begin(partition, checkpoint_id)
        error: Exception | None = None
        try:
            if wanted:
                self._each(files, function.process)
        except Exception as raised:
            error = raised
            raise
        finally:
            if end is not None:
                end(error)

    def _each(self, files: Sequence[PendingFile], call: Any) -> None:
        for file in files:
            rows = self._read(file)
            struct = struct_type(rows.schema)
            schema = spark_schema(struct)
            for batch in rows.to_batches():
                for row in batch_to_rows(batch_of_spark(batch, schema), struct):
                    call(row)


def _order(file: PendingFile) -> tuple[int, int]:
    part = part_of(file)
    return part.subtask, part.sequence
