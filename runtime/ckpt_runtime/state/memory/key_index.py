"""Key -> slot for a batch at a time, and slots back to key columns. Slots are dense: 0 .. size - 1, never reused.

Keys are append-only, so a snapshot shares their arrays and needs only the number of keys: growing replaces an array,
and frozen views keep the old one. Not safe for use by two threads, except for frozen views.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from ckpt_runtime.state import columns
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.hashing import check_key_types, hash_arrays, variable_bytes
from ckpt_runtime.state.kernels import index_kernels as kernels
from ckpt_runtime.state.kernels.hash_kernels import NULL_HASH, hash_int64
from ckpt_runtime.state.stored_rows import decode_rows, decoded_bytes, encode_rows, fixed_array, fixed_key

_FIRST_CAPACITY = 1024
_ALWAYS_DIRECT = 1 << 16
_LEAST_INT64 = -(1 << 63)
_MOST_KEY_BYTES = 8 * ((1 << 32) - 1)
"""How far the 32 bits of an entry of the table reach."""


class FrozenKeys(ABC):
    """The keys of slots ``0 .. size - 1`` as of one moment; readable from any thread."""

    size: int

    @abstractmethod
    def hashes(self) -> AnyArray:
        """The stable hash of each slot's key."""

    @abstractmethod
    def arrays(self, slots: AnyArray | None = None) -> list[pa.Array]:
        """The key columns, of all slots or of some."""


