"""Snapshots of a database: the upload of its files as of one moment, and the restore from one or several of them.

A restore from a single snapshot, which is the usual case if a subtask has the same or fewer key groups, opens and
clips it, and reads no entry at all. With several, the one that holds most of the key groups is opened, and the
entries of each other one are ingested as one sorted file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, KeyedHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.configuration.state_options import CompactionStyle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import SnapshotFile, SnapshotFiles, SnapshotReader
from ckpt_runtime.state.canonical import CanonicalWriter
from ckpt_runtime.state.rocksdb.catalog import Catalog
from ckpt_runtime.state.rocksdb.codec import ID_BYTES, PREFIX_BYTES, group_prefix, state_prefix
from ckpt_runtime.state.rocksdb.database import Moment
from ckpt_runtime.state.rocksdb.local_files import LocalCopies, at_once, fetch, is_kept, is_table, tables_of
from ckpt_runtime.state.rocksdb.store import Store, StoreMemory
from ckpt_runtime.state.rocksdb.stored_form import StoredForm, stored_form
from ckpt_runtime.state.shared_files import SharedFiles

NAME = "rocksdb"
_CHUNK_BYTES = 1 << 20


@dataclass
class RocksDBSnapshot:
    """See the module docstring. ``description`` is the catalog's as of the moment; ``threads`` uploads run at a time.

    ``copies`` keeps the table files of checkpoints.
    """

    moment: Moment
    description: dict[str, Any]
    key_groups: KeyGroupRange
    shared: SharedFiles
    checkpoint_id: int
    properties: CheckpointProperties
    threads: int
    copies: LocalCopies | None = None

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Uploads the files. Tables that the storage already has are referred to, or duplicated for a savepoint."""
        local = {path.name: path for path in self.moment.files() if is_kept(path.name)}
        tables = self._known(files, local.keys())
        new = [name for name in sorted(local.keys() - tables.keys()) if is_table(name)]
        tables |= at_once(self.threads, lambda name: files.shared_from(local[name]), new)
        if not self.properties.is_savepoint:
            # Recorded after all files are stored, so that after an error no other checkpoint refers to any of them.
            self.shared.written(self.checkpoint_id, tables)
            if self.copies is not None:
                self.copies.keep(self.checkpoint_id, {file: local[name] for name, file in tables.items()})
        others = {name: _copied(local[name], files.private()) for name in sorted(local.keys() - tables.keys())}
        return (IncrementalKeyedStateHandle(self.key_groups, NAME, tables | others, self.description),)

    def _known(self, files: SnapshotFiles, wanted: Set[str]) -> dict[str, StateFile]:
        if not self.properties.is_incremental:
            return {}
        is_savepoint = self.properties.is_savepoint
        known = self.shared.duplicable() if is_savepoint else self.shared.reusable(self.checkpoint_id)
        known = {name: file for name, file in known.items() if name in wanted}
        return files.duplicate_all(known) if is_savepoint else known

    def release(self) -> None:
        self.moment.release()


