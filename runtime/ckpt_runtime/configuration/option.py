"""One configuration option: its key, type, default, where it may be given and how it may change. Holds no values.

A type says how an option's text is read, printed and described. Durations and memory sizes are texts such as ``10 s``,
``PT10S``, ``64 kb`` and ``1g``. Durations are whole milliseconds and sizes are whole bytes everywhere else in the
system. The errors name the option, the value and what is allowed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

_QUANTITY = re.compile(r"([0-9]+)[ \t]*([a-zµ]*)")
_ISO_8601 = re.compile(
    r"p(?=[0-9t])(?:([0-9]{1,19})d)?"
    r"(?:t(?=[0-9])(?:([0-9]{1,19})h)?(?:([0-9]{1,19})m)?(?:([0-9]{1,19})(?:[.,]([0-9]{0,9}))?s)?)?"
)
"""ISO 8601 durations of days and smaller units, as Java's ``Duration.parse`` reads them."""
_MAX = (1 << 63) - 1
_NANOS_PER_MS = 1_000_000

_DURATION_UNITS: dict[int, tuple[str, ...]] = {
    86_400_000_000_000: ("d", "day", "days"),
    3_600_000_000_000: ("h", "hour", "hours"),
    60_000_000_000: ("min", "m", "minute", "minutes"),
    1_000_000_000: ("s", "sec", "secs", "second", "seconds"),
    _NANOS_PER_MS: ("ms", "milli", "millis", "millisecond", "milliseconds"),
    1_000: ("µs", "us", "micro", "micros", "microsecond", "microseconds"),
    1: ("ns", "nano", "nanos", "nanosecond", "nanoseconds"),
}
_SIZE_UNITS: dict[int, tuple[str, ...]] = {
    1 << 40: ("tb", "t", "tebibytes"),
    1 << 30: ("gb", "g", "gibibytes"),
    1 << 20: ("mb", "m", "mebibytes"),
    1 << 10: ("kb", "k", "kibibytes"),
    1: ("bytes", "b"),
}
_NANOS = {name: factor for factor, names in _DURATION_UNITS.items() for name in names}
_BYTES = {name: factor for factor, names in _SIZE_UNITS.items() for name in names}

DURATION_FORM = (
    'a number with a unit (d, h, min, s, ms), such as "10 s", "10s", "1 min", or in the form "PT10S" of ISO 8601; '
    "without a unit, milliseconds"
)
SIZE_FORM = 'a number with a unit (b, kb, mb, gb, tb), such as "64 kb", "1g"; without a unit, bytes'


def parse_duration(text: str) -> int:
    """Reads a duration as milliseconds; a bare number counts milliseconds. Raises ValueError saying what is allowed."""
    iso = _ISO_8601.fullmatch(text.strip().lower())
    nanos = _parse(text, _NANOS, _NANOS_PER_MS, DURATION_FORM) if iso is None else _nanos_of(*iso.groups())
    millis, rest = divmod(nanos, _NANOS_PER_MS)
    if rest or millis > _MAX:
        raise ValueError(f"{DURATION_FORM}; a whole number of milliseconds, at most {_MAX}")
    return millis


def format_duration(millis: int) -> str:
    """Prints the shortest form that :func:`parse_duration` reads back: ``90000`` is ``90 s``, ``0`` is ``0 ms``."""
    return _format(millis * _NANOS_PER_MS, _DURATION_UNITS, "ms")


def parse_memory_size(text: str) -> int:
    """Reads a memory size as bytes; units are powers of 1024. Raises ValueError saying what is allowed."""
    size = _parse(text, _BYTES, 1, SIZE_FORM)
    if size > _MAX:
        raise ValueError(f"{SIZE_FORM}; at most {_MAX} bytes")
    return size


def format_memory_size(size: int) -> str:
    """Prints the shortest form that :func:`parse_memory_size` reads back: ``65536`` is ``64 kb``."""
    return _format(size, _SIZE_UNITS, "bytes")


