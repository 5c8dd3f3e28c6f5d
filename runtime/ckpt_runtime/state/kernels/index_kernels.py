"""Key -> slot, and a Bloom filter of keys. Slots are dense and assigned in order of first appearance.

``table`` holds slot + 1 (0: empty), ``counters`` is ``[keys so far, slot of the null key or -1]``. Callers first make
room for as many new keys as there are rows. There are two forms of table:

* hashed: open addressing with linear probing; the size is a power of two and larger than the number of keys. Buckets
  come from the low bits of the hash, because the high ones already chose the subtask;
* direct: one entry for each integer from ``first`` on.

The filter has blocks of one cache line, 64 bytes, in which a key has six bits. It is an array of words, eight for each
block. Keys are given as their stable hashes. The high bits of these do
not distinguish keys of one subtask, because they chose the subtask: so the hashes are mixed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import I64, IN_I64, IN_U8, IN_U64, INT64, U8, U32, U64, inlined, kernel
from ckpt_runtime.state.kernels.hash_kernels import GOLDEN, hash_of_int64, is_valid, load_word, mix64

KEYS, NULL_SLOT = 0, 1
_ZERO, _ONE, _WORD = np.uint64(0), np.uint64(1), np.uint64(8)


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


@inlined
def _same_bytes(left: Any, left_start: Any, right: Any, right_start: Any, length: Any) -> Any:
    """Whether two stretches are equal, compared by words, then by bytes."""
    at, other, end = np.uint64(left_start), np.uint64(right_start), np.uint64(left_start + length)
    while at + _WORD <= end and load_word(left, at) == load_word(right, other):
        at += _WORD
        other += _WORD
    while at < end and left[at] == right[other]:
        at += _ONE
        other += _ONE
    return at == end


@kernel((IN_U64, IN_I64, IN_U8, U32, U64, I64, U8, I64, I64, U32))
def find_or_insert_bytes(
    hashes: Any,
    offsets: Any,
    data: Any,
    table: Any,
    slot_hashes: Any,
    slot_offsets: Any,
    arena: Any,
    counters: Any,
    places: Any,
    slots: Any,
) -> None:
    """The slot of each row's encoded key ``data[offsets[i]:offsets[i + 1]]``; new keys are copied into the arena.

    Slot ``s`` holds ``arena[slot_offsets[s]:slot_offsets[s + 1]]``. ``places`` has room for a number per row. The first
    two passes only fetch, from the table, then from the keys that it names: without branches their loads overlap.
    """
    mask = np.uint64(table.size - 1)
    size = counters[KEYS]
    for row in range(hashes.size):
        slots[row] = table[hashes[row] & mask]
    for row in range(hashes.size):
        first = np.uint64(max(slots[row], np.uint32(1))) - _ONE
        place = slot_offsets[first]
        places[row] = place if slot_hashes[first] == hashes[row] else np.int64(-1)
    for row in range(hashes.size):
        key_hash = hashes[row]
        start = offsets[row]
        length = offsets[row + 1] - start
        entry = np.int64(slots[row])
        place = places[row]
        if (
            entry != 0
            and place >= 0
            and slot_offsets[entry] - place == length
            and _same_bytes(arena, place, data, start, length)
        ):
            slots[row] = np.uint32(entry - 1)
            continue
        bucket = key_hash & mask
        while True:
            entry = np.int64(table[bucket])
            if entry == 0:
                end = slot_offsets[size]
                for byte in range(length):
                    arena[end + byte] = data[start + byte]
                slot_hashes[size] = key_hash
                size += 1
                slot_offsets[size] = end + length
                table[bucket] = np.uint32(size)
                slots[row] = np.uint32(size - 1)
                break
            slot = entry - 1
            known = slot_offsets[slot]
            if (
                slot_hashes[slot] == key_hash
                and slot_offsets[entry] - known == length
                and _same_bytes(arena, known, data, start, length)
            ):
                slots[row] = np.uint32(slot)
                break
            bucket = (bucket + _ONE) & mask
    counters[KEYS] = size


@kernel((IN_U64, IN_I64, IN_U8, U32, U64, I64, U8, I64))
def find_bytes(
    hashes: Any, offsets: Any, data: Any, table: Any, slot_hashes: Any, slot_offsets: Any, arena: Any, slots: Any
) -> None:
    """The slot of each row's encoded key, or -1."""
    mask = np.uint64(table.size - 1)
    for row in range(hashes.size):
        start = offsets[row]
        length = offsets[row + 1] - start
        bucket = hashes[row] & mask
        slots[row] = -1
        while table[bucket] != 0:
            slot = np.int64(table[bucket]) - 1
            known = slot_offsets[slot]
            if (
                slot_hashes[slot] == hashes[row]
                and slot_offsets[slot + 1] - known == length
                and _same_bytes(arena, known, data, start, length)
            ):
                slots[row] = slot
                break
            bucket = (bucket + _ONE) & mask


@kernel((IN_U64, INT64, U32))
def rehash_bytes(slot_hashes: Any, size: Any, table: Any) -> None:
    """Fills an empty, larger table."""
    mask = np.uint64(table.size - 1)
    for slot in range(size):
        bucket = slot_hashes[slot] & mask
        while table[bucket] != 0:
            bucket = (bucket + _ONE) & mask
        table[bucket] = np.uint32(slot + 1)


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
