"""Parses records of CSV to columns as Spark's reader does, for files and for ``from_csv``.

Arrow splits records that contain no quote, and converts columns whose texts all have a plain form. Everything else is
done value by value, which is slower and gives the same results.
"""

from __future__ import annotations

import datetime
import decimal
import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from ckpt_runtime.expressions import patterns, texts
from ckpt_runtime.expressions.csv_reader import NO_CHARACTER, Dialect, Record, fields_of
from ckpt_runtime.expressions.rows import EXACT
from ckpt_runtime.expressions.types import UnsupportedExpressionError

CSV_DEFAULTS: Mapping[str, Any] = {
    "sep": ",",
    "delimiter": None,
    "quote": '"',
    "escape": "\\",
    "nullValue": "",
    "emptyValue": "",
    "nanValue": "NaN",
    "positiveInf": "Inf",
    "negativeInf": "-Inf",
    "ignoreLeadingWhiteSpace": False,
    "ignoreTrailingWhiteSpace": False,
    "dateFormat": None,
    "timestampFormat": None,
    "timestampNTZFormat": None,
    "timeZone": "UTC",
}
"""The options that :class:`CsvParser` reads, with Spark's defaults."""

WHITE = "".join(map(chr, range(0x21)))
_MOST_FIELDS = 20_480
_ESCAPED = {"\\t": "\t", "\\r": "\r", "\\b": "\b", "\\f": "\f", '\\"': '"', "\\'": "'", "\\\\": "\\"}


class _NotConvertibleError(Exception):
    """A text cannot be converted to its column's type."""


class TooManyFieldsError(ValueError):
    """A record has more fields than Spark reads. ``record`` is its place among the given ones, from 0."""

    def __init__(self, record: int) -> None:
        super().__init__(f"it has more than {_MOST_FIELDS:,} fields")
        self.record = record


@dataclass(frozen=True, slots=True)
class _Column:
    """A column that is read: its type, a pattern of the texts that Arrow converts, and a converter for the others."""

    field: pa.Field
    plain: str | None
    convert: Callable[[str], Any]


