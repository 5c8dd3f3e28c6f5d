"""JSON: ``from_json``, ``to_json``, ``get_json_object`` and similar functions."""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions import patterns, texts
from ckpt_runtime.expressions.evaluation import Value, by_row, strict
from ckpt_runtime.expressions.json_reader import (
    Document,
    Elements,
    MalformedJson,
    Members,
    Number,
    double_of,
    is_blank,
    json_text,
    number_text,
    quoted,
    read_json,
)
from ckpt_runtime.expressions.nodes import Call, Literal
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
_Convert: TypeAlias = Callable[[Any], Any]
FORMATS = {"timestamp": "timestampFormat", "timestamp_ntz": "timestampNTZFormat", "date": "dateFormat"}


class _NotConvertible(Exception):
    """A value of a document that cannot be converted to the type; the result is null."""


class _NeedsText(Exception):
    """A value that can only be converted from its text in the document."""


def options_of(call: Call, known: frozenset[str]) -> dict[str, str]:
    """Returns the options of a function. Raises UnsupportedExpressionError for one that the engine does not know."""
    options = dict(call.settings.get("options") or {})
    lower = {name.lower(): name for name in known}
    for name in options:
        if name.lower() not in lower:
            raise UnsupportedExpressionError(
                f"the option {name!r} of {call.function}", f"the engine knows {', '.join(sorted(known))}"
            )
    return {lower[name.lower()]: value for name, value in options.items()}


_CORRUPT = "columnNameOfCorruptRecord"


@strict("JsonToStructs")
def _from_json(call: Call) -> Callable[..., Value]:
    options = options_of(call, frozenset({"mode", _CORRUPT, *FORMATS.values()}))
    mode = options.get("mode", "PERMISSIVE").upper()
    if mode not in ("PERMISSIVE", "FAILFAST"):
        raise UnsupportedExpressionError(
            f"from_json in the mode {options['mode']}", "PERMISSIVE and FAILFAST are known"
        )
    type_ = call.type
    assert isinstance(type_, dict)
    corrupt = corrupt_column(call, options)
    read = _reader(type_, corrupt, str(call.settings.get("zone", "UTC")), options)

    def parse(text: str) -> Any:
        value, is_bad = read(text)
        if is_bad and mode == "FAILFAST":
            raise EvaluationError("MALFORMED_RECORD_IN_PARSING", f"from_json, in the mode FAILFAST: {text[:200]!r}")
        if corrupt is not None and value is not None:
            value[corrupt] = text if is_bad else None
        return value

    return per_row(parse, arrow_type(type_))


def corrupt_column(call: Call, options: Mapping[str, str]) -> str | None:
    """Returns the column of a struct that gets bad records, if it has one.

    Raises UnsupportedExpressionError for one whose values would depend on Spark's optimizer.
    """
    name, function = options.get(_CORRUPT, "_corrupt_record"), call.settings.get("prettyName", call.function)
    assert isinstance(call.type, dict)
    fields = {field["name"]: field["type"] for field in call.type["fields"]} if call.type["type"] == "struct" else {}
    if name not in fields:
        return None
    if fields[name] != "string":
        raise UnsupportedExpressionError(f"{function} with a column {name} that is not a string")
    if _CORRUPT not in options:
        raise UnsupportedExpressionError(
            f"{function} with a column {name}",
            f"name it in the option {_CORRUPT}: without options, Spark's optimizer may remove the columns whose "
            "values are bad",
        )
    return name


def _reader(
    type_: dict[str, Any], corrupt: str | None, zone: str, options: Mapping[str, str]
) -> Callable[[str], tuple[Any, bool]]:
    """Returns what reads a text: to a value, and whether the text, or a value in it, is bad."""
    nothing: Any = None
    if type_["type"] == "struct":
        nothing = {field["name"]: None for field in type_["fields"]}
        type_ = {**type_, "fields": [field for field in type_["fields"] if field["name"] != corrupt]}
    bad: list[str] = []
    convert = _converter(type_, zone, options, bad, _to_text)
    single = type_["type"] == "array" and type_["elementType"]

    def read(text: str) -> tuple[Any, bool]:
        try:
            return convert(msgspec.json.decode(text)), False
        except (msgspec.DecodeError, _NeedsText, _NotConvertible, RecursionError):
            bad.clear()
        if is_blank(text):
            return None, False
        try:
            document = read_json(text, non_numeric=True)
            if isinstance(document, Members) and isinstance(single, dict) and single["type"] == "struct":
                document = Elements([document])
            if document is not None:
                return convert(document), bool(bad)
        except (MalformedJson, _NotConvertible):
            pass
        return (dict(nothing) if nothing is not None else None), True

    return read


