"""Configuration: an immutable mapping of keys to texts which knows the types of its options.

Reads, merges and prints. Never reads files or the environment, and never changes in place.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping
from typing import Any, TypeVar

from ckpt_runtime.configuration.errors import InvalidOptionError
from ckpt_runtime.configuration.option import ConfigOption
from ckpt_runtime.configuration.registry import canonical_key, find_option
from ckpt_runtime.secret_keys import MASK, shown, without_credentials

T = TypeVar("T")


class Configuration:
    """Maps keys of options to texts. Deprecated keys are stored under the current key, which wins when both are given.

    Values are kept as they were written, so that a client reads back what it gave; :meth:`get` parses them.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | Configuration | None = None) -> None:
        """Raises :class:`InvalidOptionError` for a key or a value that is not a string; values are not parsed here."""
        given: dict[Any, Any] = dict(values.items()) if values is not None else {}
        for key, value in given.items():
            if not isinstance(key, str) or not key.strip():
                raise InvalidOptionError(repr(key), value, "a key that is a text and not empty")
            if not isinstance(value, str):
                raise InvalidOptionError(key, value, "a text")
        self._values: dict[str, str] = _in_present_spelling(given)

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> Configuration:
        """Takes strings, numbers and booleans, as in JSON and Python; other values are not accepted."""
        texts: dict[str, str] = {}
        for key, value in values.items():
            if isinstance(value, bool):
                texts[key] = "true" if value else "false"
            elif isinstance(value, str | int | float):
                texts[key] = str(value)
            else:
                raise InvalidOptionError(key, value, "a text, a number, true or false")
        return cls(texts)

    @classmethod
    def from_properties(cls, properties: Iterable[str]) -> Configuration:
        """Takes ``key=value`` items such as a command line's ``-D``; a later item wins over an earlier one."""
        texts: dict[str, str] = {}
        for item in properties:
            key, separator, value = item.partition("=")
            if not separator or not key.strip():
                raise InvalidOptionError("-D", item, "key=value")
            texts[canonical_key(key)] = value.strip()
        return cls(texts)

    @classmethod
    def merge(cls, *layers: Configuration) -> Configuration:
        """Merges all layers; if two layers set the same key, the later one wins."""
        merged: dict[str, str] = {}
        for layer in layers:
            merged.update(layer.items())
        return cls(merged)

    def get(self, option: ConfigOption[T]) -> T:
        """Gives the option's value or its default. Raises :class:`InvalidOptionError` for an invalid value."""
        text = self._values.get(option.key)
        return option.default if text is None else option.parse(text)

    def get_text(self, key: str, default: str | None = None) -> str | None:
        """Returns the text as it was given under the current or a deprecated key."""
        return self._values.get(canonical_key(key), default)

    def with_option(self, option: ConfigOption[T], value: T) -> Configuration:
        """Copies it with one option set to a value."""
        return Configuration({**self._values, option.key: option.format(value)})

    def with_values(self, values: Mapping[str, str | None]) -> Configuration:
        """Copies it with some keys set, or removed where the value is None (the form of FLIP-530's ad-hoc change)."""
        changed = dict(self._values)
        for key, value in _in_present_spelling(values).items():
            if value is None:
                changed.pop(key, None)
            else:
                changed[key] = value
        return Configuration(changed)

    def without(self, prefix: str) -> Configuration:
        """Copies it without the keys that start with ``prefix``."""
        return Configuration({key: value for key, value in self._values.items() if not key.startswith(prefix)})

    def to_dict(self) -> dict[str, str]:
        """Makes a new dict of all texts, secrets included; for storage and the system's own processes."""
        return dict(self._values)

    def displayed(self) -> dict[str, str]:
        """Makes a new dict for display: secrets are masked, also those under users' own keys (see ``secret_keys``)."""
        return {key: shown_value(key, value) for key, value in self._values.items()}

    def keys(self) -> KeysView[str]:
        """The keys that are set, in the order in which they were given."""
        return self._values.keys()

    def items(self) -> ItemsView[str, str]:
        """Keys and texts that are set, in the order in which they were given."""
        return self._values.items()

    def __getitem__(self, key: str) -> str:
        return self._values[canonical_key(key)]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, ConfigOption):
            return key.key in self._values
        return isinstance(key, str) and canonical_key(key) in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._values == other._values

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Configuration({self.displayed()!r})"


def _in_present_spelling(values: Mapping[str, T]) -> dict[str, T]:
    """Merges the spellings of each option under its current key; the order of the keys does not matter.

    A value wins over the removal of another spelling: a change that replaces an old spelling by the current one has
    both. Among values, the one under the current spelling wins.
    """
    found: dict[str, T] = {}
    for key, value in values.items():
        canonical = canonical_key(key)
        if value is not None and (key.strip() == canonical or found.get(canonical) is None):
            found[canonical] = value
        else:
            found.setdefault(canonical, value)
    return found


def shown_value(key: str, value: str) -> str:
    """Returns a value for display. Options declare whether they are secret; for users' own keys the name decides."""
    option: ConfigOption[Any] | None = find_option(key)
    if option is None:
        return shown(key, value)
    return MASK if option.secret else without_credentials(value)
