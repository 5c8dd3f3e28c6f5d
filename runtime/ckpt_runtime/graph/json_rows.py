"""Format ``json``: which schemas and options it takes, and the expression that parses lines to rows.

Rows are made as ``from_json`` makes them, which is compared with Spark function by function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option

JSON_OPTIONS = (
    Option("lineSep"),
    Option("mode", default="PERMISSIVE"),
    Option("columnNameOfCorruptRecord", default="_corrupt_record"),
    Option("dateFormat"),
    Option("timestampFormat"),
    Option("timestampNTZFormat"),
    Option("timeZone", default="UTC"),
)

RowsOfLines = Callable[[list[str]], pa.RecordBatch]


def json_rows(options: Mapping[str, Any], schema: pa.Schema) -> RowsOfLines:
    """Returns the parser of lines. Raises PlanError for a type, mode or format that it cannot handle as Spark does.

    A line with an array produces a row for each element, a blank line none.
    """
    if options["mode"].upper() != "PERMISSIVE":
        raise PlanError(
            "option 'mode'",
            f"{options['mode']!r} is not supported yet; read format 'text' and filter what from_json gives",
        )
    if options["columnNameOfCorruptRecord"] in schema.names:
        raise PlanError(
            "schema",
            f"the column of bad records, {options['columnNameOfCorruptRecord']!r}, is not supported yet; read "
            "format 'text' and keep the lines beside what from_json gives",
        )
    row = _spark_type(schema)
    given = {key: options[key] for key in ("dateFormat", "timestampFormat", "timestampNTZFormat") if options[key]}
    settings = {"options": given, "zone": options["timeZone"]}

    def compiled(type_: SparkType) -> Callable[[list[str]], pa.Array]:
        try:
            evaluator = compile_expression(Call("JsonToStructs", (Column(0, "string"),), type_, settings=settings))
        except UnsupportedExpressionError as error:
            raise PlanError("schema", f"format 'json': {error}") from error
        wanted = pa.struct(list(schema)) if type_ is row else pa.list_(pa.struct(list(schema)))
        return lambda lines: evaluate(evaluator, Frame([pa.array(lines, pa.string())], len(lines)), wanted)

    objects, arrays = compiled(row), compiled({"type": "array", "elementType": row, "containsNull": True})

    def rows(lines: list[str]) -> pa.RecordBatch:
        lines = [line for line in lines if line.strip()]
        if any(line.lstrip().startswith("[") for line in lines):
            # A line with an array that holds anything but objects produces one row of nulls, as any bad line does.
            found: list[Any] = []
            for line in lines:
                if line.lstrip().startswith("["):
                    elements = arrays([line]).to_pylist()[0]
                    found += [{}] if elements is None else [element or {} for element in elements]
                else:
                    found += objects([line]).to_pylist()
            return pa.RecordBatch.from_pylist([row or {} for row in found], schema=schema)
        structs = objects(lines)
        return pa.RecordBatch.from_arrays(structs.flatten(), schema=schema)

    return rows


def _spark_type(schema: pa.Schema) -> dict[str, Any]:
    from pyspark.sql.pandas.types import from_arrow_schema

    type_: dict[str, Any] = from_arrow_schema(schema).jsonValue()
    return type_
