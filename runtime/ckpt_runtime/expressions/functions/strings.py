"""Text and bytes: cutting, padding, searching, patterns, encodings and hashes. Positions count from 1."""

from __future__ import annotations

import base64
import binascii
import decimal
import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import (
    Evaluator,
    Frame,
    Value,
    by_row,
    function,
    kernel_of,
    literal_scalar,
    strict,
)
from ckpt_runtime.expressions.functions.number_formats import decimal_format
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.regex import compile_java, like_pattern, split_java
from ckpt_runtime.expressions.rows import EXACT, per_row
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type

_STRING = pa.string()
_INT = pa.int32()


def ascii_or(fast: Callable[..., Value], exact: Callable[..., Value]) -> Callable[..., Value]:
    """Returns a kernel that is ``fast`` for texts of ASCII alone and ``exact`` for others."""
    return lambda value: fast(value) if _is_ascii(value) else exact(value)


def _is_ascii(value: Value) -> bool:
    """Whether no byte of the texts is beyond ASCII; those of nulls count, too, because all are read at once."""
    if isinstance(value, pa.Scalar):
        text = value.as_py()
        return text is None or bool(text.isascii())
    _, ends, data = value.buffers()
    if data is None or not len(value):
        return True
    first, last = np.frombuffer(ends, np.int32)[[value.offset, value.offset + len(value)]]
    return bool(np.frombuffer(data, np.int8)[first:last].min(initial=0) >= 0)


@strict("Upper", "Lower")
def _case(call: Call) -> Callable[..., Value]:
    if call.function == "Upper":
        return ascii_or(kernel_of("ascii_upper"), per_row(str.upper, _STRING))
    return ascii_or(kernel_of("ascii_lower"), per_row(str.lower, _STRING))


@strict("Length", "OctetLength", "BitLength")
def _length(call: Call) -> Callable[..., Value]:
    octets = kernel_of("binary_length")
    if call.function == "BitLength":
        return lambda value: pc.multiply(octets(value), pa.scalar(8, _INT))
    if call.function == "Length" and call.arguments[0].type != "binary":
        return ascii_or(octets, kernel_of("utf8_length"))
    return octets