class CsvParser:
    """Parses records to the columns of a schema.

    ``options`` has a value for each of :data:`CSV_DEFAULTS`. Raises UnsupportedExpressionError for an option or a type
    that is not supported.
    """

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        if options["ignoreTrailingWhiteSpace"] and not options["ignoreLeadingWhiteSpace"]:
            raise UnsupportedExpressionError(
                "option 'ignoreTrailingWhiteSpace'",
                "Spark fails at a field that begins with a blank in this case; set ignoreLeadingWhiteSpace as well",
            )
        self.dialect = _dialect(options)
        self._null: str = options["nullValue"]
        self._columns = [_column(field, options) for field in schema]

    def columns(self, records: list[str] | list[Record], bad: dict[int, str]) -> list[pa.Array]:
        """Returns the columns of records that are not blank. ``bad`` receives the faults of records, by position.

        Raises TooManyFieldsError.
        """
        texts = self._texts(records, bad)
        return [self._converted(column, values, bad) for column, values in zip(self._columns, texts, strict=True)]

    def _texts(self, records: list[str] | list[Record], bad: dict[int, str]) -> list[pa.Array]:
        """The texts of each column; a record with fewer or more fields is noted as bad."""
        wanted = len(self._columns)
        lines = [record for record in records if isinstance(record, str)]
        if lines and (plain := self._plain_texts(lines)) is not None:
            return plain
        rows = [record.fields if isinstance(record, Record) else fields_of(record, self.dialect) for record in records]
        for at, row in enumerate(rows):
            if len(row) > _MOST_FIELDS:
                raise TooManyFieldsError(at)
            if len(row) != wanted:
                bad[at] = f"it has {len(row)} fields, but the schema has {wanted}"
        return [
            pa.array([row[place] if place < len(row) else None for row in rows], pa.string()) for place in range(wanted)
        ]

    def _plain_texts(self, records: list[str]) -> list[pa.Array] | None:
        """The texts as split by Arrow; None if a line needs more than splitting at separators, or is bad."""
        dialect = self.dialect
        if not records or not self._columns or dialect.strip_left:
            return None
        block = "\n".join(records)
        line_ends = block.count("\n") - len(records) + 1
        if (dialect.quote != NO_CHARACTER and dialect.quote in block) or line_ends or "\r" in block:
            return None
        if not dialect.separator.isascii() or len(self._columns) == 1:
            return None  # Arrow takes an ASCII separator, and skips an empty line
        names = [str(place) for place in range(len(self._columns))]
        table = csv.read_csv(
            io.BytesIO(block.encode()),
            csv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) * 4 + 16),
            csv.ParseOptions(
                delimiter=dialect.separator,
                quote_char=False,
                double_quote=False,
                escape_char=False,
                ignore_empty_lines=False,
                invalid_row_handler=lambda _: "skip",
            ),
            csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False),
        )
        if table.num_rows != len(records):
            return None
        columns = [column.combine_chunks() for column in table.columns]
        return [pc.if_else(pc.equal(each, ""), dialect.null, each) for each in columns] if dialect.null else columns

    def _converted(self, column: _Column, values: pa.Array, bad: dict[int, str]) -> pa.Array:
        values = pc.if_else(pc.equal(values, self._null), pa.scalar(None, pa.string()), values)
        type_ = column.field.type
        if pa.types.is_string(type_):
            return values
        if column.plain is not None and pc.all(pc.match_substring_regex(values, column.plain)).as_py() is not False:
            try:
                converted = values.cast(type_ if type_ != _TIMESTAMP else pa.timestamp("us"))
                return converted.cast(type_)
            except pa.ArrowInvalid:
                pass  # a number out of range, a day that does not exist
        known: dict[str, Any] = {}
        results = []
        for row, text in enumerate(values.to_pylist()):
            if text is not None and text not in known:
                try:
                    known[text] = column.convert(text)
                except (_NotConvertibleError, ValueError, OverflowError):
                    known[text] = _BAD
            value = None if text is None else known[text]
            if value is _BAD:
                bad.setdefault(row, f"{text!r} in column {column.field.name!r} is not of type {type_}")
                value = None
            results.append(value)
        if pa.types.is_timestamp(type_):
            return pa.array(results, pa.int64()).cast(type_)
        return pa.array(results, type_)


_BAD = object()
_TIMESTAMP = pa.timestamp("us", "UTC")


def separator_of(options: Mapping[str, Any]) -> str:
    """Returns the character between fields. Raises UnsupportedExpressionError for several characters."""
    separator: str = options.get("delimiter") or options.get("sep", ",")
    separator = _ESCAPED.get(separator, separator)
    if len(separator) != 1 or separator in "\r\n":
        raise UnsupportedExpressionError(
            "option 'sep'", f"{separator!r} is not one character; separators of several characters are not supported"
        )
    return separator


def _dialect(options: Mapping[str, Any]) -> Dialect:
    separator = separator_of(options)
    escape = character_option("escape", options["escape"])
    if not escape:
        raise UnsupportedExpressionError(
            "option 'escape'", "reading without an escape character is not supported; set it to a quote"
        )
    return Dialect(
        separator,
        character_option("quote", options["quote"]) or NO_CHARACTER,
        escape,
        options["ignoreLeadingWhiteSpace"],
        options["ignoreTrailingWhiteSpace"],
        options["nullValue"],
        options["emptyValue"],
    )


def character_option(key: str, text: str) -> str:
    """Returns an option's character, or an empty text. Raises UnsupportedExpressionError for more characters."""
    if len(text) > 1:
        raise UnsupportedExpressionError(f"option {key!r}", f"{text!r} is more than one character")
    return text


