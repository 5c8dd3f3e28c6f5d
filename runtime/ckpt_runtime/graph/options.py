"""Options of sources and sinks: the options that a format accepts, and the conversion of the user's strings into
values.

Option names are case-insensitive, as in PySpark. An unknown option is an error, so that a typing mistake never passes
silently. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckpt_runtime.configuration.option import SIZE_FORM, MemorySizeType
from ckpt_runtime.expressions.regex import compile_java
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.graph.errors import PlanError

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Option:
    """One option. ``kind`` is ``str``, ``int``, ``float``, ``bool``, or a function that returns the value of a text or
    raises ValueError with its fault; ``default`` None means "not set".

    ``choices``, in lower case, limits strings, whose case does not matter; ``minimum`` limits numbers (inclusive).
    ``alias`` is another name; if both are given, ``key`` counts, as in Spark.
    """

    key: str
    kind: Callable[[str], Any] = str
    default: Any = None
    required: bool = False
    minimum: float | None = None
    choices: tuple[str, ...] = ()
    alias: str = ""


def parse_options(format_name: str, declared: tuple[Option, ...], given: Mapping[str, str]) -> dict[str, Any]:
    """The values of all declared options by their declared key.

    Raises PlanError for an unknown option, a missing required one, or a value that is not allowed.
    """
    by_lower = {option.alias.lower(): option for option in declared if option.alias}
    by_lower |= {option.key.lower(): option for option in declared}
    unknown = sorted(key for key in given if key.lower() not in by_lower)
    if unknown:
        allowed = ", ".join(option.key for option in declared) or "no options"
        raise PlanError(
            f"option {unknown[0]!r}", f"format {format_name!r} does not know it; known options are {allowed}"
        )
    values = {option.key: option.default for option in declared}
    for key in sorted(given, key=lambda key: key.lower() == by_lower[key.lower()].key.lower()):
        option = by_lower[key.lower()]
        values[option.key] = parse_value(option, str(given[key]))
    for option in declared:
        if option.required and values[option.key] in (None, ""):
            raise PlanError(f"option {option.key!r}", f"format {format_name!r} needs it")
    return values


def parse_value(option: Option, text: str) -> Any:
    """One value of its declared kind."""
    field = f"option {option.key!r}"
    if option.kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise PlanError(field, f"{text!r} is not true or false")
        return text.lower() in _TRUE
    if option.kind in (int, float):
        try:
            value = option.kind(text)
        except ValueError:
            kind = "a whole number" if option.kind is int else "a number"
            raise PlanError(field, f"{text!r} is not {kind}") from None
        if option.minimum is not None and not value >= option.minimum:
            raise PlanError(field, f"{text} is less than the minimum {option.minimum:g}")
        return value
    if option.choices:
        if text.lower() not in option.choices:
            raise PlanError(field, f"{text!r} is not one of {', '.join(option.choices)}")
        return text.lower()
    try:
        return option.kind(text)
    except ValueError as error:
        raise PlanError(field, str(error)) from None


def names_of(text: str | None) -> tuple[str, ...]:
    """The names in a list that is separated by commas; none without a text."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())


def absolute(path: str) -> str:
    """Returns the path unchanged. Raises ValueError for a path that subtasks in other directories or on other machines
    would resolve differently."""
    if not path.startswith("/") and ":/" not in path:
        raise ValueError(f"{path!r} is relative; give an absolute path or a URL")
    return path


def bytes_of(text: str, minimum: int = 0) -> int:
    """A size with a unit. Raises ValueError."""
    try:
        return MemorySizeType(minimum=minimum).parse(text)
    except ValueError:
        raise ValueError(f"{text!r} is not {SIZE_FORM}" + (f", at least {minimum}" if minimum else "")) from None


def java_pattern(text: str) -> re.Pattern[str]:
    """A regular expression of Java's, which is not empty. Raises ValueError."""
    if not text:
        raise ValueError("it is empty")
    try:
        return compile_java(text)
    except UnsupportedExpressionError as error:
        raise ValueError(str(error)) from None


_DURATION = re.compile(r"(\d{1,30})\s*(us|ms|s|m|min|h|d)?")
_MS_OF = {"us": 0.001, "ms": 1.0, "s": 1e3, "m": 6e4, "min": 6e4, "h": 3.6e6, "d": 8.64e7}
_GREATEST_MS = 100_000 * _MS_OF["d"]
"""A thread cannot wait for more than 292 years."""


def duration_ms(text: str, without_unit: str = "ms") -> float:
    """A duration as Spark's options have it: a whole number and us, ms, s, m, min, h or d. Raises ValueError."""
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 10s, 5m or 7d")
    number, factor = int(match[1]), _MS_OF[match[2] or without_unit]
    if number * factor > _GREATEST_MS:
        raise ValueError(f"{text!r} is longer than 100000d, the maximum")
    return number * factor


duration_in_s = partial(duration_ms, without_unit="s")
"""A duration as in :func:`duration_ms`, but a number without a unit is in seconds."""
