"""Reads JSON as Spark's reader does: single quotes and non-numeric numbers are allowed, names may be repeated.

A document is a text, a :class:`Number`, a boolean, None, :class:`Elements`, or :class:`Members`.
"""

from __future__ import annotations

import math
import re
from typing import TypeAlias

from ckpt_runtime.expressions.texts import double_text
from ckpt_runtime.expressions.types import EvaluationError

DEEPEST = 200
"""Maximum nesting depth: documents that are nested deeper are an error."""


class Number(str):
    """A number, as it is written in the document."""

    __slots__ = ()

    @property
    def is_whole(self) -> bool:
        """Whether it is written without a point and without an exponent."""
        return self.lstrip("-").isdigit()


class _Written:
    """Part of a text. ``written`` is that part, as the text has it."""

    __slots__ = ()
    place: tuple[str, int, int]

    @property
    def written(self) -> str:
        text, start, end = self.place
        return text[start:end]


class Elements(_Written, list["Document"]):
    """The elements of an array."""

    __slots__ = ("place",)


class Members(_Written, list[tuple[str, "Document"]]):
    """The members of an object in their order; names may be repeated."""

    __slots__ = ("place",)


Document: TypeAlias = "str | bool | Elements | Members | None"

_BLANK = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?(?![0-9.])")
_NOT_NUMBER = re.compile(r"NaN|[+-]?(?:Infinity|INF)")
_WORD = re.compile(r"true|false|null")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_PLAIN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"[^'\\\x00-\x1f]*")}
_ESCAPES = {'"': '"', "'": "'", "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNICODE = re.compile(r"u([0-9a-fA-F]{4})")
_SURROGATES = re.compile("[\ud800-\udfff]")


class MalformedJson(Exception):
    """A text that is not JSON."""


def read_json(text: str, *, non_numeric: bool) -> Document:
    """Returns the first document of a text; the text after it is ignored.

    ``non_numeric`` allows ``NaN`` and ``Infinity`` as numbers. Raises MalformedJson.
    """
    document, end = _value(text, _skipped(text, 0), non_numeric, 0)
    if isinstance(document, Number) and text[end : end + 1] not in ("", " ", "\t", "\n", "\r"):
        raise MalformedJson(text)
    return document


def is_blank(text: str) -> bool:
    """Returns whether a text contains no document."""
    return _skipped(text, 0) == len(text)


def _skipped(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def _value(text: str, at: int, non_numeric: bool, depth: int) -> tuple[Document, int]:
    if depth > DEEPEST:
        raise EvaluationError("MALFORMED_RECORD_IN_PARSING", f"a JSON document is nested deeper than {DEEPEST} levels")
    first = text[at : at + 1]
    if first in ('"', "'"):
        return _string(text, at)
    if first == "{":
        return _object(text, at, non_numeric, depth)
    if first == "[":
        return _array(text, at, non_numeric, depth)
    if found := _NUMBER.match(text, at):
        return Number(found[0]), found.end()
    if word := _WORD.match(text, at):
        return _WORDS[word[0]], word.end()
    if non_numeric and (found := _NOT_NUMBER.match(text, at)):
        return Number(found[0]), found.end()
    raise MalformedJson(text)


def _object(text: str, at: int, non_numeric: bool, depth: int) -> tuple[Members, int]:
    members, start = Members(), at
    at = _skipped(text, at + 1)
    more = text[at : at + 1] != "}"
    while more:
        if text[at : at + 1] not in ('"', "'"):
            raise MalformedJson(text)
        name, at = _string(text, at)
        at = _skipped(text, at)
        if text[at : at + 1] != ":":
            raise MalformedJson(text)
        value, at = _value(text, _skipped(text, at + 1), non_numeric, depth + 1)
        members.append((name, value))
        at, more = _next(text, at, "}")
    members.place = (text, start, at + 1)
    return members, at + 1


def _array(text: str, at: int, non_numeric: bool, depth: int) -> tuple[Elements, int]:
    elements, start = Elements(), at
    at = _skipped(text, at + 1)
    more = text[at : at + 1] != "]"
    while more:
        value, at = _value(text, at, non_numeric, depth + 1)
        elements.append(value)
        at, more = _next(text, at, "]")
    elements.place = (text, start, at + 1)
    return elements, at + 1


def _next(text: str, at: int, end: str) -> tuple[int, bool]:
    """Returns the place of the next member or element and True, or that of the end and False."""
    at = _skipped(text, at)
    mark = text[at : at + 1]
    if mark not in (end, ",") or not mark:
        raise MalformedJson(text)
    return (at, False) if mark == end else (_skipped(text, at + 1), True)


def _string(text: str, at: int) -> tuple[str, int]:
    quote = text[at]
    plain = _PLAIN[quote]
    parts = []
    at += 1
    while True:
        found = plain.match(text, at)
        assert found is not None
        parts.append(found[0])
        at = found.end()
        stop = text[at : at + 1]
        if stop == quote:
            return _joined(parts), at + 1
        if stop != "\\":
            raise MalformedJson(text)
        escape = text[at + 1 : at + 2]
        if escape in _ESCAPES and escape:
            parts.append(_ESCAPES[escape])
            at += 2
        elif unicode := _UNICODE.match(text, at + 1):
            parts.append(chr(int(unicode[1], 16)))
            at = unicode.end()
        else:
            raise MalformedJson(text)


def _joined(parts: list[str]) -> str:
    """Joins pairs of surrogates; a single one becomes a question mark, as in Java."""
    if len(parts) == 1:
        return parts[0]
    text = "".join(parts)
    if not _SURROGATES.search(text):
        return text
    return _SURROGATES.sub("?", text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass"))


def json_text(document: Document) -> str:
    """Returns a document as Spark copies it: without blanks, numbers with a point as Java writes doubles."""
    if document is None:
        return "null"
    if isinstance(document, bool):
        return "true" if document else "false"
    if isinstance(document, Number):
        return str(int(document)) if document.is_whole else number_text(double_of(document))
    if isinstance(document, str):
        return quoted(document)
    if isinstance(document, Members):
        return "{" + ",".join(f"{quoted(name)}:{json_text(value)}" for name, value in document) + "}"
    return "[" + ",".join(map(json_text, document)) + "]"


def double_of(number: str) -> float:
    """Returns the value of a number of a document."""
    return float(number.replace("INF", "Infinity"))


def number_text(value: float, *, single: bool = False) -> str:
    """Returns a floating number as a JSON value; those that JSON does not have are texts."""
    text = double_text(value, single=single)
    return text if math.isfinite(value) else f'"{text}"'


_ESCAPED = re.compile(r'["\\\x00-\x1f]')
_SHORT = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def quoted(text: str) -> str:
    """Returns a text as a JSON string."""
    return '"' + _ESCAPED.sub(lambda found: _SHORT.get(found[0]) or f"\\u{ord(found[0]):04X}", text) + '"'