@function("Concat")
def _concat(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    kind = arrow_type(call.type)
    if pa.types.is_list(kind):
        joined = per_row(lambda *lists: [element for list_ in lists for element in list_], kind)
        return lambda frame: joined(*[argument(frame) for argument in arguments])
    join = kernel_of("binary_join_element_wise", pc.JoinOptions("emit_null"))
    separator = pa.scalar("" if kind == _STRING else b"", kind)
    constant = call.arguments[1] if len(arguments) == 3 else None
    if isinstance(constant, Literal) and constant.value is not None:  # joining two parts is cheaper than three
        arguments, separator = arguments[::2], literal_scalar(constant).cast(kind)

    def run(frame: Frame) -> Value:
        return join(*[argument(frame) for argument in arguments], separator)

    return run


@by_row("ConcatWs", nulls=True)
def _concat_with_separator(separator: str | None, *parts: str | list[str | None] | None) -> str | None:
    if separator is None:
        return None
    texts: list[str] = []
    for part in parts:
        texts += [x for x in part if x is not None] if isinstance(part, list) else [] if part is None else [part]
    return separator.join(texts)


def _substring(text: Any, position: int, length: int = (1 << 31) - 1) -> Any:
    size = len(text)
    start = position - 1 if position > 0 else size + position if position < 0 else 0
    return text[max(start, 0) : max(start + length, 0)]


@strict("Substring")
def _substring_kernel(call: Call) -> Callable[..., Value]:
    exact = per_row(_substring, arrow_type(call.type))
    bounds = [
        argument for argument in call.arguments[1:] if isinstance(argument, Literal) and argument.value is not None
    ]
    if call.type != "string" or len(bounds) != len(call.arguments) - 1 or int(str(bounds[0].value)) < 0:
        return exact
    start = max(int(str(bounds[0].value)) - 1, 0)
    length = int(str(bounds[1].value)) if len(bounds) > 1 else (1 << 31) - 1
    part = pc.SliceOptions(start, start + max(length, 0))
    cut_bytes = kernel_of("binary_slice", part)
    cut = ascii_or(
        lambda value: cut_bytes(value.cast(pa.binary())).cast(_STRING, safe=False),
        kernel_of("utf8_slice_codeunits", part),
    )
    return lambda value, *_: cut(value)


by_row("Left")(lambda text, n: text[: max(n, 0)])
by_row("Right")(lambda text, n: text[-n:] if n > 0 else text[:0])


@strict("StringTrim", "StringTrimLeft", "StringTrimRight", "StringTrimBoth")
def _trim(call: Call) -> Callable[..., Value]:
    """Arguments: the text and, optionally, the characters to trim; otherwise blanks are trimmed."""
    side = {"StringTrimLeft": "lstrip", "StringTrimRight": "rstrip"}.get(call.function, "strip")
    if len(call.arguments) == 1:
        name = {"lstrip": "utf8_ltrim", "rstrip": "utf8_rtrim", "strip": "utf8_trim"}[side]
        return kernel_of(name, pc.TrimOptions(" "))
    cut = getattr(str, side)
    return per_row(lambda text, characters: cut(text, characters) if characters else text, _STRING)


@strict("StringLPad", "StringRPad", "BinaryPad")
def _pad(call: Call) -> Callable[..., Value]:
    left = call.function == "StringLPad" or call.settings.get("funcName") == "lpad"

    def pad(text: Any, length: int, fill: Any) -> Any:
        missing = length - len(text)
        if missing <= 0:
            return text[: max(length, 0)]
        filling = (fill * (missing // len(fill) + 1))[:missing] if fill else fill
        return filling + text if left else text + filling

    return per_row(pad, arrow_type(call.type))


by_row("StringRepeat")(lambda text, n: text * max(n, 0))
by_row("StringSpace")(lambda n: " " * max(n, 0))
by_row("StringReplace")(lambda text, old, new="": text.replace(old, new) if old else text)
by_row("StringInstr")(lambda text, part: text.find(part) + 1)
by_row("Ascii")(lambda text: ord(text[0]) if text else 0)
by_row("Chr")(lambda n: "" if n < 0 else chr(n & 0xFF))
by_row("InitCap")(lambda text: " ".join(word[:1].title() + word[1:].lower() for word in text.split(" ")))
by_row("Crc32")(zlib.crc32)
by_row("Md5")(lambda data: hashlib.md5(data, usedforsecurity=False).hexdigest())
by_row("Sha1")(lambda data: hashlib.sha1(data, usedforsecurity=False).hexdigest())


@by_row("StringTranslate")
def _translate(text: str, matching: str, replacing: str) -> str:
    table: dict[int, str | None] = {}
    for at, character in enumerate(matching):
        table.setdefault(ord(character), replacing[at] if at < len(replacing) else None)
    return text.translate(table)


@by_row("StringLocate", nulls=True)
def _locate(part: str | None, text: str | None, start: int | None = 1) -> int | None:
    if start is None:
        return 0
    if part is None or text is None:
        return None
    if start < 1 or not part:
        return 0 if start < 1 else 1
    return text.find(part, start - 1) + 1


_SEARCHES = {"StartsWith": "startswith", "EndsWith": "endswith", "Contains": "__contains__"}


@strict(*_SEARCHES)
def _search(call: Call) -> Callable[..., Value]:
    part = call.arguments[1]
    if isinstance(part, Literal) and isinstance(part.value, str) and part.type == "string":
        name = {"StartsWith": "starts_with", "EndsWith": "ends_with", "Contains": "match_substring"}[call.function]
        match = kernel_of(name, pc.MatchSubstringOptions(part.value))
        return lambda value, _: match(value)
    test = _SEARCHES[call.function]
    return per_row(lambda text, wanted: getattr(text, test)(wanted), pa.bool_())


@strict("BinaryPredicate")
def _search_bytes(call: Call) -> Callable[..., Value]:
    """``startswith``, ``endswith`` and ``contains`` over bytes."""
    test = {name.lower(): test for name, test in _SEARCHES.items()}[str(call.settings["prettyName"])]
    return per_row(lambda data, wanted: getattr(data, test)(wanted), pa.bool_())


@by_row("SubstringIndex")
def _substring_index(text: str, separator: str, count: int) -> str:
    if count == 0 or not separator:
        return ""
    if count > 0:
        at = -1
        for _ in range(count):
            at = text.find(separator, at + 1)
            if at < 0:
                return text
        return text[:at]
    at = len(text) - len(separator) + 1
    for _ in range(-count):
        at = text.rfind(separator, 0, max(at - 1 + len(separator), 0))
        if at < 0:
            return text
    return text[at + len(separator) :]


@by_row("SplitPart")
def _split_part(text: str, separator: str, number: int) -> str:
    if number == 0:
        raise EvaluationError("INVALID_INDEX_OF_ZERO", "the index 0 is invalid; the first part has index 1")
    parts = text.split(separator) if separator else [text]
    at = number - 1 if number > 0 else len(parts) + number
    return parts[at] if 0 <= at < len(parts) else ""


@by_row("Base64")
def _base64(data: bytes) -> str:
    """Lines of at most 76 characters, as Spark makes by default (``spark.sql.chunkBase64String.enabled``)."""
    return "\r\n".join(base64.b64encode(data[start : start + 57]).decode() for start in range(0, len(data), 57))


@by_row("UnBase64")
def _of_base64(text: str) -> bytes:
    """Decodes like Java's MIME decoder: characters outside of the alphabet are skipped, and padding may be missing."""
    digits = re.sub(r"[^A-Za-z0-9+/]", "", text.split("=", maxsplit=1)[0])
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4))
    except binascii.Error:
        raise EvaluationError("CONVERSION_INVALID_INPUT", f"{text!r} is not base 64") from None


_CHARSETS = {
    "US-ASCII": "ascii",
    "ISO-8859-1": "latin-1",
    "UTF-8": "utf-8",
    "UTF-16BE": "utf-16-be",
    "UTF-16LE": "utf-16-le",
}


def _charset(name: str) -> str:
    found = _CHARSETS.get(name.upper())
    if found is None:
        raise EvaluationError("INVALID_PARAMETER_VALUE.CHARSET", f"{name!r} is not one of {', '.join(_CHARSETS)}")
    return found


@by_row("Encode")
def _encode(text: str, charset: str) -> bytes:
    try:
        return text.encode(_charset(charset))
    except UnicodeEncodeError:
        raise EvaluationError("MALFORMED_CHARACTER_CODING", f"{text!r} cannot be written in {charset}") from None


@by_row("StringDecode")
def _decode(data: bytes, charset: str) -> str:
    try:
        return data.decode(_charset(charset))
    except UnicodeDecodeError:
        raise EvaluationError("MALFORMED_CHARACTER_CODING", f"the bytes are not text in {charset}") from None


@by_row("Levenshtein")
def _levenshtein(left: str, right: str, threshold: int | None = None) -> int:
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1] if threshold is None or row[-1] <= threshold else -1


