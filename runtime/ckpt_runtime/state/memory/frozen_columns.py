"""Freezes columns without copying them at once, while their owner continues to change them.

Until the columns are copied, the owner announces which slots it will change, and their old values are kept: once per
slot, so the cost of a batch depends on its rows and not on the number of slots. The copying thread copies the current
columns, with the interpreter lock released, and then writes the kept values into the copies. When a column has to grow,
its owner replaces it, and the frozen array stays unchanged. Values have a size of one byte or eight bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.frozen_kernels import first_touches, gather
from ckpt_runtime.state.kernels.split_kernels import scatter


class FrozenColumns:
    """The first ``size`` slots. One thread owns the columns, another one copies or releases them."""

    def __init__(self, size: int, columns: Sequence[AnyArray]) -> None:
        self._size = size
        self._columns = [_bits(column) for column in columns]
        self._types = [column.dtype for column in columns]
        self._touched: AnyArray = np.zeros((size + 7) // 8, dtype=np.uint8)
        # Uses memory only as far as it is written: the system allocates pages when they are touched.
        self._slots: AnyArray = np.empty(size, dtype=np.uint32)
        self._kept: list[AnyArray] = [np.empty(size, dtype=column.dtype) for column in self._columns]
        self._known = 0
        self._lock = threading.Lock()
        self.open = True
        """Whether the owner has to announce its changes with :meth:`keep`."""

    def keep(self, slots: AnyArray) -> None:
        """Keeps the values of these slots, which the owner is about to change."""
        before = self._known
        known = int(first_touches(slots, self._size, self._touched, self._slots, before))
        places = read_only(self._slots[before:known])
        for column, kept in zip(self._columns, self._kept, strict=True):
            gather(read_only(column), places, kept[before:known])
        # Published before the slots change: a thread that copied a changed value finds the kept one under this lock.
        with self._lock:
            self._known = known

    def take(self) -> list[AnyArray]:
        """Copies of the columns as they were when frozen. To be called once."""
        copies = [column[: self._size].copy() for column in self._columns]
        with self._lock:
            self.open = False
            known = self._known
        places = read_only(self._slots[:known])
        for copy, kept in zip(copies, self._kept, strict=True):
            scatter(read_only(kept[:known]), places, copy)
        return [copy.view(kind) for copy, kind in zip(copies, self._types, strict=True)]

    def release(self) -> None:
        """Ends the freeze without a copy."""
        self.open = False


def _bits(column: AnyArray) -> AnyArray:
    return column.view(np.uint64 if column.itemsize == 8 else np.uint8)
