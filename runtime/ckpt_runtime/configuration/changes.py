"""What differs between two configurations by meaning, and whether it may be changed while a job runs (FLIP-530).

Pure decisions: nothing is applied here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.configuration.cluster_options import JobManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import InvalidOptionError
from ckpt_runtime.configuration.option import Changeability, ConfigOption
from ckpt_runtime.configuration.registry import canonical_key, find_option

_ANY = "*"


@dataclass(frozen=True, slots=True)
class ConfigurationChange:
    """One key whose meaning differs. ``old`` or ``new`` is None where the key is absent."""

    key: str
    old: str | None
    new: str | None

    @property
    def changeability(self) -> Changeability:
        """What it takes to apply the change; keys that belong to the user take a restart."""
        option = find_option(self.key)
        return Changeability.RESTART if option is None else option.changeability


def find_changes(old: Configuration, new: Configuration) -> tuple[ConfigurationChange, ...]:
    """All keys whose values differ by meaning, in the order of the keys: ``10s`` equals ``10000ms``.

    A key that is set to its default equals its absence only where the option says so. Values which their option
    cannot take are compared as texts.
    """
    return tuple(
        ConfigurationChange(key, old.get_text(key), new.get_text(key))
        for key in sorted(set(old) | set(new))
        if not _equal(find_option(key), old.get_text(key), new.get_text(key))
    )


def _equal(option: ConfigOption[Any] | None, old: str | None, new: str | None) -> bool:
    if old == new:
        return True
    if option is None:
        return False
    if (old is None or new is None) and not option.default_equals_absence:
        return False
    try:
        return bool(_value(option, old) == _value(option, new))
    except InvalidOptionError:
        return False


def _value(option: ConfigOption[Any], text: str | None) -> Any:
    return option.default if text is None else option.parse(text)


@dataclass(frozen=True, slots=True)
class AllowList:
    """The keys that may be changed while a job runs; ``*`` among them allows any."""

    keys: frozenset[str]

    @classmethod
    def of(cls, cluster: Configuration) -> AllowList:
        """The list that a cluster's configuration gives."""
        keys = cluster.get(JobManagerOptions.DYNAMIC_CONFIGURATION_ALLOW_LIST)
        return cls(frozenset(canonical_key(key) for key in keys))

    def allows(self, key: str) -> bool:
        """Whether one key may be changed."""
        return _ANY in self.keys or canonical_key(key) in self.keys

    def refused(self, changes: Iterable[ConfigurationChange]) -> tuple[str, ...]:
        """The keys of all changes that may not be made: not on the list, or fixed for a job's life."""
        return tuple(
            change.key
            for change in changes
            if not self.allows(change.key) or change.changeability is Changeability.NEVER
        )
