"""Tracks the files of completed checkpoints that a backend may refer to, instead of writing their content again.

Only files of a checkpoint whose completion was notified qualify, because files of aborted checkpoints are deleted. A
file that a pending checkpoint does not refer to is excluded, because it is deleted when that checkpoint completes.
Source: Flink's RocksDB snapshot strategy, which keeps the uploaded files by checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile, is_shared


class SharedFiles:
    """The files by the backend's own names, whose content never changes.

    The subtask's thread begins checkpoints and reports outcomes; threads that write snapshots make the other calls.
    Savepoints only duplicate files: no checkpoint may refer to a savepoint's files, so they are not recorded here.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._base: dict[str, StateFile] = {}
        self._pending: dict[int, Mapping[str, StateFile] | None] = {}
        self._completed = -1

    def restored(self, files: Mapping[str, StateFile]) -> None:
        """Files of the checkpoint that the job was restored from and owns: they may be reused like its own."""
        self._base = {name: file for name, file in files.items() if file.inline is not None or is_shared(file)}

    def begun(self, checkpoint_id: int) -> None:
        """A snapshot was taken; the files that it refers to are unknown until it is written."""
        with self._lock:
            self._pending[checkpoint_id] = None

    def reusable(self, checkpoint_id: int) -> dict[str, StateFile]:
        """The files that an incremental checkpoint may refer to now."""
        with self._lock:
            older = [files for known, files in self._pending.items() if known < checkpoint_id]
            return {
                name: file
                for name, file in self._base.items()
                if all(files is not None and files.get(name) == file for files in older)
            }

    def duplicable(self) -> dict[str, StateFile]:
        """The files that a savepoint may duplicate now: none of them is deleted before the savepoint has ended."""
        with self._lock:
            return dict(self._base)

    def written(self, checkpoint_id: int, files: Mapping[str, StateFile]) -> None:
        """Records all shared files that the checkpoint refers to, new or not."""
        with self._lock:
            if checkpoint_id in self._pending:
                self._pending[checkpoint_id] = dict(files)

    def completed(self, checkpoint_id: int) -> None:
        """Notifications may be missing or late: the latest one counts, and also closes all earlier checkpoints."""
        with self._lock:
            if checkpoint_id > self._completed:
                self._completed = checkpoint_id
                # When the checkpoint's files are no longer known, there is nothing to refer to.
                self._base = dict(self._pending.get(checkpoint_id) or {})
                self._pending = {known: files for known, files in self._pending.items() if known > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        """Forgets the checkpoint; the files that were new in it are deleted."""
        with self._lock:
            self._pending.pop(checkpoint_id, None)
