"""Formats ``csv`` and ``json``: which schemas and options they take, and how lines become rows, as in Spark's readers.

``expressions/csv_values.py`` parses records of CSV. Values of JSON are read as ``from_json`` reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.csv_reader import fields_of
from ckpt_runtime.expressions.csv_values import WHITE, CsvParser, TooManyFieldsError, character_option
from ckpt_runtime.expressions.functions.documents import record_reader
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.graph.bad_rows import BadLine, BadRecordError, by_mode, check_corrupt_column, checked_mode
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option

CSV_OPTIONS = (
    Option("sep", default=","),
    Option("delimiter"),
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
    Option("lineSep"),
    Option("encoding"),
    Option("charset"),
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    Option("columnPruning", bool, True),
    Option("multiLine", bool, False),
    Option("dateFormat"),
    Option("timestampFormat"),
    Option("timestampNTZFormat"),
    Option("timeZone", default="UTC"),
)

_CODECS = {"utf-8": "utf-8", "utf8": "utf-8", "iso-8859-1": "latin-1", "us-ascii": "ascii"}


class CsvRows:
    """Parses lines of a file to rows. Raises PlanError for an option or a type that it cannot handle as Spark does."""

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        _check(options, schema)
        self._options = options
        self._schema = schema
        self._mode = options["mode"].upper()
        self._codec = _CODECS[(options["encoding"] or options["charset"] or "utf-8").lower()]
        corrupt = options["columnNameOfCorruptRecord"]
        self._corrupt = schema.get_field_index(corrupt) if corrupt in schema.names else None
        self._names = [name for name in schema.names if name != corrupt]
        try:
            self._comment = character_option("comment", options["comment"] or "")
            self._parser = CsvParser(options, pa.schema([schema.field(name) for name in self._names]))
        except UnsupportedExpressionError as error:
            raise PlanError(error.what, error.why) from error

    def header(self, line: bytes) -> str | None:
        """Checks the header line of a file: returns None for a blank line or a comment, otherwise what is wrong with
        it.

        The result is empty if nothing is wrong, or if option ``enforceSchema`` is set.
        """
        text = line.decode(self._codec, "replace")
        if not self._has_record(text):
            return None
        if self._options["enforceSchema"]:
            return ""
        found = fields_of(text, self._parser.dialect)
        if [name.lower() for name in found] == [name.lower() for name in self._names]:
            return ""
        return f"its header names the columns {', '.join(found)}, but the schema {', '.join(self._names)}"

    def rows(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """Returns the rows of lines; blank lines and comments produce none. Raises BadRecordError in mode FAILFAST."""
        return by_mode(*self.parsed(lines), self._mode)

    def parsed(self, lines: Sequence[bytes]) -> tuple[pa.RecordBatch, dict[int, BadLine]]:
        """Returns the rows of lines, bad ones too, and which are bad, by their places. Ignores the mode."""
        decoded = [line.decode(self._codec, "replace") for line in lines]
        numbers = [number for number, text in enumerate(decoded) if self._has_record(text)]
        records = [decoded[number] for number in numbers]
        bad: dict[int, str] = {}
        try:
            columns = self._parser.columns(records, bad)
        except TooManyFieldsError as error:
            raise BadRecordError(error.record, str(error)) from error
        if self._corrupt is not None:
            marked = [text if row in bad else None for row, text in enumerate(records)]
            columns.insert(self._corrupt, pa.array(marked, pa.string()))
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        found = {row: BadLine(numbers[row], reason, lines[numbers[row]]) for row, reason in bad.items()}
        return batch, found

    def _has_record(self, text: str) -> bool:
        return bool(text.strip(WHITE)) and not (self._comment and text.startswith(self._comment))


def _check(options: Mapping[str, Any], schema: pa.Schema) -> None:
    mode = checked_mode(options)
    if options["multiLine"]:
        raise PlanError("option 'multiLine'", "records over several lines are not supported yet")
    encoding = options["encoding"] or options["charset"] or "utf-8"
    if encoding.lower() not in _CODECS:
        raise PlanError("option 'encoding'", f"{encoding!r} is not one of UTF-8, ISO-8859-1, US-ASCII")
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
    Option("lineSep"),
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    Option("dateFormat"),
    Option("timestampFormat"),
    Option("timestampNTZFormat"),
    Option("timeZone", default="UTC"),
)

_FORMATS = ("dateFormat", "timestampFormat", "timestampNTZFormat")


class JsonRows:
    """Parses lines of a file to rows. Raises PlanError for a type, mode or format that it cannot handle as Spark does.

    A line with an array produces a row for each element, a blank line none.
    """

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._mode = checked_mode(options)
        self._schema = schema
        self._corrupt: str = options["columnNameOfCorruptRecord"]
        check_corrupt_column(self._corrupt, schema)
        type_ = from_arrow_schema(schema).jsonValue()
        self._nothing = dict.fromkeys(schema.names)
        type_["fields"] = [field for field in type_["fields"] if field["name"] != self._corrupt]
        given = {key: options[key] for key in _FORMATS if options[key]}
        try:
            self._read = record_reader(type_, options["timeZone"], given)
            self._stored = pa.struct([pa.field(field.name, self._kind(field)) for field in schema])
        except UnsupportedExpressionError as error:
            raise PlanError("schema", f"format 'json': {error}") from error

    def rows(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """Returns the rows of lines. Raises BadRecordError in mode FAILFAST."""
        return by_mode(*self.parsed(lines), self._mode)

    def parsed(self, lines: Sequence[bytes]) -> tuple[pa.RecordBatch, dict[int, BadLine]]:
        """Returns the rows of lines, bad ones too, and which are bad, by their places.

        In other modes than PERMISSIVE a bad line is one row, whatever was read of it.
        """
        rows: list[dict[str, Any]] = []
        bad: dict[int, BadLine] = {}
        has_column, keeps = self._corrupt in self._nothing, self._mode == "PERMISSIVE"
        for number, line in enumerate(lines):
            text = line.decode("utf-8", "replace")
            found, is_bad = self._read(text)
            if is_bad:
                bad[len(rows)] = BadLine(number, "it is not JSON of the schema's types", line)
                found = (found if keeps else []) or [dict(self._nothing)]
                if has_column:
                    for row in found:
                        row[self._corrupt] = text
            rows += found
        array = pa.array(rows, self._stored)
        columns = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(array.flatten(), self._schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema), bad

    def _kind(self, field: pa.Field) -> pa.DataType:
        from pyspark.sql.pandas.types import from_arrow_type

        return arrow_type(from_arrow_type(field.type).jsonValue())
