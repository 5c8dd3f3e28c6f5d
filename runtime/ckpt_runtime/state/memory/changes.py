"""What has changed in a state between two snapshots, for increments: slots, row numbers or keys; frozen columns.

Each state notes its changes as they happen. A snapshot *seals* them in constant time: it takes the notes, and new ones
begin. They are worked out when the increment is written, in another thread. ``None`` in place of changes means that all
of the state has to be written: it is new, or has got another schema, or its rows have other numbers than before.

Until frozen columns are copied, the owner announces which slots it will change, and their old values are kept: once per
slot, so the cost of a batch depends on its rows and not on the number of slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ckpt_runtime.state.arrays import distinct, read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.aggregate_kernels import first_touches, gather, mark, marked
from ckpt_runtime.state.kernels.hash_kernels import scatter
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE
from ckpt_runtime.state.memory.key_index import capacity_for, grown

Changed: TypeAlias = "AnyArray | frozenset[Any]"
"""Slots or row numbers, ascending; or keys."""

NOTHING: Changed = frozenset()
_FIRST_MARKS = 128
_NO_SLOTS: AnyArray = np.empty(0, dtype=np.uint32)


SealedChanges: TypeAlias = Callable[[], Changed]
"""Works out the changes between two snapshots from the notes; called by any thread."""


def _changed_slots(marks: AnyArray, start: int, size: int) -> Changed:
    """The slots with a mark below ``start``, and all from there to ``size``, which are new."""
    marks = read_only(marks)
    below = min(start, 8 * len(marks))
    slots = np.empty(int(marked(marks, below, _NO_SLOTS)), dtype=np.uint32)
    if slots.size:
        marked(marks, below, slots)
    return np.concatenate([slots, np.arange(start, size, dtype=np.uint32)])


def changed_rows(before: AnyArray, now: AnyArray) -> Changed:
    """The rows whose flags differ from those of the snapshot before, and the new ones that are still there."""
    known = len(before)
    changed = np.flatnonzero(before != now[:known])
    new = np.flatnonzero(now[known:] & ALIVE) + known
    return np.concatenate([changed, new]).astype(np.uint32)


class SlotNotes:
    """A bit for each slot that has changed since the last seal. Slots from ``start`` on are new and need none.

    Frozen columns of these slots keep the values that change.
    """

    def __init__(self) -> None:
        self._marks: AnyArray = np.zeros(_FIRST_MARKS, dtype=np.uint8)
        self._start: int | None = None
        self._frozen: list[FrozenColumns] = []

    def freeze(self, size: int, columns: Sequence[AnyArray]) -> FrozenColumns:
        """The first ``size`` slots as they are now."""
        frozen = FrozenColumns(size, columns)
        self._frozen.append(frozen)
        return frozen

    def mark(self, slots: AnyArray, size: int) -> None:
        """Notes these slots, all of which are below ``size``, before their values change."""
        if self._frozen:
            self._frozen = [frozen for frozen in self._frozen if frozen.open]
            for frozen in self._frozen:
                frozen.keep(slots)
        if self._start is None:
            return
        needed = capacity_for(len(self._marks), (size + 7) // 8)
        if needed != len(self._marks):
            self._marks = grown(self._marks, needed, len(self._marks))
        mark(slots, self._marks)

    def begin(self, size: int) -> None:
        """Forgets all changes: the first ``size`` slots are as in the snapshot before."""
        self._marks = np.zeros(len(self._marks), dtype=np.uint8)
        self._start = size

    def seal(self, size: int) -> SealedChanges | None:
        """The changes since the last seal, of ``size`` slots."""
        sealed = None if self._start is None else partial(_changed_slots, self._marks, self._start, size)
        self.begin(size)
        return sealed


class FrozenColumns:
    """The first ``size`` slots. One thread owns the columns, another one copies or releases them."""

    def __init__(self, size: int, columns: Sequence[AnyArray]) -> None:
        self._size = size
        self._columns = [column.view(np.uint64 if column.itemsize == 8 else np.uint8) for column in columns]
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

    def take(self, slots: AnyArray | None = None) -> list[AnyArray]:
        """Copies of the columns as they were when frozen, or of some ascending slots of them. To be called once."""
        copies = [column[: self._size].copy() if slots is None else column[slots] for column in self._columns]
        with self._lock:
            self.open = False
            known = self._known
        places, wanted = self._slots[:known], slice(None)
        if slots is not None and known:
            found = np.minimum(np.searchsorted(slots, places), len(slots) - 1).astype(np.uint32)
            wanted = slots[found] == places
            places = found[wanted]
        for copy, kept in zip(copies, self._kept, strict=True):
            scatter(read_only(kept[:known][wanted]), read_only(places), copy)
        return [copy.view(kind) for copy, kind in zip(copies, self._types, strict=True)]

    def release(self) -> None:
        """Ends the freeze without a copy."""
        self.open = False


def union(found: Sequence[Changed | None]) -> Changed | None:
    """What has changed in any of several spans, which follow each other."""
    if any(changed is None for changed in found):
        return None
    some = [changed for changed in found if changed is not None and len(changed)]
    if len(some) < 2:
        return some[0] if some else NOTHING
    if isinstance(some[0], frozenset):
        return frozenset().union(*(changed for changed in some if isinstance(changed, frozenset)))
    return distinct(np.concatenate([changed for changed in some if isinstance(changed, np.ndarray)]))
