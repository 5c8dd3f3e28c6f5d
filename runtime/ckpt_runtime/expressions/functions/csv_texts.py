"""CSV in a column: ``from_csv`` and ``to_csv``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.csv_values import (
    CSV_DEFAULTS,
    WHITE,
    CsvParser,
    TooManyFieldsError,
    character_option,
    separator_of,
)
from ckpt_runtime.expressions.evaluation import Value, strict
from ckpt_runtime.expressions.functions.documents import FORMATS, corrupt_column, options_of, time_writer
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    UnsupportedExpressionError,
    arrow_type,
    decimal_of,
    is_fractional,
    is_integral,
)

_FLAGS = ("ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace")
_LINE_END = re.compile(r"(?:\r\n|[\n\r\f])\Z")
"""Spark's column of bad records lacks it."""
_READ = frozenset({*CSV_DEFAULTS, "mode", "columnNameOfCorruptRecord"} - {"timeZone"})


def _flag(options: dict[str, str], name: str, default: bool) -> bool:
    text = options.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise UnsupportedExpressionError(f"option {name!r}", f"{text!r} is not true or false")
    return text == "true"


@strict("CsvToStructs")
def _from_csv(call: Call) -> Callable[..., Value]:
    given = options_of(call, _READ)
    mode = given.get("mode", "PERMISSIVE").upper()
    if mode not in ("PERMISSIVE", "FAILFAST"):
        raise UnsupportedExpressionError(f"from_csv in the mode {given['mode']}", "PERMISSIVE and FAILFAST are known")
    flags = {name: _flag(given, name, default=False) for name in _FLAGS}
    options = {**CSV_DEFAULTS, **given, **flags, "timeZone": str(call.settings.get("zone", "UTC"))}
    corrupt = corrupt_column(call, given)
    kind = arrow_type(call.type)
    parser = CsvParser(options, pa.schema([field for field in kind if field.name != corrupt]))

    def structs(records: list[str]) -> pa.Array:
        """The structs of different texts without null."""
        bad = {at: "it is empty" for at, record in enumerate(records) if not record}
        try:
            columns = parser.columns(records, bad)
        except TooManyFieldsError as error:
            raise EvaluationError("MALFORMED_CSV_RECORD", f"from_csv: {error}") from None
        if bad and mode == "FAILFAST":
            shown = records[min(bad)][:200]
            raise EvaluationError("MALFORMED_RECORD_IN_PARSING", f"from_csv, in the mode FAILFAST: {shown!r}")
        if corrupt is not None:
            marked = [_LINE_END.sub("", record) if record and at in bad else None for at, record in enumerate(records)]
            columns.insert(kind.get_field_index(corrupt), pa.array(marked, pa.string()))
        return pa.StructArray.from_arrays(columns, fields=list(kind))

    def parse(value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            return structs([value.as_py()])[0] if value.is_valid else pa.scalar(None, kind)
        encoded = pc.dictionary_encode(value)
        return structs(encoded.dictionary.to_pylist()).take(encoded.indices)

    return parse


_WRITTEN = frozenset(
    {
        *("sep", "delimiter", "quote", "escape", "nullValue", "emptyValue", "quoteAll"),
        *("dateFormat", "timestampFormat", "timestampNTZFormat", *_FLAGS),
    }
)
_COMMENT = "#"
"""Spark quotes a line that begins with it, whatever the option ``comment`` is."""


@strict("StructsToCsv")
def _to_csv(call: Call) -> Callable[..., Value]:
    options = options_of(call, _WRITTEN)
    separator = separator_of(options)
    quote, escape = (
        character_option(name, options.get(name, given)) for name, given in (("quote", '"'), ("escape", "\\"))
    )
    if not quote or not escape:
        raise UnsupportedExpressionError("to_csv without a quote or an escape character")
    write = _field_writer(
        separator,
        quote,
        escape,
        quote_all=_flag(options, "quoteAll", default=False),
        strip=[_flag(options, name, default=True) for name in _FLAGS],
        null=options.get("nullValue", ""),
        empty=options.get("emptyValue", '""'),
    )
    zone = str(call.settings.get("zone", "UTC"))
    type_ = call.arguments[0].type
    assert isinstance(type_, dict)
    fields = [(field["name"], _text_of(field["type"], zone, options)) for field in type_["fields"]]

    def line(struct: dict[str, Any]) -> str | None:
        found = [(struct[name], text) for name, text in fields]
        parts = (write(None if value is None else text(value), at) for at, (value, text) in enumerate(found))
        return separator.join(parts) or None  # Spark's writer skips an empty line

    return per_row(line, pa.string())


def _field_writer(
    separator: str, quote: str, escape: str, *, quote_all: bool, strip: Sequence[bool], null: str, empty: str
) -> Callable[[str | None, int], str]:
    """Returns what writes a text or null as a field, by the place of its column."""
    triggers = (separator, quote, "\n", "\r")

    def write(value: str | None, place: int) -> str:
        text = null if value is None else value
        rest = text.lstrip(WHITE) if strip[0] else text
        content = rest.rstrip(WHITE) if strip[1] else rest
        if not content:
            return empty if value is not None else quote * 2 if quote_all else ""
        # As in Spark, blanks in front are skipped before the text is searched, and those behind it are not.
        is_quoted = quote_all or any(trigger in rest for trigger in triggers) or (place == 0 and text[0] == _COMMENT)
        if not is_quoted:
            return content
        if escape != quote:
            content = content.replace(escape, escape * 2)
        return f"{quote}{content.replace(quote, escape + quote)}{quote}"

    return write


def _text_of(type_: SparkType, zone: str, options: dict[str, str]) -> Callable[[Any], str]:
    """Returns what writes the values of a type, without quotes."""
    if type_ == "string":
        return str
    if type_ == "boolean":
        return lambda value: "true" if value else "false"
    if isinstance(type_, str) and is_fractional(type_):
        return lambda value: texts.double_text(value, single=type_ == "float")
    if isinstance(type_, str) and (is_integral(type_) or decimal_of(type_)):
        return str
    if isinstance(type_, str) and type_ in FORMATS:
        return time_writer(type_, zone, options.get(FORMATS[type_]))
    raise UnsupportedExpressionError(f"to_csv of the type {type_ if isinstance(type_, str) else type_['type']}")
