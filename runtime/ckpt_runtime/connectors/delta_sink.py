"""Format ``delta``: rows of each completed checkpoint as one commit of a Delta table, exactly once.

Subtasks write hidden Parquet files into the table's directory, as a sink of files does; their committables carry
partition values and statistics. When the checkpoint has completed, one committer gives the files their visible names
and adds them to the table's log with an application transaction: the sink of one job, and the checkpoint's id. A
repeated commit looks the transaction up in the same snapshot of the table that it would commit from. (If it committed
from a newer snapshot than the one that was checked, the rows could be added twice.) If another writer has committed the
same transaction meanwhile, the log refuses the commit; appends of other writers do not conflict. A commit that the log
refuses is repeated from the newest snapshot, in which the transaction is looked up again.

Files lie in the table's directory itself also if it is partitioned: the log has the partition values.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, ClassVar, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.connectors.file_sink import (
    FileSink,
    ParquetFileWriter,
    PartFile,
    PartWriter,
    part_of,
    partition_text,
)
from ckpt_runtime.connectors.part_directory import CommitError, PartDirectory, PartName, is_visible_part, owner_of
from ckpt_runtime.graph.compiler import COMMITTER_SUFFIX
from ckpt_runtime.graph.formats import partition_columns
from ckpt_runtime.sinks import CommitOutcome, SinkCommitter, SinkContext, SinkWriter, Transaction
from ckpt_runtime.storage.errors import AmbiguousWriteError, StorageError
from ckpt_runtime.storage.filesystem import discard_file, naming, reason_of
from ckpt_runtime.storage.publish import publish

_LOG = logging.getLogger(__name__)
_ATTEMPTS = 10
"""Each one after the first follows a commit of another writer, which has created or altered the table."""
_LONGEST_TEXT = 64
_WRITTEN_FEATURES = frozenset(
    {"appendOnly", "changeDataFeed", "deletionVectors", "invariants", "timestampNtz", "v2Checkpoint"}
)
"""Table features that require nothing of a writer that only appends; ``invariants`` only if no column has one."""
_GREATEST_WRITER_VERSION = 2
_COMPUTED = ("delta.invariants", "delta.generationExpression", "delta.identity.start")
"""Keys in a column's metadata which say that a writer must check or compute its values."""


class DeltaFile(msgspec.Struct, frozen=True):
    """A pending file. ``values`` are its partition's, ``stats`` the JSON text of the log, ``size`` is in bytes."""

    directory: str
    name: str
    values: dict[str, str | None]
    size: int
    stats: str


class DeltaSink(FileSink):
    """The sink of format ``delta``."""

    committable: ClassVar[type[msgspec.Struct]] = DeltaFile
    single_committer = True

    def __init__(self, options: Mapping[str, str], *, overwrites: bool = False) -> None:
        """``overwrites``: each commit replaces the rows of the table (output mode complete)."""
        super().__init__("delta", options)
        self._overwrites = overwrites

    @classmethod
    def name(cls) -> str:
        return "delta"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        self.directory.create()
        return _DeltaWriter(self, schema, context)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        assert schema is not None
        self.directory.create()
        return DeltaCommitter(self.directory, schema, self.parsed, context, overwrites=self._overwrites)


class _DeltaWriter(PartWriter):
    """Adds to each pending file the facts that the table's log records of a file."""

    def partition_name(self, values: Sequence[tuple[str, str | None]]) -> str:
        return json.dumps(dict(values)) if values else ""

    def directory_of(self, partition: str) -> str:
        return ""

    def committable(self, file: PartFile, pending: str) -> DeltaFile:
        assert isinstance(file.writer, ParquetFileWriter)
        values = json.loads(file.partition) if file.partition else {}
        statistics = json.dumps(_statistics(file.writer.metadata[0]))
        return DeltaFile(self._sink.directory.url, pending, values, file.size, statistics)