def _column(field: pa.Field, options: Mapping[str, Any]) -> _Column:
    """Returns how a column is read. Raises UnsupportedExpressionError for a type that is not supported."""
    type_ = field.type
    if pa.types.is_signed_integer(type_):
        return _Column(field, r"^-?[0-9]{1,19}$", _integer(type_.bit_width))
    if pa.types.is_float32(type_) or pa.types.is_float64(type_):
        special = {
            options["nanValue"]: float("nan"),
            options["positiveInf"]: float("inf"),
            options["negativeInf"]: float("-inf"),
        }
        return _Column(field, r"^-?[0-9]{1,30}(\.[0-9]{1,30})?$", _floating(type_, special))
    if pa.types.is_decimal(type_):
        plain = rf"^-?[0-9]{{1,37}}(\.[0-9]{{1,{type_.scale}}})?$" if type_.scale > 0 else r"^-?[0-9]{1,37}$"
        return _Column(field, plain, _decimal(type_))
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return _time_column(field, options)
    if type_ == pa.bool_():
        return _Column(field, None, _boolean)
    if type_ == pa.string():
        return _Column(field, None, str)
    if type_ == pa.binary():
        return _Column(field, None, str.encode)
    raise UnsupportedExpressionError(
        "schema", f"format 'csv': column {field.name!r} is {type_}, which a field of a line cannot represent"
    )


def _integer(bits: int) -> Callable[[str], int]:
    limit = 1 << (bits - 1)

    def convert(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise _NotConvertibleError
        value = int(text)
        if not -limit <= value < limit:
            raise _NotConvertibleError
        return value

    return convert


_FLOATING = re.compile(r"([+-]?)(?:(NaN|Infinity)|((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[fFdD]?)")
_HEXADECIMAL = re.compile(r"([+-]?0[xX](?:[0-9a-fA-F]+\.?[0-9a-fA-F]*|\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?")


def _floating(type_: pa.DataType, special: Mapping[str, float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        if text in special:
            return special[text]
        text = text.strip(WHITE)
        if hexadecimal := _HEXADECIMAL.fullmatch(text):
            return float.fromhex(hexadecimal[1])
        found = _FLOATING.fullmatch(text)
        if found is None:
            raise _NotConvertibleError
        sign, word, number = found.groups()
        if word or type_ == pa.float64():
            return float(sign + (number or word))
        try:
            # Rounded once, from the digits: a double in between would be rounded twice.
            single: float = pa.scalar(number).cast(type_).as_py()
        except pa.ArrowInvalid:
            single = float(number)
        return -single if sign == "-" else single

    return convert


def _decimal(type_: pa.DataType) -> Callable[[str], decimal.Decimal]:
    quantum = decimal.Decimal(1).scaleb(-type_.scale)
    limit = decimal.Decimal(10) ** (type_.precision - type_.scale)

    def convert(text: str) -> decimal.Decimal:
        text = text.replace(",", "")
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,9})?", text):
            raise _NotConvertibleError
        value = decimal.Decimal(text)
        if value and value.adjusted() > type_.precision:
            raise _NotConvertibleError
        rounded = value.quantize(quantum, decimal.ROUND_HALF_UP, EXACT)
        if abs(rounded) >= limit:
            raise _NotConvertibleError
        return rounded

    return convert


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise _NotConvertibleError
    return text.lower() == "true"


def _time_column(field: pa.Field, options: Mapping[str, Any]) -> _Column:
    if pa.types.is_date(field.type):
        key, plain = "dateFormat", r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$"
    else:
        key = "timestampFormat" if field.type.tz else "timestampNTZFormat"
        plain = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?$"
    has_zone = pa.types.is_timestamp(field.type) and field.type.tz is not None
    try:
        tokens = None if options[key] is None else patterns.tokens_of(options[key], zoned=has_zone)
        zone = texts.zone_of(options["timeZone"])
    except (UnsupportedExpressionError, ValueError) as error:
        raise UnsupportedExpressionError(f"option {key!r}", str(error)) from error
    of_arrow = tokens is None and not (has_zone and zone is not datetime.UTC)

    def local(text: str) -> tuple[datetime.datetime, datetime.tzinfo | None]:
        found = texts.parse_local(text) if tokens is None else patterns.read(text, tokens)
        if found is None:
            raise _NotConvertibleError
        return found

    def moment(text: str) -> int:
        time, of_text = local(text)
        if of_text is not None and not has_zone:
            raise _NotConvertibleError
        return texts.micros_of_local(time, (of_text or zone) if has_zone else datetime.UTC)

    def date(text: str) -> datetime.date:
        if tokens is not None:
            return local(text)[0].date()
        found = texts.parse_date(text)
        if found is None:
            raise _NotConvertibleError
        return found

    return _Column(field, plain if of_arrow else None, date if pa.types.is_date(field.type) else moment)
