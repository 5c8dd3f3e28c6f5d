"""Java's regular expressions as Python's, where both have the same matches; anything else is refused."""

from __future__ import annotations

import re
from functools import lru_cache

from ckpt_runtime.expressions.types import UnsupportedExpressionError

_LINE = "\\n\\r\\x85\\u2028\\u2029"
_POSIX = {
    "Lower": "a-z",
    "Upper": "A-Z",
    "Alpha": "a-zA-Z",
    "Digit": "0-9",
    "Alnum": "a-zA-Z0-9",
    "Punct": "!-/:-@\\[-`{-~",
    "XDigit": "0-9a-fA-F",
    "Space": " \\t\\n\\x0b\\f\\r",
    "Blank": " \\t",
    "ASCII": "\\x00-\\x7f",
}
_PLAIN_ESCAPES = frozenset("dDwWsStnrfabBA0123456789\\.[]{}()*+?^$|/-\"'#&~@!%,:;<=>_ ")


@lru_cache(maxsize=1024)
def compile_java(pattern: str) -> re.Pattern[str]:
    """Returns the Python pattern with the matches of a Java pattern.

    Raises UnsupportedExpressionError for constructs that Python lacks or reads in another way: Unicode properties,
    unions and intersections of character classes, inline flags beyond ``i``, ``s``, ``m`` and ``x`` at the start.
    """
    flags = re.ASCII
    body = pattern
    inline = re.match(r"\(\?([a-zA-Z]+)\)", body)
    if inline:
        if set(inline[1]) - set("ism"):
            raise _refused(pattern, f"the flags {inline[1]}")
        for letter in inline[1]:
            flags |= {"i": re.IGNORECASE, "s": re.DOTALL, "m": re.MULTILINE}[letter]
        body = body[inline.end() :]
    text = _translated(body, pattern, bool(flags & re.DOTALL), bool(flags & re.MULTILINE))
    try:
        return re.compile(text, flags)
    except re.error as error:
        raise _refused(pattern, str(error)) from None


def _refused(pattern: str, what: str) -> UnsupportedExpressionError:
    return UnsupportedExpressionError(
        f"the regular expression {pattern!r}", f"the engine interprets it differently from Java: {what}"
    )


def _translated(body: str, pattern: str, dot_all: bool, multi_line: bool) -> str:
    out: list[str] = []
    at = 0
    in_class = False
    while at < len(body):
        character = body[at]
        if character == "\\":
            piece, at = _escape(body, at, pattern, in_class)
            out.append(piece)
            continue
        if in_class:
            if character == "[" or body.startswith("&&", at):
                raise _refused(pattern, "a union or intersection of character classes")
            in_class = character != "]"
            out.append(character)
        elif character == "[":
            in_class = True
            out.append(character)
            if body.startswith("[^]", at) or body.startswith("[]", at):
                raise _refused(pattern, "a bracket at the start of a character class")
        elif character == "." and not dot_all:
            out.append(f"[^{_LINE}]")
        elif character == "$":
            if multi_line:
                raise _refused(pattern, "$ in multi-line mode")
            out.append(f"(?=(?:\\r\\n|[{_LINE}])?\\Z)")
        elif character == "^" and multi_line:
            raise _refused(pattern, "^ in multi-line mode")
        elif body.startswith("(?<", at) and body[at + 3 : at + 4] not in ("=", "!"):
            out.append("(?P<")
            at += 3
            continue
        elif re.match(r"\(\?[a-zA-Z-]+[:)]", body[at:]):
            raise _refused(pattern, "flags inside the pattern")
        else:
            out.append(character)
        at += 1
    return "".join(out)


def _escape(body: str, at: int, pattern: str, in_class: bool) -> tuple[str, int]:
    following = body[at + 1 : at + 2]
    if following in ("p", "P") and (found := re.match(r"\\[pP]\{(\w+)\}", body[at:])) and found[1] in _POSIX:
        members = _POSIX[found[1]]
        if in_class:
            if following == "P":
                raise _refused(pattern, found[0])
            return members, at + found.end()
        return f"[{'^' if following == 'P' else ''}{members}]", at + found.end()
    if following == "Q":
        end = body.find("\\E", at + 2)
        quoted = body[at + 2 : end if end >= 0 else len(body)]
        return re.escape(quoted), (end + 2 if end >= 0 else len(body))
    if following == "z":
        return "\\Z", at + 2
    if following == "h":
        return (" \\t\\xA0" if in_class else "[ \\t\\xA0]"), at + 2
    if following in ("u", "x"):
        width = 4 if following == "u" else 2
        digits = body[at + 2 : at + 2 + width]
        if re.fullmatch(r"[0-9a-fA-F]+", digits) and len(digits) == width:
            return body[at : at + 2 + width], at + 2 + width
    if following in _PLAIN_ESCAPES and following:
        if following == "0":
            raise _refused(pattern, "an octal escape")
        return body[at : at + 2], at + 2
    raise _refused(pattern, f"the escape \\{following}")


def like_pattern(pattern: str, escape: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """Returns the Python pattern of a ``LIKE`` pattern. Raises ValueError for an escape before another character."""
    out = []
    at = 0
    while at < len(pattern):
        character = pattern[at]
        if character == escape:
            following = pattern[at + 1 : at + 2]
            if following not in ("_", "%", escape) or not following:
                raise ValueError(f"the escape character stands before {following!r}, not before _, % or itself")
            out.append(re.escape(following))
            at += 2
            continue
        out.append({"_": ".", "%": ".*"}.get(character) or re.escape(character))
        at += 1
    return re.compile("".join(out), re.DOTALL | (re.IGNORECASE if ignore_case else 0))


def split_java(text: str, pattern: str, limit: int = 0) -> list[str]:
    """Splits a text where a regular expression matches, as Java does: into at most ``limit`` parts if that is above 0.

    An empty match at the start or at the end gives no empty part.
    """
    parts: list[str] = []
    start = 0
    for match in compile_java(pattern).finditer(text):
        if 0 < limit <= len(parts) + 1:
            break
        if match.end() == 0 or (match.start() == match.end() and match.start() == len(text)):
            continue
        parts.append(text[start : match.start()])
        start = match.end()
    return [*parts, text[start:]]
