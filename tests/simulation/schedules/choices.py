"""Where every decision of a simulated schedule comes from: one seed, a stream of random numbers for each kind.

A kind of decision has a stream of its own, so that leaving one fault out hardly disturbs the others: this is what lets
a failing schedule shrink. Streams depend on the seed and the kind's name, never on a hash of a text.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
FaultKey = tuple[str, int]
"""(kind, how many of this kind were drawn before)"""


class Choices:
    """``muted`` faults do not happen; ``fired`` lists those that did. Faults end when ``chaos`` is set to False."""

    def __init__(
        self, seed: int, muted: frozenset[FaultKey] = frozenset(), *, scale: float = 1.0, plain: bool = False
    ) -> None:
        self.chaos = True
        self.fired: list[FaultKey] = []
        self._seed = seed
        self._muted = muted
        self._scale = scale
        self._plain = plain
        self._streams: dict[str, Random] = {}
        self._drawn: dict[str, int] = {}

    def _stream(self, kind: str) -> Random:
        stream = self._streams[kind] = Random((self._seed << 32) | zlib.crc32(kind.encode()))
        return stream

    def fault(self, kind: str, probability: float) -> bool:
        """Whether something goes wrong now."""
        if not self.chaos or not self._scale:
            return False
        stream = self._streams.get(kind) or self._stream(kind)
        number = self._drawn.get(kind, 0)
        self._drawn[kind] = number + 1
        if stream.random() >= probability * self._scale or (kind, number) in self._muted:
            return False
        self.fired.append((kind, number))
        return True

    def delay(self, kind: str, low: int, high: int) -> int:
        """Milliseconds in [low, high]; always ``low`` in a plain schedule."""
        if self._plain:
            return low
        stream = self._streams.get(kind) or self._stream(kind)
        return low + int(stream.random() * (high - low + 1))

    def chance(self, kind: str, probability: float) -> bool:
        """A decision that is not a fault."""
        return (self._streams.get(kind) or self._stream(kind)).random() < probability

    def pick(self, kind: str, options: Sequence[T]) -> T:
        """One of several."""
        stream = self._streams.get(kind) or self._stream(kind)
        return options[int(stream.random() * len(options))]