def _parse(text: str, factors: dict[str, int], default_factor: int, form: str) -> int:
    match = _QUANTITY.fullmatch(text.strip().lower())
    if match is None or len(match[1]) > len(str(_MAX)):
        raise ValueError(form)
    unit = match[2]
    if unit and unit not in factors:
        raise ValueError(form)
    return int(match[1]) * (factors[unit] if unit else default_factor)


def _nanos_of(days: str | None, hours: str | None, minutes: str | None, seconds: str | None, part: str | None) -> int:
    whole = ((int(days or 0) * 24 + int(hours or 0)) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)
    return whole * 1_000_000_000 + int((part or "").ljust(9, "0"))


def _format(amount: int, units: dict[int, tuple[str, ...]], zero_unit: str) -> str:
    for factor, names in units.items():
        if amount and amount % factor == 0:
            return f"{amount // factor} {names[0]}"
    return f"0 {zero_unit}"


T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=StrEnum)

MAX_INT = (1 << 31) - 1
MAX_LONG = (1 << 63) - 1


class ValueType(Protocol[T_co]):
    """Reads and prints the values of one kind of option."""

    @property
    def name(self) -> str:
        """The kind's name in the documentation."""

    @property
    def allowed(self) -> str:
        """The allowed values, for error messages and the documentation."""

    def parse(self, text: str) -> T_co:
        """Reads the value of a text. Raises ValueError; users see :attr:`allowed`, not its message."""

    def format(self, value: Any) -> str:
        """Prints the canonical text of a value; :meth:`parse` reads it back."""


@dataclass(frozen=True, slots=True)
class StringType:
    """Takes a text that is not empty; surrounding white space is dropped."""

    name: str = "String"
    allowed: str = "a text that is not empty"

    def parse(self, text: str) -> str:
        value = text.strip()
        if not value:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class DirectoryType:
    """Takes the absolute path of a local directory, which need not exist."""

    name: str = "String"
    allowed: str = "an absolute path, such as /mnt/state"

    def parse(self, text: str) -> str:
        value = text.strip()
        if not value.startswith("/") or "\0" in value:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class BooleanType:
    """Takes ``true`` or ``false`` in any case."""

    name: str = "Boolean"
    allowed: str = "true, false"

    def parse(self, text: str) -> bool:
        match text.strip().lower():
            case "true":
                return True
            case "false":
                return False
            case _:
                raise ValueError(self.allowed)

    def format(self, value: Any) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class IntegerType:
    """Takes a whole number between ``minimum`` and ``maximum``, both included."""

    minimum: int = 0
    maximum: int = MAX_INT
    name: str = "Integer"

    @property
    def allowed(self) -> str:
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, text: str) -> int:
        stripped = text.strip()
        digits = stripped.removeprefix("-")
        # int() alone accepts underscores and digits of other scripts, and is slow for long texts.
        if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(1 << 63))):
            raise ValueError(self.allowed)
        value = int(stripped)
        if not self.minimum <= value <= self.maximum:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True, slots=True)
class FloatType:
    """Takes a finite number between ``minimum`` and ``maximum``, both included."""

    minimum: float = 0.0
    maximum: float = 1e9
    name: str = "Double"

    @property
    def allowed(self) -> str:
        return f"a number from {self.minimum:g} to {self.maximum:g}"

    def parse(self, text: str) -> float:
        # float() accepts both.
        if "_" in text or not text.isascii():
            raise ValueError(self.allowed)
        value = float(text.strip())
        if not math.isfinite(value) or not self.minimum <= value <= self.maximum:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return repr(float(value))


@dataclass(frozen=True, slots=True)
class DurationType:
    """Reads text with a unit as milliseconds."""

    minimum: int = 0
    name: str = "Duration"

    @property
    def allowed(self) -> str:
        bound = f", at least {format_duration(self.minimum)}" if self.minimum else ""
        return DURATION_FORM + bound

    def parse(self, text: str) -> int:
        value = parse_duration(text)
        if value < self.minimum:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return format_duration(value)