def record_reader(
    type_: dict[str, Any], zone: str, options: Mapping[str, str], *, exact: bool
) -> Callable[[str], tuple[list[dict[str, Any]], bool]]:
    """Returns a function that reads a record of a file to rows of a struct, and returns whether it is bad.

    ``exact``: a number, an object or an array is as a text what the record has, and is not written again. An array
    makes a row of each of its elements, and a blank text none. A record of which nothing can be read is bad and makes
    no row. Raises UnsupportedExpressionError for a type that cannot be read as Spark reads it.
    """
    bad: list[str] = []
    convert = _converter(type_, zone, options, bad, _to_exact_text if exact else _to_text)

    def read(text: str) -> tuple[list[dict[str, Any]], bool]:
        try:
            return [convert(msgspec.json.decode(text))], False
        except (msgspec.DecodeError, _NeedsText, _NotConvertible, RecursionError):
            bad.clear()
        if is_blank(text):
            return [], False
        try:
            document = read_json(text, non_numeric=True)
            elements = document if isinstance(document, Elements) else [document]
            return [convert(element) for element in elements], bool(bad)
        except (MalformedJson, _NotConvertible):
            return [], True

    return read


def _converter(type_: SparkType, zone: str, options: Mapping[str, str], bad: list[str], to_text: _Convert) -> _Convert:
    """Returns a converter of documents from :func:`read_json`, or from msgspec where its documents hold enough.

    ``bad`` gets the names of fields whose values do not fit and are null therefore; ``to_text`` converts to strings.
    """
    if isinstance(type_, dict):
        return _nested_converter(type_, zone, options, bad, to_text)
    if is_integral(type_):
        return _to_integer(type_)
    if is_fractional(type_):
        return _to_double
    if found := decimal_of(type_):
        return _to_decimal(found)
    if type_ == "string":
        return to_text
    if type_ == "boolean":
        return _to_boolean
    if type_ == "binary":
        return _to_bytes
    if type_ in FORMATS:
        return _to_time(str(type_), zone, options.get(FORMATS[str(type_)]))
    raise UnsupportedExpressionError(f"from_json to the type {type_}")


def _nested_converter(
    type_: dict[str, Any], zone: str, options: Mapping[str, str], bad: list[str], to_text: _Convert
) -> _Convert:
    if type_["type"] == "array":
        element = _converter(type_["elementType"], zone, options, bad, to_text)

        def array(value: Any) -> Any:
            if not isinstance(value, list) or isinstance(value, Members):
                raise _NeedsText() if isinstance(value, dict) else _NotConvertible()
            return [None if each is None else element(each) for each in value]

        return array
    if type_["type"] == "map":
        if type_["keyType"] != "string":
            raise UnsupportedExpressionError("from_json to a map whose keys are not strings")
        item = _converter(type_["valueType"], zone, options, bad, to_text)

        def entries(value: Any) -> Any:
            if isinstance(value, dict):
                raise _NeedsText  # duplicate names are kept
            if not isinstance(value, Members):
                raise _NotConvertible
            return [(name, None if each is None else item(each)) for name, each in value]

        return entries
    names = [field["name"] for field in type_["fields"]]
    fields = {field["name"]: _converter(field["type"], zone, options, bad, to_text) for field in type_["fields"]}
    if len(fields) < len(names):
        raise UnsupportedExpressionError("from_json to a struct with two fields of one name")

    def struct(value: Any) -> Any:
        row = dict.fromkeys(names)
        if isinstance(value, dict):
            for name, convert in fields.items():
                found = value.get(name)
                if found is not None:
                    row[name] = convert(found)  # a value that does not fit is read again, with repeated names
            return row
        if not isinstance(value, Members):
            raise _NotConvertible
        for name, found in value:
            if name in fields:
                try:
                    row[name] = None if found is None else fields[name](found)
                except _NotConvertible:
                    bad.append(name)
        return row

    return struct


def _to_integer(type_: SparkType) -> _Convert:
    bits = {"byte": 8, "short": 16, "integer": 32, "long": 64}[str(type_)]
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    most = 255 if bits == 8 else high  # Spark's reader accepts unsigned bytes, too

    def convert(value: Any) -> int:
        if isinstance(value, Number) and value.is_whole:
            value = int(value)
        if type(value) is not int:
            raise _NotConvertible
        if not low <= value <= most:
            raise _NotConvertible
        return int(value) if value <= high else int(value) - 256

    return convert


_NOT_FINITE = {
    **dict.fromkeys(("+INF", "+Infinity", "Infinity"), float("inf")),
    **dict.fromkeys(("-INF", "-Infinity"), float("-inf")),
    "NaN": float("nan"),
}


def _to_double(value: Any) -> float:
    if isinstance(value, Number):
        return double_of(value)
    if type(value) in (int, float):
        return float(value)
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    raise _NotConvertible


