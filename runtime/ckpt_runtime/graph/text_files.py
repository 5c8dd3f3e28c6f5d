"""Files of text, as Spark's readers of ``csv`` and ``json`` take them: encodings, ends of lines, schemas, options.

``expressions/csv_values.py`` parses the records of ``csv``. The values of ``json`` are read as ``from_json`` does.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.csv_reader import Record, fields_of, records_of
from ckpt_runtime.expressions.csv_values import WHITE, CsvParser, TooManyFieldsError, character_option
from ckpt_runtime.expressions.functions.documents import record_reader
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.graph.bad_rows import BadLine, BadRecordError, by_mode, check_corrupt_column, checked_mode
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option

TEXT_OPTIONS = (
    Option("lineSep"),
    Option("encoding", alias="charset"),
    Option("multiLine", bool, False),
    Option("locale", default="en-us", choices=("en-us", "en_us")),
    Option("samplingRatio", float, 1.0),
)
"""``samplingRatio``, and others that only matter when Spark infers a schema, have no effect on the rows."""

_CODECS = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "iso-8859-1": "latin-1",
    "us-ascii": "ascii",
    "utf-16": "utf-16",
    "utf-16be": "utf-16-be",
    "utf-16le": "utf-16-le",
    "utf-32": "utf-32",
}
_NAMES = "UTF-8, ISO-8859-1, US-ASCII, UTF-16, UTF-16BE, UTF-16LE, UTF-32"
_WITH_MARK = {
    "utf-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
    "utf-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
}


def codec_of(options: Mapping[str, Any], *, plain: tuple[str, ...]) -> str:
    """Python's name of the encoding. ``plain`` are those whose lines can be found without ``lineSep``. Raises PlanError
    for an encoding that Spark does not have, or whose lines it cannot find.
    """
    name = options["encoding"] or "utf-8"
    codec = _CODECS.get(name.lower())
    if codec is None:
        raise PlanError("option 'encoding'", f"{name!r} is not one of {_NAMES}")
    if options["multiLine"]:
        return codec
    if codec in _WITH_MARK:
        problem = f"the byte order of a line in {name} is unknown; name it, as in {name}LE, or set multiLine"
        raise PlanError("option 'encoding'", problem if codec == "utf-16" else f"{name} needs multiLine, as in Spark")
    if codec not in plain and not options["lineSep"]:
        raise PlanError("option 'encoding'", f"{name} needs option lineSep, or multiLine")
    return codec


def line_end(options: Mapping[str, Any]) -> bytes | None:
    """The bytes of the option ``lineSep``; None if it is not set."""
    given = options["lineSep"]
    if not given:
        return None
    name = options.get("encoding") or "utf-8"
    return str(given).encode(_CODECS[name.lower()])


def decoded(data: bytes, codec: str) -> str:
    """Decodes bytes to text. Malformed bytes become U+FFFD; without a byte order mark, the greatest byte is first."""
    if codec in _WITH_MARK and not data.startswith(_WITH_MARK[codec]):
        codec += "-be"
    return data.decode(codec, "replace")


def detected(data: bytes) -> str:
    """Python's name of the encoding of a JSON document, as Jackson finds it by the first bytes."""
    return json.detect_encoding(data)


_FORMATS = ("dateFormat", "timestampFormat", "timestampNTZFormat")
_RECORD_OPTIONS = (
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    *map(Option, _FORMATS),
    Option("timeZone", default="UTC"),
)


def _only(**values: str) -> tuple[Option, ...]:
    """Options of Spark's with the only value that the engine has, which is Spark's default."""
    return tuple(Option(key, default=value, choices=(value,)) for key, value in values.items())


CSV_OPTIONS = (
    *_only(unescapedQuoteHandling="stop_at_delimiter", maxColumns="20480", maxCharsPerColumn="-1"),
    Option("sep", default=",", alias="delimiter"),
    Option("header", bool, False),
    Option("enforceSchema", bool, True),
    Option("quote", default='"'),
    Option("escape", default="\\"),
    Option("comment"),
    Option("nullValue", default=""),
    Option("emptyValue", default=""),
    Option("nanValue", default="NaN"),
    Option("positiveInf", default="Inf"),
    Option("negativeInf", default="-Inf"),
    Option("ignoreLeadingWhiteSpace", bool, False),
    Option("ignoreTrailingWhiteSpace", bool, False),
    *TEXT_OPTIONS,
    *_RECORD_OPTIONS,
    Option("columnPruning", bool, True),
    Option("preferDate", bool, True),
)