_SOUNDEX = "01230120022455012623010202"


@by_row("SoundEx")
def _soundex(text: str) -> str:
    if not text or not ("A" <= text[0].upper() <= "Z" and text[0].isascii()):
        return text
    first = text[0].upper()
    code, last = first, _SOUNDEX[ord(first) - 65]
    for character in text[1:]:
        upper = character.upper()
        if not (upper.isascii() and "A" <= upper <= "Z"):
            last = "0"
            continue
        if upper in "HW":
            continue
        digit = _SOUNDEX[ord(upper) - 65]
        if digit not in ("0", last):
            code += digit
            if len(code) == 4:
                break
        last = digit
    return code.ljust(4, "0")


@by_row("Overlay")
def _overlay(text: Any, new: Any, position: int, length: int) -> Any:
    size = len(new) if length < 0 else length
    return _substring(text, 1, position - 1) + new + _substring(text, position + size)


@by_row("FindInSet")
def _find_in_set(word: str, words: str) -> int:
    parts = words.split(",")
    return 0 if "," in word or word not in parts else parts.index(word) + 1


@function("Elt")
def _elt(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    def pick(index: int | None, *values: Any) -> Any:
        if index is None:
            return None
        if not 1 <= index <= len(values):
            if call.mode == "ansi":
                raise EvaluationError(
                    "INVALID_ARRAY_INDEX", f"elt has {len(values)} values, so {index} is not an index"
                )
            return None
        return values[index - 1]

    choose = per_row(pick, arrow_type(call.type), nulls=True)
    return lambda frame: choose(*[argument(frame) for argument in arguments])


@strict("FormatNumber")
def _format_number(call: Call) -> Callable[..., Value]:
    pattern = call.arguments[1]
    if pattern.type == "string" and not isinstance(pattern, Literal):
        raise UnsupportedExpressionError("format_number with a pattern that is not constant")
    of_pattern = None
    if isinstance(pattern, Literal) and pattern.type == "string" and pattern.value is not None:
        of_pattern = decimal_format(str(pattern.value))

    def write(value: Any, places: Any) -> str | None:
        if of_pattern is None and places < 0:
            return None
        if isinstance(value, float):
            if value != value:
                return "NaN"
            if abs(value) == float("inf"):
                return "∞" if value > 0 else "-∞"
        if of_pattern is not None:
            return of_pattern(decimal.Decimal(value))
        number = decimal.Decimal(value).quantize(decimal.Decimal(1).scaleb(-places), decimal.ROUND_HALF_EVEN, EXACT)
        return f"{number:,f}"

    return per_row(write, _STRING)


@by_row("Luhncheck")
def _luhn(text: str) -> bool:
    if not (text.isascii() and text.isdigit()):
        return False
    digits = [int(digit) for digit in reversed(text)]
    return sum(d if at % 2 == 0 else (2 * d - 9 if d > 4 else 2 * d) for at, d in enumerate(digits)) % 10 == 0


@by_row("Mask", nulls=True)
def _mask(text: str | None, upper: str | None, lower: str | None, digit: str | None, other: str | None) -> str | None:
    if text is None:
        return None

    def masked(character: str) -> str:
        kind = (
            upper
            if character.isupper()
            else lower
            if character.islower()
            else (digit if character.isdecimal() else other)
        )
        return character if kind is None else kind

    return "".join(map(masked, text))


@strict("Like", "ILike")
def _like(call: Call) -> Callable[..., Value]:
    escape = str(call.settings.get("escapeChar", "\\"))
    ignore_case = call.function == "ILike"

    def like(text: str, pattern: str) -> bool:
        try:
            return like_pattern(pattern, escape, ignore_case=ignore_case).fullmatch(text) is not None
        except ValueError as error:
            raise EvaluationError("INVALID_FORMAT.ESC_IN_THE_MIDDLE", str(error)) from None

    return per_row(like, pa.bool_())


@strict("LikeAny", "LikeAll", "NotLikeAny", "NotLikeAll")
def _like_several(call: Call) -> Callable[..., Value]:
    """Whether a text matches, or does not match, some or all constant patterns. A null among them may decide."""
    given: list[str | None] = call.settings["patterns"]
    try:
        compiled = [like_pattern(pattern, "\\") for pattern in given if pattern is not None]
    except ValueError as error:
        raise UnsupportedExpressionError("LIKE with several patterns", str(error)) from None
    wanted = not call.function.startswith("Not")
    decides = call.function.endswith("Any")

    def matches(text: str) -> bool | None:
        found = ((pattern.fullmatch(text) is not None) is wanted for pattern in compiled)
        if any(found) if decides else not all(found):
            return decides
        return None if None in given else not decides

    return per_row(matches, pa.bool_())


def _by_pattern(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function by row whose second argument is a regular expression: a constant, which is checked first."""

    def register(compute: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(call: Call) -> Callable[..., Value]:
            pattern = call.arguments[1]
            if not (isinstance(pattern, Literal) and isinstance(pattern.value, str)):
                raise UnsupportedExpressionError("a regular expression that is not constant")
            compile_java(pattern.value)
            return per_row(compute, arrow_type(call.type))

        strict(name)(kernel)
        return compute

    return register


_by_pattern("RLike")(lambda text, pattern: compile_java(pattern).search(text) is not None)
_by_pattern("RegExpCount")(lambda text, pattern: sum(1 for _ in compile_java(pattern).finditer(text)))
_by_pattern("StringSplit")(split_java)


def _group(match: re.Match[str], index: int) -> str:
    if not 0 <= index <= match.re.groups:
        raise EvaluationError(
            "INVALID_PARAMETER_VALUE.REGEX_GROUP_INDEX", f"group {index} is not one of 0 to {match.re.groups}"
        )
    return match[index] or ""


@_by_pattern("RegExpExtract")
def _extract(text: str, pattern: str, index: int) -> str:
    match = compile_java(pattern).search(text)
    return _group(match, index) if match else ""


@_by_pattern("RegExpExtractAll")
def _extract_all(text: str, pattern: str, index: int) -> list[str]:
    return [_group(match, index) for match in compile_java(pattern).finditer(text)]


@_by_pattern("RegExpReplace")
def _regexp_replace(text: str, pattern: str, new: str, position: int = 1) -> str:
    if position - 1 >= len(text) and text:
        return text
    compiled = compile_java(pattern)
    head, tail = text[: position - 1], text[position - 1 :]
    return head + compiled.sub(lambda match: _expanded(new, match), tail)


def _expanded(template: str, match: re.Match[str]) -> str:
    """Replaces Java's ``$1`` and ``${name}``; a backslash escapes a character."""
    out = []
    at = 0
    while at < len(template):
        character = template[at]
        if character == "\\":
            out.append(template[at + 1 : at + 2])
            at += 2
        elif character == "$":
            named = re.match(r"\$\{(\w+)\}", template[at:])
            numbered = re.match(r"\$(\d)", template[at:])
            if not (named or numbered):
                raise EvaluationError("INVALID_REGEXP_REPLACE", f"the replacement {template!r} is malformed")
            found = named or numbered
            assert found is not None
            reference: str | int = named[1] if named else int(found[1])
            at += found.end()
            while isinstance(reference, int) and at < len(template) and template[at].isdigit():
                longer = reference * 10 + int(template[at])
                if longer > match.re.groups:
                    break
                reference = longer
                at += 1
            out.append(match[reference] or "")
        else:
            out.append(character)
            at += 1
    return "".join(out)


@_by_pattern("RegExpInStr")
def _regexp_position(text: str, pattern: str, index: int = 0) -> int:
    match = compile_java(pattern).search(text)
    return match.start() + 1 if match else 0


@_by_pattern("RegExpSubStr")
def _regexp_part(text: str, pattern: str) -> str | None:
    match = compile_java(pattern).search(text)
    return match[0] if match else None


@by_row("Sha2")
def _sha2(data: bytes, bits: int) -> str | None:
    if bits not in (0, 224, 256, 384, 512):
        return None
    return hashlib.new(f"sha{bits or 256}", data).hexdigest()


_Units: TypeAlias = Sequence[bytes]


@by_row("StringInstrWithOccurrence")
def _instr(text: str, part: str, start: int, occurrence: int) -> int:
    """Arguments: text, part, position of the first character that counts (from the end if negative), occurrence."""
    if occurrence < 1:
        raise EvaluationError("INVALID_PARAMETER_VALUE", f"instr with the occurrence {occurrence}, which is below 1")
    if not part:
        return 1
    if start == 0:
        return 0
    at = start - 1 if start > 0 else len(text) + start
    while 0 <= at <= len(text):
        at = text.find(part, at) if start > 0 else text.rfind(part, 0, at + len(part))
        if at < 0:
            return 0
        occurrence -= 1
        if not occurrence:
            return at + 1
        at += 1 if start > 0 else -1
    return 0


@by_row("JaroWinkler")
def _jaro_winkler(left: str, right: str) -> float:
    """The similarity of Jaro and Winkler: 0 to 1. Characters are Java's, which are units of UTF-16."""
    if left == right:
        return 1.0
    first, second = _units(left), _units(right)
    similarity = _jaro(first, second)
    prefix = 0
    for one, other in zip(first[:4], second[:4], strict=False):
        if one != other:
            break
        prefix += 1
    return similarity + 0.1 * prefix * (1 - similarity)


def _units(text: str) -> _Units:
    data = text.encode("utf-16-le")
    return [data[at : at + 2] for at in range(0, len(data), 2)]


def _jaro(left: _Units, right: _Units) -> float:
    """Returns Jaro's similarity: equal characters that are near each other count, less where their order differs."""
    reach = max(max(len(left), len(right)) // 2 - 1, 0)
    matched_left: list[bytes] = []
    used = [False] * len(right)
    for at, unit in enumerate(left):
        for near in range(max(0, at - reach), min(len(right), at + reach + 1)):
            if not used[near] and right[near] == unit:
                used[near] = True
                matched_left.append(unit)
                break
    if not matched_left:
        return 0.0
    matched_right = [unit for unit, found in zip(right, used, strict=True) if found]
    matches = len(matched_left)
    transpositions = sum(one != other for one, other in zip(matched_left, matched_right, strict=True)) / 2
    return (matches / len(left) + matches / len(right) + (matches - transpositions) / matches) / 3
