"""``Stream``: the result of ``load()`` and of every transformation, by the conventions of PySpark's ``DataFrame``.

Each transformation adds one operator to the plan and checks its arguments against the schema at once, so that a mistake
raises an error at the author's own line. ``union``, ``rebalance`` and ``broadcast`` add none: they say how rows reach
the next operator.
"""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.api import pyspark_names
from ckpt_runtime.api.checks import checked_text, flattened
from ckpt_runtime.api.intervals import parse_interval
from ckpt_runtime.api.operator_settings import OperatorSettings
from ckpt_runtime.api.options import Resolve
from ckpt_runtime.api.pyspark_names import NamesOfPySpark
from ckpt_runtime.api.writer import StreamWriter
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.expressions import check_columns, expression_type
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.schemas import project_output_schema
from ckpt_runtime.graph.specs import (
    ArrowFunction,
    FilterSpec,
    MapInArrowSpec,
    OperatorSpec,
    ProjectSpec,
    WatermarkSpec,
)

if TYPE_CHECKING:
    from ckpt_runtime.api.grouped import GroupedStream


class Stream(NamesOfPySpark, OperatorSettings):
    """Unbounded rows of one schema."""

    _missing = pyspark_names.STREAM

    def __init__(
        self, plan: LogicalPlan, resolve: Resolve, inputs: tuple[LogicalInput, ...], schema: pa.Schema
    ) -> None:
        self._plan = plan
        self._resolve = resolve
        self._inputs = inputs
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its rows."""
        return self._schema

    @property
    def columns(self) -> list[str]:
        """The names of its columns."""
        return list(self._schema.names)

    @property
    def plan(self) -> LogicalPlan:
        """The plan that the stream belongs to."""
        return self._plan

    @property
    def inputs(self) -> tuple[LogicalInput, ...]:
        """The operators that its rows come from."""
        return self._inputs

    @property
    def writeStream(self) -> StreamWriter:
        """A new writer, as ``df.writeStream``."""
        return StreamWriter(self._plan, self._resolve, self._inputs, self._schema)

    def mapInArrow(self, func: ArrowFunction, schema: Any) -> Stream:
        """Applies ``func(batches) -> batches``. ``schema`` is that of its result: Arrow, DDL or ``StructType``.

        ``func`` is called once per buffer; it must not keep state between calls that the results depend on.

        :param func: takes an iterator of Arrow record batches and returns one.
        :param schema: of the result: an Arrow schema, a DDL string or a PySpark ``StructType``.
        :raises PlanError: no function, or a schema that cannot be understood
        """
        if not callable(func):
            raise PlanError("mapInArrow", f"expected a function from batches to batches, not {type(func).__name__}")
        output = to_arrow_schema(schema, "mapInArrow schema")
        return self.apply(MapInArrowSpec(func, output), output)

    def filter(self, condition: pc.Expression | str) -> Stream:
        """Keeps the rows for which a boolean expression (or a boolean column, by name) is true.

        :param condition: an Arrow expression over the columns, or the name of a boolean column.
        :raises PlanError: a column that is not there, or an expression that is not boolean
        """
        expression = pc.field(condition) if isinstance(condition, str) else condition
        kind = expression_type(expression, self._schema, "filter")
        if not pa.types.is_boolean(kind):
            raise PlanError("filter", f"{expression} is {kind}, not boolean")
        return self.apply(FilterSpec(expression), self._schema)

    where = filter

    def select(self, *columns: str | Sequence[str], **computed: pc.Expression | str) -> Stream:
        """Keeps some columns by name, then adds ``name=expression`` ones.

        :param columns: names of columns, or a list of them, in the order in which they come out; ``*`` for all.
        :param computed: a name and its Arrow expression, or the column to rename.
        :raises PlanError: a column that is not there, one that is named twice, or none
        """
        names = flattened(columns)
        if "*" in names and "*" not in self._schema.names:
            names = [name for given in names for name in (self._schema.names if given == "*" else [given])]
        check_columns(names, self._schema, "select")
        chosen: list[tuple[str, pc.Expression]] = [(name, pc.field(name)) for name in names]
        for name, value in computed.items():
            chosen.append((name, pc.field(value) if isinstance(value, str) else value))
        return self._project(chosen, "select")

    def withColumn(self, colName: str, col: pc.Expression) -> Stream:
        """Adds one computed column, which replaces a column of the same name.

        :param colName: the name of the computed column.
        :param col: an Arrow expression over the columns.
        :raises PlanError: an expression that does not fit the columns
        """
        checked_text("withColumn", colName)
        chosen = [(name, col if name == colName else pc.field(name)) for name in self._schema.names]
        if colName not in self._schema.names:
            chosen.append((colName, col))
        return self._project(chosen, "withColumn")

    def withWatermark(self, eventTime: str, delayThreshold: str) -> Stream:
        """Declares a timestamp column as event time; the watermark trails its greatest value by the threshold.

        Behind a PySpark reader it advances between the reader's batches, as in Spark, otherwise with every buffer. Call
        it right behind ``load``. The plan is rejected where the end of a batch is unknown: behind ``groupBy``,
        ``join``, ``union``, ``rebalance``, ``broadcast`` or a change of parallelism.

        :param eventTime: a column of timestamps.
        :param delayThreshold: how late rows may be, such as ``"5 min"`` or ``"1 minute 30 seconds"``; a month has 31
            days, as in Spark.
        :raises PlanError: no such column, one of another type, or no duration
        """
        check_columns([eventTime], self._schema, "withWatermark")
        kind = self._schema.field(eventTime).type
        if not pa.types.is_timestamp(kind):
            raise PlanError("withWatermark", f"column {eventTime!r} is {kind}, not a timestamp")
        try:
            delay_ms = parse_interval(delayThreshold)
        except (ValueError, AttributeError) as error:
            raise PlanError("withWatermark", f"delay threshold {delayThreshold!r}: {error}") from None
        return self.apply(WatermarkSpec(eventTime, delay_ms), self._schema)

    def groupBy(self, *cols: str | Sequence[str]) -> GroupedStream:
        """Sends rows with equal values in ``cols`` to the same subtask of the next operator.

        :param cols: the columns of the key, or a list of them.
        :raises PlanError: no column, one that is not there, or one that is nested
        """
        from ckpt_runtime.api.grouped import GroupedStream

        keys = tuple(flattened(cols))
        if not keys:
            raise PlanError("groupBy", "no column given; a stream is grouped by at least one")
        check_columns(keys, self._schema, "groupBy")
        nested = [column for column in keys if pa.types.is_nested(self._schema.field(column).type)]
        if nested:
            raise PlanError("groupBy", f"column {nested[0]!r} is nested and cannot be a key")
        self._without_partitioning("groupBy")
        inputs = tuple(LogicalInput(edge.node, Partitioning.HASH, keys) for edge in self._inputs)
        return GroupedStream(Stream(self._plan, self._resolve, inputs, self._schema), keys)

    groupby = groupBy

    def union(self, other: Stream) -> Stream:
        """Returns the rows of both, unordered; a union with itself repeats each row. Schemas must be equal.

        :param other: a stream of the same session and schema.
        :raises PlanError: one of another session or schema
        """
        _check_same_session(other, self._plan, "union")
        if not other._schema.equals(self._schema):
            raise PlanError("union", f"schemas differ: {_brief(self._schema)} and {_brief(other._schema)}")
        return Stream(self._plan, self._resolve, self._inputs + other._inputs, self._schema)

    def join(self, other: Stream, on: Any, how: str = "inner", *, within: Any = None) -> Stream:
        """Pairs rows of both streams that have equal keys and whose event times lie within bounds of each other.

        :param other: the right stream, of the same session.
        :param on: a column of both streams or a list of them, which come out once and first; a pair ``("left name",
            "right name")`` stands for columns of different names, which both come out. Null matches nothing.
        :param how: as PySpark's: ``inner``, ``left_outer`` (``left``), ``right_outer`` (``right``), ``full_outer``
            (``outer``, ``full``), ``left_semi`` (``semi``).
        :param within: ``(lower, upper)`` keeps pairs with ``left time + lower <= right time <= left time + upper``;
            bounds are texts such as ``"-5 min"`` and ``"1 hour"``, or timedeltas. The times are the columns that
            ``withWatermark`` named on either stream. Only an inner join may omit it, and then keeps all rows in state.
        :raises PlanError: columns that are missing, of different types, nested, or in both streams besides the keys;
            an unknown ``how``; bounds without a watermark on both streams, or none where they are needed.
        """
        from ckpt_runtime.api.joined import hashed, join_spec

        _check_same_session(other, self._plan, "join")
        self._without_partitioning("join")
        other._without_partitioning("join")
        spec, schema = join_spec((self._schema, self._inputs), (other._schema, other._inputs), on, how, within)
        inputs = hashed(self._inputs, spec.left.keys) + hashed(other._inputs, spec.right.keys)
        node = self._plan.add(LogicalNode(spec, inputs, schema))
        return Stream(self._plan, self._resolve, (LogicalInput(node),), schema)

    def rebalance(self) -> Stream:
        """Sends rows to the next operator's subtasks in turn."""
        return self._partitioned(Partitioning.REBALANCE, "rebalance")

    def broadcast(self) -> Stream:
        """Sends each row to all subtasks of the next operator."""
        return self._partitioned(Partitioning.BROADCAST, "broadcast")

    def _project(self, columns: Sequence[tuple[str, pc.Expression]], field: str) -> Stream:
        if not columns:
            raise PlanError(field, "no column given")
        names = [name for name, _ in columns]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise PlanError(field, f"column {repeated[0]!r} is given twice")
        for name, expression in columns:
            expression_type(expression, self._schema, f"{field}: column {name!r}")
        spec = ProjectSpec(tuple(columns))
        return self.apply(spec, project_output_schema(self._schema, spec))

    def apply(self, spec: OperatorSpec, schema: pa.Schema) -> Stream:
        """Returns the stream behind a new operator; every transformation uses this.

        :param spec: what the operator does.
        :param schema: of the rows that it emits.
        """
        node = self._plan.add(LogicalNode(spec, self._inputs, schema))
        return Stream(self._plan, self._resolve, (LogicalInput(node),), schema)

    def _partitioned(self, partitioning: Partitioning, method: str) -> Stream:
        self._without_partitioning(method)
        inputs = tuple(replace(edge, partitioning=partitioning) for edge in self._inputs)
        return Stream(self._plan, self._resolve, inputs, self._schema)

    def _without_partitioning(self, method: str) -> None:
        for edge in self._inputs:
            if edge.partitioning is not Partitioning.FORWARD:
                raise PlanError(method, f"rows are already distributed by {edge.partitioning.value.lower()}")

    def _operator(self, method: str) -> LogicalNode:
        if len(self._inputs) != 1 or self._inputs[0].partitioning is not Partitioning.FORWARD:
            raise PlanError(method, "call it right behind an operator, not behind union, rebalance or broadcast")
        return self._inputs[0].node


def _check_same_session(other: object, plan: LogicalPlan, method: str) -> None:
    if not isinstance(other, Stream) or other.plan is not plan:
        raise PlanError(method, "expected a stream of the same session")


def _brief(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)
