"""The types that an option's value can have: how its text is read, printed and described. No option is named here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from ckpt_runtime.configuration.quantities import (
    DURATION_FORM,
    SIZE_FORM,
    format_duration,
    format_memory_size,
    parse_duration,
    parse_memory_size,
)

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
        """What a value may be, for error messages and the documentation."""

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
    """Takes pairs of texts in Flink's form: ``key:value,key:value``, and in quotes what holds a comma, colon or quote.

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