class DeltaCommitter(SinkCommitter):
    """Adds files to the table's log."""

    def __init__(
        self,
        directory: PartDirectory,
        schema: pa.Schema,
        options: Mapping[str, Any],
        context: SinkContext,
        *,
        overwrites: bool = False,
    ) -> None:
        # Of the writers, whose hidden files are removed after a crash.
        self._owner = owner_of(context.job_id, context.uid.removesuffix(COMMITTER_SUFFIX), context.sink_id)
        self._attempt = context.attempt
        self._mode: Literal["append", "overwrite"] = "overwrite" if overwrites else "append"
        self._directory = directory
        self._schema = schema
        self._keys = partition_columns(options, schema)
        self._compression = options["compression"]
        self._merges = bool(options["mergeSchema"])
        self._target_size = 0 if overwrites else options["targetFileSize"]
        self._user_metadata: str | None = options["userMetadata"]
        self._small_bytes: int | None = None
        """The size of all files that are worth merging; None before the first commit of this attempt."""

    def commit(self, transaction: Transaction, committables: Sequence[DeltaFile]) -> CommitOutcome:
        """Raises CommitError for a table that the engine cannot append to, and when a file is missing."""
        from deltalake.exceptions import CommitFailedError, DeltaError

        place, refused = self._directory.location, 0
        while True:
            try:
                return self._commit_once(transaction, committables)
            except StorageError:
                raise
            except (DeltaError, OSError) as error:
                refused += 1
                if refused == _ATTEMPTS or not isinstance(error, CommitFailedError):
                    raise StorageError(f"cannot commit to {place.url}: {reason_of(error)}", place.url, error) from error

    def _commit_once(self, transaction: Transaction, committables: Sequence[DeltaFile]) -> CommitOutcome:
        table = self._table()
        committed = table.transaction_version(transaction.writer_id)
        if committed is not None and committed >= transaction.checkpoint_id:
            return CommitOutcome.ALREADY_COMMITTED
        self.publish(committables)
        self.add(table, transaction, committables)
        if self._target_size:
            self._merge_small_files(committables)
        return CommitOutcome.COMMITTED

    def publish(self, files: Sequence[DeltaFile]) -> None:
        """Renames pending files to their visible names; files that were renamed before are left as they are."""
        for file in files:
            if self._directory.commit(part_of(file)) is None:
                raise CommitError(
                    f"neither the pending file {file.directory}/{file.name} nor its visible form exists: its rows are "
                    "lost; restore an earlier checkpoint"
                )

    def add(self, table: Any, transaction: Transaction, files: Sequence[DeltaFile]) -> None:
        """Commits from the snapshot of ``table``, which does not contain the transaction."""
        import deltalake
        from deltalake.transaction import AddAction

        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        actions = [
            AddAction(self._directory.visible_name(part_of(file)), file.size, file.values, now_ms, True, file.stats)
            for file in files
        ]
        mark = deltalake.Transaction(transaction.writer_id, transaction.checkpoint_id)
        table.create_write_transaction(
            actions,
            self._mode,
            table.schema(),
            list(self._keys) or None,
            commit_properties=deltalake.CommitProperties(
                app_transactions=[mark],
                custom_metadata=None if self._user_metadata is None else {"userMetadata": self._user_metadata},
            ),
        )

    def _merge_small_files(self, files: Sequence[DeltaFile]) -> None:
        """Merges small files of sinks when together they have the target size, in a version that changes no row.

        The version follows the one whose files were read, or is not written: if another writer has removed one of
        these files meanwhile, its rows would be there again. (deltalake's own ``optimize`` looks for conflicts from a
        newer version on, so that two of them at once double rows.) Then the files are merged after a later commit.
        """
        small = self._target_size // 2
        sizes = [file.size for file in files]
        if self._small_bytes is None:  # those of earlier attempts and jobs count as well
            sizes = pa.table(self._opened().get_add_actions(flatten=True)).column("size_bytes").to_pylist()
        self._small_bytes = (self._small_bytes or 0) + sum(size for size in sizes if size < small)
        if self._small_bytes < self._target_size:
            return
        self._small_bytes = 0
        table = self._opened()
        if "deletionVectors" in (table.protocol().writer_features or ()):
            return  # the files have rows that were deleted
        version = table.version() + 1
        now_ms = int(datetime.now(UTC).timestamp() * 1000)
        info = {"timestamp": now_ms, "operation": "OPTIMIZE", "operationParameters": {}, "readVersion": version - 1}
        actions: list[dict[str, Any]] = [{"commitInfo": info}]
        merged: list[PartName] = []
        try:
            for values, group in self._mergeable(table, small):
                part = PartName(
                    self._owner, 0, self._attempt, len(merged), secrets.token_hex(4), version, extension="parquet"
                )
                merged.append(part)
                size, stats = self._merged(table, [name for name, _ in group], part)
                name = self._directory.visible_name(part)
                added = {"path": name, "partitionValues": values, "size": size, "modificationTime": now_ms}
                actions.append({"add": {**added, "dataChange": False, "stats": stats}})
                for path, old_size in group:
                    removed = {"path": path, "deletionTimestamp": now_ms, "dataChange": False}
                    more = {"extendedFileMetadata": True, "partitionValues": values, "size": old_size}
                    actions.append({"remove": {**removed, **more}})
            if merged:
                log = self._directory.location.child("_delta_log", f"{version:020d}.json")
                publish(log, "\n".join(map(json.dumps, actions)).encode(), private=False)
        except AmbiguousWriteError:
            raise  # the version may be there, with the merged files
        except (StorageError, pa.ArrowException) as error:
            for part in merged:
                self._directory.discard(replace(part, checkpoint=None))
                self._directory.discard(part)
                discard_file(self._directory.location.child(self._directory.visible_name(part)))
            _LOG.warning("%s: small files are merged later: %s", self._directory.url, error)

    def _mergeable(self, table: Any, small: int) -> Iterator[tuple[dict[str, str | None], list[tuple[str, int]]]]:
        """Groups of small files that sinks have written, with the values of their partition, each with its size."""
        added = pa.table(table.get_add_actions(flatten=True))
        texts = []
        for key in self._keys:
            kind = self._schema.field(key).type
            values_of_files = added.column(f"partition.{key}").combine_chunks().cast(kind)
            texts.append(partition_text(kind, "UTC")(values_of_files).to_pylist())
        groups: dict[tuple[str | None, ...], list[tuple[str, int]]] = {}
        for at, (path, size) in enumerate(zip(*added.select(["path", "size_bytes"]).to_pydict().values(), strict=True)):
            if size < small and is_visible_part(path):
                groups.setdefault(tuple(column[at] for column in texts), []).append((path, size))
        for values, files in groups.items():
            group: list[tuple[str, int]] = []
            for at, file in enumerate(files):
                group.append(file)
                if sum(size for _, size in group) >= self._target_size or at == len(files) - 1:
                    if len(group) > 1:
                        yield dict(zip(self._keys, values, strict=True)), group
                    group = []

    def _merged(self, table: Any, names: Sequence[str], part: PartName) -> tuple[int, str]:
        """Writes the rows of files into another one, whose size and statistics it returns."""
        wanted = pa.schema([field for field in pa.schema(table.schema().to_arrow()) if field.name not in self._keys])
        written = replace(part, checkpoint=None)
        file = self._directory.open_for_writing(written)
        with naming("write", self._directory.location.child(written.in_progress)):
            writer = ParquetFileWriter(file, wanted, self._compression)
            for name in names:
                with self._directory.open_for_reading(name) as stream:
                    for batch in pq.ParquetFile(stream).iter_batches():
                        columns = [
                            batch.column(field.name).cast(field.type)
                            if field.name in batch.schema.names
                            else pa.nulls(batch.num_rows, field.type)
                            for field in wanted
                        ]
                        writer.write(pa.Table.from_arrays(columns, schema=wanted))
            writer.close()
            size = file.tell()
            self._directory.finish(written, file)
        self._directory.make_pending(part)
        self._directory.commit(part)
        return size, json.dumps(_statistics(writer.metadata[0]))

    def abort(self, transaction: Transaction, committables: Sequence[DeltaFile]) -> None:
        for file in committables:
            self._directory.discard(part_of(file))

    def _table(self) -> Any:
        """The newest snapshot of the table, which is created if there is none, with the columns of the rows."""
        import deltalake
        from deltalake.exceptions import TableNotFoundError

        schema = deltalake.Schema.from_arrow(self._schema)
        try:
            table = self._opened()
        except TableNotFoundError:
            deltalake.DeltaTable.create(self._url, schema, mode="ignore", partition_by=list(self._keys))
            table = self._opened()
        _check_features(table)
        self._check_partitions(table)
        if missing := self._missing_columns(table, schema):
            table.alter.add_columns(missing)
            table = self._opened()
        return table

    @property
    def _url(self) -> str:
        return self._directory.location.path if self._directory.location.is_local else self._directory.url

    def _opened(self) -> Any:
        import deltalake

        return deltalake.DeltaTable(self._url)

    def _check_partitions(self, table: Any) -> None:
        found = list(table.metadata().partition_columns)
        if found != list(self._keys):
            raise CommitError(
                f"{self._directory.url} is partitioned by {found}, and the query says {list(self._keys)}: call "
                "partitionBy with the table's columns"
            )

    def _missing_columns(self, table: Any, schema: Any) -> list[Any]:
        known = {field.name: field for field in table.schema().fields}
        spelled = {name.lower(): name for name in known}
        missing = []
        for field in schema.fields:
            if field.name not in known:
                if same := spelled.get(field.name.lower()):
                    raise CommitError(
                        f"{self._directory.url} has column {same!r}, which differs from {field.name!r} of the query in "
                        "case alone, and readers find columns ignoring case: rename that of the query"
                    )
                missing.append(field)
            elif known[field.name].type != field.type:
                raise CommitError(
                    f"{self._directory.url}: column {field.name!r} is {known[field.name].type} in the table and "
                    f"{field.type} in the query; cast it"
                )
        if missing and not self._merges:
            names = ", ".join(repr(field.name) for field in missing)
            raise CommitError(f"{self._directory.url} has no column {names}: set option mergeSchema=true to add it")
        return missing


