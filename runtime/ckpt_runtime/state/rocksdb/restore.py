"""Builds one database from several snapshots: opens one of them and clips it, and adds the entries of the others.

So a restore from a single snapshot, which is the usual case if a subtask has the same or fewer key groups, reads no
entry at all. With several, the one that holds most of the key groups is opened, and the entries of each other one are
ingested as one sorted file.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.checkpoint.state_handles import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.configuration.state_options import CompactionStyle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.rocksdb.catalog import Catalog
from ckpt_runtime.state.rocksdb.codec import ID_BYTES, PREFIX_BYTES, group_prefix, state_prefix
from ckpt_runtime.state.rocksdb.local_copies import LocalCopies
from ckpt_runtime.state.rocksdb.local_files import fetch, tables_of
from ckpt_runtime.state.rocksdb.store import Store, StoreMemory
from ckpt_runtime.state.snapshots import SnapshotReader


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
