"""Rows of one side that do not fit into memory: a run per key in the database (``row_runs.py``).

A key's rows are all in memory or all here. Rows of unused keys are put here when memory is full, and taken back when a
row with their key arrives or the earliest of them expires. Taken rows are removed from the database with the next
write; until then they are recorded as removed. The subtask's thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.arrays import distinct
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.row_runs import RunCodec

_MAX, _MIN = (1 << 63) - 1, -(1 << 63)
_RUNS_AT_ONCE = 2_048


@dataclass(slots=True)
class FrozenSpill:
    """The changes up to one moment that have to be written to the database."""

    counts: list[tuple[bytes, bytes]]
    gone: dict[bytes, None]
    is_stored: bool = False

    def puts(self) -> list[tuple[bytes, bytes]]:
        return self.counts

    def deletes(self) -> Iterable[bytes]:
        return self.gone

    def release(self) -> None:
        self.is_stored = True


class SpilledRows:
    """See the module docstring. ``is_timed``: whether rows expire by event time."""

    def __init__(self, codec: RunCodec, database: Database, owned: KeyGroupRange, *, is_timed: bool) -> None:
        self._codec = codec
        self._database = database
        self._first = owned.first
        self._is_timed = is_timed
        self._counts: AnyArray = np.zeros(len(owned), dtype=np.int64)
        self._least: AnyArray = np.full(len(owned), _MAX, dtype=np.int64)
        """A lower bound of the event times of each key group."""
        self._changed: set[int] = set()
        self._gone: dict[bytes, None] = {}
        self._frozen: list[FrozenSpill] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def restore(self) -> None:
        """Reads the numbers of spilled rows from the database."""
        keys = [self._codec.count_key(self._first + place) for place in range(len(self._counts))]
        for place, found in enumerate(self._database.multi_get(keys)):
            if found is not None:
                self._counts[place] = self._codec.decode_count(found)
                self._least[place] = _MIN
        self._rows = int(self._counts.sum())

    def _count(self, groups: AnyArray, rows: AnyArray) -> None:
        places = groups - self._first
        np.add.at(self._counts, places, rows)
        self._changed.update(distinct(places).tolist())
        self._rows += int(rows.sum())

    def put(self, rows: pa.RecordBatch, starts: AnyArray, times: AnyArray) -> None:
        """Adds stored rows, sorted by key, with the first row of each key and, if rows expire, their event times."""
        least = np.minimum.reduceat(times, starts) if self._is_timed else np.zeros(len(starts), dtype=np.int64)
        first = rows.take(pa.array(starts))
        groups, keys = self._codec.keys(first.columns[: self._codec.key_width])
        puts = dict(zip(keys, self._codec.encode(rows, starts, least), strict=True))
        if self._is_timed:
            puts |= {self._codec.time_key(key, time): b"" for key, time in zip(keys, least.tolist(), strict=True)}
            np.minimum.at(self._least, groups - self._first, least)
        self._database.write(puts.items(), [key for key in self._gone if key not in puts])
        self._gone, self._frozen = {}, []
        self._count(groups, np.diff([*starts, rows.num_rows]))

    def take(self, keys: Sequence[pa.Array]) -> Iterator[tuple[AnyArray, pa.RecordBatch]]:
        """Removes and yields the stored rows of keys, with the position of each row's key."""
        groups, encoded = self._codec.keys(keys)
        order = sorted((place for place, key in enumerate(encoded) if not self._is_gone(key)), key=encoded.__getitem__)
        for start in range(0, len(order), _RUNS_AT_ONCE):
            part = order[start : start + _RUNS_AT_ONCE]
            found = self._database.multi_get([encoded[place] for place in part])
            present = [(place, run) for place, run in zip(part, found, strict=True) if run is not None]
            places = np.array([place for place, _ in present], dtype=np.int64)
            runs = [run for _, run in present]
            sizes = [self._codec.size(run) for run in runs]
            for place, (least, _) in zip(places.tolist(), sizes, strict=True):
                self._gone[encoded[place]] = None
                if self._is_timed:
                    self._gone[self._codec.time_key(encoded[place], least)] = None
            self._count(groups[places], np.array([-rows for _, rows in sizes], dtype=np.int64))
            for run_places, rows in self._codec.decode(runs):
                yield places[run_places], rows

    def _is_gone(self, key: bytes) -> bool:
        return key in self._gone or any(key in frozen.gone for frozen in self._frozen)

    def due(self, bound: int) -> Iterator[list[pa.Array]]:
        """Keys with rows whose event time is at or before ``bound``, some at a time; the caller takes them."""
        for place in np.flatnonzero((self._least <= bound) & (self._counts > 0)).tolist():
            self._least[place] = _MAX
            entries = self._database.scan(self._codec.times_prefix(self._first + place))
            following = _MAX
            while part := list(islice(entries, _RUNS_AT_ONCE)):
                found = [self._codec.found_by_time(key) for key, _ in part]
                keys = [key for time, key in found if time <= bound and not self._is_gone(key)]
                if keys:
                    yield self._codec.key_columns(keys)
                if found[-1][0] > bound:
                    following = next(time for time, _ in found if time > bound)
                    break
            self._least[place] = min(self._least[place], following)

    def all_rows(self) -> Iterator[pa.RecordBatch]:
        """All stored rows, without removing them, in parts that split no key."""
        groups = (np.flatnonzero(self._counts) + self._first).tolist()
        gone = self._gone.keys() | {key for frozen in self._frozen for key in frozen.gone}
        return self._parts([self._database.scan(self._codec.runs_prefix(group)) for group in groups], gone)

    def take_all(self) -> Iterator[pa.RecordBatch]:
        """Removes and yields all stored rows, in parts that split no key. The call itself removes them."""
        groups = (np.flatnonzero(self._counts) + self._first).tolist()
        scans = [self._database.scan(self._codec.runs_prefix(group)) for group in groups]
        gone = self._gone.keys() | {key for frozen in self._frozen for key in frozen.gone}
        for group in groups:
            self._database.delete_range(*self._codec.spilled_range(group))
        self._count(np.array(groups, dtype=np.int64), -self._counts[np.flatnonzero(self._counts)])
        self._least[:] = _MAX
        return self._parts(scans, gone)

    def _parts(self, scans: list[Iterator[tuple[bytes, bytes]]], gone: set[bytes]) -> Iterator[pa.RecordBatch]:
        for entries in scans:
            while part := list(islice(entries, _RUNS_AT_ONCE)):
                for _, rows in self._codec.decode([run for key, run in part if key not in gone]):
                    yield rows

    def changes(self) -> list[FrozenSpill]:
        """The changes that have to be written to the database."""
        self._frozen = [frozen for frozen in self._frozen if not frozen.is_stored]
        if not self._gone and not self._changed:
            return []
        counts = []
        for place in sorted(self._changed):
            if self._counts[place] < 0:
                raise CorruptStateError(f"there are runs of more rows than key group {self._first + place} has")
            counts.append(
                (self._codec.count_key(self._first + place), self._codec.encode_count(int(self._counts[place])))
            )
        frozen = FrozenSpill(counts, self._gone)
        self._frozen.append(frozen)
        self._gone, self._changed = {}, set()
        return [frozen]
