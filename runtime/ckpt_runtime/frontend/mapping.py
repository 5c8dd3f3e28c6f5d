"""From the typed plans of a program's queries to the operators of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.evaluation import compile_expression
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.generators import generate_spec
from ckpt_runtime.frontend.joins import Side, conditions_of
from ckpt_runtime.frontend.python_functions import functions_spec, separated
from ckpt_runtime.frontend.sink_mapping import sink_spec
from ckpt_runtime.frontend.stateful_functions import stateful_spec
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Filter,
    Generate,
    Join,
    MapPartitions,
    PlanNode,
    Project,
    Source,
    StatefulFunction,
    TypedColumn,
    Union,
    Watermark,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.schemas import SchemaDerivationError, aggregate_output_schema, join_output_schema

Resolve = Callable[[str], str | type]

_AGGREGATES = {"Sum": "sum", "Count": "count", "Min": "min", "Max": "max", "Average": "avg"}


def spark_columns(source: CapturedSource, resolve: Resolve) -> list[tuple[str, str]]:
    """Returns the columns of a stream with Spark's names of their types, for Spark's analyzer. Raises PlanError."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(_schema_of(source, resolve))
    return [(field.name, field.dataType.simpleString()) for field in schema]


def _schema_of(source: CapturedSource, resolve: Resolve) -> pa.Schema:
    return source_schema(resolve(source.format), source.options, _declared(source))


def _declared(source: CapturedSource) -> pa.Schema | None:
    if not source.schema:
        return None
    if source.schema.lstrip().startswith("{"):
        import json

        from pyspark.sql.types import StructType

        return to_arrow_schema(StructType.fromJson(json.loads(source.schema)))
    return to_arrow_schema(source.schema)


def add_queries(capture: Capture, plan: LogicalPlan, resolve: Resolve) -> None:
    """Adds the operators of all queries that a program started. A stream that several of them read is read once.

    Raises PlanError for what the engine does not have, which names it and the way out.
    """
    sources: dict[int, LogicalNode] = {}
    for query in capture.queries:
        _QueryMapper(capture, plan, resolve, sources).add(query)


