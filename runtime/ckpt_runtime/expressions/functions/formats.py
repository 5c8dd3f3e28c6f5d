"""Text formats: URLs, ``format_string``, base 32, checks of UTF-8, and texts that are split into maps."""

from __future__ import annotations

import base64
import decimal
import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.evaluation import Evaluator, Value, by_row, compile_expression, function, strict
from ckpt_runtime.expressions.functions.nested import checked_map
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.regex import compile_java, split_java
from ckpt_runtime.expressions.rows import EXACT, per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    UnsupportedExpressionError,
    arrow_type,
    decimal_of,
    is_fractional,
    is_integral,
)

_STRING = pa.string()


by_row("UrlEncode")(lambda text: urllib.parse.quote_plus(text, safe="*").replace("~", "%7E"))


@strict("UrlDecode")
def _url_decoded(call: Call) -> Callable[..., Value]:
    fails = bool(call.settings.get("failOnError", True))

    def decode(text: str) -> str | None:
        if re.search(r"%(?![0-9a-fA-F]{2})", text):
            if fails:
                raise EvaluationError("CANNOT_DECODE_URL", f"{text!r} is not encoded; try_url_decode gives null")
            return None
        return urllib.parse.unquote_plus(text)

    return per_row(decode, _STRING)


_URI = re.compile(r"(?:([A-Za-z][A-Za-z0-9+.\-]*):)?(?://([^/?#]*))?([^?#]*)(?:\?([^#]*))?(?:#(.*))?", re.S)
_LEGAL = re.compile(r"(?:[A-Za-z0-9_\-!.~'()*,;:$&+=?/\[\]@]|%[0-9a-fA-F]{2}|[^\x00-\x7f])*")
_SERVER = re.compile(r"(?:([^@]*)@)?(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.\-]+)(?::(\d*))?")
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9\-]*[A-Za-z0-9])?\.)*[A-Za-z](?:[A-Za-z0-9\-]*[A-Za-z0-9])?\.?")
_SPACE = re.compile("[\x80-\x9f\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
"""Characters outside of ASCII that Java takes for a space or a control character; it accepts all others."""
_IPV4 = re.compile(r"\d{1,3}(?:\.\d{1,3}){3}")


def _parts_of_url(url: str) -> dict[str, str | None] | None:
    """Returns the parts that Java's ``URI`` finds, or None where it refuses the text."""
    found = _URI.fullmatch(url)
    assert found is not None
    scheme, authority, path, query, fragment = found.groups()
    pieces = [piece for piece in (authority, path, query, fragment) if piece]
    if not all(_LEGAL.fullmatch(piece) for piece in pieces) or "[" in path or "]" in path:
        return None
    if _SPACE.search(url):
        return None
    if scheme is not None and not authority and not path and query is None:
        return None  # Java expects a scheme-specific part
    if scheme is None and ":" in path.split("/", maxsplit=1)[0]:
        return None
    if authority == "" and not path:
        return None
    opaque = scheme is not None and authority is None and not path.startswith("/")
    server = _SERVER.fullmatch(authority) if authority else None
    named = server is not None and (
        server[2].startswith("[") or bool(_HOST.fullmatch(server[2]) or _IPV4.fullmatch(server[2]))
    )
    return {
        "HOST": server[2] if server and named else None,
        "PATH": None if opaque else path,
        "QUERY": None if opaque else query,
        "REF": fragment,
        "PROTOCOL": scheme,
        "FILE": None if opaque else path if query is None else f"{path}?{query}",
        "AUTHORITY": authority or None,
        "USERINFO": server[1] if server and named else None,
    }


@strict("ParseUrl")
def _parse_url(call: Call) -> Callable[..., Value]:
    """Arguments: the address, the name of a part and, for a query, the name of a parameter."""
    fails = bool(call.settings.get("failOnError", call.mode == "ansi"))

    def parse(url: str, part: str, key: str | None = None) -> str | None:
        parts = _parts_of_url(url)
        if parts is None:
            if fails:
                raise EvaluationError("INVALID_URL", f"{url!r} is not a URL; try_parse_url gives null instead")
            return None
        value = parts.get(part)
        if key is None:
            return value
        if part != "QUERY" or value is None:
            return None
        found = re.search(f"(?:&|^){re.escape(key)}=([^&]*)", value)
        return found[1] if found else None

    return per_row(parse, _STRING)


_SPECIFIER = re.compile(r"%(?:(\d+)\$)?([-+ 0,(#]*)(\d+)?(?:\.(\d+))?([a-zA-Z%])")


@strict("FormatString")
def _format_string(call: Call) -> Callable[..., Value]:
    """Java's formats of integers, decimals, doubles, texts and booleans; the format is constant."""
    pattern = call.arguments[0]
    if not isinstance(pattern, Literal):
        raise UnsupportedExpressionError("format_string with a format that is not constant")
    if pattern.value is None:
        return per_row(lambda *values: None, _STRING)
    pieces = _format_pieces(str(pattern.value), [argument.type for argument in call.arguments[1:]])

    def write(_pattern: str, *values: Any) -> str:
        return "".join(piece if isinstance(piece, str) else piece(values) for piece in pieces)

    return per_row(write, _STRING, nulls=True)


def _format_pieces(pattern: str, types: list[SparkType]) -> list[str | Callable[[tuple[Any, ...]], str]]:
    pieces: list[str | Callable[[tuple[Any, ...]], str]] = []
    at = ordinary = 0
    for found in _SPECIFIER.finditer(pattern):
        literal = pattern[at : found.start()]
        pieces.append(literal)
        if "%" in literal:
            raise _no_format(pattern)
        at = found.end()
        number, flags, width, precision, conversion = found.groups()
        if conversion in "%n":
            if number or flags or width or precision:
                raise _no_format(found[0])
            pieces.append("%" if conversion == "%" else "\n")
            continue
        position = int(number) - 1 if number else ordinary
        ordinary += number is None
        if position >= len(types):
            raise _no_format(f"{found[0]} without a value")
        pieces.append(_formatter(found[0], position, types[position], flags, int(width or 0), precision, conversion))
    if "%" in pattern[at:]:
        raise _no_format(pattern)
    return [*pieces, pattern[at:]]


def _no_format(what: str) -> UnsupportedExpressionError:
    return UnsupportedExpressionError(f"format_string with {what}")


def _formatter(
    specifier: str, position: int, type_: SparkType, flags: str, width: int, precision: str | None, conversion: str
) -> Callable[[tuple[Any, ...]], str]:
    """Returns a function that formats one value of a row."""
    write: Callable[[Any], str]
    if conversion in "sS" and not set(flags) - {"-"}:
        shown = type_ in ("string", "boolean", "double", "float", "void") or is_integral(type_) or decimal_of(type_)
        if not shown:
            raise _no_format(f"{specifier} of the type {type_}")

        def write(value: Any) -> str:
            text = "null" if value is None else value if isinstance(value, str) else _shown(value, type_)
            text = text if precision is None else text[: int(precision)]
            return text.upper() if conversion == "S" else text
    elif conversion == "d" and is_integral(type_) and precision is None and not set(flags) - set("-+0,"):

        def write(value: Any) -> str:
            return _number(value, f"{value:{',' if ',' in flags else ''}d}" if value is not None else "", flags, width)
    elif conversion == "f" and (type_ == "double" or decimal_of(type_)) and not set(flags) - set("-+0,"):
        places = decimal.Decimal(1).scaleb(-int(precision or 6))

        def write(value: Any) -> str:
            if value is None:
                return "null"
            if isinstance(value, float) and (value != value or abs(value) == float("inf")):
                text = {"inf": "Infinity", "-inf": "-Infinity"}.get(str(value), "NaN")
                return f"+{text}" if "+" in flags and value > 0 else text
            number = decimal.Decimal(texts.double_text(value) if isinstance(value, float) else value)
            rounded = number.quantize(places, decimal.ROUND_HALF_UP, EXACT)
            return _number(value, f"{rounded:{',' if ',' in flags else ''}f}", flags, width)
    elif conversion in "xX" and type_ in ("integer", "long") and not set(flags) - set("-0") and precision is None:
        bits = 32 if type_ == "integer" else 64

        def write(value: Any) -> str:
            digits = "" if value is None else f"{value & ((1 << bits) - 1):{conversion}}"
            return _number(value, digits, flags, width)
    elif conversion == "b" and type_ == "boolean" and not set(flags) - {"-"} and precision is None:

        def write(value: Any) -> str:
            return "true" if value else "false"
    else:
        raise _no_format(f"{specifier} of the type {type_}")
    if "-" in flags:
        return lambda values: write(values[position]).ljust(width)
    return lambda values: write(values[position]).rjust(width)


def _shown(value: Any, type_: SparkType) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if is_fractional(type_):
        return texts.double_text(value, single=type_ == "float")
    return str(value)


def _number(value: Any, digits: str, flags: str, width: int) -> str:
    if value is None:
        return "null"
    sign, digits = (digits[0], digits[1:]) if digits[:1] == "-" else ("+" if "+" in flags else "", digits)
    return sign + (digits.rjust(width - len(sign), "0") if "0" in flags else digits)


@by_row("UnBase32")
def _of_base32(text: str) -> bytes:
    """Skips other characters, accepts lower-case letters, and drops trailing bits that are not a whole byte.

    As in Spark, a last digit behind whole groups of eight makes a byte, of its upper bits and those in front of it.
    """
    digits = re.sub(r"[^A-Za-z2-7]", "", text.split("=", maxsplit=1)[0]).upper()
    whole = digits + "A" * (-len(digits) % 8)
    decoded = base64.b32decode(whole)
    size = len(digits) * 5 // 8
    if len(digits) % 8 == 1:
        before = int.from_bytes(decoded[max(0, size - 1) : size + 1])  # 16 bits, of which the last 3 are filled up
        return decoded[:size] + bytes([before >> 5 & 255])
    return decoded[:size]


@function("IsValidUTF8", "MakeValidUTF8", "ValidateUTF8", "TryValidateUTF8")
def _valid_text(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """The engine's texts are always valid, so the check applies to the bytes before a cast converts them to text."""
    source, test = call.arguments[0], call.function == "IsValidUTF8"
    if not (isinstance(source, Call) and source.function == "Cast" and source.arguments[0].type == "binary"):
        plain = arguments[0]
        certain = per_row(lambda text: True, pa.bool_())
        return lambda frame: certain(plain(frame)) if test else plain(frame)
    inner = compile_expression(source.arguments[0])

    def checked(data: bytes) -> Any:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            if test or call.function == "TryValidateUTF8":
                return False if test else None
            if call.function == "MakeValidUTF8":
                return data.decode(errors="replace")
            raise EvaluationError("INVALID_UTF8_STRING", "the bytes are not UTF-8") from None
        return True if test else text

    compute = per_row(checked, arrow_type(call.type))
    return lambda frame: compute(inner(frame))


_BUCKET = 32768

by_row("Base32")(lambda data: base64.b32encode(data).decode())
by_row("Quote")(lambda text: "'" + text.replace("'", "\\'") + "'")
by_row("BitmapCount")(lambda data: int.from_bytes(data).bit_count())
by_row("BitmapBitPosition")(lambda value: (value - 1) % _BUCKET if value > 0 else -value % _BUCKET)
by_row("BitmapBucketNumber")(lambda value: 1 + (value - 1) // _BUCKET if value > 0 else -(-value // _BUCKET))


@strict("Hmac")
def _hmac(call: Call) -> Callable[..., Value]:
    algorithm = call.arguments[2]
    names = {"SHA-224": "sha224", "SHA-256": "sha256", "SHA-384": "sha384", "SHA-512": "sha512", "SHA-1": "sha1"}
    name = names.get(str(algorithm.value).upper()) if isinstance(algorithm, Literal) else None
    if name is None:
        raise UnsupportedExpressionError("hmac with another algorithm", f"the engine knows {', '.join(names)}")

    def digest(key: bytes, message: bytes, _algorithm: str) -> bytes:
        if not key:
            raise EvaluationError("INVALID_PARAMETER_VALUE", "the key of hmac is empty")
        return hmac.digest(key, message, hashlib.new(name).name)

    return per_row(digest, pa.binary())


@strict("StringToMap")
def _string_to_map(call: Call) -> Callable[..., Value]:
    """Both separators are regular expressions."""
    for argument in call.arguments[1:]:
        if not isinstance(argument, Literal):
            raise UnsupportedExpressionError("str_to_map with a separator that is not constant")
        compile_java(str(argument.value))

    def build(text: str, between_pairs: str, between_key_and_value: str) -> list[tuple[str, str | None]]:
        entries: list[tuple[str, str | None]] = []
        for pair in split_java(text, between_pairs):
            key, *value = split_java(pair, between_key_and_value, 2)
            entries.append((key, value[0] if value else None))
        return checked_map(entries)

    return per_row(build, arrow_type(call.type))