MOST_RECORDS = 8192
"""Number of records of a file with ``multiLine`` that are parsed at a time."""


class CsvRows:
    """Parses records of a file to rows: its lines, or with ``multiLine`` what :meth:`whole` finds.

    Raises PlanError for an option or a type that it cannot handle as Spark does.
    """

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        _check(options, schema)
        self._options = options
        self._schema = schema
        self._mode = options["mode"].upper()
        self._codec = codec_of(options, plain=("utf-8", "latin-1", "ascii"))
        corrupt = options["columnNameOfCorruptRecord"]
        self._corrupt = schema.get_field_index(corrupt) if corrupt in schema.names else None
        self._names = [name for name in schema.names if name != corrupt]
        try:
            self._comment = character_option("comment", options["comment"] or "")
            self._parser = CsvParser(options, pa.schema([schema.field(name) for name in self._names]))
        except UnsupportedExpressionError as error:
            raise PlanError(error.what, error.why) from error

    def whole(self, data: bytes) -> Iterator[Sequence[Record]]:
        """Yields the records of a file, which may have several lines, some at a time, for :meth:`parsed`."""
        text = decoded(data, self._codec).removeprefix("\ufeff")
        records = records_of(text, self._parser.dialect, self._comment)
        while some := list(islice(records, MOST_RECORDS)):
            yield some

    def header(self, line: bytes | Record) -> str | None:
        """Checks the header of a file: returns None for a blank line or a comment, otherwise its fault.

        The result is empty if nothing is wrong, or if option ``enforceSchema`` is set.
        """
        if isinstance(line, bytes) and not self._has_record(decoded(line, self._codec)):
            return None
        if self._options["enforceSchema"]:
            return ""
        found = line.fields if isinstance(line, Record) else fields_of(decoded(line, self._codec), self._parser.dialect)
        if [name.lower() for name in found] == [name.lower() for name in self._names]:
            return ""
        return f"its header names the columns {', '.join(found)}, but the schema {', '.join(self._names)}"

    def rows(self, lines: Sequence[bytes] | Sequence[Record]) -> pa.RecordBatch:
        """Returns the rows of lines; blank lines and comments produce none. Raises BadRecordError in mode FAILFAST."""
        return by_mode(*self.parsed(lines), self._mode)

    def parsed(self, lines: Sequence[bytes] | Sequence[Record]) -> tuple[pa.RecordBatch, dict[int, BadLine]]:
        """Returns the rows of lines, bad ones too, and which are bad, by their places. Ignores the mode.

        Raises BadRecordError for a line that Spark would not read as one, or not read at all.
        """
        given = [line if isinstance(line, Record) else decoded(line, self._codec) for line in lines]
        for number, each in enumerate(given if len(self._options["lineSep"] or "") > 1 else ()):
            if isinstance(each, str) and "\n" in each:
                raise BadRecordError(
                    number, "it has a line feed, at which Spark ends records, too, when lineSep has two characters"
                )
        numbers = [at for at, each in enumerate(given) if isinstance(each, Record) or self._has_record(each)]
        records: Any = [given[number] for number in numbers]
        bad: dict[int, str] = {}
        try:
            columns = self._parser.columns(records, bad)
        except TooManyFieldsError as error:
            raise BadRecordError(error.record, str(error)) from error
        if self._corrupt is not None:
            texts = [each.text if isinstance(each, Record) else each for each in records]
            marked = [text if row in bad else None for row, text in enumerate(texts)]
            columns.insert(self._corrupt, pa.array(marked, pa.string()))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        found = {row: BadLine(numbers[row], reason, self._raw(lines[numbers[row]])) for row, reason in bad.items()}
        return batch, found

    def _raw(self, line: bytes | Record) -> bytes:
        return line.text.encode(self._codec, "replace") if isinstance(line, Record) else line

    def _has_record(self, text: str) -> bool:
        return bool(text.strip(WHITE)) and not (self._comment and text.startswith(self._comment))