def _to_decimal(found: tuple[int, int]) -> _Convert:
    quantum = decimal.Decimal(1).scaleb(-found[1])
    limit = decimal.Decimal(10) ** (found[0] - found[1])

    def convert(value: Any) -> decimal.Decimal:
        if type(value) is float:
            raise _NeedsText
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise _NotConvertible
        number = texts.parse_decimal(value.replace(",", "")) if isinstance(value, str) else decimal.Decimal(value)
        if number is None or not number.is_finite():
            raise _NotConvertible
        rounded = number.quantize(quantum, decimal.ROUND_HALF_UP, EXACT)
        if abs(rounded) >= limit:
            raise _NotConvertible
        return rounded

    return convert


def _to_text(value: Any) -> str:
    if isinstance(value, str) and not isinstance(value, Number):
        return value
    if not isinstance(value, bool | Number | Elements | Members):
        raise _NeedsText  # msgspec made it
    return json_text(value)


def _to_exact_text(value: Any) -> str:
    if isinstance(value, Elements | Members):
        return value.written
    return str(value) if isinstance(value, Number) else _to_text(value)


def _to_boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _NotConvertible
    return value


def _to_bytes(value: Any) -> bytes:
    if not isinstance(value, str) or isinstance(value, Number):
        raise _NotConvertible
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise _NotConvertible from None


def _to_time(type_: str, zone: str, pattern: str | None) -> _Convert:
    tokens = None if pattern is None else patterns.tokens_of(pattern, zoned=type_ == "timestamp")
    of_zone = texts.zone_of(zone) if type_ == "timestamp" else datetime.UTC

    def convert(value: Any) -> Any:
        if isinstance(value, bool):
            raise _NotConvertible
        whole = int(value) if isinstance(value, Number) and value.is_whole else value
        if type_ == "timestamp" and type(whole) is int:
            return whole * 1_000_000
        if not isinstance(value, str) or isinstance(value, Number):
            raise _NotConvertible
        if tokens is None:
            if type_ == "date":
                date = texts.parse_date(value)
                if date is None:
                    raise _NotConvertible
                return date
            found = texts.parse_local(value)
        else:
            found = patterns.read(value, tokens)
        if found is None:
            raise _NotConvertible
        if type_ == "date":
            return found[0].date()
        return texts.micros_of_local(found[0], (found[1] if type_ == "timestamp" else None) or of_zone)

    return convert


@strict("StructsToJson")
def _to_json(call: Call) -> Callable[..., Value]:
    options = options_of(call, frozenset({"ignoreNullFields", *FORMATS.values()}))
    ignore = options.get("ignoreNullFields", "true").lower() == "true"
    writer = _writer(call.arguments[0].type, str(call.settings.get("zone", "UTC")), options, ignore)
    return per_row(writer, _STRING)


def _writer(type_: SparkType, zone: str, options: Mapping[str, str], ignore_nulls: bool) -> Callable[[Any], str]:
    if isinstance(type_, dict):
        return _nested_writer(type_, zone, options, ignore_nulls)
    if type_ == "boolean":
        return lambda value: "true" if value else "false"
    if is_integral(type_) or decimal_of(type_):
        return str
    if is_fractional(type_):
        return lambda value: number_text(value, single=type_ == "float")
    if type_ == "string":
        return quoted
    if type_ == "binary":
        return lambda value: f'"{base64.b64encode(value).decode()}"'
    if type_ == "void":
        return lambda value: "null"
    if type_ in FORMATS:
        write = time_writer(str(type_), zone, options.get(FORMATS[str(type_)]))
        return lambda value: quoted(write(value))
    raise UnsupportedExpressionError(f"to_json of the type {type_}")


def time_writer(type_: str, zone: str, pattern: str | None) -> Callable[[Any], str]:
    """Returns what writes dates and timestamps, by default as ISO 8601 with milliseconds."""
    of_zone = texts.zone_of(zone)
    tokens = None if pattern is None else patterns.tokens_of(pattern, zoned=type_ == "timestamp", written=True)

    def write(value: Any) -> str:
        if type_ == "date":
            local = datetime.datetime.combine(value, datetime.time())
        else:
            local = value.astimezone(of_zone) if type_ == "timestamp" else value
        if tokens is not None:
            return patterns.write(local, tokens)
        if type_ == "date":
            return texts.date_text(value)
        time = f"{local.hour:02}:{local.minute:02}:{local.second:02}.{local.microsecond // 1000:03}"
        return f"{texts.date_text(local)}T{time}{_offset(local) if type_ == 'timestamp' else ''}"

    return write


def _offset(moment: datetime.datetime) -> str:
    shift = moment.utcoffset()
    assert shift is not None
    minutes, _ = divmod(abs(shift), datetime.timedelta(minutes=1))
    if not minutes:
        return "Z"
    return f"{'-' if shift < datetime.timedelta() else '+'}{minutes // 60:02}:{minutes % 60:02}"


