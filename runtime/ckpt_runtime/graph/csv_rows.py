"""Format ``csv``: which schemas and options it takes, and how lines are parsed to rows, as in Spark's reader.

``expressions/csv_values.py`` parses the records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.csv_reader import Record, fields_of, records_of
from ckpt_runtime.expressions.csv_values import WHITE, CsvParser, TooManyFieldsError, character_option
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.graph.bad_rows import BadLine, BadRecordError, by_mode, check_corrupt_column, checked_mode
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option
from ckpt_runtime.graph.text_files import TEXT_OPTIONS, codec_of, decoded

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
    *TEXT_OPTIONS,
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    Option("columnPruning", bool, True),
    Option("dateFormat"),
    Option("timestampFormat"),
    Option("timestampNTZFormat"),
    Option("timeZone", default="UTC"),
)

MOST_RECORDS = 8192
"""How many records of a file with ``multiLine`` are parsed at a time."""


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
        """Checks the header of a file: returns None for a blank line or a comment, otherwise what is wrong with it.

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
        """Returns the rows of lines, bad ones too, and which are bad, by their places. Ignores the mode."""
        given = [line if isinstance(line, Record) else decoded(line, self._codec) for line in lines]
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
