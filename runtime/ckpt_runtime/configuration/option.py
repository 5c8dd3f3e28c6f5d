"""One configuration option: its key, type, default, where it may be given and how it may change. Holds no values.

The errors name the option, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from ckpt_runtime.configuration.value_types import ValueType


class ConfigurationError(ValueError):
    """Base class of all configuration errors."""


class InvalidOptionError(ConfigurationError):
    """An option has a value that it cannot take, or is given where it has no effect."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key}: {value!r} is not acceptable; allowed: {allowed}")
        self.key = key
        self.value = value
        self.allowed = allowed


class UnknownOptionError(ConfigurationError):
    """A key in the system's own namespaces matches no option. ``suggestions`` are the nearest known keys."""

    def __init__(self, key: str, value: object, suggestions: Sequence[str]) -> None:
        hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else ""
        super().__init__(f"{key}: there is no such option (value {value!r}){hint}")
        self.key = key
        self.value = value
        self.suggestions = tuple(suggestions)


class InvalidConfigurationError(ConfigurationError):
    """Lists all problems of a configuration, one per line."""

    def __init__(self, problems: Sequence[InvalidOptionError | UnknownOptionError]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


T = TypeVar("T")


class OptionScope(StrEnum):
    """Where an option has an effect. A JOB option set on a cluster is the default for the cluster's jobs."""

    CLUSTER = "cluster"
    JOB = "job"


class Changeability(StrEnum):
    """What a change of an option of a running job requires (FLIP-530, FLIP-571)."""

    LIVE = "live"
    RESTART = "restart"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ConfigOption(Generic[T]):
    """An option. ``default`` is a parsed value (milliseconds, bytes, an enum member) or None for "not set".

    ``default_equals_absence`` says that giving the default and giving nothing mean the same (FLIP-530): true only for
    options for which a cluster-wide value makes no sense. ``fallback_keys`` are deprecated keys, read as ``key``.
    The values of ``secret`` options are never shown. ``fixed_because`` says why a job's option can never change.
    """

    key: str
    type: ValueType[T]
    default: T
    description: str
    scope: OptionScope = OptionScope.JOB
    changeability: Changeability = Changeability.RESTART
    fallback_keys: tuple[str, ...] = ()
    default_equals_absence: bool = False
    secret: bool = False
    fixed_because: str = ""

    def parse(self, text: str) -> T:
        """Reads a text. Raises :class:`InvalidOptionError` naming the key, the value and what is allowed."""
        try:
            return self.type.parse(text)
        except ValueError:
            raise InvalidOptionError(self.key, "***" if self.secret else text, self.type.allowed) from None

    def format(self, value: T) -> str:
        """Prints the canonical text of a value."""
        return self.type.format(value)

    @property
    def default_text(self) -> str | None:
        """Prints the default as a user would write it; None when there is none."""
        return None if self.default is None else self.type.format(self.default)


def cluster_option(
    key: str, type: ValueType[T], default: T, description: str, *, secret: bool = False
) -> ConfigOption[T]:
    """Declares an option of the session itself, which is fixed when the session starts."""
    return ConfigOption(key, type, default, description, OptionScope.CLUSTER, Changeability.NEVER, secret=secret)
