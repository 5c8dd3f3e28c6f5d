"""The rows of a simulated job and what it must make of them, computed without the engine.

A row is four int64: ``id`` (source, number in the source, copy), ``key``, ``ts`` (event time, ms) and ``value``. An id
says where a row came from, so that every operator can check what it gets.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa

Row: TypeAlias = tuple[int, int, int, int]
SCHEMA = pa.schema([(name, pa.int64()) for name in ("id", "key", "ts", "value")])
WINDOW_MS = 60
SOURCE_BITS = 31
"""Rows of one of two sources at most; a single source may have twice as many."""

_INT64 = pa.int64()
_PAIR = 1 << 40
_WINDOW = 1 << 41


def row_id(source: int, number: int, copy: int = 0) -> int:
    """What a row is known by everywhere."""
    return source << 12 | number << 4 | copy


def source_of(identity: int) -> int:
    """Which source a row came from."""
    return identity >> 12 & 0xFF


def number_of(identity: int) -> int:
    """Its number in that source."""
    return identity >> 4 & 0xFF


def copy_of(identity: int) -> int:
    """0, or 1 for the second copy that a flat map makes."""
    return identity & 0xF


def bit_of(identity: int) -> int:
    """The position of a row in a mask of 62 bits, one mask for each copy."""
    return source_of(identity) * SOURCE_BITS + number_of(identity)


def pair_id(left: int, right: int) -> int:
    """Of a joined row."""
    return _PAIR | left << 20 | right


def window_id(window: int) -> int:
    """Of a window's result."""
    return _WINDOW | window


def batch_of(rows: Sequence[Row]) -> pa.RecordBatch:
    """At least one row as Arrow has it."""
    # All columns in one buffer: converting lists costs Arrow more than everything else that a row costs here.
    count = len(rows)
    values = [value for column in zip(*rows, strict=True) for value in column]
    buffers = [None, pa.py_buffer(struct.pack(f"<{4 * count}q", *values))]
    columns = [pa.Array.from_buffers(_INT64, count, buffers, 0, column * count) for column in range(4)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """The inverse of :func:`batch_of`, for columns in any order."""
    return list(zip(*(integers_of(batch.column(name)) for name in SCHEMA.names), strict=True))


def integers_of(column: pa.Array) -> list[int]:
    """An int64 column without nulls."""
    data = column.buffers()[1]
    return [] if data is None else memoryview(data).cast("q")[column.offset : column.offset + len(column)].tolist()


@dataclass(frozen=True, slots=True)
class SourceRows:
    """``rows`` of one source in ``splits``; row ``n`` is in split ``n % splits``, where event time rises."""

    source: int
    rows: int
    splits: int
    keys: int

    def row(self, number: int) -> Row:
        return (
            row_id(self.source, number),
            (number * 7 + self.source * 3 + number // 5) % self.keys,
            self.ts(number),
            0,
        )

    def ts(self, number: int) -> int:
        return number // self.splits * 10 + number % self.splits

    def split(self, index: int) -> list[int]:
        """The numbers of a split's rows, in order."""
        return list(range(index, self.rows, self.splits))

    def all(self) -> list[Row]:
        return [self.row(number) for number in range(self.rows)]


def flat_mapped(row: Row) -> list[Row]:
    """None, one or two copies of a row."""
    identity, key, ts, value = row
    if number_of(identity) % 5 == 3:
        return []
    if number_of(identity) % 4 == 2:
        return [row, (identity + 1, key, ts, value)]
    return [row]


def counted(rows: Iterable[Row]) -> Counter[tuple[int, int, int]]:
    """Rows by (id, key, value), value left out where it depends on the order between inputs."""
    return Counter((identity, key, value) for identity, key, _, value in rows)


def joined(left: Iterable[Row], right: Iterable[Row]) -> list[Row]:
    """All pairs of equal keys."""
    by_key: dict[int, list[Row]] = {}
    for row in right:
        by_key.setdefault(row[1], []).append(row)
    return [
        (pair_id(row[0], other[0]), row[1], max(row[2], other[2]), 0)
        for row in left
        for other in by_key.get(row[1], ())
    ]


def windowed(rows: Iterable[Row]) -> list[Row]:
    """Counts by key and window of event time."""
    counts = Counter((key, ts // WINDOW_MS) for _, key, ts, _ in rows)
    return [
        (window_id(window), key, (window + 1) * WINDOW_MS - 1, count) for (key, window), count in sorted(counts.items())
    ]