def _check_features(table: Any) -> None:
    """Raises CommitError for a table that requires a writer feature which the engine lacks."""
    protocol = table.protocol()
    if protocol.writer_features is not None:
        unknown = sorted(set(protocol.writer_features) - _WRITTEN_FEATURES)
        if unknown:
            raise CommitError(
                f"the table needs writers with the features {', '.join(unknown)}, which this sink does not support"
            )
    elif protocol.min_writer_version > _GREATEST_WRITER_VERSION:
        raise CommitError(
            f"the table needs writers of version {protocol.min_writer_version}; this sink supports "
            f"{_GREATEST_WRITER_VERSION}, and version 7 with known features"
        )
    for field in table.schema().fields:
        if found := [key for key in _COMPUTED if key in (field.metadata or {})]:
            raise CommitError(f"column {field.name!r} of the table has {found[0]}, which this sink does not support")


def _statistics(metadata: Any) -> dict[str, Any]:
    """The statistics of a file as the log has them: of top-level columns, where minimum and maximum bound all rows."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for at in range(metadata.num_columns):
        name = metadata.schema.column(at).path
        if name != metadata.schema.column(at).name:
            continue
        columns = [metadata.row_group(group).column(at).statistics for group in range(metadata.num_row_groups)]
        if any(column is None or not column.has_null_count for column in columns):
            continue
        nulls[name] = sum(column.null_count for column in columns)
        bounded = [column for column in columns if column.has_min_max]
        if len(bounded) != len([column for column in columns if column.num_values]) or not bounded:
            continue
        low = _bound(min(column.min for column in bounded), up=False)
        high = _bound(max(column.max for column in bounded), up=True)
        if low is not None and high is not None:
            least[name], greatest[name] = low, high
    return {"numRecords": metadata.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls}


def _bound(value: Any, *, up: bool) -> Any:
    """A bound as JSON; None for a value whose bounds are left out.

    Decimals and floats have no bounds: JSON rounds decimals, and NaN is greater than any bound of a float.
    """
    if isinstance(value, bool) or not isinstance(value, int | str | date | datetime):
        return None
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else None
    if isinstance(value, datetime):
        milliseconds = value.microsecond / 1000
        whole = math.ceil(milliseconds) if up else math.floor(milliseconds)
        rounded = value.replace(microsecond=0) + timedelta(milliseconds=whole)
        return rounded.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    return value
