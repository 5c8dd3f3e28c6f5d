"""The canonical form of keyed state (FLIP-203): Parquet files that every backend writes and every Parquet tool reads.

One file holds one named state of one operator, for one range of key groups:

* columns: ``key_group`` (int32, not null), then those of the stored rows (``state/stored_rows.py``), in Parquet's own
  types. No Arrow schema is stored: a duration is an integer, an encoded column its plain values
* rows: sorted by ``key_group``; rows of one key are adjacent, elements of a list and rows of a join in their order
* row groups: at most :data:`ROWS_PER_GROUP` rows; the handle lists the key groups of each, so that a reader can skip
  the others
* compression: zstd
* key-value metadata ``ckpt.state``: JSON with ``format`` (1), ``operator``, ``state``, ``key_groups`` (first and last)
  and ``descriptor``

A reader takes the types from the descriptor, and rejects a file with other types. Files are untrusted: schema, number
of rows, order of key groups, and that each key is in the key group of its hash are checked before any row is used.
Reading and writing stream rows: only one row group is in memory, at any size of the state.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ckpt_runtime.checkpoint.completed_checkpoint import CanonicalKeyedStateHandle, RowGroup, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import SnapshotFiles, SnapshotReader
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, plain
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError, schema_mismatch, schema_text
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.stored_rows import KEY_PREFIX, check_descriptor, check_owned, schema_from_json

FORMAT_VERSION = 1
SUFFIX = ".parquet"
KEY_GROUP = "key_group"
METADATA_KEY = b"ckpt.state"
ROWS_PER_GROUP = 1 << 17
BYTES_PER_GROUP = 32 << 20
"""Maximum size of a row group in memory; a larger row gets its own row group."""

parquet_writer = partial(pq.ParquetWriter, compression="zstd", store_schema=False)


def file_schema(stored: pa.Schema) -> pa.Schema:
    """The columns of a file with these stored rows."""
    return pa.schema([pa.field(KEY_GROUP, pa.int32(), nullable=False), *stored]).remove_metadata()


def schema_as_read(stored: pa.Schema) -> pa.Schema:
    """The schema that Parquet returns for these columns. Raises ArrowException when it cannot hold them."""
    sink = pa.BufferOutputStream()
    parquet_writer(sink, file_schema(stored)).close()
    return pq.read_schema(pa.BufferReader(sink.getvalue())).remove_metadata()


def description(operator: str, name: str, key_groups: KeyGroupRange, descriptor: dict[str, Any]) -> bytes:
    """The key-value metadata of a file."""
    document = {
        "format": FORMAT_VERSION,
        "operator": operator,
        "state": name,
        "key_groups": [key_groups.first, key_groups.last],
        "descriptor": descriptor,
    }
    return json.dumps(document, sort_keys=True).encode()


class CanonicalWriter:
    """A :class:`~ckpt_runtime.state.stored_rows.StateWriter` for the states of one operator in one subtask.

    One thread uses it. ``handles`` has one handle for each state that was written.
    """

    def __init__(self, files: SnapshotFiles, uid: str, key_groups: KeyGroupRange) -> None:
        self._files = files
        self._uid = uid
        self._key_groups = key_groups
        self.handles: list[CanonicalKeyedStateHandle] = []

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`. Sorts by key group and key."""
        check_owned(name, groups, owned)
        self._write(name, descriptor, table.schema, _sorted(table, groups))

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`. Rows of one key must be adjacent.

        Raises :class:`CorruptStateError` for key groups that do not ascend or belong to another subtask.
        """
        self._write(name, descriptor, schema, self._gathered(name, schema, batches))

    def _write(self, name: str, descriptor: dict[str, Any], stored: pa.Schema, row_groups: Iterable[pa.Table]) -> None:
        try:
            schema_as_read(stored)
        except pa.ArrowException as error:  # Parquet cannot hold structs without fields
            what = f"state {name!r} of operator {self._uid!r} has no canonical form"
            raise StateSchemaError(f"{what}: {error}; it has [{schema_text(stored)}]") from error
        about = description(self._uid, name, self._key_groups, descriptor)
        written = []
        with self._files.private(SUFFIX) as file:
            writer = parquet_writer(file.stream, file_schema(stored))
            try:
                writer.add_key_value_metadata({METADATA_KEY: about})
                for table in row_groups:
                    writer.write_table(table, row_group_size=ROWS_PER_GROUP)
                    groups = table.column(0)
                    written.append(RowGroup(len(groups), KeyGroupRange(groups[0].as_py(), groups[-1].as_py())))
            except BaseException:
                # Closed here, because garbage collection would also write the buffered rows. The file is discarded, so
                # errors do not matter.
                with suppress(Exception):
                    writer.close()
                raise
            writer.close()
            stored_file = file.finish()
        self.handles.append(CanonicalKeyedStateHandle(self._key_groups, name, descriptor, tuple(written), stored_file))

    def _gathered(
        self, name: str, schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> Iterator[pa.Table]:
        gathered: list[pa.RecordBatch] = []
        groups: list[int] = []
        rows = size = 0
        owned = self._key_groups
        for key_group, batch in batches:
            check_owned(name, np.array([key_group]), owned)
            owned = KeyGroupRange(key_group, owned.last)
            step = _rows_per_group(batch)
            for start in range(0, batch.num_rows, step):
                piece = batch.slice(start, step)
                if gathered and (rows + piece.num_rows > ROWS_PER_GROUP or size + piece.nbytes > BYTES_PER_GROUP):
                    yield _numbered(pa.Table.from_batches(gathered, schema), groups, gathered)
                    gathered, groups, rows, size = [], [], 0, 0
                gathered.append(piece)
                groups.append(key_group)
                rows += piece.num_rows
                size += piece.nbytes
        if gathered:
            yield _numbered(pa.Table.from_batches(gathered, schema), groups, gathered)


def _numbered(table: pa.Table, groups: list[int], batches: list[pa.RecordBatch]) -> pa.Table:
    return _with_groups(table, np.repeat(np.array(groups, np.int32), [batch.num_rows for batch in batches]))


def _sorted(table: pa.Table, groups: AnyArray) -> Iterator[pa.Table]:
    whole = _with_groups(table, groups.astype(np.int32)).combine_chunks()
    keys = [name for name in table.column_names if name.startswith(KEY_PREFIX)]
    order = order_by([whole.column(name) for name in (KEY_GROUP, *keys)])
    step = _rows_per_group(table)
    for start in range(0, len(order), step):
        yield whole.take(order.slice(start, step))


def order_by(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """The positions of rows in the order of these columns; equal rows keep their order."""
    names = [str(index) for index in range(len(columns))]
    return pc.sort_indices(
        pa.table([_sortable(column) for column in columns], names), sort_keys=[(name, "ascending") for name in names]
    )


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column without encodings and half floats, which Arrow cannot sort."""
    values = pa.chunked_array([plain(chunk) for chunk in column.chunks] or [plain(pa.nulls(0, column.type))])
    return values.cast(pa.float32()) if pa.types.is_float16(values.type) else values


def _with_groups(table: pa.Table, groups: AnyArray) -> pa.Table:
    return table.add_column(0, file_schema(pa.schema([])).field(0), arrow_from_numpy(pa.int32(), groups))


def _rows_per_group(rows: pa.Table | pa.RecordBatch) -> int:
    fitting = BYTES_PER_GROUP * rows.num_rows // max(1, rows.nbytes)
    return max(1, min(ROWS_PER_GROUP, int(fitting)))


_BATCH_ROWS = 1 << 16
_MOST_FOOTER = 64 << 20
"""Maximum size of a text, and maximum length of a list, in the footer."""


@dataclass(frozen=True, slots=True)
class CanonicalState:
    """One named state of a snapshot in canonical form: the common description of its parts, and its rows."""

    uid: str
    name: str
    descriptor: dict[str, Any]
    schema: pa.Schema
    parts: tuple[CanonicalKeyedStateHandle, ...]

    def batches(
        self, reader: SnapshotReader, owned: KeyGroupRange, max_parallelism: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of ``owned`` by key group, ascending. Reads little more than it yields.

        Raises :class:`CorruptStateError`, and the errors of ``reader``.
        """
        for part in self.parts:
            if len(part.key_groups.intersection(owned)):
                yield from _Part(self, part, reader, max_parallelism).batches(owned)


def canonical_states(uid: str, handles: Iterable[CanonicalKeyedStateHandle]) -> list[CanonicalState]:
    """The states of one operator, of all its former subtasks. Reads no file.

    Raises :class:`CorruptStateError`, and :class:`StateSchemaError` for parts with different descriptors.
    """
    parts: dict[str, list[CanonicalKeyedStateHandle]] = {}
    for handle in handles:
        parts.setdefault(handle.name, []).append(handle)
    return [_state(uid, name, sorted(found, key=lambda part: part.key_groups)) for name, found in parts.items()]


def _state(uid: str, name: str, parts: Sequence[CanonicalKeyedStateHandle]) -> CanonicalState:
    descriptor = parts[0].descriptor
    check_descriptor(name, descriptor)
    schema = schema_from_json(descriptor.get("schema"))
    for part in parts:
        if part.descriptor != descriptor:
            other = schema_from_json(part.descriptor.get("schema"))
            raise schema_mismatch(uid, name, "parts of the snapshot differ", schema, other)
    for before, after in pairwise(parts):
        if before.key_groups.last >= after.key_groups.first:
            raise CorruptStateError(
                f"state {name!r} has two parts with key group {after.key_groups.first}: "
                f"{before.file.path!r} and {after.file.path!r}"
            )
    return CanonicalState(uid, name, descriptor, schema, tuple(parts))


class _Part:
    """One part of a state: a single file."""

    def __init__(
        self, state: CanonicalState, handle: CanonicalKeyedStateHandle, reader: SnapshotReader, max_parallelism: int
    ) -> None:
        self._state = state
        self._handle = handle
        self._stream = _StoredFile(reader, handle.file)
        self._max_parallelism = max_parallelism
        self._keys = [name for name in state.schema.names if name.startswith(KEY_PREFIX)]

    def batches(self, owned: KeyGroupRange) -> Iterator[tuple[int, pa.RecordBatch]]:
        with self._naming():
            limits = {"thrift_string_size_limit": _MOST_FOOTER, "thrift_container_size_limit": _MOST_FOOTER}
            file = pq.ParquetFile(self._stream, **limits)
            self._check(file)
        for index, group in enumerate(self._handle.row_groups):
            if len(group.key_groups.intersection(owned)):
                for groups, rows in self._row_group(file, index, group):
                    yield from _runs(groups, rows, owned)

    def _row_group(
        self, file: pq.ParquetFile, index: int, group: RowGroup
    ) -> Iterator[tuple[AnyArray, pa.RecordBatch]]:
        """The key groups of rows, and the rows, a batch at a time."""
        before, last = group.key_groups.first, group.key_groups.last
        # Threads would read the file concurrently, which the reader does not allow.
        batches = file.iter_batches(_BATCH_ROWS, [index], use_threads=False)
        while True:
            with self._naming():
                batch = next(batches, None)
                if batch is None:
                    return
                groups, rows = self._checked(batch, KeyGroupRange(before, last))
            before = int(groups[-1])
            yield groups, rows

    def _check(self, file: pq.ParquetFile) -> None:
        handle, state = self._handle, self._state
        metadata = file.metadata
        found = (metadata.metadata or {}).get(METADATA_KEY, b"")
        if found != description(state.uid, state.name, handle.key_groups, state.descriptor):
            raise self._corrupt(f"it describes itself as {found[:200]!r}")
        wanted = schema_as_read(state.schema)
        if not file.schema_arrow.equals(wanted):
            raise self._corrupt(f"its columns are [{schema_text(file.schema_arrow)}], not [{schema_text(wanted)}]")
        # Statistics are not read: with an inconsistent footer, reading them crashes the process.
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        written = [group.rows for group in handle.row_groups]
        if sizes != written or max(sizes, default=0) > ROWS_PER_GROUP:
            raise self._corrupt(f"it has row groups of {sizes[:10]} rows instead of {written[:10]}")

    def _checked(self, batch: pa.RecordBatch, expected: KeyGroupRange) -> tuple[AnyArray, pa.RecordBatch]:
        """The key group of each row, and the stored rows."""
        groups: AnyArray = batch.column(0).to_numpy()
        schema = self._state.schema
        columns = [column.cast(field.type) for column, field in zip(batch.columns[1:], schema, strict=True)]
        rows = pa.RecordBatch.from_arrays(columns, schema=schema)
        rows.validate(full=True)
        if groups[0] < expected.first or groups[-1] > expected.last or (np.diff(groups) < 0).any():
            raise self._corrupt(f"its key groups do not ascend from {expected.first} to {expected.last}")
        hashes = hash_arrays([rows.column(name) for name in self._keys], self._keys)
        if (key_groups_of(hashes, self._max_parallelism) != groups).any():
            raise self._corrupt(f"keys are not in their key groups of {self._max_parallelism}")
        return groups, rows

    def _corrupt(self, reason: object) -> CorruptStateError:
        return CorruptStateError(f"state {self._state.name!r}, file {self._handle.file.path!r}: {reason}")

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Turns Arrow's errors about the file's content into CorruptStateError; MemoryError stays as it is."""
        try:
            yield
        except (CorruptStateError, MemoryError):
            raise
        except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
            if self._stream.failure is not None:
                raise self._stream.failure from None
            raise self._corrupt(error) from error


def _runs(groups: AnyArray, rows: pa.RecordBatch, owned: KeyGroupRange) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Splits rows by key group; yields only the groups in ``owned``."""
    bounds = [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist(), len(groups)]
    for start, end in pairwise(bounds):
        key_group = int(groups[start])
        if key_group in owned:
            yield key_group, rows.slice(start, end - start)


class _StoredFile(io.RawIOBase):
    """A file of a snapshot as a stream for Arrow. ``failure`` is the error that reading it raised."""

    def __init__(self, reader: SnapshotReader, file: StateFile) -> None:
        self._reader = reader
        self._file = file
        self._position = 0
        self.failure: Exception | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.length}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        rest = max(0, self._file.length - self._position)
        length = rest if size is None or size < 0 else min(size, rest)
        try:
            content = bytes(self._reader.read(self._file, self._position, length))
        except Exception as error:
            self.failure = error
            raise
        self._position += length
        return content