class _QueryMapper:
    """Adds one query to a plan."""

    def __init__(self, capture: Capture, plan: LogicalPlan, resolve: Resolve, sources: dict[int, LogicalNode]) -> None:
        self._capture = capture
        self._plan = plan
        self._resolve = resolve
        self._sources = sources
        self._inputs: list[tuple[LogicalInput, ...]] = []
        self._places: Mapping[str, str] = {}

    def add(self, query: CapturedQuery) -> None:
        nodes = query.analysis.nodes
        self._places = query.analysis.places
        for node in nodes:
            self._inputs.append(self._operators(node, nodes))
        self._sink(query, self._inputs[-1], _arrow_schema(query.analysis.columns))

    def _operators(  # noqa: PLR0911 one for each kind of node
        self, node: PlanNode, nodes: tuple[PlanNode, ...]
    ) -> tuple[LogicalInput, ...]:
        """Adds the operators of a node and returns what their rows come from."""
        inputs = self._inputs[node.inputs[0]] if node.inputs else ()
        schema = _arrow_schema(node.columns)
        match node:
            case Source():
                return self._source(node, schema)
            case Project():
                inputs, trees = self._python_functions(node.expressions, nodes[node.inputs[0]].columns, inputs)
                columns = tuple(zip(schema.names, trees, strict=True))
                return self._apply(specs.EvaluateSpec(columns, schema), inputs, schema, node.plan_id)
            case Filter():
                inputs, [condition] = self._python_functions([node.condition], node.columns, inputs)
                kept = self._apply(specs.ConditionSpec(condition), inputs, inputs[0].node.schema, node.plan_id)
                return kept if condition is node.condition else self._first_columns(kept, node.columns)
            case MapPartitions():
                return self._map_partitions(node, nodes[node.inputs[0]], inputs, schema)
            case Watermark():
                column = schema.names[node.column]
                if not pa.types.is_timestamp(schema.field(node.column).type):
                    raise PlanError("withWatermark", f"column {column!r} is not a timestamp; cut its window open first")
                return self._apply(specs.WatermarkSpec(column, node.delay_ms), inputs, schema, node.plan_id)
            case Generate():
                return self._generate(node, nodes, inputs, schema)
            case Join():
                return self._join(node, [nodes[at].columns for at in node.inputs], schema)
            case StatefulFunction():
                below = _arrow_schema(nodes[node.inputs[0]].columns)
                spec = stateful_spec(node, self._capture.called, inputs, below, schema)
                by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, spec.keys) for edge in inputs)
                return self._apply(spec, by_key, schema, node.plan_id)
            case Union():
                return tuple(edge for at in node.inputs for edge in self._renamed(at, nodes[at], schema))
            case Aggregate():
                return self._aggregate(node, nodes[node.inputs[0]], inputs)

    def _python_functions(
        self, trees: Sequence[Expression], columns: tuple[TypedColumn, ...], inputs: tuple[LogicalInput, ...]
    ) -> tuple[tuple[LogicalInput, ...], Sequence[Expression]]:
        """Adds operators for the Python functions in expressions over ``columns``. Returns what is behind them."""
        steps, remaining = separated(trees, len(columns), self._capture.called)
        if not steps:
            return inputs, trees
        kept = [(column.name, arrow_type(column.type)) for column in columns]
        types = [column.type for column in columns]
        for step in steps:
            spec, arguments = functions_spec(step, kept, self._settings())
            carried = [(name, Column(at, kind)) for at, ((name, _), kind) in enumerate(zip(kept, types, strict=True))]
            computed = (*carried, *arguments)
            schema = pa.schema([(name, arrow_type(tree.type)) for name, tree in computed])
            inputs = self._apply(specs.EvaluateSpec(computed, schema), inputs, schema, None)
            inputs = self._apply(spec, inputs, spec.schema, None)
            kept = [(field.name, field.type) for field in spec.schema]
            types += [function.type for function in spec.functions]
        return inputs, remaining

    def _generate(
        self, node: Generate, nodes: tuple[PlanNode, ...], inputs: tuple[LogicalInput, ...], schema: pa.Schema
    ) -> tuple[LogicalInput, ...]:
        columns = nodes[node.inputs[0]].columns
        inputs, [function] = self._python_functions([node.function], columns, inputs)
        if function is node.function:
            spec = generate_spec(node, nodes, len(self._inputs), schema)
            return self._apply(spec, inputs, schema, node.plan_id)
        between = inputs[0].node.schema
        assert between is not None
        wide = pa.schema([*between, *list(schema)[len(columns) :]])
        behind = msgspec.structs.replace(node, function=function)
        made = self._apply(generate_spec(behind, nodes, len(self._inputs), wide), inputs, wide, node.plan_id)
        added = len(between) - len(columns)
        places = [at if at < len(columns) else at + added for at in range(len(schema))]
        trees = tuple((c.name, Column(at, c.type)) for at, c in zip(places, node.columns, strict=True))
        return self._apply(specs.EvaluateSpec(trees, schema), made, schema, None)

    def _join(
        self, node: Join, columns: Sequence[tuple[TypedColumn, ...]], schema: pa.Schema
    ) -> tuple[LogicalInput, ...]:
        sides = []
        for at, typed in zip(node.inputs, columns, strict=True):
            names = [column.name for column in typed]
            event_time = event_time_column(self._inputs[at])
            known = names.index(event_time) if event_time is not None and names.count(event_time) == 1 else None
            sides.append(Side(typed, known))
        conditions = conditions_of(node, *sides)
        spec = conditions.spec()
        edges: list[LogicalInput] = []
        for side, letter, at, given in zip(sides, "lr", node.inputs, spec.sides, strict=True):
            inputs = self._inputs[at]
            for tree in side.filters:
                inputs = self._apply(specs.ConditionSpec(tree), inputs, _arrow_schema(side.columns), None)
            prepared = specs.EvaluateSpec(side.prepared(letter), given.schema)
            inputs = self._apply(prepared, inputs, given.schema, None)
            edges += [LogicalInput(edge.node, Partitioning.HASH, given.keys) for edge in inputs]
        output = join_output_schema(spec)
        joined = self._apply(spec, tuple(edges), output, node.plan_id)
        for tree in conditions.remaining():
            joined = self._apply(specs.ConditionSpec(tree), joined, output, None)
        columns_out = tuple(zip(schema.names, conditions.joined(node.columns), strict=True))
        return self._apply(specs.EvaluateSpec(columns_out, schema), joined, schema, None)

    def _settings(self) -> dict[str, str]:
        """Returns the options by which values are converted for Python functions."""
        return {**self._capture.conversions, **self._capture.configuration}

    def _first_columns(
        self, inputs: tuple[LogicalInput, ...], columns: tuple[TypedColumn, ...]
    ) -> tuple[LogicalInput, ...]:
        schema = _arrow_schema(columns)
        trees = tuple((column.name, Column(at, column.type)) for at, column in enumerate(columns))
        return self._apply(specs.EvaluateSpec(trees, schema), inputs, schema, None)

    def _map_partitions(
        self, node: MapPartitions, below: PlanNode, inputs: tuple[LogicalInput, ...], schema: pa.Schema
    ) -> tuple[LogicalInput, ...]:
        function = self._capture.called.of_number(node.function)
        given, made = (_struct_type(each.columns) for each in (below, node))
        form = specs.SparkForm(given, made, self._settings(), in_pandas=node.in_pandas)
        return self._apply(specs.MapInArrowSpec(function, schema, form), inputs, schema, node.plan_id)

    def _apply(
        self, spec: specs.OperatorSpec, inputs: tuple[LogicalInput, ...], schema: pa.Schema, plan_id: int | None
    ) -> tuple[LogicalInput, ...]:
        _check_expressions(spec, self._places)
        node = self._plan.add(LogicalNode(spec, inputs, schema))
        hints = self._capture.hints.get(plan_id, {}) if plan_id is not None else {}
        node.uid = hints.get("uid")
        if "parallelism" in hints:
            node.parallelism = int(hints["parallelism"])
        return (LogicalInput(node),)

    def _source(self, node: Source, schema: pa.Schema) -> tuple[LogicalInput, ...]:
        assert node.plan_id is not None
        known = self._sources.get(node.plan_id)
        if known is None:
            source = self._capture.sources[node.plan_id]
            declared = _declared(source)
            read = _schema_of(source, self._resolve)
            spec = specs.SourceSpec(self._resolve(source.format), dict(source.options), declared)
            known = self._apply(spec, (), read, node.plan_id)[0].node
            self._sources[node.plan_id] = known
        assert known.schema is not None
        if known.schema.equals(schema):
            return (LogicalInput(known),)
        expressions = tuple(
            (name, Column(at, column.type))
            for at, (name, column) in enumerate(zip(schema.names, node.columns, strict=True))
        )
        return self._apply(specs.EvaluateSpec(expressions, schema), (LogicalInput(known),), schema, None)

    def _renamed(self, at: int, node: PlanNode, schema: pa.Schema) -> tuple[LogicalInput, ...]:
        """Gives an input of a union the names and types of the union's columns."""
        if _arrow_schema(node.columns).equals(schema):
            return self._inputs[at]
        columns = tuple(
            (name, Column(position, column.type))
            for position, (name, column) in enumerate(zip(schema.names, node.columns, strict=True))
        )
        return self._apply(specs.EvaluateSpec(columns, schema), self._inputs[at], schema, None)

    def _aggregate(
        self, node: Aggregate, below: PlanNode, inputs: tuple[LogicalInput, ...]
    ) -> tuple[LogicalInput, ...]:
        """Keys that are structs, such as windows, are grouped by their fields."""
        flat: list[tuple[str, Expression]] = []
        keys: list[str] = []
        for position in node.keys:
            for expression in _leaves(Column(position, below.columns[position].type)):
                keys.append(f"key{len(keys)}")
                flat.append((keys[-1], expression))
        if not keys:
            keys.append("key0")
            flat.append(("key0", Literal("0", "integer")))
        arguments = {at for aggregate in node.aggregates for at in aggregate.arguments}
        flat += [(f"argument{at}", Column(at, below.columns[at].type)) for at in sorted(arguments)]
        schema = pa.schema([(name, arrow_type(expression.type)) for name, expression in flat])
        prepared = self._apply(specs.EvaluateSpec(tuple(flat), schema), inputs, schema, None)
        aggregates = []
        for at, aggregate in enumerate(node.aggregates):
            function = _AGGREGATES.get(aggregate.function)
            if function is None or len(aggregate.arguments) > 1:
                raise PlanError("agg", f"the aggregate {aggregate.function} is not supported yet")
            column = (
                None
                if _counts_rows(aggregate.function, aggregate.arguments, below)
                else (f"argument{aggregate.arguments[0]}")
            )
            aggregates.append(specs.Aggregate(function, column, f"result{at}"))
        spec = specs.AggregateSpec(tuple(keys), tuple(aggregates))
        try:
            output = aggregate_output_schema(schema, spec)
        except SchemaDerivationError as error:
            raise PlanError("agg", str(error)) from None
        by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, tuple(keys)) for edge in prepared)
        grouped = self._apply(spec, by_key, output, node.plan_id)
        rebuilt, used = [], 0
        for position in node.keys:
            expression, used = _rebuilt(below.columns[position].type, used)
            rebuilt.append(expression)
        rebuilt += [Column(len(keys) + at, aggregate.type) for at, aggregate in enumerate(node.aggregates)]
        outcome = _arrow_schema(node.columns)
        columns = tuple(zip(outcome.names, rebuilt, strict=True))
        return self._apply(specs.EvaluateSpec(columns, outcome), grouped, outcome, None)

    def _sink(self, query: CapturedQuery, inputs: tuple[LogicalInput, ...], schema: pa.Schema) -> None:
        start = query.start
        _check_start(start, aggregates=any(isinstance(node, Aggregate) for node in query.analysis.nodes))
        spec = sink_spec(start, self._capture, self._resolve, schema)
        node = self._plan.add(LogicalNode(spec, inputs, None))
        if start.query_name:
            # Not the name itself, which programs also give to the operator that the query is about.
            node.uid, node.name = f"{start.query_name}-sink", start.query_name


