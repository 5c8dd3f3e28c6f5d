"""``to_number``, ``to_char`` of numbers, and ``to_binary``: texts of numbers and bytes in a constant format.

A format has these parts, in this order: ``S`` or ``MI`` for a sign, ``$``, digits (``0`` and ``9``) in groups between
``,`` or ``G``, ``.`` or ``D``, digits, ``$``, and ``S``, ``MI`` or ``PR`` (angle brackets around negative numbers).
Spark's analyzer has checked it. How texts match it is defined by Spark's ``ToNumberParser``.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Value, strict
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.rows import EXACT, per_row
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type, decimal_of

_PARTS = re.compile(r"(?P<digits>[09,G]+)|(?P<point>[.D])|(?P<dollar>\$)|(?P<sign>S)|(?P<minus>MI)|(?P<close>PR)")
_NOT_BLANK_IN_JAVA = "\u0085\u00a0\u2007\u202f"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a format. ``groups`` are its digits between separators; a ``0`` in front asks for all of them."""

    kind: str
    groups: tuple[str, ...] = ()


def _parts(call: Call) -> list[_Part] | None:
    """Returns the parts of the format that is the call's second argument; None for a null."""
    pattern = call.arguments[1]
    if not isinstance(pattern, Literal):
        raise UnsupportedExpressionError(f"{call.function} with a format that is not constant")
    if pattern.value is None:
        return None
    parts = []
    for found in _PARTS.finditer(str(pattern.value).upper()):
        groups = tuple(re.split("[,G]", found[0])) if found.lastgroup == "digits" else ()
        parts.append(_Part(str(found.lastgroup), groups))
    if any(part.kind == "close" for part in parts):
        parts.insert(0, _Part("open"))
    return parts


def _position_of_point(parts: Sequence[_Part]) -> int:
    """Returns which part is the point; the number of parts where there is none."""
    return next((at for at, part in enumerate(parts) if part.kind == "point"), len(parts))


def _exact(group: str, *, fraction: bool) -> bool:
    """Whether a text has to have all digits of a group: those behind the point may be missing."""
    return group[:1] == "0" and not fraction


def _digits_at(text: str, at: int, part: _Part, *, fraction: bool) -> tuple[str, int] | None:
    """Returns the digits of a text from a position on, and the position behind them; None if they do not match.

    Blanks between digits do not count. Groups are compared from the right: the first ones of the format may be missing.
    """
    found = [""]
    while at < len(text):
        character = text[at]
        if character.isdecimal() and character <= "\uffff":
            found[-1] += character
        elif character == ",":
            found.append("")
        elif not character.isspace() or character in _NOT_BLANK_IN_JAVA:
            break
        at += 1
    missing = len(part.groups) - len(found)
    if missing < 0:
        return None
    for group, digits in zip(part.groups, [""] * missing + found, strict=True):
        if len(digits) > len(group) or (_exact(group, fraction=fraction) and len(digits) < len(group)):
            return None
    return "".join(found), at


_MARKS = {"point": ".", "dollar": "$", "sign": "+-", "minus": "-", "open": "<", "close": ">"}


def _parsed(text: str, parts: Sequence[_Part]) -> decimal.Decimal | None:
    """Returns the number of a text; None if it does not match the format."""
    at, whole, fraction = 0, "", ""
    marks, point = "", _position_of_point(parts)
    for position, part in enumerate(parts):
        if part.kind == "digits":
            digits = _digits_at(text, at, part, fraction=position > point)
            if digits is None:
                return None
            found, at = digits
            whole, fraction = (whole, fraction + found) if "." in marks else (whole + found, fraction)
        elif at < len(text) and text[at] in _MARKS[part.kind]:
            marks += text[at]
            at += 1
        elif part.kind == "dollar" and at < len(text):
            return None
    if at < len(text) or ("<" in marks) != (">" in marks) or not whole + fraction:
        return None
    number = decimal.Decimal(f"{whole or '0'}.{fraction or '0'}")
    return -number if (marks.count("-") + marks.count(">")) % 2 else number


@strict("ToNumber", "TryToNumber")
def _to_number(call: Call) -> Callable[..., Value]:
    parts, kind = _parts(call), arrow_type(call.type)
    found = decimal_of(call.type)
    places = decimal.Decimal(1).scaleb(-(found[1] if found else 0))
    if parts and all(part.kind != "digits" for part in parts[: _position_of_point(parts)]):
        raise UnsupportedExpressionError(f"{call.function} with a format that has no digit before the point")

    def read(text: str, pattern: str) -> decimal.Decimal | None:
        number = _parsed(text, parts or ())
        if number is None:
            if call.function == "TryToNumber":
                return None
            raise EvaluationError(
                "INVALID_FORMAT", f"{text!r} does not have the format {pattern!r}; try_to_number gives null instead"
            )
        return number.quantize(places, context=EXACT)

    return per_row(read, kind)


