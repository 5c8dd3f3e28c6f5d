"""The database of one backend, its snapshots in the order in which they were taken, and its local files.

A snapshot is taken in memory (``dirty.py``). Its entries reach the database before those of any later moment, and
between the two its files are linked into a directory: whoever needs that first does it, which usually is the thread
that writes the snapshot, and otherwise the subtask when its cache has to give up changed entries. So a slow or late
writer costs memory or time, never content. Files and database go with the last of the backend and its snapshots.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.rocksdb.codec import state_prefix
from ckpt_runtime.state.rocksdb.dirty import FrozenDirty
from ckpt_runtime.state.rocksdb.local_directory import LocalDirectory

if TYPE_CHECKING:  # what every worker loads before it has a job must not load rocksdict
    from ckpt_runtime.state.rocksdb.store import Store


class Moment:
    """The database as of one moment. Made by :meth:`Database.freeze`."""

    def __init__(self, database: Database, parts: Sequence[FrozenDirty], directory: Path) -> None:
        self._database = database
        self.directory = directory
        self._parts = parts
        self._wanted = True
        self._failure: Exception | None = None

    def files(self) -> list[Path]:
        """The files of a database with this content, until the release. Raises what RocksDB raises."""
        self._database.settle(self)
        if self._failure is not None:
            raise self._failure
        return sorted(self.directory.iterdir())

    def store(self, store: Store) -> None:
        """Brings the entries to the database; once more after an error does no harm."""
        for part in self._parts:
            store.write(part.puts(), part.deletes())
        for part in self._parts:
            part.release()
        self._parts = ()

    def link(self, store: Store) -> None:
        """Links the files, unless nobody wants them any more."""
        if not self._wanted:
            return
        try:
            store.flush()
            store.checkpoint(self.directory)
        except Exception as failure:  # of this snapshot alone: the database goes on
            self._failure = failure
        self._discard_unwanted()  # it may have been released meanwhile

    def _discard_unwanted(self) -> None:
        if not self._wanted:
            shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """The files go. Called once, from any thread."""
        self._wanted = False
        self._discard_unwanted()
        self._database.left()


class Database:
    """See the module. The store lies in ``directory``; both are this object's from here on."""

    def __init__(self, directory: LocalDirectory, store: Store, key_groups: KeyGroupRange) -> None:
        self._directory = directory
        self._store = store
        self._key_groups = key_groups
        self._order = threading.Lock()
        self._pending: deque[Moment] = deque()
        self._numbers = count(1)
        self._users = 1
        self._users_lock = threading.Lock()
        self.multi_get = store.multi_get
        self.scan = store.scan
        self.keys = store.keys
        self.figure = store.figure

    def freeze(self, parts: Sequence[FrozenDirty]) -> Moment:
        """The content at this moment, of which ``parts`` are what is not in the database yet. Does not wait."""
        with self._users_lock:
            self._users += 1
        moment = Moment(self, parts, self._directory.path / f"snapshot-{next(self._numbers)}")
        # Without the lock of the order, which a writer may hold for as long as the disk takes.
        self._pending.append(moment)
        return moment

    @property
    def pending(self) -> int:
        """Moments whose entries the database lacks."""
        return len(self._pending)

    def settle(self, last: Moment | None = None) -> None:
        """Brings the moments up to ``last``, or all, to the database."""
        with self._order:
            self._settle(last)

    def _settle(self, last: Moment | None) -> None:
        while self._pending and (last is None or last in self._pending):
            moment = self._pending[0]
            moment.store(self._store)
            # Before the entries of the next moment come: the files show this one and nothing younger.
            moment.link(self._store)
            # Only now: an error above leaves it the first, and whoever settles next goes on with it.
            self._pending.popleft()

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Sets and removes entries that are younger than all moments: these come first."""
        with self._order:
            self._settle(None)
            self._store.write(puts, deletes)

    def delete_state(self, state_id: int) -> None:
        """Removes all entries of a state; moments keep them."""
        with self._order:
            self._settle(None)
            for group in range(self._key_groups.first, self._key_groups.last + 1):
                prefix = state_prefix(group, state_id)
                # A range that was deleted costs every later read: none where nothing was.
                if next(self.scan(prefix), None) is not None:
                    self._store.delete_range(prefix, state_prefix(group, state_id + 1))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Removes many entries at once, as of now; moments keep them. It costs every later read there."""
        with self._order:
            self._settle(None)
            self._store.delete_range(begin, end)

    def left(self) -> None:
        """The backend or a moment needs the database no more."""
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self._store.close()
        self._directory.remove()
