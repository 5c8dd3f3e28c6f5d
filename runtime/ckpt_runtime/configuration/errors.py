"""Errors of the configuration package: each names the option, the value and what is allowed. Holds no logic."""

from __future__ import annotations

from collections.abc import Sequence


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