def _check_expressions(spec: specs.OperatorSpec, places: Mapping[str, str]) -> None:
    """Raises PlanError for an expression that no worker could evaluate."""
    trees = [spec.condition] if isinstance(spec, specs.ConditionSpec) else []
    if isinstance(spec, specs.EvaluateSpec):
        trees = [tree for _, tree in spec.columns]
    for tree in trees:
        try:
            compile_expression(tree)
        except UnsupportedExpressionError as error:
            place = places.get(error.what.rpartition(" ")[2], "")
            raise PlanError("expression", str(error.called_in(place))) from error


def _check_start(start: object, *, aggregates: bool) -> None:
    mode = str(start.output_mode or "append").lower()  # type: ignore[attr-defined]
    if mode not in ("append", "update"):
        raise PlanError("outputMode", f"{mode!r} is not supported yet; use update")
    if aggregates and mode == "append":
        raise PlanError("outputMode", "an aggregation in append mode is not supported yet; use update")


def _counts_rows(function: str, arguments: tuple[int, ...], below: PlanNode) -> bool:
    """Whether a count is of rows: its argument is a constant, as Spark writes ``count(*)``."""
    if function != "Count":
        return False
    assert isinstance(below, Project)
    argument = below.expressions[arguments[0]] if arguments else Literal("1", "integer")
    return isinstance(argument, Literal) and argument.value is not None


