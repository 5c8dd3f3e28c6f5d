"""Spark's patterns of dates and times (``yyyy-MM-dd HH:mm:ss.SSS``): reading and writing local times with them."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from functools import lru_cache

from ckpt_runtime.expressions.texts import zone_of
from ckpt_runtime.expressions.types import UnsupportedExpressionError

MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TOKEN = re.compile(r"'((?:[^']|'')*)'|([A-Za-z])\2*|([^A-Za-z'])")
_GREATEST_COUNT = {"y": 6, "M": 4, "d": 2, "H": 2, "h": 2, "m": 2, "s": 2, "S": 9, "a": 1, "E": 4, "D": 3}
_OF_OFFSETS = {"X": 3, "x": 3, "Z": 3}
_DIGITS = frozenset("yMdDHhmsS")
"""The letters whose texts are digits, ``M`` only up to two of them."""
_ONLY_WRITTEN = {"Q": 4, "q": 2}


@dataclass(frozen=True, slots=True)
class Token:
    """A letter of a pattern and how often it is repeated, or literal text (``letter`` is empty).

    The letters ``[`` and ``]`` begin and end a part that texts may lack.
    """

    letter: str
    count: int
    text: str = ""


@lru_cache(maxsize=256)
def tokens_of(pattern: str, *, zoned: bool = False, written: bool = False) -> tuple[Token, ...]:
    """Returns the tokens of a pattern, which may have letters for offsets from UTC if it is for times of a zone.

    ``written``: it is only for writing. Raises UnsupportedExpressionError for letters that the engine does not know.
    """
    known = _GREATEST_COUNT | (_OF_OFFSETS if zoned else {}) | (_ONLY_WRITTEN if written else {})
    tokens = []
    at = depth = 0
    while at < len(pattern):
        found = _TOKEN.match(pattern, at)
        if found is None:
            raise _refused(pattern, f"the character {pattern[at]!r}")
        at = found.end()
        if found[1] is not None:
            tokens.append(Token("", 0, found[1].replace("''", "'") or "'"))
        elif found[3]:
            depth += (found[3] == "[") - (found[3] == "]")
            if found[3] in "{}#" or depth < 0:
                raise _refused(pattern, f"the character {found[3]!r}")
            tokens.append(Token(found[3], 0) if found[3] in "[]" else Token("", 0, found[3]))
        else:
            letter, count = found[2], len(found[0])
            if count > known.get(letter, 0):
                raise _refused(pattern, f"the letters {found[0]!r}")
            tokens.append(Token(letter, count))
    if depth:
        raise _refused(pattern, "the character '[' without ']'")
    return tuple(tokens)


def _refused(pattern: str, what: str) -> UnsupportedExpressionError:
    return UnsupportedExpressionError(f"the date pattern {pattern!r}", f"the engine does not know {what}")


def has_offset(tokens: tuple[Token, ...]) -> bool:
    """Whether texts of a pattern have an offset from UTC."""
    return any(token.letter in _OF_OFFSETS for token in tokens if token.letter)


def write(local: datetime.datetime, tokens: tuple[Token, ...]) -> str:
    """Returns a local time as text. It has its zone if the pattern has an offset."""
    return "".join(_written(local, token) for token in tokens)


def _written(local: datetime.datetime, token: Token) -> str:
    width = token.count
    match token.letter:
        case "" | "[" | "]":
            return token.text
        case "y":
            return f"{local.year % 100:02}" if width == 2 else f"{local.year:0{width}}"
        case "M":
            name = MONTHS[local.month - 1]
            return f"{local.month:0{width}}" if width < 3 else name[:3] if width == 3 else name
        case "d":
            return f"{local.day:0{width}}"
        case "D":
            return f"{local.timetuple().tm_yday:0{width}}"
        case "H":
            return f"{local.hour:0{width}}"
        case "h":
            return f"{(local.hour + 11) % 12 + 1:0{width}}"
        case "m":
            return f"{local.minute:0{width}}"
        case "s":
            return f"{local.second:0{width}}"
        case "S":
            return f"{local.microsecond:06}000"[:width]
        case "a":
            return "AM" if local.hour < 12 else "PM"
        case "X" | "x" | "Z":
            return _offset(local, token)
        case "Q" | "q":
            quarter = (local.month + 2) // 3
            long = f"{quarter}{('st', 'nd', 'rd', 'th')[quarter - 1]} quarter"
            return f"{quarter:0{width}}" if width < 3 else f"Q{quarter}" if width == 3 else long
    return DAYS[local.weekday()][: 3 if width < 4 else None]


def _offset(local: datetime.datetime, token: Token) -> str:
    """The offset in hours and minutes: ``X`` has Z instead of zero, one letter only minutes that are not zero."""
    offset = local.utcoffset()
    assert offset is not None
    hours, minutes = divmod(abs(offset) // datetime.timedelta(minutes=1), 60)
    if token.letter == "X" and not (hours or minutes):
        return "Z"
    sign = "-" if offset < datetime.timedelta() and (hours or minutes) else "+"
    if token.count == 1 and token.letter != "Z" and not minutes:
        return f"{sign}{hours:02}"
    return f"{sign}{hours:02}{':' if token.count == 3 and token.letter != 'Z' else ''}{minutes:02}"


def read(text: str, tokens: tuple[Token, ...]) -> tuple[datetime.datetime, datetime.tzinfo | None] | None:
    """Returns the local time of a text, and its zone if the text has an offset; None if it does not match.

    Missing fields are those of 1970-01-01 0:00.
    """
    expression, letters = _expression(tokens)
    found = expression.fullmatch(text)
    if not found:
        return None
    values = {letter: part for letter, part in zip(letters, found.groups(), strict=True) if part is not None}
    offset = next((values[letter] for letter in _OF_OFFSETS if letter in values), None)
    try:
        return _moment(values), None if offset is None else zone_of(offset.upper())
    except ValueError:
        return None


def _moment(values: dict[str, str]) -> datetime.datetime:
    year = int(values.get("y", "1970"))
    if len(values.get("y", "")) == 2 and values.get("yy"):
        year += 2000
    month = values.get("M", "1")
    number = int(month) if month.isdigit() else [name[: len(month)] for name in MONTHS].index(month) + 1
    hour = int(values["H"]) if "H" in values else 0
    if "h" in values:
        if not 1 <= int(values["h"]) <= 12:
            raise ValueError(values["h"])
        hour = int(values["h"]) % 12 + (12 if values.get("a", "").upper() == "PM" else 0)
    micros = int(values.get("S", "0")[:6].ljust(6, "0"))
    minute, second = int(values.get("m", "0")), int(values.get("s", "0"))
    moment = datetime.datetime(year, number, int(values.get("d", "1")), hour, minute, second, micros)
    if "E" in values and DAYS[moment.weekday()][:3] != values["E"][:3]:
        raise ValueError(values["E"])
    return moment


@lru_cache(maxsize=256)
def _expression(tokens: tuple[Token, ...]) -> tuple[re.Pattern[str], tuple[str, ...]]:
    """Returns a regular expression for texts of a pattern, and the letter of each of its groups."""
    parts, letters = [], []
    for at, token in enumerate(tokens):
        if not token.letter:
            parts.append(re.escape(token.text))
            continue
        if token.letter in "[]":  # Java does not come back to a part that fits
            parts.append("(?>" if token.letter == "[" else ")?+")
            continue
        following = next((each for each in tokens[at + 1 :] if each.letter not in ("[", "]")), Token("", 0))
        digits_follow = following.letter in _DIGITS and not (following.letter == "M" and following.count > 2)
        letters.append(token.letter)
        parts.append(f"({_matching(token, digits_follow=digits_follow)})")
    return re.compile("".join(parts)), tuple(letters)


def _matching(token: Token, *, digits_follow: bool) -> str:
    width = token.count
    match token.letter:
        case "y":
            return r"\d{2}" if width == 2 else rf"\d{{{width}}}" if digits_follow else rf"\d{{{width},10}}"
        case "M" if width >= 3:
            return "|".join(name[:3] if width == 3 else name for name in MONTHS)
        case "E":
            return "|".join(name[:3] if width < 4 else name for name in DAYS)
        case "a":
            return "[AP]M"
        case "X" | "x" | "Z":
            colon = ":" if width == 3 and token.letter != "Z" else ""
            minutes = rf"{colon}[0-5]\d"
            optional = "?" if width == 1 and token.letter != "Z" else ""
            return rf"[+-]\d{{2}}(?:{minutes}){optional}" + ("|[Zz]" if token.letter == "X" else "")
        case "S":
            return rf"\d{{1,{width}}}" if not digits_follow else rf"\d{{{width}}}"
    return r"\d{1,2}" if width == 1 else rf"\d{{{width}}}"
