"""A Bloom filter of the keys that a database may hold, so that most new keys need no read.

A restored database has keys that were not added: :class:`UnknownKeys` reads them step by step.

There are no false negatives. The rate of false positives grows with the number of keys per size: with ten bits per key
it is about one in a hundred.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.filter_kernels import BLOCK_WORDS, filter_add, filter_test
from ckpt_runtime.state.rocksdb.codec import state_prefix
from ckpt_runtime.state.rocksdb.columnar_codec import ColumnarCodec
from ckpt_runtime.state.rocksdb.database import Database


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

    Keys that are written meanwhile need not be among them: their writer adds them to the filter.
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