def _written(number: decimal.Decimal, parts: Sequence[_Part]) -> str:
    """Returns the text of a number, with ``#`` for each digit if the format has too few digits for it."""
    whole, _, fraction = f"{abs(number):f}".partition(".")
    whole, fraction = whole.lstrip("0"), fraction.rstrip("0")
    point = _position_of_point(parts)
    sizes = [sum(map(len, part.groups)) for part in parts]
    before, after = sum(sizes[:point]), sum(sizes[point:])
    if len(whole) > before or len(fraction) > after:
        whole, fraction = "#" * before, "#" * after
    whole, fraction = whole.rjust(before), fraction.ljust(after, "0")
    text = ""
    for at, part in enumerate(parts):
        if part.kind == "digits" and at < point:
            text, whole = _with_groups(text, part, whole)
        elif part.kind == "digits":
            text += fraction
        else:
            text = _with_mark(text, part.kind, negative=number < 0)
    text = _without_lone_point(text)
    return "0" if text in ("", "+", "-") else text


def _with_groups(text: str, part: _Part, whole: str) -> tuple[str, str]:
    """Returns a text with the groups before the point behind it, and the digits that are left."""
    for number, group in enumerate(part.groups):
        if number:
            text = f"{text}," if text[-1:].isdecimal() else _with_blank(text)
        for digit in whole[: len(group)]:
            if digit == " " and not _exact(group, fraction=False):
                text = _with_blank(text)
            else:
                text += "0" if digit == " " else digit
        whole = whole[len(group) :]
    return text, whole


def _with_blank(text: str) -> str:
    """Returns a text with a blank more, which stands before a sign or bracket at the end."""
    kept = text.rstrip("+-<")
    return f"{kept} {text[len(kept) :]}"


def _with_mark(text: str, kind: str, *, negative: bool) -> str:
    """Returns a text with the mark of a part. Marks behind the digits stand before trailing blanks."""
    if kind == "point":
        return f"{text[:-1]}0." if text.endswith(" ") else f"{text}."
    if kind == "dollar":
        return f"{text}$"
    if kind == "open":
        return f"{text}<" if negative else text
    if kind == "close" or negative or kind == "sign":
        text = _without_lone_point(text)
    mark = {"close": ">", "sign": "-", "minus": "-"}[kind] if negative else "+" if kind == "sign" else ""
    if not mark:
        return text + (" " if kind == "minus" else "  ")
    kept = text.rstrip(" ")
    return kept + mark + text[len(kept) :]


def _without_lone_point(text: str) -> str:
    """Returns a text with a blank in place of a point that no digit follows."""
    at = text.find(".")
    if at >= 0 and text[at + 1 : at + 2] in ("", " "):
        return f"{text[:at]} {text[at + 1 :]}"
    return text


@strict("ToCharacter")
def _to_char(call: Call) -> Callable[..., Value]:
    parts = _parts(call)
    return per_row(lambda number, _pattern: _written(number, parts or ()), pa.string())


@strict("ToBinary")
def _to_binary(call: Call) -> Callable[..., Value]:
    """Arguments: a text or bytes and, where given, the format: hexadecimal digits without one."""
    pattern = call.arguments[1] if len(call.arguments) > 1 else Literal("hex", "string")
    name = str(pattern.value).lower() if isinstance(pattern, Literal) else ""
    known: dict[str, Callable[[str], bytes]] = {"utf-8": str.encode, "utf8": str.encode, "hex": _from_hex}
    if name not in known or call.arguments[0].type != "string":
        raise UnsupportedExpressionError(
            f"to_binary with the format {name or 'of a column'}", f"the engine knows texts in {', '.join(known)}"
        )
    read = known[name]
    return per_row(lambda text, *_pattern: read(text), pa.binary())


def _from_hex(text: str) -> bytes:
    if not re.fullmatch("[0-9a-fA-F]*", text):
        raise EvaluationError(
            "CONVERSION_INVALID_INPUT", f"{text!r} is not hexadecimal; try_to_binary gives null instead"
        )
    return bytes.fromhex(text if len(text) % 2 == 0 else f"0{text}")


_DECIMAL_FORMAT = re.compile(r"(?=[#0])([#,]*)(0[0,]*)?(?:\.(?=[0#])(0*)(#*))?")


def decimal_format(pattern: str) -> Callable[[decimal.Decimal], str]:
    """Returns what writes a number as Java's ``DecimalFormat``, for patterns of ``#``, ``0``, comma and point.

    An empty pattern stands for ``#,###,###,###,###,###,##0``, as in Spark. Raises UnsupportedExpressionError.
    """
    found = _DECIMAL_FORMAT.fullmatch(pattern or "#,###,###,###,###,###,##0")
    whole = "" if found is None else found[1] + (found[2] or "")
    if found is None or whole.endswith(","):
        raise UnsupportedExpressionError(f"format_number with the pattern {pattern!r}")
    size = len(whole) - whole.rfind(",") - 1 if "," in whole else 0
    zeros, places = len(found[3] or ""), len((found[3] or "") + (found[4] or ""))
    least = whole.count("0") or int(places > zeros == 0)

    def write(number: decimal.Decimal) -> str:
        rounded = number.quantize(decimal.Decimal(1).scaleb(-places), decimal.ROUND_HALF_EVEN, EXACT)
        digits, _, fraction = f"{abs(rounded):f}".partition(".")
        fraction = fraction[:zeros] + fraction[zeros:].rstrip("0")
        digits = digits.lstrip("0").rjust(least, "0")
        if not digits and not fraction:
            digits = "0"
        if size:
            first = len(digits) % size or size
            digits = ",".join([digits[:first], *(digits[at : at + size] for at in range(first, len(digits), size))])
        return f"{'-' if rounded.is_signed() else ''}{digits}{'.' if fraction else ''}{fraction}"

    return write
