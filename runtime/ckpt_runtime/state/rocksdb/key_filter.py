"""Which keys a database may hold: those that were added, and a few others. So most new keys need no read.

Never says no of a key that was added. The more keys there are for its size, the more often it says yes of others: with
ten bits per key about once in a hundred times.
"""

from __future__ import annotations

import numpy as np

from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.filter_kernels import BLOCK_WORDS, filter_add, filter_test


class KeyFilter:
    """Has no memory before the first key, and then up to ``size`` bytes, however many keys there are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._words: AnyArray = np.empty(0, dtype=np.uint64)

    def add(self, hashes: AnyArray) -> None:
        """Adds keys by their stable hashes."""
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
