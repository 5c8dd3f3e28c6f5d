"""Durations and memory sizes as text: ``10 s``, ``PT10S``, ``64 kb``, ``1g``. Parsing and printing only, no clock.

Durations are whole milliseconds and sizes are whole bytes everywhere else in the system.
"""

from __future__ import annotations

import re

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