def _nested_writer(
    type_: dict[str, Any], zone: str, options: Mapping[str, str], ignore_nulls: bool
) -> Callable[[Any], str]:
    def writer(inner: SparkType) -> Callable[[Any], str]:
        return _writer(inner, zone, options, ignore_nulls)

    if type_["type"] == "array":
        element = writer(type_["elementType"])
        return lambda values: "[" + ",".join("null" if v is None else element(v) for v in values) + "]"
    if type_["type"] == "map":
        if type_["keyType"] not in ("string", "integer", "long", "short", "byte", "boolean", "double"):
            raise UnsupportedExpressionError(f"to_json of a map with keys of the type {type_['keyType']}")
        item, key_type = writer(type_["valueType"]), type_["keyType"]
        return lambda entries: (
            "{"
            + ",".join(
                f"{quoted(texts.value_text(key, key_type, datetime.UTC))}:{'null' if v is None else item(v)}"
                for key, v in entries
            )
            + "}"
        )
    fields = [(field["name"], quoted(field["name"]), writer(field["type"])) for field in type_["fields"]]

    def struct(value: dict[str, Any]) -> str:
        parts = []
        for name, text, write in fields:
            found = value[name]
            if found is not None:
                parts.append(f"{text}:{write(found)}")
            elif not ignore_nulls:
                parts.append(f"{text}:null")
        return "{" + ",".join(parts) + "}"

    return struct


_STEP = re.compile(r"\.([^.\[]+)|\[\s*(\d+)\s*\]|\[\s*(\*)\s*\]|\['([^'?]+)'\]")
_EACH = ("each element",)


def _steps(path: str) -> tuple[object, ...] | None:
    """Returns the steps of a path: names, indexes and ``_EACH``; None if it matches nothing, such as ``$.*``."""
    if not path.startswith("$"):
        return None
    steps: list[object] = []
    at = 1
    while at < len(path):
        found = _STEP.match(path, at)
        if found is None:
            return None
        name = found[1] or found[4]
        if name == "*":
            return None
        if name is not None:
            steps.append(name)
        else:
            steps.append(_EACH if found[2] is None else int(found[2]))
        at = found.end()
    return tuple(steps)


def _found(document: Document, steps: tuple[Any, ...], style: str) -> list[str]:
    """Returns the matches of a path, as JSON texts to concatenate. ``style`` is raw, quoted or flat."""
    if not steps:
        if isinstance(document, str) and not isinstance(document, Number) and style == "raw":
            return [document]
        if isinstance(document, Elements) and style == "flat":
            return [text for element in document for text in _found(element, (), style)]
        return [json_text(document)]
    step, *rest = steps
    if isinstance(document, Members):
        values = [value for name, value in document if name == step and value is not None]
        return next(filter(None, (_found(value, tuple(rest), style) for value in values)), [])
    if not isinstance(document, Elements):
        return []
    if step == _EACH:
        return _found_in_elements(document, tuple(rest), style)
    if not isinstance(step, int) or step >= len(document):
        return []
    return _found(document[step], tuple(rest), "quoted" if rest and rest[0] == _EACH else style)


def _found_in_elements(elements: list[Any], rest: tuple[Any, ...], style: str) -> list[str]:
    if rest and rest[0] == _EACH:
        inner = [text for each in elements for text in _found(each, rest[1:], "flat")]
        return [f"[{','.join(inner)}]"] if inner else []
    following = {"raw": "quoted", "flat": "flat", "quoted": "quoted"}[style]
    inner = [",".join(found) for each in elements if (found := _found(each, rest, following))]
    if not inner:
        return []
    if style != "quoted" and len(inner) == 1:
        return inner
    return [f"[{','.join(inner)}]"]


@strict("GetJsonObject")
def _get_json_object(call: Call) -> Callable[..., Value]:
    path = call.arguments[1]
    if not isinstance(path, Literal):
        raise UnsupportedExpressionError("get_json_object with a path that is not constant")
    steps = _steps(path.value) if isinstance(path.value, str) else None

    def get(text: str, _path: str) -> str | None:
        if steps is None:
            return None
        try:
            found = _found(read_json(text, non_numeric=False), steps, "raw")
        except MalformedJson:
            return None
        return ",".join(found) if found else None

    return per_row(get, _STRING)


def _document(text: str) -> Document:
    try:
        return read_json(text, non_numeric=False)
    except MalformedJson:
        return None


@by_row("LengthOfJsonArray")
def _length(text: str) -> int | None:
    found = _document(text)
    return len(found) if isinstance(found, Elements) else None


@by_row("JsonObjectKeys")
def _keys(text: str) -> list[str] | None:
    found = _document(text)
    return [name for name, _ in found] if isinstance(found, Members) else None
