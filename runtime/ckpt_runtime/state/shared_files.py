"""Which files of completed checkpoints a backend may refer to, instead of writing what they hold once more.

Only files of a checkpoint whose completion was notified: those of aborted ones are deleted. And none that a checkpoint
which is still under way leaves out: when that one completes, it makes them go. Source: Flink's RocksDB snapshot
strategy, which keeps the uploaded files by checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import StateFile


class SharedFiles:
    """By the backend's own names, whose content never changes.

    The subtask's thread begins checkpoints and hears what becomes of them; those that write snapshots do the rest.
    Savepoints take no part but that they duplicate: nothing may refer to their files, which are not told of here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._base: dict[str, StateFile] = {}
        self._pending: dict[int, Mapping[str, StateFile] | None] = {}
        self._completed = -1

    def restored(self, files: Mapping[str, StateFile]) -> None:
        """Files of the checkpoint that the job was restored from and owns: they are as good as those of its own."""
        self._base = {name: file for name, file in files.items() if file.inline is not None or is_shared(file)}

    def begun(self, checkpoint_id: int) -> None:
        """A snapshot was taken; which files it refers to is not known before it is written."""
        with self._lock:
            self._pending[checkpoint_id] = None

    def reusable(self, checkpoint_id: int) -> dict[str, StateFile]:
        """What an incremental checkpoint may refer to now."""
        with self._lock:
            older = [files for known, files in self._pending.items() if known < checkpoint_id]
            return {
                name: file
                for name, file in self._base.items()
                if all(files is not None and files.get(name) == file for files in older)
            }

    def duplicable(self) -> dict[str, StateFile]:
        """What a savepoint may duplicate now: none of these files goes before it has ended."""
        with self._lock:
            return dict(self._base)

    def written(self, checkpoint_id: int, files: Mapping[str, StateFile]) -> None:
        """All shared files that the checkpoint refers to, new or not."""
        with self._lock:
            if checkpoint_id in self._pending:
                self._pending[checkpoint_id] = dict(files)

    def completed(self, checkpoint_id: int) -> None:
        """Notifications may be missing or late: the latest counts, and settles all before it."""
        with self._lock:
            if checkpoint_id > self._completed:
                self._completed = checkpoint_id
                # One that is not known to be written any more leaves nothing to refer to.
                self._base = dict(self._pending.get(checkpoint_id) or {})
                self._pending = {known: files for known, files in self._pending.items() if known > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        """The files that were new in it are deleted."""
        with self._lock:
            self._pending.pop(checkpoint_id, None)