@dataclass
class CanonicalSnapshot:
    """A savepoint in canonical form, which every backend can read."""

    uid: str
    moment: Moment
    description: dict[str, Any]
    key_groups: KeyGroupRange
    max_parallelism: int
    memory: StoreMemory

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Reads the linked files, because only they show the state as of the moment."""
        catalog = Catalog.from_json(self.uid, self.description)
        writer = CanonicalWriter(files, self.uid, self.key_groups)
        self.moment.files()
        with closing(Store(self.moment.directory, self.memory)) as store:
            for name in catalog:
                entry = catalog[name]
                form = stored_form(name, entry, self.key_groups, self.max_parallelism)
                schema = entry.schemas()[entry.current]
                writer.write_batches(name, entry.descriptor, schema, self._batches(store, entry.id, form))
        return writer.handles

    def _batches(self, store: Store, state_id: int, form: StoredForm) -> Iterator[tuple[int, pa.RecordBatch]]:
        for group in range(self.key_groups.first, self.key_groups.last + 1):
            for batch in form.batches(store.scan(state_prefix(group, state_id))):
                yield group, batch

    def release(self) -> None:
        self.moment.release()


class EmptySnapshot:
    """The snapshot of a backend that holds no state."""

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        return ()

    def release(self) -> None:
        """Does nothing: there is nothing to release."""


def _copied(path: Path, file: SnapshotFile) -> StateFile:
    with file, path.open("rb") as source:
        shutil.copyfileobj(source, file.stream, _CHUNK_BYTES)
        return file.finish()


@dataclass(slots=True)
class Restored:
    """A database with its catalog; ``tables`` are the files of the snapshot that it still consists of."""

    store: Store
    catalog: Catalog
    tables: dict[str, StateFile] = field(default_factory=dict)


def restored_database(
    uid: str,
    handles: Sequence[IncrementalKeyedStateHandle],
    reader: SnapshotReader,
    root: Path,
    memory: StoreMemory,
    compaction: CompactionStyle,
    owned: KeyGroupRange,
    threads: int,
    copies: LocalCopies | None = None,
) -> Restored:
    """The database in ``root / "db"`` with the key groups ``owned`` of all handles; fetches ``threads`` at a time."""
    parts = [handle for handle in handles if len(handle.key_groups.intersection(owned))]
    if not parts:
        return Restored(Store(root / "db", memory, compaction), Catalog(uid))
    # Size breaks ties, because the entries of the other parts are copied.
    parts.sort(key=lambda part: (len(part.key_groups.intersection(owned)), _bytes(part)), reverse=True)
    largest = parts[0]
    catalog = Catalog.from_json(uid, largest.description)
    fetch(largest, reader, root / "db", threads, copies)
    restored = Restored(Store(root / "db", memory, compaction), catalog, tables_of(largest))
    try:
        theirs = largest.key_groups
        restored.store.delete_range(group_prefix(theirs.first), group_prefix(owned.first))
        restored.store.delete_range(group_prefix(owned.last + 1), group_prefix(theirs.last + 1))
        for number, part in enumerate(parts[1:]):
            fetch(part, reader, root / f"part-{number}", threads, copies)
            _add(uid, restored, part, root / f"part-{number}", memory, owned)
    except BaseException:
        restored.store.close()
        raise
    return restored


def _bytes(handle: IncrementalKeyedStateHandle) -> int:
    return sum(file.length for file in handle.files.values())


def _add(
    uid: str,
    restored: Restored,
    part: IncrementalKeyedStateHandle,
    directory: Path,
    memory: StoreMemory,
    owned: KeyGroupRange,
) -> None:
    places = restored.catalog.merge(Catalog.from_json(uid, part.description))
    with closing(Store(directory, memory)) as store:
        groups = part.key_groups.intersection(owned)
        restored.store.ingest(_entries(store, groups, places), directory / "entries")
    shutil.rmtree(directory)


def _entries(
    store: Store, groups: KeyGroupRange, places: dict[int, tuple[int, list[int]]]
) -> Iterator[tuple[bytes, bytes]]:
    """The entries of a database in the order of their keys in the other one."""
    if all(new_id == old_id and schemas == list(range(len(schemas))) for old_id, (new_id, schemas) in places.items()):
        # This is the case whenever a job is rescaled: entries are copied unchanged.
        yield from store.between(group_prefix(groups.first), group_prefix(groups.last + 1))
        return
    by_new_id = sorted((new_id, old_id, schemas) for old_id, (new_id, schemas) in places.items())
    for group in range(groups.first, groups.last + 1):
        for new_id, old_id, schemas in by_new_id:
            prefix = state_prefix(group, new_id)
            headers = {old.to_bytes(ID_BYTES, "big"): new.to_bytes(ID_BYTES, "big") for old, new in enumerate(schemas)}
            for key, value in store.scan(state_prefix(group, old_id)):
                header = headers.get(value[:ID_BYTES], value[:ID_BYTES])
                yield prefix + key[PREFIX_BYTES:], header + value[ID_BYTES:]
