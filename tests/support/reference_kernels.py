"""Slow, obviously right forms of the kernels in plain Python and NumPy. For tests only; production never calls them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_WORD_A = 0xC2B2AE3D27D4EB4F
_WORD_B = 0x9E3779B185EBCA87
_WORD_C = 0x85EBCA77C2B2AE63
NULL_HASH = 0xD6E8FEB86659FD93


def mix64(word: int) -> int:
    """The splitmix64 finaliser."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)


def hash_int(value: int) -> int:
    """Hash of an integer."""
    return mix64(((value & _MASK) + _GOLDEN) & _MASK)


def hash_float(value: float) -> int:
    """Hash of a float."""
    if value != value:
        return hash_int(0x7FF8000000000000)
    return hash_int(struct.unpack("<q", struct.pack("<d", value + 0.0 if value != 0 else 0.0))[0])


def key_group_of_hash(key_hash: int, max_parallelism: int) -> int:
    """The key group of one 64-bit hash."""
    return ((key_hash >> 32) * max_parallelism) >> 32


def _rotate(word: int, shift: int) -> int:
    return ((word << shift) | (word >> (64 - shift))) & _MASK


def hash_bytes(data: bytes) -> int:
    """Hash of a string's UTF-8 bytes or of a binary."""
    state = (len(data) * _WORD_B + _GOLDEN) & _MASK
    for start in range(0, len(data), 8):
        word = int.from_bytes(data[start : start + 8].ljust(8, b"\0"), "little")
        state ^= (_rotate((word * _WORD_A) & _MASK, 31) * _WORD_B) & _MASK
        state = (_rotate(state, 27) * _WORD_B + _WORD_C) & _MASK
    return mix64(state)


def hash_value(value: Any) -> int:
    """Hash of an int, bool, float, str, bytes or None."""
    if value is None:
        return NULL_HASH
    if isinstance(value, float):
        return hash_float(value)
    if isinstance(value, int):
        return hash_int(int(value))
    return hash_bytes(value.encode() if isinstance(value, str) else value)


def hash_key(key: Sequence[Any]) -> int:
    """Hash of a key of one or more columns."""
    result = hash_value(key[0])
    for part in key[1:]:
        result = mix64((result * _WORD_B + hash_value(part) + _GOLDEN) & _MASK)
    return result


def key_groups(hashes: np.ndarray[Any, Any], max_parallelism: int) -> np.ndarray[Any, Any]:
    """Key groups of hashes."""
    return (((hashes >> np.uint64(32)) * np.uint64(max_parallelism)) >> np.uint64(32)).astype(np.int32)


def stable_order(groups: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the counting sorts give."""
    return np.argsort(groups, kind="stable")


def slots_of(keys: Sequence[Any], known: dict[Any, int]) -> list[int]:
    """Slots in order of first appearance; ``known`` is changed."""
    return [known.setdefault(key, len(known)) for key in keys]


def running_aggregate(function: str, values: Sequence[Any]) -> Any:
    """SQL's aggregate of the values so far; NaN is the greatest float."""
    present = [value for value in values if value is not None]
    if function == "count":
        return len(present)
    if not present:
        return None
    if function == "sum":
        total = present[0]
        for value in present[1:]:
            total = total + value
        return total
    if function == "avg":
        total = 0.0
        for value in present:
            total += float(value)
        return total / len(present)

    def order(value: Any) -> tuple[bool, Any]:
        return (value != value, value if value == value else 0)

    return min(present, key=order) if function == "min" else max(present, key=order)


class BufferedRows:
    """What the kernels of buffered rows do, with a list of ``[key, time, alive, matched]``."""

    def __init__(self, keeps_matched: bool) -> None:
        self._keeps_matched = keeps_matched
        self._rows: list[list[Any]] = []

    def append(self, keys: Sequence[Any], times: Sequence[int]) -> None:
        self._rows += [[key, time, True, False] for key, time in zip(keys, times, strict=True)]

    def matches(self, keys: Sequence[Any], times: Sequence[int], lower: int, upper: int) -> list[tuple[int, int]]:
        """Pairs of probing position and row; a row that ends with its first match is in one pair only."""
        pairs: list[tuple[int, int]] = []
        gone: set[int] = set()
        for position, (key, time) in enumerate(zip(keys, times, strict=True)):
            for number, (other, row_time, alive, _) in enumerate(self._rows):
                if alive and number not in gone and other == key and lower <= row_time - time <= upper:
                    pairs.append((position, number))
                    gone |= set() if self._keeps_matched else {number}
        return pairs

    def mark(self, pairs: Sequence[tuple[int, int]]) -> None:
        for _, number in pairs:
            self._rows[number][2:] = [self._keeps_matched, True]

    def expire(self, bound: int) -> list[int]:
        """Ends rows at or before ``bound``; those without a match."""
        ended = [number for number, (_, time, alive, _) in enumerate(self._rows) if alive and time <= bound]
        for number in ended:
            self._rows[number][2] = False
        return [number for number in ended if not self._rows[number][3]]

    def living(self) -> int:
        return sum(alive for _, _, alive, _ in self._rows)
