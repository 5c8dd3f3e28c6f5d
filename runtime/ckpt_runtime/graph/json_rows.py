"""Format ``json``: which schemas and options it takes, and how lines are parsed to rows, as in Spark's reader.

The values of a row are read as ``from_json`` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.functions.documents import record_reader
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.graph.bad_rows import BadLine, by_mode, check_corrupt_column, checked_mode
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option
from ckpt_runtime.graph.text_files import TEXT_OPTIONS, codec_of, decoded, detected

JSON_OPTIONS = (
    *TEXT_OPTIONS,
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    Option("dateFormat"),
    Option("timestampFormat"),
    Option("timestampNTZFormat"),
    Option("timeZone", default="UTC"),
)

_FORMATS = ("dateFormat", "timestampFormat", "timestampNTZFormat")


class JsonRows:
    """Parses documents to rows. Raises PlanError for a type, mode or format that it cannot handle as Spark does.

    A document is a line, or with ``multiLine`` a file. An array makes a row of each element, a blank text none.
    """

    def __init__(self, options: Mapping[str, Any], schema: pa.Schema) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._mode = checked_mode(options)
        codec = codec_of(options, plain=("utf-8",))
        named = options["encoding"] or options["charset"]
        self._codec = None if options["multiLine"] and not named else codec
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

    def whole(self, data: bytes) -> Iterator[Sequence[bytes]]:
        """Yields the only document of a file, for :meth:`parsed`."""
        yield [data]

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
            found, is_bad = self._read(decoded(line, self._codec or detected(line)))
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

    def _kind(self, field: pa.Field) -> pa.DataType:
        from pyspark.sql.pandas.types import from_arrow_type

        return arrow_type(from_arrow_type(field.type).jsonValue())
