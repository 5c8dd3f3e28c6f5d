"""Key groups: the unit in which keyed state is split over subtasks and moved when a job is rescaled.

A key group is ``high 32 bits of the stable 64-bit key hash, scaled to [0, max_parallelism)``; see
``state/hashing.py`` for the hash. The low bits stay free for hash-table buckets. Pure arithmetic, no I/O.
"""

from __future__ import annotations

from msgspec import Struct

DEFAULT_MAX_PARALLELISM = 128
UPPER_BOUND_MAX_PARALLELISM = 32_768


class KeyGroupRange(Struct, frozen=True, order=True, array_like=True, forbid_unknown_fields=True):
    """Key groups ``first`` to ``last``, both included. Empty when ``last < first``."""

    first: int
    last: int

    def __contains__(self, key_group: int) -> bool:
        return self.first <= key_group <= self.last

    def __len__(self) -> int:
        return max(0, self.last - self.first + 1)

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange:
        return KeyGroupRange(max(self.first, other.first), min(self.last, other.last))


def key_group_range(max_parallelism: int, parallelism: int, subtask_index: int) -> KeyGroupRange:
    """The key groups that a subtask owns: ``ceil(i*max/p) .. ceil((i+1)*max/p) - 1``."""
    first = (subtask_index * max_parallelism + parallelism - 1) // parallelism
    last = ((subtask_index + 1) * max_parallelism + parallelism - 1) // parallelism - 1
    return KeyGroupRange(first, last)


def owner_of_key_group(key_group: int, max_parallelism: int, parallelism: int) -> int:
    """The subtask whose range holds ``key_group``; the inverse of :func:`key_group_range`."""
    return key_group * parallelism // max_parallelism
