"""Parses user input: job ids, durations, sizes, ``key=value`` pairs. Raises usage errors that name the option."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

from ckpt_runtime.configuration.value_types import parse_duration, parse_memory_size

_HEX_ID = re.compile(r"[0-9a-fA-F]{32}")


def job_id(text: str) -> str:
    """Parse a job id: 32 hex digits, in lower case."""
    if not _HEX_ID.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a job id, it must be 32 hexadecimal digits")
    return text.lower()


def optional_job_id(text: str | None) -> str | None:
    """:func:`job_id` of the text; None if not given."""
    return None if text is None else job_id(text)


def job_ids(texts: list[str] | None) -> list[str] | None:
    """:func:`job_id` of each text; None if not given."""
    return None if texts is None else [job_id(text) for text in texts]


def duration_ms(option: str, text: str | None) -> int | None:
    """Milliseconds of ``10 s``, ``5min``, ...; None if not given.

    A bare number is refused as ambiguous: options count milliseconds, as Flink's do, but users may mean seconds.
    """
    if text is None:
        return None
    number = text.strip()
    if number.isdecimal() and int(number) > 0:
        raise typer.BadParameter(f'{option}: {text!r} has no unit, write "{number} s", "{number} ms" or "{number} min"')
    return _parsed(option, text, parse_duration)


def size_bytes(option: str, text: str | None) -> int | None:
    """Bytes of ``64 mb``, ...; None if not given."""
    return None if text is None else _parsed(option, text, parse_memory_size)


def _parsed(option: str, text: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be {error}") from None


def timeout_s(option: str, text: str | None) -> float | None:
    """Seconds of a duration; None if not given, which means no time limit."""
    millis = duration_ms(option, text)
    return None if millis is None else millis / 1000


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse ``key=value``, given any number of times; a repeated key must have the same value.

    ``@FILE`` stands for the lines of a file, so that a secret need not be in the process list.
    """
    found: dict[str, str] = {}
    for text in _with_files(option, texts):
        key, separator, value = text.partition("=")
        key, value = key.strip(), value.strip()
        if not separator or not key:
            raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be key=value")
        if found.setdefault(key, value) != value:
            raise typer.BadParameter(f"{option}: {key} is given twice with different values")
    return found


def parallelism(option: str, text: str) -> tuple[str | None, int]:
    """Parse ``N`` or ``VERTEX=N``."""
    vertex, separator, number = text.rpartition("=")
    if not number.strip().isdecimal() or (separator and not vertex.strip()):
        raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be N or VERTEX=N")
    return (vertex.strip() if separator else None), int(number)


def _with_files(option: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if not text.startswith("@"):
            yield text
            continue
        try:
            lines = Path(text[1:]).read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise typer.BadParameter(
                f"{option}: {text!r} is not acceptable, the file cannot be read: {error}"
            ) from None
        yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
