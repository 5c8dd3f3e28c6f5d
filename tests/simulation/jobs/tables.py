"""A keyed state backend that writes increments as RocksDB's does, without a database: for simulated jobs.

State is that of the one in memory. A snapshot cuts it into tables named after their content, which stand for table
files; which of them are written, referred to or duplicated, the code of RocksDB's snapshots decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from io import BytesIO
from typing import Any, BinaryIO, cast

from ckpt_runtime.checkpoint.completed_checkpoint import (
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
    StateFile,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.state import registry
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, SnapshotReader
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.rocksdb.local_files import tables_of
from ckpt_runtime.state.rocksdb.snapshot import NAME, RocksDBSnapshot
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.task import snapshot_files

_MANIFEST = "MANIFEST-000001"


class _LocalFile:
    """What RocksDB's snapshots want of a path."""

    def __init__(self, name: str, content: bytes) -> None:
        self.name = name
        self._content = content

    def open(self, mode: str) -> BinaryIO:
        return BytesIO(self._content)


class _Captured:
    """Where the state in memory is written to: a :class:`~ckpt_runtime.state.backend.SnapshotFiles`, and its file."""

    def __init__(self) -> None:
        self.stream = BytesIO()

    def __enter__(self) -> _Captured:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def private(self, suffix: str = "") -> _Captured:
        return self

    def finish(self) -> StateFile:
        return StateFile("", self.stream.tell(), "")


class _Moment:
    """The tables of a moment, in place of a database's."""

    def __init__(self, files: Sequence[_LocalFile]) -> None:
        self._files = files

    def files(self) -> Sequence[_LocalFile]:
        return self._files

    def release(self) -> None:
        """Nothing is held."""


class _Tables:
    """Reads what a handle in memory refers to out of tables: ``places`` are (file, offset) of a handle."""

    def __init__(self, reader: SnapshotReader) -> None:
        self._reader = reader
        self.places: dict[tuple[str, int], StateFile] = {}

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        return self._reader.read(self.places[file.path, offset], 0, length)

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        raise AssertionError("nothing is fetched")

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        return False


class TablesBackend(MemoryKeyedStateBackend):
    """See the module."""

    def __init__(self, parameters: BackendParameters) -> None:
        super().__init__(parameters.key_groups, parameters.max_parallelism, parameters.uid)
        self._shared = SharedFiles()

    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        tables = _Tables(reader)
        mine = [handle for handle in handles if isinstance(handle, IncrementalKeyedStateHandle)]
        others = [handle for handle in handles if not isinstance(handle, IncrementalKeyedStateHandle)]
        known = [_in_memory(handle, str(number), tables) for number, handle in enumerate(mine)]
        super().restore([*others, *known], tables if mine else reader, owned=owned)
        if owned:
            self._shared.restored({name: file for handle in mine for name, file in tables_of(handle).items()})

    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        frozen = super().snapshot(checkpoint_id, properties)
        if not properties.is_savepoint:
            self._shared.begun(checkpoint_id)
        if properties.savepoint_format is SavepointFormat.CANONICAL:
            return frozen
        captured = _Captured()
        try:
            handles = frozen.write(cast(Any, captured))
        finally:
            frozen.release()
        files, sections = _cut(handles, captured.stream.getvalue())
        moment, description = cast(Any, _Moment(files)), {"sections": sections}
        return RocksDBSnapshot(moment, description, self.key_groups, self._shared, checkpoint_id, properties, threads=1)

    def notify_complete(self, checkpoint_id: int) -> None:
        self._shared.completed(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        self._shared.aborted(checkpoint_id)


def _cut(handles: Sequence[KeyedHandle], content: bytes) -> tuple[list[_LocalFile], list[Any]]:
    """A table for each key group of each state, and which they are."""
    files = {_MANIFEST: _LocalFile(_MANIFEST, b"tables")}
    sections = []
    for section in (section for handle in handles for section in cast(KeyedStateHandle, handle).sections):
        blocks = []
        for group, offset, length in section.key_group_offsets:
            block = content[offset : offset + length]
            name = f"{int.from_bytes(blake2b(block, digest_size=8).digest()):020d}.sst"
            files[name] = _LocalFile(name, block)
            blocks.append([group, name, length])
        sections.append([section.name, section.descriptor, blocks])
    return list(files.values()), sections


def _in_memory(handle: IncrementalKeyedStateHandle, name: str, tables: _Tables) -> KeyedStateHandle:
    sections, offset = [], 0
    for state, descriptor, blocks in handle.description["sections"]:
        offsets = []
        for group, table, length in blocks:
            tables.places[name, offset] = handle.files[table]
            offsets.append((group, offset, length))
            offset += length
        sections.append(KeyedSection(state, descriptor, tuple(offsets)))
    return KeyedStateHandle(handle.key_groups, StateFile(name, offset, ""), tuple(sections))


@contextmanager
def in_place_of_rocksdb() -> Iterator[None]:
    """Jobs that name RocksDB get this one. Files go one at a time: the order of faults is the seed's."""
    known, names = registry._FACTORIES[NAME], vars(snapshot_files)
    at_once = names["DUPLICATED_AT_ONCE"]
    registry.register_backend(NAME, TablesBackend)
    names["DUPLICATED_AT_ONCE"] = 1
    try:
        yield
    finally:
        registry.register_backend(NAME, known)
        names["DUPLICATED_AT_ONCE"] = at_once