def _check(options: Mapping[str, Any], schema: pa.Schema) -> None:
    mode = checked_mode(options)
    if options["multiLine"] and options["lineSep"]:
        raise PlanError("option 'lineSep'", "with multiLine, lines end as the first line of a file does: remove it")
    corrupt = options["columnNameOfCorruptRecord"]
    check_corrupt_column(corrupt, schema)
    if (mode != "PERMISSIVE" or corrupt in schema.names) and options["columnPruning"]:
        what = f"option 'mode' {mode}" if mode != "PERMISSIVE" else f"the column of bad records, {corrupt!r}"
        raise PlanError(
            "option 'columnPruning'",
            f"{what}: in Spark, the columns that its optimizer keeps decide which records are bad; set columnPruning "
            "to false, so that all columns of the schema count in Spark and here",
        )


JSON_OPTIONS = (
    *_only(allowSingleQuotes="true", allowNonNumericNumbers="true", allowNumericLeadingZeros="false"),
    *_only(allowUnquotedFieldNames="false", allowUnquotedControlChars="false", allowComments="false"),
    *_only(allowBackslashEscapingAnyCharacter="false"),
    *TEXT_OPTIONS,
    Option("primitivesAsString", bool, False),
    Option("prefersDecimal", bool, False),
    Option("dropFieldIfAllNull", bool, False),
    *_RECORD_OPTIONS,
)


class JsonRows:
    """Parses documents to rows. Raises PlanError for a type, mode or format that it cannot handle as Spark does.

    A document is a line, or with ``multiLine`` a file. An array makes a row of each element, a blank text none. A
    number, an object or an array read as a text is a part of the document; it is serialised again if ``copies`` is set,
    or in a document with a named encoding.
    """

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema, *, copies: bool = False) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type

        self._mode = checked_mode(options)
        codec = codec_of(options, plain=("utf-8",))
        named = options["encoding"]
        self._is_named = bool(named)
        self._codec = None if options["multiLine"] and not named else codec
        self._schema = schema
        self._corrupt: str = options["columnNameOfCorruptRecord"]
        check_corrupt_column(self._corrupt, schema)
        type_ = from_arrow_schema(schema).jsonValue()
        self._nothing = dict.fromkeys(schema.names)
        type_["fields"] = [field for field in type_["fields"] if field["name"] != self._corrupt]
        given = {key: options[key] for key in _FORMATS if options[key]}
        try:
            self._read = record_reader(type_, options["timeZone"], given, exact=not named and not copies)
            kinds = [arrow_type(from_arrow_type(field.type).jsonValue()) for field in schema]
            self._stored = pa.struct([pa.field(name, kind) for name, kind in zip(schema.names, kinds, strict=True)])
        except UnsupportedExpressionError as error:
            raise PlanError("schema", f"format 'json': {error}") from error

    def whole(self, data: bytes) -> Iterator[Sequence[bytes]]:
        """Yields the only document of a file, for :meth:`parsed`."""
        yield [data]

    def rows(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """Returns the rows of lines. Raises BadRecordError in mode FAILFAST."""
        return by_mode(*self.parsed(lines), self._mode)

    def parsed(self, lines: Sequence[bytes]) -> tuple[pa.RecordBatch, dict[int, BadLine]]:
        """Returns the rows of lines, bad ones too, and which are bad, by their places.

        In other modes than PERMISSIVE a bad line is one row, even if parts of it were read.
        """
        rows: list[dict[str, Any]] = []
        bad: dict[int, BadLine] = {}
        has_column, keeps = self._corrupt in self._nothing, self._mode == "PERMISSIVE"
        for number, line in enumerate(lines):
            text = self._text(line)
            found, is_bad = ([], True) if text is None else self._read(text)
            if is_bad:
                bad[len(rows)] = BadLine(number, "it is not JSON of the schema's types", line)
                found = (found if keeps else []) or [dict(self._nothing)]
                if has_column:
                    for row in found:
                        row[self._corrupt] = line.decode("utf-8", "replace")  # in any encoding, as in Spark
            rows += found
        array = pa.array(rows, self._stored)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(array.flatten(), self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema), bad

    def _text(self, line: bytes) -> str | None:
        """The text of a document; None for bytes that are not UTF-8 unless an encoding is named, as in Spark."""
        codec = self._codec or detected(line)
        if self._is_named or not codec.startswith("utf-8"):
            return decoded(line, codec)
        try:
            return line.decode(codec)
        except UnicodeDecodeError:
            return None
