"""``stream.groupBy(...)``: keyed operators, which follow the conventions of PySpark's ``GroupedData``."""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from ckpt_runtime.api import functions, pyspark_names
from ckpt_runtime.api.checks import chosen
from ckpt_runtime.api.functions import AggregateExpression
from ckpt_runtime.api.pyspark_names import NamesOfPySpark
from ckpt_runtime.api.stream import Stream
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column, has_watermark
from ckpt_runtime.graph.expressions import check_columns, kind_text
from ckpt_runtime.graph.schemas import SchemaDerivationError, aggregate_output_schema
from ckpt_runtime.graph.specs import AggregateSpec, ProcessSpec

_OUTPUT_MODES = {"append": "Append", "update": "Update"}
_TIME_MODES = {"none": "None", "processingtime": "ProcessingTime", "eventtime": "EventTime"}
_PROCESSOR_METHODS = ("init", "handleInputRows", "close")


class GroupedStream(NamesOfPySpark):
    """A stream split by key; ``agg`` and ``transformWithState`` keep state per key."""

    _missing = pyspark_names.GROUPED

    def __init__(self, stream: Stream, keys: tuple[str, ...]) -> None:
        self._stream = stream
        self._keys = keys

    def agg(self, *exprs: AggregateExpression) -> Stream:
        """Keeps running aggregates: emits one row with the keys and the updated values per input row.

        :param exprs: aggregate functions of this module, with ``alias`` for names of their own.
        :raises PlanError: no aggregate, a column that is not there or cannot be aggregated, or one name twice
        """
        schema = self._stream.schema
        if not exprs:
            raise PlanError("agg", "no aggregate given; e.g. agg(count(), sum('x').alias('total'))")
        taken = set(self._keys)
        for column in exprs:
            _check_aggregate(column)
            if column.column is not None:
                check_columns([column.column], schema, f"agg: {column.function}")
            if column.name in taken:
                raise PlanError("agg", f"two result columns are called {column.name!r}; use .alias(...)")
            taken.add(column.name)
        spec = AggregateSpec(self._keys, tuple(column.to_aggregate() for column in exprs))
        try:
            output = aggregate_output_schema(schema, spec)
        except SchemaDerivationError as error:
            raise PlanError("agg", str(error)) from None
        return self._stream.apply(spec, output)

    def count(self) -> Stream:
        """Counts the rows per key, in a column ``count``."""
        return self.agg(functions.count())

    def transformWithState(
        self,
        statefulProcessor: Any,
        outputStructType: Any,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """Runs a PySpark ``StatefulProcessor`` on each key's rows.

        With ``EventTime``, rows whose event time is not after the watermark are dropped while the column can be
        traced: behind ``mapInArrow`` it is unknown, and all rows are kept.

        :param statefulProcessor: an instance of a subclass.
        :param outputStructType: the schema of the rows that it returns: Arrow, DDL or ``StructType``.
        :param outputMode: ``Append`` or ``Update``.
        :param timeMode: ``None``, ``ProcessingTime`` or ``EventTime``: which timers it may register.
        :param initialState: must be omitted: start from a savepoint.
        :param eventTimeColumnName: the column of the result that is event time for what follows, a timestamp. The
            watermark stays that of the input; a row at or before it fails the job, as in Spark.
        :raises PlanError: wrong modes, event time without a watermark, an event time column that is not a timestamp of
            the result, an object that is not a processor; also for ``initialState`` (start from a savepoint).
        """
        more = (initialState, eventTimeColumnName)
        return self._processed(statefulProcessor, outputStructType, outputMode, timeMode, more, in_pandas=False)

    def transformWithStateInPandas(
        self,
        statefulProcessor: Any,
        outputStructType: Any,
        outputMode: str,
        timeMode: str,
        initialState: Any = None,
        eventTimeColumnName: str = "",
    ) -> Stream:
        """As :meth:`transformWithState`, for a processor that gets and returns pandas frames.

        :param statefulProcessor: an instance of a subclass.
        :param outputStructType: the schema of the frames that it returns: Arrow, DDL or ``StructType``.
        :param outputMode: ``Append`` or ``Update``.
        :param timeMode: ``None``, ``ProcessingTime`` or ``EventTime``: which timers it may register.
        :param initialState: must be omitted: start from a savepoint.
        :param eventTimeColumnName: as of :meth:`transformWithState`.
        :raises PlanError: as :meth:`transformWithState`, and without pandas.
        """
        if find_spec("pandas") is None:
            raise PlanError("transformWithStateInPandas", "pandas is not installed: install pandas 2.2 or later")
        more = (initialState, eventTimeColumnName)
        return self._processed(statefulProcessor, outputStructType, outputMode, timeMode, more, in_pandas=True)

    def _processed(
        self,
        processor: Any,
        schema: Any,
        mode: str,
        time: str,
        more: tuple[Any, str],
        *,
        in_pandas: bool,
    ) -> Stream:
        initial_state, output_event_time = more
        missing = [method for method in _PROCESSOR_METHODS if not callable(getattr(processor, method, None))]
        if isinstance(processor, type) or missing:
            raise PlanError("statefulProcessor", "expected an instance of a StatefulProcessor subclass")
        if initial_state is not None:
            raise PlanError("initialState", "not supported; start the job from a savepoint that holds the state")
        output = to_arrow_schema(schema, "outputStructType")
        time_mode = chosen("timeMode", time, _TIME_MODES)
        watermark = has_watermark(self._stream.inputs)
        if time_mode == "EventTime" and not watermark:
            raise PlanError("timeMode", "EventTime needs .withWatermark(column, delay) before groupBy")
        if output_event_time:
            _check_output_event_time(output_event_time, output, watermark)
        event_time = event_time_column(self._stream.inputs) if time_mode == "EventTime" else None
        output_mode = chosen("outputMode", mode, _OUTPUT_MODES)
        spec = ProcessSpec(
            self._keys, processor, output, output_mode, time_mode, event_time, in_pandas, output_event_time or None
        )
        return self._stream.apply(spec, output)


def _check_output_event_time(column: str, output: pa.Schema, watermark: bool) -> None:
    check_columns([column], output, "eventTimeColumnName")
    kind = output.field(column).type
    if not pa.types.is_timestamp(kind):
        raise PlanError("eventTimeColumnName", f"column {column!r} is {kind}, not a timestamp")
    if not watermark:
        raise PlanError("eventTimeColumnName", f"{column!r} needs .withWatermark(column, delay) before groupBy")


def _check_aggregate(column: object) -> None:
    if not isinstance(column, AggregateExpression):
        what = "count(), sum(...), min(...), max(...) or avg(...) of ckpt_runtime.api"
        raise PlanError("agg", f"expected {what}, not {kind_text(column)}")
