"""Compares two configurations of a job by the meaning of their values, and says what may change while it runs.

FLIP-530. Pure. The cluster defines the allow-list; each option defines whether it can change at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.configuration.configuration import Configuration, shown_value
from ckpt_runtime.configuration.errors import InvalidConfigurationError, InvalidOptionError
from ckpt_runtime.configuration.option import Changeability, ConfigOption
from ckpt_runtime.configuration.registry import find_option
from ckpt_runtime.secret_keys import MASK

ANY = "*"


@dataclass(frozen=True, slots=True)
class OptionChange:
    """The change of one option. ``before`` and ``after`` are texts as they were given, None for not given."""

    key: str
    before: str | None
    after: str | None

    @property
    def changeability(self) -> Changeability:
        """What the change requires: for users' own keys a restart, since pipeline code may read them at any time."""
        option = find_option(self.key)
        return Changeability.RESTART if option is None else option.changeability

    @property
    def shown(self) -> tuple[str | None, str | None]:
        """Both texts for display."""
        before, after = (None if text is None else shown_value(self.key, text) for text in (self.before, self.after))
        return before, after


def differences(before: Configuration, after: Configuration) -> tuple[OptionChange, ...]:
    """Returns options whose values differ in meaning, by key. Values must be valid.

    ``10s`` and ``10000ms`` are equal. Not giving an option differs from giving its default, since the cluster may set
    another value, except for options with ``default_equals_absence``.
    """
    changes = (OptionChange(key, before.get_text(key), after.get_text(key)) for key in {*before, *after})
    return tuple(sorted((change for change in changes if _differs(change)), key=lambda change: change.key))


def _differs(change: OptionChange) -> bool:
    option = find_option(change.key)
    if option is None:
        return change.before != change.after
    return _meaning(option, change.before) != _meaning(option, change.after)


def _meaning(option: ConfigOption[Any], text: str | None) -> tuple[bool, Any]:
    """Returns whether the option is given, and its value."""
    if text is None:
        return option.default_equals_absence, option.default
    return True, option.parse(text)


def check_changeable(changes: Iterable[OptionChange]) -> None:
    """Raises :class:`InvalidConfigurationError` with a line for each option that can never change, and why."""
    problems = [
        InvalidOptionError(
            change.key,
            change.shown[1],
            f"what the job was submitted with, which is {change.shown[0]!r}: {_reason(change.key)}",
        )
        for change in changes
        if change.changeability is Changeability.NEVER
    ]
    if problems:
        raise InvalidConfigurationError(problems)


def _reason(key: str) -> str:
    option = find_option(key)
    assert option is not None
    return option.fixed_because or "it cannot change while a job runs"


def not_allowed(changes: Iterable[OptionChange], allow_list: Iterable[str]) -> tuple[str, ...]:
    """The keys of changed options that are not on the allow-list, on which ``*`` stands for all."""
    allowed = set(allow_list)
    return () if ANY in allowed else tuple(change.key for change in changes if change.key not in allowed)


def with_kept_secrets(given: Configuration, present: Configuration) -> Configuration:
    """Returns ``given`` with the current value wherever it repeats the masked display of that value.

    Raises :class:`InvalidConfigurationError` for a masked value without a current value.
    """
    kept: dict[str, str | None] = {}
    problems = []
    for key, text in given.items():
        known = present.get_text(key)
        if known is not None and text == shown_value(key, known):
            kept[key] = known
        elif MASK in text and text == shown_value(key, text):
            problems.append(InvalidOptionError(key, text, "a value; this is how one is shown, and the job has no such"))
    if problems:
        raise InvalidConfigurationError(problems)
    return given.with_values(kept)
