"""Key -> slot, and a Bloom filter of keys. Slots are dense and assigned in order of first appearance.

``counters`` is ``[keys so far, slot of the null key or -1]``. Callers first make room for as many new keys as there are
rows. There are three forms of table; the first two hold slot + 1 (0: empty):

* hashed: open addressing with linear probing; the size is a power of two and larger than the number of keys. Buckets
  come from the low bits of the hash, because the high ones already chose the subtask;
* direct: one entry for each integer from ``first`` on;
* hashed, for keys of bytes: an entry is a word with the high half of the hash and the place of the key in an arena, in
  units of 8 bytes, plus 1 (0: empty). Slot and length stand in front of the key: finding a known key takes two accesses
  that miss the cache, one to the table and one to the arena.

The filter has blocks of one cache line, 64 bytes, in which a key has six bits. It is an array of words, eight for each
block. Keys are given as their stable hashes. The high bits of these do
not distinguish keys of one subtask, because they chose the subtask: so the hashes are mixed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import I64, IN_I32, IN_I64, IN_U8, IN_U64, INT64, U8, U32, U64, inlined, kernel
from ckpt_runtime.state.kernels.hash_kernels import (
    GOLDEN,
    copy_bytes,
    hash_of_int64,
    is_valid,
    load_word,
    mix64,
    same_bytes,
    store_word,
)

KEYS, NULL_SLOT = 0, 1
_ZERO, _ONE, _SEVEN = np.uint64(0), np.uint64(1), np.uint64(7)


@inlined
def _with_null_slot(slot_keys: Any, counters: Any, size: Any) -> Any:
    """Assigns a slot to the null key if it has none; returns the number of keys after that."""
    if counters[NULL_SLOT] >= 0:
        return size
    counters[NULL_SLOT] = size
    slot_keys[size] = 0
    return size + _ONE


@kernel((IN_I64, IN_U8, INT64, U32, I64, I64, U32))
def find_or_insert_int64(
    keys: Any, bitmap: Any, bit_offset: Any, table: Any, slot_keys: Any, counters: Any, slots: Any
) -> None:
    """The slot of each row's integer key; new keys get the next slot.

    The first pass only fetches from the table: without branches its loads overlap, also when they miss the cache.
    """
    mask = np.uint64(table.size - 1)
    size = np.uint64(counters[KEYS])
    for row in range(keys.size):
        slots[row] = table[hash_of_int64(keys[row]) & mask]
    for row in range(keys.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            size = _with_null_slot(slot_keys, counters, size)
            slots[row] = np.uint32(counters[NULL_SLOT])
            continue
        key = keys[row]
        entry = np.uint64(slots[row])
        if entry == _ZERO or slot_keys[entry - _ONE] != key:
            bucket = hash_of_int64(key) & mask
            entry = np.uint64(table[bucket])
            while entry != _ZERO and slot_keys[entry - _ONE] != key:
                bucket = (bucket + _ONE) & mask
                entry = np.uint64(table[bucket])
            if entry == _ZERO:
                slot_keys[size] = key
                size += _ONE
                entry = size
                table[bucket] = np.uint32(entry)
        slots[row] = np.uint32(entry - _ONE)
    counters[KEYS] = size


@kernel((IN_I64, IN_U8, INT64, U32, I64, INT64, I64))
def find_int64(keys: Any, bitmap: Any, bit_offset: Any, table: Any, slot_keys: Any, null_slot: Any, slots: Any) -> None:
    """The slot of each row's integer key, or -1; like :func:`find_or_insert_int64`, but inserts no keys."""
    mask = np.uint64(table.size - 1)
    for row in range(keys.size):
        slots[row] = np.int64(table[hash_of_int64(keys[row]) & mask]) - 1
    for row in range(keys.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            slots[row] = null_slot
            continue
        key = keys[row]
        if slots[row] >= 0 and slot_keys[slots[row]] != key:
            bucket = ((hash_of_int64(key) & mask) + _ONE) & mask
            while table[bucket] != 0 and slot_keys[np.int64(table[bucket]) - 1] != key:
                bucket = (bucket + _ONE) & mask
            slots[row] = np.int64(table[bucket]) - 1


@kernel((IN_I64, INT64, INT64, U32))
def rehash_int64(slot_keys: Any, size: Any, null_slot: Any, table: Any) -> None:
    """Fills an empty, larger table."""
    mask = np.uint64(table.size - 1)
    for slot in range(size):
        if slot == null_slot:
            continue
        bucket = hash_of_int64(slot_keys[slot]) & mask
        while table[bucket] != 0:
            bucket = (bucket + _ONE) & mask
        table[bucket] = np.uint32(slot + 1)


@kernel((IN_I64, IN_U8, INT64))
def key_bounds(keys: Any, bitmap: Any, bit_offset: Any) -> Any:
    """The least and the greatest key; (0, -1) when there are only nulls."""
    least, greatest = np.int64(0), np.int64(-1)
    if bitmap.size == 0:
        if keys.size:
            least = greatest = keys[0]
        for row in range(keys.size):
            least = min(least, keys[row])
            greatest = max(greatest, keys[row])
        return least, greatest
    found = False
    for row in range(keys.size):
        if is_valid(bitmap, bit_offset + row):
            least = min(least, keys[row]) if found else keys[row]
            greatest = max(greatest, keys[row]) if found else keys[row]
            found = True
    return least, greatest


@kernel((IN_I64, IN_U8, INT64, INT64, U32, I64, I64, U32))
def find_or_insert_direct(
    keys: Any, bitmap: Any, bit_offset: Any, first: Any, table: Any, slot_keys: Any, counters: Any, slots: Any
) -> Any:
    """Like :func:`find_or_insert_int64` with a direct table; False when a key is outside of its range.

    In that case the keys before that one have their slots, and a retry with another table returns the same ones. If
    every key is known, only the first pass runs; its loads overlap, and nothing is compared.
    """
    length = np.uint64(table.size)
    size = np.uint64(counters[KEYS])
    if bitmap.size == 0:
        known = True
        for row in range(keys.size):
            place = np.uint64(keys[row] - first)
            entry = table[place] if place < length else np.uint32(0)
            known &= entry != 0
            slots[row] = entry - np.uint32(1)
        if known:
            return True
    inside = True
    for row in range(keys.size):
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            size = _with_null_slot(slot_keys, counters, size)
            slots[row] = np.uint32(counters[NULL_SLOT])
            continue
        place = np.uint64(keys[row] - first)
        if place >= length:
            inside = False
            break
        if table[place] == 0:
            slot_keys[size] = keys[row]
            size += _ONE
            table[place] = np.uint32(size)
        slots[row] = table[place] - np.uint32(1)
    counters[KEYS] = size
    return inside


@kernel((IN_I64, IN_U8, INT64, INT64, U32, INT64, I64))
def find_direct(keys: Any, bitmap: Any, bit_offset: Any, first: Any, table: Any, null_slot: Any, slots: Any) -> None:
    """The slot of each row's integer key in a direct table, or -1."""
    length = np.uint64(table.size)
    for row in range(keys.size):
        place = np.uint64(keys[row] - first)
        if bitmap.size and not is_valid(bitmap, bit_offset + row):
            slots[row] = null_slot
        elif place < length:
            slots[row] = np.int64(table[place]) - 1
        else:
            slots[row] = -1


@kernel((IN_I64, INT64, INT64, INT64, U32))
def fill_direct(slot_keys: Any, size: Any, null_slot: Any, first: Any, table: Any) -> None:
    """Fills an empty direct table whose range includes all keys."""
    for slot in range(size):
        if slot != null_slot:
            table[np.uint64(slot_keys[slot] - first)] = np.uint32(slot + 1)


HEADER = 8
"""Bytes in front of each key in the arena: its slot and its length, 4 bytes each. The length of null is 2**32 - 1."""
_NULL_LENGTH = np.uint64(0xFFFFFFFF)
_LOW, _HALF, _EIGHTH = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(3)
_MISS = np.uint64(0xFFFFFFFFFFFFFFFF)


@inlined
def _entry_of(key_hash: Any, position: Any) -> Any:
    """The entry of a key whose header is at ``position``, a multiple of 8."""
    return ((key_hash >> _HALF) << _HALF) | ((np.uint64(position) >> _EIGHTH) + _ONE)


@inlined
def _position_of(entry: Any) -> Any:
    """The inverse; the first position for an empty entry."""
    return (max(entry & _LOW, _ONE) - _ONE) << _EIGHTH


@inlined
def _length_of(offsets: Any, bitmap: Any, bit_offset: Any, row: Any) -> Any:
    """The length of a row's key as it stands in a header."""
    if bitmap.size and not is_valid(bitmap, bit_offset + row):
        return _NULL_LENGTH
    return np.uint64(offsets[row + 1] - offsets[row])


@inlined
def _is_key(arena: Any, position: Any, header: Any, data: Any, start: Any, length: Any) -> Any:
    """Whether the key behind this header is the given one."""
    if header >> _HALF != length:
        return False
    return length == _NULL_LENGTH or same_bytes(arena, position + np.uint64(HEADER), data, start, length)


_KEYS_BY_BYTES = (IN_U64, IN_I32, IN_U8, IN_U8, INT64), (IN_U64, IN_I64, IN_U8, IN_U8, INT64)


@kernel(*((*keys, U64, U64, I64, U8, I64, U64, U64, U32) for keys in _KEYS_BY_BYTES))
def find_or_insert_bytes(
    hashes: Any,
    offsets: Any,
    data: Any,
    bitmap: Any,
    bit_offset: Any,
    table: Any,
    slot_hashes: Any,
    slot_positions: Any,
    arena: Any,
    counters: Any,
    entries: Any,
    headers: Any,
    slots: Any,
) -> None:
    """The slot of each row's key ``data[offsets[i]:offsets[i + 1]]``, or null; new keys are copied into the arena.

    The header of slot ``s`` is at ``slot_positions[s]`` of the arena; the one after the last slot says where the arena
    ends. ``entries`` and ``headers`` have room for a word per row. The first two passes only fetch, from the table,
    then from the arena: without branches their loads overlap.
    """
    mask = np.uint64(table.size - 1)
    size = counters[KEYS]
    for row in range(hashes.size):
        entries[row] = table[hashes[row] & mask]
    for row in range(hashes.size):
        entry = entries[row]
        header = load_word(arena, _position_of(entry))
        headers[row] = header if entry != _ZERO and (entry ^ hashes[row]) >> _HALF == _ZERO else _MISS
    for row in range(hashes.size):
        start, length = np.uint64(offsets[row]), _length_of(offsets, bitmap, bit_offset, row)
        header = headers[row]
        if header != _MISS and _is_key(arena, _position_of(entries[row]), header, data, start, length):
            slots[row] = np.uint32(header & _LOW)
            continue
        key_hash = hashes[row]
        bucket = key_hash & mask
        while True:
            entry = table[bucket]
            if entry == _ZERO:
                position = np.uint64(slot_positions[size])
                table[bucket] = _entry_of(key_hash, position)
                store_word(arena, position, (length << _HALF) | np.uint64(size))
                position += np.uint64(HEADER)
                if length != _NULL_LENGTH:
                    copy_bytes(data, start, arena, position, length)
                    position += (length + _SEVEN) & ~_SEVEN
                slots[row] = np.uint32(size)
                slot_hashes[size] = key_hash
                size += 1
                slot_positions[size] = np.int64(position)
                break
            position = _position_of(entry)
            if (entry ^ key_hash) >> _HALF == _ZERO:
                header = load_word(arena, position)
                if _is_key(arena, position, header, data, start, length):
                    slots[row] = np.uint32(header & _LOW)
                    break
            bucket = (bucket + _ONE) & mask
    counters[KEYS] = size


@kernel(*((*keys, U64, U8, I64) for keys in _KEYS_BY_BYTES))
def find_bytes(
    hashes: Any, offsets: Any, data: Any, bitmap: Any, bit_offset: Any, table: Any, arena: Any, slots: Any
) -> None:
    """The slot of each row's key, or -1."""
    mask = np.uint64(table.size - 1)
    for row in range(hashes.size):
        start, length = np.uint64(offsets[row]), _length_of(offsets, bitmap, bit_offset, row)
        bucket = hashes[row] & mask
        slots[row] = -1
        while table[bucket] != _ZERO:
            position = _position_of(table[bucket])
            if (table[bucket] ^ hashes[row]) >> _HALF == _ZERO:
                header = load_word(arena, position)
                if _is_key(arena, position, header, data, start, length):
                    slots[row] = np.int64(header & _LOW)
                    break
            bucket = (bucket + _ONE) & mask


@kernel((IN_U64, IN_I64, INT64, U64))
def rehash_bytes(slot_hashes: Any, slot_positions: Any, size: Any, table: Any) -> None:
    """Fills an empty, larger table."""
    mask = np.uint64(table.size - 1)
    for slot in range(size):
        bucket = slot_hashes[slot] & mask
        while table[bucket] != _ZERO:
            bucket = (bucket + _ONE) & mask
        table[bucket] = _entry_of(slot_hashes[slot], slot_positions[slot])


@kernel((IN_U8, IN_I64, I64, U8))
def lengths_of_keys(arena: Any, positions: Any, ends: Any, valid: Any) -> None:
    """Reads the lengths behind headers into running ends (``ends[0]`` is 0)."""
    total = np.int64(0)
    for row in range(positions.size):
        length = load_word(arena, np.uint64(positions[row])) >> _HALF
        valid[row] = np.uint8(length != _NULL_LENGTH)
        total += np.int64(length) if valid[row] else np.int64(0)
        ends[row + 1] = total


BLOCK_WORDS = 8
_PROBES = 6
_ODD = np.uint64(0x9E3779B185EBCA87)
_U1, _U3, _U7, _U9, _U10, _U32, _U63 = (np.uint64(number) for number in (1, 3, 7, 9, 10, 32, 63))


@inlined
def _first_word(mixed: Any, words: Any) -> Any:
    return (((mixed >> _U32) * np.uint64(words.size >> 3)) >> _U32) << _U3


@kernel((IN_U64, U64))
def filter_add(hashes: Any, words: Any) -> None:
    """Adds keys."""
    for row in range(hashes.size):
        mixed = mix64(hashes[row] + GOLDEN)
        first = _first_word(mixed, words)
        bits = (mixed * _ODD) >> _U10
        for _ in range(_PROBES):
            words[first + (bits & _U7)] |= _U1 << ((bits >> _U3) & _U63)
            bits >>= _U9


@kernel((IN_U64, IN_U64, U8))
def filter_test(hashes: Any, words: Any, found: Any) -> None:
    """Sets 1 for each key that may have been added, 0 for others. It has no branches, so that loads overlap."""
    for row in range(hashes.size):
        mixed = mix64(hashes[row] + GOLDEN)
        first = _first_word(mixed, words)
        bits = (mixed * _ODD) >> _U10
        every = _U1
        for _ in range(_PROBES):
            every &= words[first + (bits & _U7)] >> ((bits >> _U3) & _U63)
            bits >>= _U9
        found[row] = np.uint8(every & _U1)