@dataclass(frozen=True, slots=True)
class MemorySizeType:
    """Reads text with a unit as bytes."""

    minimum: int = 0
    maximum: int = MAX_LONG
    name: str = "MemorySize"

    @property
    def allowed(self) -> str:
        lower = f", at least {format_memory_size(self.minimum)}" if self.minimum else ""
        upper = "" if self.maximum == MAX_LONG else f", at most {format_memory_size(self.maximum)}"
        return SIZE_FORM + lower + upper

    def parse(self, text: str) -> int:
        value = parse_memory_size(text)
        if not self.minimum <= value <= self.maximum:
            raise ValueError(self.allowed)
        return value

    def format(self, value: Any) -> str:
        return format_memory_size(value)


@dataclass(frozen=True, slots=True)
class EnumType(Generic[E]):
    """Takes a member of ``members``, in any case, with or without ``-`` and ``_``; ``aliases`` are more spellings."""

    members: type[E]
    aliases: dict[str, E] = field(default_factory=dict)
    name: str = "Enum"

    @property
    def allowed(self) -> str:
        return ", ".join(member.value for member in self.members)

    def parse(self, text: str) -> E:
        spelled = _fold(text)
        for member in self.members:
            if _fold(member.value) == spelled:
                return member
        for alias, member in self.aliases.items():
            if _fold(alias) == spelled:
                return member
        raise ValueError(self.allowed)

    def format(self, value: Any) -> str:
        return str(value.value)


def _fold(text: str) -> str:
    return text.strip().lower().replace("-", "").replace("_", "")


@dataclass(frozen=True, slots=True)
class KeysType:
    """Takes keys separated by commas, or none; their order does not matter."""

    name: str = "Keys"
    allowed: str = "keys of options separated by commas, or *"

    def parse(self, text: str) -> tuple[str, ...]:
        keys = [key.strip() for key in text.split(",")]
        if any(not key or any(character.isspace() for character in key) for key in keys) and text.strip():
            raise ValueError(self.allowed)
        return tuple(sorted({key for key in keys if key}))

    def format(self, value: Any) -> str:
        return ",".join(value)


_PAIR_PART = re.compile(r"""\s*(?:'((?:[^']|'')*)'|"((?:[^"]|"")*)"|([^'",:]*))\s*""")


@dataclass(frozen=True, slots=True)
class MapType:
    """Takes pairs of texts in Flink's form: ``key:value,key:value``, with quotes around a text that holds a comma,
    colon or quote.

    A quote within quotes is written twice.
    """

    name: str = "Map"
    allowed: str = "pairs such as team:payments,url:'https://host', with a comma, colon or quote in quotes only"

    def parse(self, text: str) -> dict[str, str]:
        found: dict[str, str] = {}
        position = 0
        while position < len(text.rstrip()):
            key, position = self._part(text, position)
            if not key or key in found or text[position : position + 1] != ":":
                raise ValueError(self.allowed)
            found[key], position = self._part(text, position + 1)
            if text[position : position + 1] not in (",", ""):
                raise ValueError(self.allowed)
            position += 1
        return found

    def _part(self, text: str, position: int) -> tuple[str, int]:
        match = _PAIR_PART.match(text, position)
        if match is None:
            raise ValueError(self.allowed)
        single, double, plain = match.groups()
        if single is not None:
            return single.replace("''", "'"), match.end()
        return (plain.strip() if double is None else double.replace('""', '"')), match.end()

    def format(self, value: Any) -> str:
        return ",".join(f"{_in_quotes(key)}:{_in_quotes(item)}" for key, item in value.items())


def _in_quotes(text: str) -> str:
    needed = not text or text != text.strip() or any(character in text for character in "'\",:")
    return "'" + text.replace("'", "''") + "'" if needed else text


KEYS = KeysType()
MAP = MapType()
NON_EMPTY_STRING = StringType()
BOOLEAN = BooleanType()
DURATION = DurationType()


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
