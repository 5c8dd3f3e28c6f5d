"""The checksum of stored bytes: XXH3 with 128 bits, written as ``xxh3-128:<32 hex digits>``.

It finds damage (truncation, flipped bits, swapped files) at memory speed; it does not protect against forgery.
"""

from __future__ import annotations

import re

import xxhash

ALGORITHM = "xxh3-128"
_FORM = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")


class RunningChecksum:
    """The checksum of bytes that arrive piece by piece."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._state.update(data)

    def text(self) -> str:
        """The checksum of everything added so far."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of one piece."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def is_checksum(text: object) -> bool:
    """Whether a text is a checksum that this version can verify."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None
