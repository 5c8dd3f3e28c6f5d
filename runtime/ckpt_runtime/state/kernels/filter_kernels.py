"""A Bloom filter in blocks of one cache line: 64 bytes, in which a key has six bits.

A filter is an array of words, eight for each block. Keys are given as their stable hashes. The high bits of these do
not distinguish keys of one subtask, because they chose the subtask: so the hashes are mixed again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_runtime.state.kernels.compiler import IN_U64, U8, U64, inlined, kernel
from ckpt_runtime.state.kernels.hash_kernels import GOLDEN, mix64

BLOCK_WORDS = 8
_PROBES = 6
_ODD = np.uint64(0x9E3779B185EBCA87)
_ONE, _U3, _U7, _U9, _U10, _U32, _U63 = (np.uint64(number) for number in (1, 3, 7, 9, 10, 32, 63))


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
            words[first + (bits & _U7)] |= _ONE << ((bits >> _U3) & _U63)
            bits >>= _U9


@kernel((IN_U64, IN_U64, U8))
def filter_test(hashes: Any, words: Any, found: Any) -> None:
    """Sets 1 for each key that may have been added, 0 for others. It has no branches, so that loads overlap."""
    for row in range(hashes.size):
        mixed = mix64(hashes[row] + GOLDEN)
        first = _first_word(mixed, words)
        bits = (mixed * _ODD) >> _U10
        every = _ONE
        for _ in range(_PROBES):
            every &= words[first + (bits & _U7)] >> ((bits >> _U3) & _U63)
            bits >>= _U9
        found[row] = np.uint8(every & _ONE)