class KeyIndex(ABC):
    """Finds or creates the slot of each row's key."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._counters = np.array([0, -1], dtype=np.int64)
        self._table = _empty_table()

    @property
    def size(self) -> int:
        return int(self._counters[kernels.KEYS])

    @property
    def nbytes(self) -> int:
        """The size of its arrays, with their room for further keys."""
        return sum(array.nbytes for array in vars(self).values() if isinstance(array, np.ndarray))

    @abstractmethod
    def slots_of(self, arrays: list[pa.Array]) -> AnyArray:
        """The uint32 slot of each row; unknown keys get new slots."""

    @abstractmethod
    def find(self, arrays: list[pa.Array]) -> AnyArray:
        """The slot of each row as int64, -1 for an unknown key."""

    @abstractmethod
    def finish(self, moved: Callable[[AnyArray], AnyArray]) -> None:
        """Replaces its arrays by what ``moved`` makes of them: equal ones. No key can be added from then on."""

    @abstractmethod
    def freeze(self) -> FrozenKeys:
        """The keys as of this call, in constant time."""

    def _table_for(self, rows: int) -> AnyArray | None:
        """A new table when keys fill half of the present one, or ``rows`` new keys could fill 7/8 of it.

        Most rows bring no new key: sizing the table for all of them would spread it over more cache than it needs.
        """
        size = self.size
        length = len(self._table)
        while 2 * size > length or 8 * (size + rows) > 7 * length:
            length *= 2
        return None if length == len(self._table) else np.zeros(length, dtype=self._table.dtype)


def _empty_table() -> AnyArray:
    return np.zeros(2 * _FIRST_CAPACITY, dtype=np.uint32)


def key_index(schema: pa.Schema) -> KeyIndex:
    """The index for this schema: a single integer-like or float column gets a fast one."""
    check_key_types(schema, schema.names)
    kind = columns.decoded_type(schema.field(0).type)
    if len(schema) == 1 and (columns.is_integer_like(kind) or pa.types.is_floating(kind)):
        return Int64KeyIndex(schema)
    return BytesKeyIndex(schema)


def grown(array: AnyArray, capacity: int, used: int) -> AnyArray:
    """A larger array with the first ``used`` entries of ``array``; the rest is zero."""
    larger = np.zeros(capacity, dtype=array.dtype)
    larger[:used] = array[:used]
    return larger


def capacity_for(present: int, needed: int) -> int:
    """The present capacity, or the next power of two if ``needed`` exceeds it."""
    return present if needed <= present else 1 << (needed - 1).bit_length()


@dataclass
class _FrozenInt64Keys(FrozenKeys):
    kind: pa.DataType
    keys: AnyArray
    size: int
    null_slot: int

    def hashes(self) -> AnyArray:
        out = np.empty(self.size, dtype=np.uint64)
        hash_int64(read_only(self.keys[: self.size]), columns.NO_BITMAP, 0, out)
        if self.null_slot >= 0:
            out[self.null_slot] = NULL_HASH
        return out

    def arrays(self, slots: AnyArray | None = None) -> list[pa.Array]:
        valid = None
        if self.null_slot >= 0:
            wanted = np.arange(self.size) if slots is None else slots
            valid = (wanted != self.null_slot).astype(np.uint8)
        return [fixed_array(self.kind, self.keys[: self.size] if slots is None else self.keys[slots], valid)]


@dataclass(frozen=True, slots=True)
class _DirectTable:
    """A table addressed by the key itself, without hash, comparison or collision: for keys that lie close together."""

    first: int
    entries: AnyArray

    @staticmethod
    def fits(least: int, greatest: int, keys: int) -> bool:
        """Whether a table over that range is small: half a MiB at most, or 40 bytes for each of its ``keys``."""
        return greatest - least < max(_ALWAYS_DIRECT, 4 * keys)

    @classmethod
    def over(cls, least: int, greatest: int) -> Self:
        """An empty table, with room on both sides, so that slowly growing keys do not replace it each time."""
        span = greatest - least + 1
        length = capacity_for(_FIRST_CAPACITY, span + span // 4)
        return cls(max(least - (length - span) // 2, _LEAST_INT64), np.zeros(length, dtype=np.uint32))


class Int64KeyIndex(KeyIndex):
    """An index of one key column that fits 64 bits. Its table is a direct one while the keys lie close together."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        self._kind = columns.decoded_type(schema.field(0).type)
        self._keys: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.int64)
        self._direct: _DirectTable | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._direct is None else self._direct.entries.nbytes)

    def slots_of(self, arrays: list[pa.Array]) -> AnyArray:
        key = fixed_key(columns.plain(arrays[0]))
        self._make_room(key)
        slots = np.empty(len(key.values), dtype=np.uint32)
        # A retry covers the whole batch: keys that the smaller table could take are found now.
        while not self._find_or_insert(key, slots):
            self._replace_table(key)
        return slots

    def find(self, arrays: list[pa.Array]) -> AnyArray:
        key = fixed_key(columns.plain(arrays[0]))
        slots = np.empty(len(key.values), dtype=np.int64)
        given, null_slot = (key.values, key.bitmap, key.bit_offset), int(self._counters[kernels.NULL_SLOT])
        if self._direct is not None:
            kernels.find_direct(*given, self._direct.first, self._direct.entries, null_slot, slots)
        else:
            kernels.find_int64(*given, self._table, self._keys, null_slot, slots)
        return slots

    def _find_or_insert(self, key: columns.FixedColumn, slots: AnyArray) -> bool:
        """Whether the table could take all keys."""
        given = (key.values, key.bitmap, key.bit_offset)
        if self._direct is not None:
            table = (self._direct.first, self._direct.entries)
            return bool(kernels.find_or_insert_direct(*given, *table, self._keys, self._counters, slots))
        kernels.find_or_insert_int64(*given, self._table, self._keys, self._counters, slots)
        return True

    def _make_room(self, key: columns.FixedColumn) -> None:
        """Makes room for as many new keys as there are rows; a direct table itself reports when it has no room."""
        size, rows = self.size, len(key.values)
        capacity = capacity_for(len(self._keys), size + rows)
        if capacity != len(self._keys):
            self._keys = grown(self._keys, capacity, size)
        if self._direct is None and (larger := self._table_for(rows)) is not None:
            self._table = larger
            self._replace_table(key)

    def _replace_table(self, key: columns.FixedColumn) -> None:
        """Makes a direct table if the known and the new keys fit one; otherwise fills the hashed table."""
        size, null_slot = self.size, int(self._counters[kernels.NULL_SLOT])
        known = kernels.key_bounds(read_only(self._keys[:size]), columns.NO_BITMAP, 0)
        coming = kernels.key_bounds(key.values, key.bitmap, key.bit_offset)
        bounds = [bound for least, greatest in (known, coming) if least <= greatest for bound in (least, greatest)]
        if bounds and _DirectTable.fits(min(bounds), max(bounds), size):
            self._direct = _DirectTable.over(min(bounds), max(bounds))
            self._table = _empty_table()
            kernels.fill_direct(read_only(self._keys), size, null_slot, self._direct.first, self._direct.entries)
            return
        if self._direct is not None:
            self._direct = None
            larger = self._table_for(len(key.values))
            self._table = self._table if larger is None else larger
        kernels.rehash_int64(read_only(self._keys), size, null_slot, self._table)

    def finish(self, moved: Callable[[AnyArray], AnyArray]) -> None:
        self._keys, self._table = moved(self._keys[: self.size]), moved(self._table)
        if self._direct is not None:
            self._direct = _DirectTable(self._direct.first, moved(self._direct.entries))

    def freeze(self) -> FrozenKeys:
        return _FrozenInt64Keys(self._kind, self._keys, self.size, int(self._counters[kernels.NULL_SLOT]))


