"""Reads keyed state in canonical form, for a range of key groups; for every backend.

The files are untrusted. So the following is checked before any row is used: the schema, the number of rows, the order
of key groups, and that each key is in the key group of its hash.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ckpt_runtime.checkpoint.state_handles import CanonicalKeyedStateHandle, RowGroup, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.canonical.parquet_form import (
    METADATA_KEY,
    ROWS_PER_GROUP,
    description,
    schema_as_read,
)
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError, schema_mismatch, schema_text
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.snapshots import SnapshotReader
from ckpt_runtime.state.stored_rows import KEY_PREFIX, check_descriptor, schema_from_json

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
            raise self._corrupt(f"it says of itself {found[:200]!r}")
        wanted = schema_as_read(state.schema)
        if not file.schema_arrow.equals(wanted):
            raise self._corrupt(f"its columns are [{schema_text(file.schema_arrow)}], not [{schema_text(wanted)}]")
        # Statistics are not read: with an inconsistent footer, reading them crashes the process.
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        written = [group.rows for group in handle.row_groups]
        if sizes != written or max(sizes, default=0) > ROWS_PER_GROUP:
            raise self._corrupt(f"it has row groups of {sizes[:10]} rows, and should have those of {written[:10]}")

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
