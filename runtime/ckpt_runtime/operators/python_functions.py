"""Calls an author's Python functions on batches, with PySpark's own code around them.

What Spark's Python workers do between Arrow and the author's function (conversions, checks of results, named arguments,
iterators) is done by the same code: ``pyspark.worker`` runs in this process. It is given the function objects
themselves; Spark's workers get pickles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.graph.specs import PythonFunction, PythonFunctionsSpec, SparkForm
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows
from ckpt_runtime.operators.row_functions import row_functions
from ckpt_runtime.operators.task_context import new_task, running
from ckpt_runtime.state.columns import plain

BATCH_ROWS = 10_000
"""Maximum number of rows that a function gets at once, which is Spark's default."""
_PICKLED = 100
"""PySpark's number for functions whose results Spark reads from pickles."""
ZONE = "spark.sql.session.timeZone"

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
        for _, arrays in self._parts(batch, self._computed):
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._spec.schema))

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
        if not self._arguments:
            for start in range(0, batch.num_rows, BATCH_ROWS):
                rows = min(BATCH_ROWS, batch.num_rows - start)
                yield pa.record_batch([pa.nulls(rows)], ["_"]).select([])
            return
        columns = batch.columns[self._carried :]
        yield from in_spark_form(columns, self._arguments)


def in_spark_form(columns: Sequence[pa.Array], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields batches as Spark sends them to a function: with its Arrow types and at most :data:`BATCH_ROWS` rows."""
    arrays = [
        column if column.type == field.type else plain(column).cast(field.type)
        for column, field in zip(columns, schema, strict=True)
    ]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    for start in range(0, whole.num_rows, BATCH_ROWS):
        yield whole.slice(start, BATCH_ROWS)


def arrow_schema_of(type_: SparkType, settings: Mapping[str, str]) -> pa.Schema:
    """Returns the Arrow schema with which Spark sends rows of a struct to Python functions."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(_data_type(type_), timezone=settings.get(ZONE, "UTC"))


def in_form(function: Callable[..., Any], form: SparkForm) -> Callable[[Iterator[pa.RecordBatch]], Any]:
    """Returns a function over the engine's batches calling one of ``mapInArrow`` or ``mapInPandas``, as Spark does."""
    from pyspark.sql.conversion import ArrowBatchTransformer
    from pyspark.util import PythonEvalType

    schema = arrow_schema_of(form.given, form.settings)

    def parts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from in_spark_form(batch.columns, schema)

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
        {ZONE: "UTC", "spark.sql.execution.pandas.convertToArrowArraySafely": "true", **settings}
    )
    more = worker.EvalConf({"input_type": json.dumps(input_type)})
    call: WorkerFunction = worker.read_udfs(_Objects(), arguments, eval_type, options, more)[0]
    return call


def _data_type(type_: SparkType) -> Any:
    from pyspark.sql.types import _parse_datatype_json_value

    return _parse_datatype_json_value(type_)
