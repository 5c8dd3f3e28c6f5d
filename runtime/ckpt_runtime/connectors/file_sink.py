"""File formats: writes each row to exactly one visible file of a directory, by two-phase commit.

Rows are written to a hidden file. Before a checkpoint the file is closed and renamed to a hidden pending name; when the
checkpoint completes, it is renamed to its visible name. With ``partitionBy``, each value has its own files, which
become visible in its directory (``country=AT``); hidden files are always in the directory of the sink itself, so that a
clean-up finds them. Files that an earlier attempt left behind and the snapshot does not cover are recognized by their
names and deleted, and so are those of ended jobs that had the same sink before this one. Never touches files of another
sink or of a job that may still be running. At the end of the job the driver cleans up (``snapshots/clean_up.py``).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.connectors.part_directory import (
    CommitError,
    PartDirectory,
    PartName,
    owner_of,
    parse_hidden,
    partition_directory,
)
from ckpt_runtime.connectors.sink_log import SinkLog
from ckpt_runtime.expressions.functions.casts import caster
from ckpt_runtime.graph.formats import file_extension, partition_columns, sink_options
from ckpt_runtime.graph.source_formats import taken_by_spark
from ckpt_runtime.graph.text_outputs import TEXT_OUTPUTS, TextOutput
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import reason_of


class FileWriter(Protocol):
    """Writes tables of one schema into an open binary file, which it does not close."""

    def write(self, rows: pa.Table) -> None:
        """Appends rows."""

    def close(self) -> None:
        """Writes the end of the file."""


_CODECS = {"uncompressed": "none", "lz4_raw": "lz4"}
"""Arrow's names of Spark's compressions, where they differ."""


class ParquetFileWriter:
    """``metadata`` has the footer of a closed file."""

    def __init__(self, file: Any, schema: pa.Schema, compression: str) -> None:
        self.metadata: list[pq.FileMetaData] = []
        codec = _CODECS.get(compression, compression)
        schema = _with_types_of_spark(schema)
        self._writer = pq.ParquetWriter(file, schema, compression=codec, metadata_collector=self.metadata)

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def close(self) -> None:
        self._writer.close()


def _with_types_of_spark(schema: pa.Schema) -> pa.Schema:
    """Adds the schema that Spark reads in the footer of a file, if there are types that Parquet lacks."""
    if not any(map(_is_lacking, schema.types)):
        return schema
    from pyspark.sql.pandas.types import from_arrow_schema

    return schema.with_metadata({"org.apache.spark.sql.parquet.row.metadata": from_arrow_schema(schema).json()})


def _is_lacking(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_is_lacking(kind.field(at).type) for at in range(kind.num_fields))
    return bool(pa.types.is_duration(kind) or pa.types.is_null(kind))


class _ArrowWriter:
    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._writer = pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))

    def write(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)

    def close(self) -> None:
        self._writer.close()


class _TextWriter:
    def __init__(self, file: Any, output: TextOutput) -> None:
        self._file = file
        self._output = output
        file.write(output.header())

    def write(self, rows: pa.Table) -> None:
        self._file.write(self._output.rows(rows))

    def close(self) -> None:
        """The end of a text has no mark."""


def open_file_writer(format_: str, file: Any, schema: pa.Schema, options: Mapping[str, Any]) -> FileWriter:
    """Returns a writer for a file of a format. ``options`` are the parsed ones of its sink."""
    if format_ == "foreach":
        return _ArrowWriter(file, schema)
    if format_ in TEXT_OUTPUTS:
        return _TextWriter(file, TextOutput(format_, options, schema))
    return ParquetFileWriter(file, schema, options["compression"])


_ROWS_HELD = 131_072
_MOST_OPEN_FILES = 64
"""Maximum number of files that a subtask has open; opening one more closes the file that was opened first."""
_LOG = logging.getLogger(__name__)


class HasName(Protocol):
    """A committable that names a pending file."""

    @property
    def name(self) -> str: ...


class PendingFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """A file that becomes visible when its checkpoint, or a later one, completes.

    ``partition`` is the directory, below that of the sink, in which it becomes visible.
    """

    directory: str
    name: str
    partition: str = ""


class FileSink(Sink):
    """The sink of the file formats. ``format_`` is the format's name."""

    committable: ClassVar[type[msgspec.Struct]] = PendingFile
    single_committer = False

    def __init__(self, format_: str, options: Mapping[str, str], parsed: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self.format = format_
        self.parsed = sink_options(format_, options) if parsed is None else parsed
        self.directory = PartDirectory(self.parsed["path"])

    @classmethod
    def name(cls) -> str:
        return "files"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        self.directory.create()
        if SinkLog(self.directory.location):
            raise taken_by_spark(self.directory.url)
        return PartWriter(self, schema, context)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        self.directory.create()
        return _PartCommitter(self.directory, ignore_missing=self.parsed["onMissing"] == "ignore")

    def clean_up(self, context: SinkContext) -> None:
        """Deletes files that earlier writers of this sink left; the writer's number decides which subtask does it."""
        restored = context.restored_checkpoint_id or 0
        covered = max(restored, context.savepoint_id)
        own = owner_of(context.job_id, context.uid, context.sink_id)
        former = [owner_of(job_id, context.uid, context.sink_id) for job_id in context.ended_jobs]
        for part in self.directory.hidden_parts():
            if part.subtask % context.parallelism != context.subtask_index:
                continue
            if part.owner == own:
                # Files of this attempt belong to other subtasks, which are still writing them.
                left = part.attempt < context.attempt and (part.checkpoint or covered + 1) > covered
            else:
                left = part.owner in former and (part.checkpoint or restored + 1) > restored
            if left:
                self.directory.discard(part)


class PartFile:
    """One file being written; rows are buffered and written in large groups."""

    def __init__(self, sink: FileSink, part: PartName, schema: pa.Schema, partition: str, directory: str) -> None:
        """``directory`` is the one, below the sink's, in which the file becomes visible."""
        self.part = part
        self.partition = partition
        self.rows = 0
        self.size = 0
        """In bytes, once the file is finished."""
        self._schema = schema
        self._held: list[pa.RecordBatch] = []
        self._held_rows = 0
        self._place = sink.directory
        self._file = self._place.open_for_writing(part, directory)
        with self._writing():
            self.writer: FileWriter = open_file_writer(sink.format, self._file, schema, sink.parsed)

    def write(self, batch: pa.RecordBatch) -> None:
        self.rows += batch.num_rows
        self._held.append(batch)
        self._held_rows += batch.num_rows
        if self._held_rows >= _ROWS_HELD:
            self._flush()

    def finish(self) -> None:
        """Writes the buffered rows and the end of the file, which is then complete and durable."""
        if self._held:
            self._flush()
        with self._writing():
            self.writer.close()
            self.size = self._file.tell()
            self._place.finish(self.part, self._file)

    def abandon(self) -> None:
        """Closes the file, whose content is discarded: its end need not be written, as on a full disk."""
        self._held = []
        for closed in (self.writer, self._file):
            with suppress(Exception):
                closed.close()

    def _flush(self) -> None:
        rows = pa.Table.from_batches(self._held, self._schema)
        with self._writing():
            self.writer.write(rows)
        self._held = []
        self._held_rows = 0

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises StorageError with the name of the file for errors of its file system."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            url = f"{self._place.url}/{self.part.in_progress}"
            raise StorageError(f"cannot write {url}: {reason_of(error)}", url, error) from error


class PartWriter(SinkWriter):
    """Writes the hidden files of one subtask."""

    def __init__(self, sink: FileSink, schema: pa.Schema, context: SinkContext) -> None:
        self._sink = sink
        self._context = context
        self._owner = owner_of(context.job_id, context.uid, context.sink_id)
        self._max_rows = int(sink.parsed["maxRecordsPerFile"])
        zone = sink.parsed.get("timeZone", "UTC")
        self._keys = {
            name: partition_text(schema.field(name).type, zone) for name in partition_columns(sink.parsed, schema)
        }
        self._open: dict[str, PartFile] = {}
        self._closed: list[PartFile] = []
        self._sequence = 0

    def write(self, batch: pa.RecordBatch) -> None:
        for values, part in _partitioned(batch, self._keys):
            self._write(self.partition_name(values), part)

    def partition_name(self, values: Sequence[tuple[str, str | None]]) -> str:
        """The partition of rows with these values of its columns."""
        return partition_directory(values)

    def directory_of(self, partition: str) -> str:
        """The directory, below the sink's, in which the files of a partition become visible."""
        return partition

    def committable(self, file: PartFile, pending: str) -> Any:
        """What the committer has to know about a file, whose name is ``pending`` now."""
        return PendingFile(self._sink.directory.url, pending, file.partition)

    def prepare_commit(self, checkpoint_id: int) -> Sequence[Any]:
        for partition in list(self._open):
            self._close_file(partition)
        prepared = []
        for file in self._closed:
            part = replace(file.part, checkpoint=checkpoint_id)
            self._sink.directory.make_pending(part, self.directory_of(file.partition))
            prepared.append(self.committable(file, part.pending))
        self._closed = []
        return prepared

    def close(self) -> None:
        """Deletes files that no snapshot covers, but no pending files: the latest checkpoint may cover these."""
        uncovered = [file.part for file in (*self._closed, *self._open.values())]
        for file in self._open.values():
            file.abandon()
        self._open = {}
        self._closed = []
        for part in uncovered:
            self._sink.directory.discard(part)

    def _write(self, partition: str, batch: pa.RecordBatch) -> None:
        if not batch.num_rows and partition not in self._open:  # an empty result table
            self._open[partition] = self._new_file(batch.schema, partition)
        while batch.num_rows:
            file = self._open.get(partition)
            if file is None:
                if len(self._open) >= _MOST_OPEN_FILES:
                    self._close_file(next(iter(self._open)))
                file = self._open[partition] = self._new_file(batch.schema, partition)
            room = self._max_rows - file.rows if self._max_rows else batch.num_rows
            file.write(batch.slice(0, room))
            batch = batch.slice(room)
            if self._max_rows and file.rows >= self._max_rows:
                self._close_file(partition)

    def _new_file(self, schema: pa.Schema, partition: str) -> PartFile:
        part = PartName(
            self._owner,
            self._context.subtask_index,
            self._context.attempt,
            self._sequence,
            secrets.token_hex(4),
            extension=file_extension(self._sink.format, self._sink.parsed),
        )
        self._sequence += 1
        return PartFile(self._sink, part, schema, partition, self.directory_of(partition))

    def _close_file(self, partition: str) -> None:
        file = self._open[partition]
        file.finish()
        del self._open[partition]
        self._closed.append(file)


class _PartCommitter(SinkCommitter):
    """Makes pending files visible."""

    def __init__(self, directory: PartDirectory, *, ignore_missing: bool) -> None:
        self._directory = directory
        self._ignore_missing = ignore_missing

    def commit(self, transaction: Transaction, committables: Sequence[PendingFile]) -> CommitOutcome:
        """Commits every file that can become visible: continues after an error, and raises it at the end."""
        missing: list[str] = []
        errors: list[Exception] = []
        renamed = False
        files = [(pending, part_of(pending)) for pending in committables]
        for pending, part in files:
            try:
                found = self._directory_of(pending).commit(part, pending.partition)
                renamed |= found is True
                if found is None:
                    missing.append(f"{pending.directory}/{pending.name}")
            except OSError as error:
                errors.append(error)
        cause = f"checkpoint {transaction.checkpoint_id}"
        if errors:
            raise CommitError(f"{cause}: {len(errors)} of {len(files)} files not committed; first: {errors[0]}")
        if missing and self._ignore_missing:
            _LOG.warning(
                "%s: %d pending files are missing and are ignored, the first is %s", cause, len(missing), missing[0]
            )
        elif missing:
            raise CommitError(
                f"{cause}: neither the pending file {missing[0]} nor its visible form exists ({len(missing)} such "
                "files); its rows are lost, or a reader has removed them: option onMissing=ignore continues without "
                "them"
            )
        return CommitOutcome.COMMITTED if renamed else CommitOutcome.ALREADY_COMMITTED

    def abort(self, transaction: Transaction, committables: Sequence[PendingFile]) -> None:
        for pending in committables:
            self._directory_of(pending).discard(part_of(pending))

    def _directory_of(self, pending: PendingFile) -> PartDirectory:
        return self._directory if pending.directory == self._directory.url else PartDirectory(pending.directory)


def part_of(pending: HasName) -> PartName:
    """Raises CommitError for a restored name that does not have the form of a pending file's, and could be any file."""
    part = parse_hidden(pending.name)
    if part is None or part.checkpoint is None:
        raise CommitError(f"restored state names {pending.name!r}, which is not a pending file")
    return part


def _partitioned(
    batch: pa.RecordBatch, keys: Mapping[str, Callable[[Any], Any]]
) -> Iterator[tuple[Sequence[tuple[str, str | None]], pa.RecordBatch]]:
    """Yields the rows of each partition without their keys, and the texts of the keys; rows keep their order.

    ``keys`` are the columns of the partition, with what makes texts of their values.
    """
    if not keys:
        yield (), batch
        return
    rest = batch.drop_columns(list(keys))
    encoded = [as_text(batch.column(name)).dictionary_encode(null_encoding="encode") for name, as_text in keys.items()]
    codes = np.zeros(batch.num_rows, np.int64)
    for column in encoded:
        # Numbered again after each column, codes never exceed the product of two numbers of rows.
        _, codes = np.unique(codes * len(column.dictionary) + column.indices.to_numpy(), return_inverse=True)
    for code in range(int(codes.max(initial=-1)) + 1):
        rows = np.flatnonzero(codes == code)
        values = [(key, column[int(rows[0])].as_py()) for key, column in zip(keys, encoded, strict=True)]
        yield values, rest.take(rows)


def partition_text(kind: pa.DataType, zone: str) -> Callable[[Any], Any]:
    """Returns what casts a column of a type to the texts that name partitions, as Spark does."""
    if pa.types.is_dictionary(kind):
        return lambda column: column.cast(kind.value_type).cast(pa.string())
    if not (pa.types.is_decimal(kind) or pa.types.is_floating(kind) or pa.types.is_timestamp(kind)):
        return lambda column: column.cast(pa.string())
    from pyspark.sql.pandas.types import from_arrow_type

    return caster(from_arrow_type(kind).jsonValue(), "string", "ansi", zone)
