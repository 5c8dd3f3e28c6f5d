"""Files of text that the engine itself writes: lines as Spark's writers of ``csv``, ``json`` and ``text`` make them.

A line of ``csv`` is that of ``to_csv``, and one of ``json`` that of ``to_json``: in Spark, functions and writers share
the code that makes them.
"""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Evaluator, Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option

_TIMES = ("dateFormat", "timestampFormat", "timestampNTZFormat")
_LINES = (
    Option("lineSep", default="\n"),
    Option("compression", default="none", choices=("none", "uncompressed", "gzip", "bzip2")),
)
_VALUES = tuple(map(Option, _TIMES))
_CSV = ("sep", "delimiter", "quote", "escape", "nullValue", "emptyValue", "quoteAll")
_CSV_BLANKS = ("ignoreLeadingWhiteSpace", "ignoreTrailingWhiteSpace")

TEXT_OUTPUTS: dict[str, tuple[Option, ...]] = {
    "csv": (*_LINES, *_VALUES, *map(Option, (*_CSV, *_CSV_BLANKS)), Option("header", bool, False)),
    "json": (*_LINES, *_VALUES, Option("ignoreNullFields")),
    "text": _LINES,
}
"""The options of each format, in addition to those of every directory of files."""

_FUNCTIONS = {"csv": "StructsToCsv", "json": "StructsToJson"}
_COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, mtime=0),
    "bzip2": bz2.compress,
}


class TextOutput:
    """Turns rows of a schema into the bytes of a file. A compressed file has a member for each call."""

    def __init__(self, format_: str, options: Mapping[str, Any], schema: pa.Schema) -> None:
        """``options`` are the parsed ones. Raises PlanError for rows or options that Spark does not write like this."""
        self._end: str = options["lineSep"]
        self._compressed = _COMPRESSIONS.get(options["compression"], bytes)
        self._stored = schema
        self._line: Evaluator | None = None
        header = None
        if format_ == "text":
            if schema.types != [pa.string()]:
                raise PlanError("format", "'text' writes a single text column; select it, as in to_json(struct('*'))")
        else:
            self._stored, self._line = _line(format_, options, schema)
        if format_ == "csv" and options["header"]:
            names = pa.table({name: [name] for name in schema.names})
            stored, line = _line(format_, options, names.schema)
            header = _lines(names, stored, line)
        self._header = header

    def header(self) -> bytes:
        """The bytes at the beginning of a file."""
        return b"" if self._header is None else self._bytes(self._header)

    def rows(self, rows: pa.Table) -> bytes:
        if self._line is None:
            return self._bytes(pc.fill_null(rows.column(0), ""))
        return self._bytes(_lines(rows, self._stored, self._line))

    def _bytes(self, lines: Any) -> bytes:
        text = "".join(f"{line}{self._end}" for line in lines.to_pylist() if line is not None)
        return self._compressed(text.encode())


def _line(format_: str, options: Mapping[str, Any], schema: pa.Schema) -> tuple[pa.Schema, Evaluator]:
    """Returns the schema that rows have to have for an evaluator, and the evaluator of their lines."""
    from pyspark.sql.pandas.types import from_arrow_schema

    try:
        type_ = from_arrow_schema(schema).jsonValue()
        given = {
            option.key: str(options[option.key])
            for option in TEXT_OUTPUTS[format_]
            if options[option.key] is not None and option not in _LINES and option.key != "header"
        }
        settings = {"options": given, "zone": options["timeZone"]}
        call = Call(_FUNCTIONS[format_], (Column(0, type_),), "string", settings=settings)
        kinds = arrow_type(type_)
        return pa.schema(list(kinds)), compile_expression(call)
    except UnsupportedExpressionError as error:
        raise PlanError("format", f"{format_!r}: {error}; select other columns, or write parquet") from error


def _lines(rows: pa.Table, stored: pa.Schema, line: Evaluator) -> pa.Array:
    if not rows.num_rows:
        return pa.array([], pa.string())
    columns = [column.combine_chunks().cast(field.type) for column, field in zip(rows.columns, stored, strict=True)]
    structs = pa.StructArray.from_arrays(columns, fields=list(stored))
    return evaluate(line, Frame([structs], len(structs)), pa.string())
