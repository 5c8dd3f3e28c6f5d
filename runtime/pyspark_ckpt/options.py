"""The options of the format ``ckpt-state``, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

READING = ("path", "operator", "state", "numPartitions")
WRITING = ("path", "operator", "state", "base", "kind", "maxParallelism")
_DIGITS = 10


class OptionError(ValueError):
    """An option is missing, unknown or has a value that it cannot have."""


class Options:
    """The given options, which must be among the ``allowed``. Names are case-insensitive, like Spark's."""

    def __init__(self, given: Mapping[str, str], allowed: Sequence[str]) -> None:
        """Raises :class:`OptionError` for an option that is not allowed."""
        known = {name.lower() for name in allowed}
        self._given = {name.lower(): value for name, value in given.items()}
        for name in self._given.keys() - known:
            raise OptionError(f"option {name!r} is unknown, allowed are {', '.join(allowed)}")

    def get(self, name: str) -> str | None:
        """The value of an option, or None when it was not given."""
        return self._given.get(name.lower())

    def required(self, name: str) -> str:
        """The value of an option. Raises :class:`OptionError` when it was not given."""
        value = self.get(name)
        if not value:
            raise OptionError(f"option {name!r} is missing")
        return value

    def positive(self, name: str) -> int | None:
        """The value as a number above zero and below a billion, or None when it was not given."""
        value = self.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < _DIGITS and int(value) > 0):
            raise OptionError(f"option {name!r} is {value!r}, it must be a number above 0 and below a billion")
        return int(value)
