"""What the state must be: read from a savepoint, and computed from the generator's definition without the engine.

Row ``i`` is ``h = splitmix64(i)``, ``key = h mod keys``, ``value = h & 1023``. The savepoint says how many rows of each
split the source has emitted; split ``s`` owns the blocks of 256 rows whose number is ``s`` modulo 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import open_snapshot

BLOCK = 256
SPLITS = 128

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Totals:
    """``counts[k]`` and ``sums[k]`` of each key ``k``."""

    counts: Int64s
    sums: Int64s

    @property
    def rows(self) -> int:
        return int(self.counts.sum())


def splitmix64(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns splitmix64 of numbers, modulo 2**64; compiled, also of one number."""
    h = numbers + np.uint64(0x9E3779B97F4A7C15)
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


_splitmix64: Any = numba.njit(nogil=True)(splitmix64)


@numba.njit(nogil=True)
def _add_split(split: int, rows: int, keys: np.uint64, counts: Int64s, sums: Int64s) -> None:  # pragma: no cover
    for position in range(rows):
        row = (position // BLOCK * SPLITS + split) * BLOCK + position % BLOCK
        h = _splitmix64(np.uint64(row))
        key = h % keys
        counts[key] += 1
        sums[key] += np.int64(h & np.uint64(1023))


def computed(positions: dict[int, int], keys: int) -> Totals:
    """The totals of the first ``positions[s]`` rows of each split ``s``."""
    totals = Totals(np.zeros(keys, dtype=np.int64), np.zeros(keys, dtype=np.int64))
    for split, rows in positions.items():
        _add_split(split, rows, np.uint64(keys), totals.counts, totals.sums)
    return totals


@numba.njit(nogil=True)
def _digest_split(split: int, rows: int) -> int:  # pragma: no cover
    total = np.uint64(0)
    for position in range(rows):
        row = (position // BLOCK * SPLITS + split) * BLOCK + position % BLOCK
        total += _splitmix64(np.uint64(row))
    return total  # type: ignore[return-value]


def digest(positions: dict[int, int]) -> int:
    """The sum of splitmix64 modulo 2**64 over the first ``positions[s]`` rows of each split ``s``."""
    return sum(int(_digest_split(split, rows)) for split, rows in positions.items()) % (1 << 64)


KEY_FORMS = ("int", "scattered", "string")


def scattered(keys: Int64s) -> Int64s:
    """splitmix64 of each key, as a signed integer."""
    return splitmix64(keys.astype(np.uint64)).view(np.int64)


def _places(found: Any, form: str, known: pa.Array) -> Int64s:
    """The numbers of keys that were found, of which ``known`` are all in their order."""
    if form == "string":
        found = np.array([int(text, 16) for text in found], dtype=np.uint64).view(np.int64)
    places = pc.index_in(pa.array(found), known)
    if places.null_count:
        raise KeyError(f"there are keys that the generator never makes, {places.null_count} of {len(places)}")
    return np.asarray(places).astype(np.int64)


class Savepoint:
    """A savepoint of one of the benchmarks, or a checkpoint with state in memory, read without restoring it."""

    def __init__(self, url: str) -> None:
        self._snapshot = open_snapshot(url)

    def positions(self, uid: str) -> dict[int, int]:
        """Rows emitted by split of the source ``uid``."""
        return {int(item["split"]): int(item["position"]) for item in self._items(uid, "positions")}

    def rows(self, uid: str) -> int:
        """Rows that the verifying sink ``uid`` has got."""
        return sum(map(int, self._items(uid, "rows")))

    def _items(self, uid: str, name: str) -> Iterator[Any]:
        lists = (listed for state in self._snapshot.states(uid) for listed in state.lists if listed.name == name)
        return (item for listed in lists for item in listed.items)

    def totals(self, uid: str, keys: int, form: str = "int") -> Totals:
        """The state of operator ``uid``: a state whose first columns are the key, the count and the sum.

        Keys have one of the :data:`KEY_FORMS`. Raises KeyError for a key that is not one of the ``keys``.
        """
        known = None if form == "int" else pa.array(scattered(np.arange(keys)))
        totals = Totals(np.zeros(keys, dtype=np.int64), np.zeros(keys, dtype=np.int64))
        for batch in self._batches(uid):
            key, count, total = (np.asarray(column) for column in batch.columns[:3])
            if known is not None:
                key = _places(key, form, known)
            totals.counts[key] += count
            totals.sums[key] += total
        return totals

    def _batches(self, uid: str) -> Iterator[Any]:
        for state in keyed_states(self._snapshot, uid):
            for _, batch in state.rows(state.key_groups):
                yield batch