@dataclass
class _FrozenBytesKeys(FrozenKeys):
    schema: pa.Schema
    slot_hashes: AnyArray
    slot_positions: AnyArray
    arena: AnyArray
    size: int

    def hashes(self) -> AnyArray:
        return self.slot_hashes[: self.size]

    def arrays(self, slots: AnyArray | None = None) -> list[pa.Array]:
        positions = self.slot_positions[: self.size] if slots is None else self.slot_positions[slots]
        if len(self.schema) > 1:
            return decode_rows(self.schema.types, self.arena, positions + kernels.HEADER)
        ends, valid = np.zeros(len(positions) + 1, dtype=np.int64), np.empty(len(positions), dtype=np.uint8)
        arena = read_only(self.arena)
        kernels.lengths_of_keys(arena, read_only(positions), ends, valid)
        return [
            decoded_bytes(
                columns.decoded_type(self.schema.field(0).type), arena, positions + kernels.HEADER, ends, valid
            )
        ]


class BytesKeyIndex(KeyIndex):
    """An index of any other key. Several columns are encoded as bytes; the values of one column are bytes already."""

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        self._table = self._table.astype(np.uint64)
        self._hashes: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.uint64)
        self._positions: AnyArray = np.zeros(_FIRST_CAPACITY + 1, dtype=np.int64)
        self._arena: AnyArray = np.zeros(64 * _FIRST_CAPACITY, dtype=np.uint8)

    def slots_of(self, arrays: list[pa.Array]) -> AnyArray:
        rows = len(arrays[0])
        keys = self._bytes_of(arrays)
        self._make_room(rows, int(keys[1][-1]) - int(keys[1][0]))
        entries, headers = np.empty(rows, dtype=np.uint64), np.empty(rows, dtype=np.uint64)
        slots = np.empty(rows, dtype=np.uint32)
        stored = (self._table, self._hashes, self._positions, self._arena)
        kernels.find_or_insert_bytes(*keys, *stored, self._counters, entries, headers, slots)
        return slots

    def find(self, arrays: list[pa.Array]) -> AnyArray:
        slots = np.empty(len(arrays[0]), dtype=np.int64)
        kernels.find_bytes(*self._bytes_of(arrays), self._table, self._arena, slots)
        return slots

    def _bytes_of(self, arrays: list[pa.Array]) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, int]:
        """Each row's hash, the offsets of its bytes, the bytes, and the bitmap of nulls with its offset."""
        hashes = read_only(hash_arrays(arrays, self.schema.names))
        if len(arrays) == 1:
            var = variable_bytes(columns.plain(arrays[0]), self.schema.names[0])
            return hashes, var.offsets, var.data, var.bitmap, var.bit_offset
        offsets, data = encode_rows(arrays, self.schema.names, keys=True)
        return hashes, read_only(offsets), read_only(data), columns.NO_BITMAP, 0

    def _make_room(self, rows: int, data_bytes: int) -> None:
        size = self.size
        table = self._table_for(rows)
        if table is not None:
            kernels.rehash_bytes(read_only(self._hashes), read_only(self._positions), size, table)
            self._table = table
        capacity = capacity_for(len(self._hashes), size + rows)
        if capacity != len(self._hashes):
            self._hashes = grown(self._hashes, capacity, size)
            self._positions = grown(self._positions, capacity + 1, size + 1)
        used = int(self._positions[size])
        needed = used + data_bytes + 2 * kernels.HEADER * rows  # a header, and at most as many bytes to fill a word
        arena_capacity = capacity_for(len(self._arena), needed)
        if arena_capacity != len(self._arena):
            if needed > _MOST_KEY_BYTES:
                raise OverflowError(f"the keys {self.schema.names} of one subtask take more than 32 GiB of memory")
            self._arena = grown(self._arena, arena_capacity, used)

    def finish(self, moved: Callable[[AnyArray], AnyArray]) -> None:
        size = self.size
        self._table, self._hashes = moved(self._table), moved(self._hashes[:size])
        self._arena = moved(self._arena[: int(self._positions[size])])
        self._positions = moved(self._positions[: size + 1])

    def freeze(self) -> FrozenKeys:
        return _FrozenBytesKeys(self.schema, self._hashes, self._positions, self._arena, self.size)
