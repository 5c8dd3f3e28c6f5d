"""The database of one backend, its snapshots in the order in which they were taken, and its local files.

States write to a cache. A snapshot freezes its changed entries, and until the database has them
their state must find them itself and must not evict them, because the database would return their old values. The
entries of a snapshot reach the database before those of any later moment, and between the two its files are linked into
a directory. The first thread that needs this does it: usually the thread that writes the snapshot, otherwise the
subtask when its cache has to evict changed entries. So a slow or late writer costs memory or time, but loses no
content. Files and database are deleted when the backend and all snapshots are closed.

A Bloom filter knows the keys that the database may hold, so that most new keys need no read. A restored database has
keys that were not added: :class:`UnknownKeys` reads them step by step. There are no false negatives. The rate of
false positives grows with the number of keys per size: with ten bits per key it is about one in a hundred.
"""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.index_kernels import BLOCK_WORDS, filter_add, filter_test
from ckpt_runtime.state.rocksdb.codec import state_prefix
from ckpt_runtime.state.rocksdb.columnar_rows import ColumnarCodec
from ckpt_runtime.state.rocksdb.local_files import LocalDirectory

if TYPE_CHECKING:  # modules that a worker loads before it has a job must not load rocksdict
    from ckpt_runtime.state.rocksdb.store import Store


class FrozenDirty(Protocol):
    """The changed entries of a state as of one moment; they no longer change."""

    def puts(self) -> Iterable[tuple[bytes, bytes]]:
        """Encoded keys and values, from any thread; called again when writing them has failed."""

    def deletes(self) -> Iterable[bytes]:
        """Keys to delete, none of them in :meth:`puts`. Called under the same conditions."""

    def release(self) -> None:
        """Releases the entries: the database has them, or they are no longer needed. Called once, from any thread."""


class Moment:
    """The database as of one moment. Made by :meth:`Database.freeze`."""

    def __init__(self, database: Database, parts: Sequence[FrozenDirty], directory: Path) -> None:
        self._database = database
        self.directory = directory
        self._parts = parts
        self._wanted = True
        self._failure: Exception | None = None

    def files(self) -> list[Path]:
        """The files of a database with this content, valid until the release. Raises RocksDB's errors."""
        self._database.settle(self)
        if self._failure is not None:
            raise self._failure
        return sorted(self.directory.iterdir())

    def store(self, store: Store) -> None:
        """Writes the entries to the database; calling it again after an error does no harm."""
        for part in self._parts:
            store.write(part.puts(), part.deletes())
        for part in self._parts:
            part.release()
        self._parts = ()

    def link(self, store: Store) -> None:
        """Links the files, unless the moment was released."""
        if not self._wanted:
            return
        try:
            store.flush()
            store.checkpoint(self.directory)
        except Exception as failure:  # only this snapshot fails, the database remains usable
            self._failure = failure
        self._discard_unwanted()  # it may have been released in the meantime

    def _discard_unwanted(self) -> None:
        if not self._wanted:
            shutil.rmtree(self.directory, ignore_errors=True)

    def release(self) -> None:
        """Deletes the files. Called once, from any thread."""
        self._wanted = False
        self._discard_unwanted()
        self._database.left()


class Database:
    """See the module docstring. The store is in ``directory``; this object takes ownership of both."""

    def __init__(self, directory: LocalDirectory, store: Store, key_groups: KeyGroupRange) -> None:
        self._directory = directory
        self.directory = directory.path
        """For files that end with this process."""
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
        """The content at this moment; ``parts`` are the entries that are not in the database yet. Does not wait."""
        with self._users_lock:
            self._users += 1
        moment = Moment(self, parts, self._directory.path / f"snapshot-{next(self._numbers)}")
        # Without ``_order``, which a writer may hold for as long as the disk takes.
        self._pending.append(moment)
        return moment

    @property
    def pending(self) -> int:
        """Moments whose entries the database lacks."""
        return len(self._pending)

    def settle(self, last: Moment | None = None) -> None:
        """Writes the moments up to ``last``, or all, to the database."""
        with self._order:
            self._settle(last)

    def _settle(self, last: Moment | None) -> None:
        while self._pending and (last is None or last in self._pending):
            moment = self._pending[0]
            moment.store(self._store)
            # Before the entries of the next moment are written: the files contain nothing younger than this one.
            moment.link(self._store)
            # Only now: after an error above it stays the first, and the next call retries it.
            self._pending.popleft()

    def write(self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = ()) -> None:
        """Sets and removes entries that are younger than all moments, which are therefore written first."""
        with self._order:
            self._settle(None)
            self._store.write(puts, deletes)

    def delete_state(self, state_id: int) -> None:
        """Removes all entries of a state; moments keep them."""
        with self._order:
            self._settle(None)
            for group in range(self._key_groups.first, self._key_groups.last + 1):
                prefix = state_prefix(group, state_id)
                # A deleted range slows every later read, so none is deleted where there is no entry.
                if next(self.scan(prefix), None) is not None:
                    self._store.delete_range(prefix, state_prefix(group, state_id + 1))

    def delete_range(self, begin: bytes, end: bytes) -> None:
        """Removes many entries at once, as of now; moments keep them. It slows every later read in that range."""
        with self._order:
            self._settle(None)
            self._store.delete_range(begin, end)

    def left(self) -> None:
        """The backend and each moment call this once when they end; the last call closes and deletes the database."""
        with self._users_lock:
            self._users -= 1
            if self._users:
                return
        self._store.close()
        self._directory.remove()


class KeyFilter:
    """Uses no memory before the first key is added, and at most ``size`` bytes for any number of keys."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: AnyArray = np.empty(0, dtype=np.uint64)

    def add(self, hashes: AnyArray) -> None:
        """Adds keys by their stable hashes."""
        if not len(hashes):
            return
        if not len(self._words):
            blocks = max(1, self._size // (8 * BLOCK_WORDS))
            self._words = np.zeros(blocks * BLOCK_WORDS, dtype=np.uint64)
        filter_add(read_only(hashes), self._words)

    def may_hold(self, hashes: AnyArray) -> AnyArray:
        """For each of these keys whether it may have been added."""
        found = np.zeros(len(hashes), dtype=np.uint8)
        if len(self._words):
            filter_test(read_only(hashes), read_only(self._words), found)
        return found.view(np.bool_)


class UnknownKeys:
    """The keys that a state had in a database before anything was added to its filter, read in their order.

    Keys that are written during the call need not be among them: their writer adds them to the filter.
    """

    def __init__(self, database: Database, codec: ColumnarCodec, state_id: int, key_groups: KeyGroupRange) -> None:
        self._database = database
        self._codec = codec
        self._id = state_id
        self._groups = iter(range(key_groups.first, key_groups.last + 1))
        self._prefix: bytes | None = self._next_prefix()
        self._start = b""

    def __bool__(self) -> bool:
        """Whether there may be more."""
        return self._prefix is not None

    def hashes(self, most: int) -> AnyArray:
        """The stable hashes of the next keys, at most ``most``."""
        keys = list(islice(self._keys(), most))
        return self._codec.hashes(keys) if keys else np.empty(0, dtype=np.uint64)

    def _keys(self) -> Iterator[bytes]:
        """The next keys. Callers drop the iterator: an open one would keep files that are no longer needed."""
        while self._prefix is not None:
            for key in self._database.keys(self._prefix, self._start):
                self._start = key + b"\0"
                yield key
            self._prefix, self._start = self._next_prefix(), b""

    def _next_prefix(self) -> bytes | None:
        return next((state_prefix(group, self._id) for group in self._groups), None)
