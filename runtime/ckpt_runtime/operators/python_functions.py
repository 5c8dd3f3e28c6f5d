"""Calls an author's Python functions on batches, with PySpark's own code around them.

The work of Spark's Python workers between Arrow and the author's function (conversions, checks of results, named
arguments, iterators) is done by the same code: ``pyspark.worker`` runs in this process. It is given the function
objects themselves; Spark's workers get pickles.

Results that Spark reads from pickles (``udf(..., useArrow=False)``) are converted as there: Spark turns a result that
does not have the declared type into null, truncates integers to their width, and converts any value to text for a
string column; see ``EvaluatePython.makeFromJava`` in Spark.

``mapInArrow`` has the form ``func(iterator of batches) -> iterator of batches``. The function is called once per buffer
with an iterator of that one batch, so that no rows are kept across a barrier. Its result is checked against the
declared schema as in Spark: types are compared by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.texts import double_text
from ckpt_runtime.expressions.types import SparkType, arrow_type, decimal_of
from ckpt_runtime.graph.specs import (
    ZONE_OPTION,
    MapInArrowSpec,
    PythonFunction,
    PythonFunctionsSpec,
    SparkForm,
    most_rows,
)
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows
from ckpt_runtime.operators.conformed import conformed_result
from ckpt_runtime.operators.errors import UserFunctionError
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.task_context import new_task, running
from ckpt_runtime.state.columns import in_type

_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}
Convert = Callable[[Any], Any]


def row_functions(
    functions: Sequence[PythonFunction], input_type: SparkType
) -> Callable[[int, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Returns a function from batches of arguments to batches of results, a column for each function."""
    from pyspark.sql.conversion import ArrowTableToRowsConversion

    assert isinstance(input_type, dict)
    given = [
        ArrowTableToRowsConversion._create_converter(  # noqa: SLF001 -- PySpark's conversions have no public form
            _data_type(field["type"]), none_on_identity=True, binary_as_bytes=True
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
    first, *others = function.chain
    positions, named = function.positions, dict(function.named)
    type_ = _data_type(function.type)
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


_PICKLED = 100
"""PySpark's number for functions whose results Spark reads from pickles."""

WorkerFunction = Callable[[int, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


class PythonFunctionsOperator(LeavesOutBadRows):
    """Built from a :class:`PythonFunctionsSpec`."""

    caught_for_bad_rows = Exception
    requires_final_checkpoint = False

    def __init__(self, spec: PythonFunctionsSpec) -> None:
        self._spec = spec
        self._carried = len(spec.schema) - len(spec.functions)
        fields = [
            {"name": f"_{at}", "type": kind, "nullable": True, "metadata": {}} for at, kind in enumerate(spec.arguments)
        ]
        input_type = {"type": "struct", "fields": fields}
        self._arguments = arrow_schema_of(input_type, spec.settings)
        if spec.eval_type == _PICKLED:
            self._call: WorkerFunction = row_functions(spec.functions, input_type)
        else:
            self._call = worker_function(spec.eval_type, spec.functions, spec.settings, input_type)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part, arrays in self._parts(batch, self._computed):
            self._emit_from(part, pa.RecordBatch.from_arrays(arrays, schema=self._spec.schema))

    def _computed(self, batch: pa.RecordBatch) -> list[pa.Array]:
        names = ", ".join(function.name for function in self._spec.functions)
        try:
            with running(new_task(self.context.subtask_index, self.context.attempt)):
                parts = list(self._call(0, iter(list(self._argument_batches(batch)))))
        except Exception as error:
            error.add_note(f"in the Python function {names} of operator {self.context.uid!r}")
            raise
        results = pa.Table.from_batches(parts).combine_chunks()
        arrays: list[pa.Array] = batch.columns[: self._carried]
        for column, field in zip(results.columns, list(self._spec.schema)[self._carried :], strict=True):
            arrays.append(pa.concat_arrays(column.chunks).cast(field.type))
        return arrays

    def _argument_batches(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        most = most_rows(self._spec.settings)
        if not self._arguments:
            for start in range(0, batch.num_rows, most):
                rows = min(most, batch.num_rows - start)
                yield pa.record_batch([pa.nulls(rows)], ["_"]).select([])
            return
        columns = batch.columns[self._carried :]
        yield from in_spark_form(columns, self._arguments, most)


def in_spark_form(columns: Sequence[pa.Array], schema: pa.Schema, most: int) -> Iterator[pa.RecordBatch]:
    """Yields batches as Spark sends them to a function: with its Arrow types and at most so many rows."""
    arrays = [in_type(column, field.type) for column, field in zip(columns, schema, strict=True)]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    for start in range(0, whole.num_rows, most):
        yield whole.slice(start, most)


def arrow_schema_of(type_: SparkType, settings: Mapping[str, str]) -> pa.Schema:
    """Returns the Arrow schema with which Spark sends rows of a struct to Python functions."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(_data_type(type_), timezone=settings.get(ZONE_OPTION, "UTC"))


def in_form(function: Callable[..., Any], form: SparkForm) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    """Returns a function over the engine's batches calling one of ``mapInArrow`` or ``mapInPandas``, as Spark does."""
    from pyspark.sql.conversion import ArrowBatchTransformer
    from pyspark.util import PythonEvalType

    schema, most = arrow_schema_of(form.given, form.settings), most_rows(form.settings)

    def parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from in_spark_form(batch.columns, schema, most)

    if not form.in_pandas:
        return lambda batches: function(parts(batches))
    named = PythonFunction(getattr(function, "__name__", "function"), (function,), (), {}, form.made)
    call = worker_function(PythonEvalType.SQL_MAP_PANDAS_ITER_UDF, (named,), form.settings, form.given)

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        wrapped = map(ArrowBatchTransformer.wrap_struct, parts(batches))
        yield from map(ArrowBatchTransformer.flatten_struct, call(0, wrapped))

    return run


class _Objects:
    """Replaces the deserializer of Spark's Python worker: the "commands" that it reads are the function objects."""

    def _read_with_length(self, command: Any) -> Any:
        return command


def worker_function(
    eval_type: int, functions: Sequence[PythonFunction], settings: Mapping[str, str], input_type: SparkType
) -> WorkerFunction:
    """Returns the function that Spark's Python worker would run for these functions.

    ``settings`` are the Spark options that it reads. The returned function takes an index and batches, and yields
    batches.
    """
    import json

    from pyspark import worker
    from pyspark.worker_message import UDFInfo

    arguments: list[Any] = [
        UDFInfo(
            udfs=[(each, _data_type(function.type)) for each in function.chain],  # type: ignore[misc]
            args=list(function.positions),
            kwargs=dict(function.named),
            result_id=at,
        )
        for at, function in enumerate(functions)
    ]
    options = worker.RunnerConf(
        {ZONE_OPTION: "UTC", "spark.sql.execution.pandas.convertToArrowArraySafely": "true", **settings}
    )
    more = worker.EvalConf({"input_type": json.dumps(input_type)})
    call: WorkerFunction = worker.read_udfs(_Objects(), arguments, eval_type, options, more)[0]
    return call


def _data_type(type_: SparkType) -> Any:
    from pyspark.sql.types import _parse_datatype_json_value

    return _parse_datatype_json_value(type_)


class MapInArrowOperator(Operator):
    """Built from a :class:`MapInArrowSpec`."""

    def __init__(self, spec: MapInArrowSpec) -> None:
        self._function = spec.func if spec.form is None else in_form(spec.func, spec.form)
        self._schema = spec.schema
        self.requires_final_checkpoint = getattr(spec.func, "requires_final_checkpoint", False) is True

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        with running(new_task(self.context.subtask_index, self.context.attempt)):
            self._apply(batch)

    def _apply(self, batch: pa.RecordBatch) -> None:
        result = self._function(iter((batch,)))
        if not isinstance(result, Iterable) or isinstance(result, pa.RecordBatch | pa.Table):
            raise UserFunctionError(
                f"the function of operator {self.context.uid!r} returned {type(result).__name__}, "
                "it must return an iterator of pyarrow.RecordBatch"
            )
        for part in result:
            if not isinstance(part, pa.RecordBatch):
                raise UserFunctionError(
                    f"the function of operator {self.context.uid!r} returned a {type(part).__name__}, it must return "
                    "pyarrow.RecordBatch"
                )
            conformed = conformed_result(part, self._schema, self.context.uid)
            if conformed.num_rows:
                self.output.emit(conformed)