def _leaves(expression: Expression) -> list[Expression]:
    kind = expression.type
    if not isinstance(kind, dict) or kind["type"] != "struct":
        return [expression]
    fields = [
        Call("GetStructField", (expression,), field["type"], settings={"ordinal": at})
        for at, field in enumerate(kind["fields"])
    ]
    return [leaf for field in fields for leaf in _leaves(field)]


def _rebuilt(kind: object, used: int) -> tuple[Expression, int]:
    """Returns the key that was cut into leaves, and the number of leaves used so far."""
    if not isinstance(kind, dict) or kind["type"] != "struct":
        return Column(used, kind), used + 1  # type: ignore[arg-type]
    arguments: list[Expression] = []
    for field in kind["fields"]:
        value, used = _rebuilt(field["type"], used)
        arguments += [Literal(field["name"], "string"), value]
    return Call("CreateNamedStruct", tuple(arguments), kind), used


def _arrow_schema(columns: tuple[TypedColumn, ...]) -> pa.Schema:
    """Returns the Arrow schema of typed columns."""
    return pa.schema([(column.name, arrow_type(column.type)) for column in columns])


def _struct_type(columns: tuple[TypedColumn, ...]) -> SparkType:
    fields = [{"name": c.name, "type": c.type, "nullable": c.nullable, "metadata": {}} for c in columns]
    return {"type": "struct", "fields": fields}
