"""Python functions whose results Spark reads from pickles (``udf(..., useArrow=False)``).

Spark turns a result that does not have the declared type into null, truncates integers to their width, and converts any
value to text for a string column; see ``EvaluatePython.makeFromJava`` in Spark.
"""

# PySpark's conversions have no public form.
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.texts import double_text
from ckpt_runtime.expressions.types import SparkType, arrow_type, decimal_of
from ckpt_runtime.graph.specs import PythonFunction
from ckpt_runtime.operators.errors import UserFunctionError

_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
Convert = Callable[[Any], Any]


def row_functions(
    functions: Sequence[PythonFunction], input_type: SparkType
) -> Callable[[int, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns a function from batches of arguments to batches of results, a column for each function."""
    from pyspark.sql.conversion import ArrowTableToRowsConversion
    from pyspark.sql.types import _parse_datatype_json_value

    assert isinstance(input_type, dict)
    given = [
        ArrowTableToRowsConversion._create_converter(
            _parse_datatype_json_value(field["type"]), none_on_identity=True, binary_as_bytes=True
        )
        for field in input_type["fields"]
    ]
    callables = [_called(function) for function in functions]
    types = [arrow_type(function.type) for function in functions]
    names = [f"_{at}" for at in range(len(functions))]

    def run(_: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            columns = [
                column.to_pylist() if convert is None else [convert(value) for value in column.to_pylist()]
                for column, convert in zip(batch.columns, given, strict=True)
            ]
            rows = list(zip(*columns, strict=True)) if columns else [()] * batch.num_rows
            arrays = [pa.array([call(row) for row in rows], kind) for call, kind in zip(callables, types, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, names)

    return run


def _called(function: PythonFunction) -> Callable[[tuple[Any, ...]], Any]:
    """Returns a function from a row of arguments to the value of the result's column."""
    from pyspark.sql.types import _parse_datatype_json_value

    first, *others = function.chain
    positions, named = function.positions, dict(function.named)
    type_ = _parse_datatype_json_value(function.type)
    internal: Convert | None = type_.toInternal if type_.needConversion() else None
    convert = _from_pickle(function.type)

    def call(row: tuple[Any, ...]) -> Any:
        value = first(*[row[at] for at in positions], **{name: row[at] for name, at in named.items()})
        for other in others:
            value = other(value)
        if internal is not None:
            value = internal(value)
        return None if value is None else convert(value)

    return call


def _from_pickle(type_: SparkType) -> Convert:
    """Returns a function that converts a result, in which dates and times are numbers, to a value for Arrow."""
    if isinstance(type_, dict):
        return _nested(type_)
    if type_ in _BITS:
        return lambda value: _cut(value, _BITS[type_])
    if found := decimal_of(type_):
        return lambda value: _decimal(value, *found) if isinstance(value, Decimal) else None
    if type_ == "boolean":
        return lambda value: value if isinstance(value, bool) else None
    if type_ in ("float", "double"):
        return lambda value: value if isinstance(value, float) else None
    if type_ == "binary":
        return _bytes
    if type_ == "string":
        return _text
    return lambda value: _cut(value, 64)  # dates, timestamps and intervals are numbers here


def _nested(type_: dict[str, Any]) -> Convert:
    if type_["type"] == "array":
        element = _from_pickle(type_["elementType"])
        return lambda value: [_or_none(element, each) for each in value] if isinstance(value, list | tuple) else None
    if type_["type"] == "map":
        key, item = _from_pickle(type_["keyType"]), _from_pickle(type_["valueType"])
        return lambda value: (
            [(_or_none(key, one), _or_none(item, other)) for one, other in value.items()]
            if isinstance(value, dict)
            else None
        )
    names = [field["name"] for field in type_["fields"]]
    fields = [_from_pickle(field["type"]) for field in type_["fields"]]

    def struct(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return None
        if len(value) != len(fields):
            raise UserFunctionError(f"a function returned {len(value)} values for the {len(fields)} fields {names}")
        return {name: _or_none(field, each) for name, field, each in zip(names, fields, value, strict=True)}

    return struct


def _or_none(convert: Convert, value: Any) -> Any:
    return None if value is None else convert(value)


def _cut(value: Any, bits: int) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool) or not -(1 << 63) <= value < 1 << 63:
        return None
    half = 1 << (bits - 1)
    return (value + half) % (1 << bits) - half


def _decimal(value: Decimal, precision: int, scale: int) -> Decimal:
    rounded = value.quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)
    if len(rounded.as_tuple().digits) > precision:
        raise UserFunctionError(f"a function returned {value}, which does not fit decimal({precision},{scale})")
    return rounded


def _bytes(value: Any) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    return bytes(value) if isinstance(value, bytes | bytearray) else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return double_text(value)
    raise UserFunctionError(
        f"a function returned {type(value).__name__} where a string is declared; Spark would convert it with Java's "
        "format: return str"
    )
