"""Configuration: an immutable mapping of keys to texts which knows the types of its options.

Reads, merges and prints. Never reads files or the environment, and never changes in place.

A job's own configuration has a version, and an author of each version (FLIP-530). The effective options of a job are
listed with the origin of each value; secrets are masked.
"""

from __future__ import annotations

from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from ckpt_runtime.configuration.option import ConfigOption, InvalidOptionError, OptionScope
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, OPTIONS, canonical_key, find_option
from ckpt_runtime.secret_keys import MASK, shown, without_credentials

T = TypeVar("T")


class Configuration:
    """Maps keys of options to texts. Deprecated keys are stored under the current key, which wins when both are given.

    Values are kept as they were written, so that a client reads back the text that it gave; :meth:`get` parses them.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, str] | Configuration | None = None) -> None:
        """Raises :class:`InvalidOptionError` for a key or a value that is not a string; values are not parsed here."""
        given: dict[Any, Any] = dict(values.items()) if values is not None else {}
        for key, value in given.items():
            if not isinstance(key, str) or not key.strip():
                raise InvalidOptionError(repr(key), value, "a non-empty text as key")
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
        """Returns a copy with one option set to a value."""
        return Configuration({**self._values, option.key: option.format(value)})

    def with_values(self, values: Mapping[str, str | None]) -> Configuration:
        """Returns a copy with keys set, or removed if their value is None (the form of FLIP-530's ad-hoc change)."""
        changed = dict(self._values)
        for key, value in _in_present_spelling(values).items():
            if value is None:
                changed.pop(key, None)
            else:
                changed[key] = value
        return Configuration(changed)

    def without(self, prefix: str) -> Configuration:
        """Returns a copy without the keys that start with ``prefix``."""
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


MAX_NOTES = 20
"""Number of changes that are kept."""


@dataclass(frozen=True, slots=True)
class ChangeNote:
    """The author and time (milliseconds since the epoch) of ``version``, and the keys of the options it changed."""

    version: int
    timestamp_ms: int
    by: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OwnConfiguration:
    """``given`` holds the pipeline's options, overridden by those of the submission or later; never the cluster's.

    ``version`` counts accepted changes from 1, of which ``notes`` has the latest, oldest first.
    """

    given: Configuration = field(default_factory=Configuration)
    version: int = 1
    notes: tuple[ChangeNote, ...] = ()

    def changed(self, given: Configuration, note: ChangeNote) -> OwnConfiguration:
        """Returns the next version."""
        return OwnConfiguration(given, note.version, (*self.notes, note)[-MAX_NOTES:])


class Origin(StrEnum):
    """Origins of a value, highest precedence first."""

    OVERRIDE = "override"
    CHANGE = "change"
    SUBMISSION = "submission"
    PIPELINE = "pipeline"
    CLUSTER = "cluster"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class EffectiveOption:
    """``value`` is as a user would write it, None for an option without a value; secrets are masked."""

    key: str
    value: str | None
    origin: Origin


def effective_options(
    own: OwnConfiguration, submitted: Collection[str], cluster: Configuration, overrides: Mapping[str, str | None]
) -> tuple[EffectiveOption, ...]:
    """Lists job options and the user's own keys, by key.

    ``submitted`` are the keys that came with the submission, ``overrides`` the values that replace them for now
    (FLIP-571), by key. A value that was neither submitted nor changed later was set by the pipeline.
    """
    sent = {canonical_key(key) for key in submitted}
    changed = {key for note in own.notes for key in note.options}
    found: dict[str, EffectiveOption] = {}
    for key, option in OPTIONS.items():
        if option.scope is OptionScope.JOB:
            text = cluster.get_text(key)
            origin = Origin.DEFAULT if text is None else Origin.CLUSTER
            found[key] = EffectiveOption(key, _shown(key, option.default_text if text is None else text), origin)
    for key, text in own.given.items():
        if not key.startswith(INTERNAL_PREFIX):
            origin = Origin.CHANGE if key in changed else Origin.SUBMISSION if key in sent else Origin.PIPELINE
            found[key] = EffectiveOption(key, _shown(key, text), origin)
    for key, text in overrides.items():
        found[key] = EffectiveOption(key, _shown(key, text), Origin.OVERRIDE)
    return tuple(found[key] for key in sorted(found))


def own_options(own: OwnConfiguration, submitted: Collection[str]) -> tuple[EffectiveOption, ...]:
    """Lists the job's own options only: the cluster's options of an ended job are not kept."""
    given = set(own.given.keys())
    return tuple(item for item in effective_options(own, submitted, Configuration(), {}) if item.key in given)


def _shown(key: str, value: str | None) -> str | None:
    return None if value is None else shown_value(key, value)
