"""The asynchronous part of a snapshot: the files of a database as of one moment go to the storage."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import IncrementalKeyedStateHandle, KeyedHandle, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.rocksdb.database import Moment
from ckpt_runtime.state.rocksdb.local_files import is_kept, is_table
from ckpt_runtime.state.shared_files import SharedFiles
from ckpt_runtime.state.snapshots import SnapshotFile, SnapshotFiles

NAME = "rocksdb"
_CHUNK_BYTES = 1 << 20


class RocksDBSnapshot:
    """See the module. ``description`` is the catalog's, as of the moment."""

    def __init__(
        self,
        moment: Moment,
        description: dict[str, Any],
        key_groups: KeyGroupRange,
        shared: SharedFiles,
        checkpoint_id: int,
        properties: CheckpointProperties,
    ) -> None:
        self._moment = moment
        self._description = description
        self._key_groups = key_groups
        self._shared = shared
        self._id = checkpoint_id
        self._properties = properties

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Refers to table files that the storage has already, and writes the others."""
        known = self._shared.reusable(self._id) if self._properties.is_incremental else {}
        written: dict[str, StateFile] = {}
        for path in self._moment.files():
            if is_table(path.name):
                written[path.name] = known.get(path.name) or _copied(path, files.shared())
            elif is_kept(path.name):
                written[path.name] = _copied(path, files.private())
        if not self._properties.is_savepoint:
            self._shared.written(self._id, {name: file for name, file in written.items() if is_table(name)})
        return (IncrementalKeyedStateHandle(self._key_groups, NAME, written, self._description),)

    def release(self) -> None:
        self._moment.release()


class EmptySnapshot:
    """Of a backend that holds no state."""

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        return ()

    def release(self) -> None:
        """Nothing is held."""


def _copied(path: Path, file: SnapshotFile) -> StateFile:
    with file, path.open("rb") as source:
        shutil.copyfileobj(source, file.stream, _CHUNK_BYTES)
        return file.finish()
