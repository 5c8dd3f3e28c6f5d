"""Maps the typed plans of a program's queries to the operators of a job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.evaluation import compile_expression
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, rewritten
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.complete_mode import check_complete, check_complete_sink
from ckpt_runtime.frontend.function_mapping import add_filter, add_functional, with_functions
from ckpt_runtime.frontend.observe import add_observe
from ckpt_runtime.frontend.read_columns import check_pruned
from ckpt_runtime.frontend.sink_mapping import sink_spec
from ckpt_runtime.frontend.stateful import add_stateful, arrow_schema, check_output_mode
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Analysis,
    Deduplicate,
    Expand,
    Filter,
    Generate,
    Join,
    Limit,
    MapPartitions,
    Observe,
    PlanNode,
    Project,
    Repartition,
    Sort,
    Source,
    StatefulFunction,
    StaticTable,
    Union,
    Watermark,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import AVAILABLE_NOW_OPTION, is_split_source, source_schema
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import Chaining, LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import ObserveSpec
from ckpt_runtime.sources import is_source

Resolve = Callable[[str], str | type]
_DEEPEST = 50
"""Maximum depth of the expressions of projections that are merged."""


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
    """Adds the operators of all queries that a program started. What several of them have in common is computed once.

    Raises PlanError for a feature that the engine lacks; the message names it and an alternative.
    """
    shared = Shared()
    for query in capture.queries:
        QueryMapper(capture, plan, resolve, shared).add(query)


@dataclass(slots=True)
class Shared:
    """Operators that several queries may use.

    ``sources`` are those of streams, by the ids of their relations, and whether they end with the data that is there.
    ``frames`` are the outputs of other relations, by the relation, its inputs, and what else decides about them.
    """

    sources: dict[int, tuple[LogicalNode, bool]] = field(default_factory=dict)
    frames: dict[Any, tuple[LogicalInput, ...]] = field(default_factory=dict)


class QueryMapper:
    """Adds one query to a plan."""

    def __init__(
        self,
        capture: Capture,
        plan: LogicalPlan,
        resolve: Resolve,
        shared: Shared,
    ) -> None:
        self.capture = capture
        self._plan = plan
        self._resolve = resolve
        self._shared = shared
        self._inputs: list[tuple[LogicalInput, ...]] = []
        self._places: Mapping[str, str] = {}
        self.output_mode = "append"
        self._ends = False
        self.whole = False
        """Whether operators that are added now follow the result table of an aggregation, and so have one subtask."""

    def add(self, query: CapturedQuery) -> str:
        """Adds the operators of the query, the sink included. Returns its output mode."""
        self._ends = bool(query.start.available_now or query.start.once)
        self.add_frame(query.analysis, str(query.start.output_mode or "append").lower())
        if isinstance(query.analysis.nodes[-1], StaticTable):
            raise PlanError("writeStream", "the frame reads no stream; write it with df.write, or read with readStream")
        self._sink(query, self._inputs[-1], arrow_schema(query.analysis.columns))
        return self.output_mode

    def add_frame(self, analysis: Analysis, output_mode: str) -> None:
        """Adds the operators of a frame, without a sink."""
        nodes = analysis.nodes
        self._places = analysis.places
        self.output_mode = check_output_mode(output_mode, nodes)
        if self.output_mode == "complete":
            check_complete(nodes)
        for at, node in enumerate(nodes):
            if isinstance(node, Source) and node.plan_id is not None:
                check_pruned(self.capture.sources[node.plan_id], at, nodes)
            self._inputs.append(self._once(node, nodes))

    def _once(self, node: PlanNode, nodes: tuple[PlanNode, ...]) -> tuple[LogicalInput, ...]:
        """Returns what the rows of a node come from; adds its operators unless another query has the same node."""
        static = isinstance(node, StaticTable) or any(isinstance(nodes[at], StaticTable) for at in node.inputs)
        if static or isinstance(node, Generate) or self.output_mode == "complete":
            # A table is no operator by which its join could be found again, what a generator repeats depends on what
            # reads it, and a complete result belongs to one query.
            return self._operators(node, nodes)
        inputs = tuple(self._inputs[at] for at in node.inputs)
        relation = msgspec.json.encode(msgspec.structs.replace(node, inputs=()), order="sorted")
        key = (self.output_mode if isinstance(node, Aggregate) else "", self._ends, relation, inputs)
        found = self._shared.frames.get(key)
        if found is None:
            found = self._shared.frames[key] = self._operators(node, nodes)
        return found

    def _add(self, node: LogicalNode) -> LogicalNode:
        """Adds a node to the plan, and what it reads if that was merged into a projection of another query."""
        for edge in node.inputs:
            if edge.node not in self._plan.nodes:
                self._plan.nodes.append(edge.node)
        return self._plan.add(node)

    def _operators(self, node: PlanNode, nodes: tuple[PlanNode, ...]) -> tuple[LogicalInput, ...]:
        """Adds the operators of a node and returns what their rows come from."""
        inputs = self._inputs[node.inputs[0]] if node.inputs else ()
        schema = arrow_schema(node.columns)
        match node:
            case Source():
                return self._source(node, schema)
            case StaticTable():
                return ()  # the join that reads it gets it as a file
            case Project():
                inputs, trees = with_functions(self, node.expressions, nodes[node.inputs[0]].columns, inputs)
                columns = tuple(zip(schema.names, trees, strict=True))
                return self.apply(specs.EvaluateSpec(columns, schema), inputs, schema, node.plan_id)
            case Filter() | Observe():
                add: Any = add_filter if isinstance(node, Filter) else add_observe
                return tuple(add(self, node, inputs, schema))
            case Watermark():
                column = schema.names[node.column]
                if not pa.types.is_timestamp(schema.field(node.column).type):
                    raise PlanError(
                        "withWatermark",
                        f"column {column!r} is not a timestamp; select its window.start or window.end first",
                    )
                return self._watermark(specs.WatermarkSpec(column, node.delay_ms), inputs, schema, node.plan_id)
            case Union() | Repartition():
                return self._edges(node, nodes, schema)
            case Aggregate() | Expand() | Deduplicate() | Sort() | Limit():
                return add_stateful(self, node, nodes, inputs)
            case Generate() | MapPartitions() | StatefulFunction() | Join():
                return add_functional(self, node, nodes, [self._inputs[at] for at in node.inputs])

    def _edges(
        self, node: Union | Repartition, nodes: tuple[PlanNode, ...], schema: pa.Schema
    ) -> tuple[LogicalInput, ...]:
        """Returns the edges of a relation that needs no operator: it says how rows reach the next one."""
        if isinstance(node, Repartition):
            return _in_turn(self._inputs[node.inputs[0]])
        if any(isinstance(nodes[at], StaticTable) for at in node.inputs):
            raise PlanError("union", "a stream and a static table cannot be combined by union, as in Spark; join them")
        return tuple(edge for at in node.inputs for edge in self._renamed(at, nodes[at], schema))

    def _watermark(
        self, spec: specs.WatermarkSpec, inputs: tuple[LogicalInput, ...], schema: pa.Schema, plan_id: int | None
    ) -> tuple[LogicalInput, ...]:
        """Adds event time. Where rows are repartitioned before it, they are after it: it has to see them in order."""
        repartitioned = any(edge.partitioning is Partitioning.REBALANCE for edge in inputs)
        edges = self.apply(spec, tuple(LogicalInput(edge.node) for edge in inputs), schema, plan_id)
        return _in_turn(edges) if repartitioned else edges

    def apply(
        self, spec: specs.OperatorSpec, inputs: tuple[LogicalInput, ...], schema: pa.Schema, plan_id: int | None
    ) -> tuple[LogicalInput, ...]:
        """Adds an operator with the hints of the relation ``plan_id``. A projection of a projection becomes one."""
        hints = self.capture.hints.get(plan_id, {}) if plan_id is not None else {}
        if isinstance(spec, specs.EvaluateSpec) and len(inputs) == 1:
            spec, inputs = self._merged(spec, inputs)
            if not hints and _changes_nothing(spec, inputs):
                return inputs
        check_expressions(spec, self._places)
        node = self._add(LogicalNode(spec, inputs, schema))
        node.uid = hints.get("uid")
        if "parallelism" in hints:
            node.parallelism = int(hints["parallelism"])
        if self.whole:
            if node.parallelism not in (None, 1):
                raise PlanError(
                    "parallelism", "after an aggregation in output mode complete the parallelism is 1; remove the hint"
                )
            node.parallelism = 1
        return (LogicalInput(node),)

    def _merged(
        self, spec: specs.EvaluateSpec, inputs: tuple[LogicalInput, ...]
    ) -> tuple[specs.EvaluateSpec, tuple[LogicalInput, ...]]:
        """Returns a projection over the input of the projection before it, if no row is computed twice by that."""
        [edge] = inputs
        below = edge.node
        if (
            not isinstance(below.spec, specs.EvaluateSpec)
            or edge.partitioning is not Partitioning.FORWARD
            or below.uid is not None
            or below.parallelism is not None
            or any(known.node is below for node in self._plan.nodes for known in node.inputs)
        ):
            return spec, inputs
        trees = composed([tree for _, tree in spec.columns], [tree for _, tree in below.spec.columns])
        if trees is None:
            return spec, inputs
        if below in self._plan.nodes:
            self._plan.nodes.remove(below)
        names = [name for name, _ in spec.columns]
        return specs.EvaluateSpec(tuple(zip(names, trees, strict=True)), spec.schema), below.inputs

    def apply_table(self, spec: specs.TableSpec, inputs: tuple[LogicalInput, ...]) -> tuple[LogicalInput, ...]:
        """Adds the operator that keeps the result of an aggregation; all later operators get whole results."""
        self.whole = True
        by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, spec.keys) for edge in inputs)
        table = self.apply(spec, by_key, spec.schema, None)
        above = inputs[0].node.uid
        table[0].node.uid = None if above is None else f"{above}.table"
        table[0].node.chaining = Chaining.HEAD
        return table

    def _source(self, node: Source, schema: pa.Schema) -> tuple[LogicalInput, ...]:
        assert node.plan_id is not None
        known, ends = self._shared.sources.get(node.plan_id, (None, self._ends))
        if ends != self._ends:
            raise PlanError("trigger", "queries that read one stream need one trigger, availableNow or another")
        if known is None:
            source = self.capture.sources[node.plan_id]
            if source.format.lower() in ("csv", "json") and not any(
                key.lower() == "timezone" for key in source.options
            ):
                source.options["timeZone"] = self.capture.configuration.get("spark.sql.session.timeZone", "UTC")
            if self._ends and is_split_source(self._resolve(source.format)):
                source.options[AVAILABLE_NOW_OPTION] = "true"
            declared = _declared(source)
            read = _schema_of(source, self._resolve)
            format_ = self._resolve(source.format)
            program = specs.UserFunction(None, self.capture.session, dict(self.capture.configuration))
            spec = specs.SourceSpec(
                format_, dict(source.options), declared, program=program if is_source(format_) else None
            )
            known = self.apply(spec, (), read, node.plan_id)[0].node
            self._shared.sources[node.plan_id] = (known, ends)
        assert known.schema is not None
        if known.schema.equals(schema):
            return (LogicalInput(known),)
        if len(known.schema) != len(schema):
            raise PlanError(
                "schema",
                f"the source has the columns {', '.join(known.schema.names)}, but had {', '.join(schema.names)} when "
                "the job was planned: submit the program again from the last checkpoint",
            )
        expressions = tuple(
            (name, Column(at, column.type))
            for at, (name, column) in enumerate(zip(schema.names, node.columns, strict=True))
        )
        return self.apply(specs.EvaluateSpec(expressions, schema), (LogicalInput(known),), schema, None)

    def _renamed(self, at: int, node: PlanNode, schema: pa.Schema) -> tuple[LogicalInput, ...]:
        """Converts an input of a union to the names and types of the union's columns."""
        if arrow_schema(node.columns).equals(schema):
            return self._inputs[at]
        columns = tuple(
            (name, Column(position, column.type))
            for position, (name, column) in enumerate(zip(schema.names, node.columns, strict=True))
        )
        return self.apply(specs.EvaluateSpec(columns, schema), self._inputs[at], schema, None)

    def _sink(self, query: CapturedQuery, inputs: tuple[LogicalInput, ...], schema: pa.Schema) -> None:
        start = query.start
        spec = sink_spec(start, self.capture, self._resolve, schema)
        if self.whole:
            check_complete_sink(spec)
            spec = replace(spec, table=schema)
        node = self._add(LogicalNode(spec, inputs, None, parallelism=1 if self.whole else None))
        if start.query_name:
            # Not the name itself, which programs may also give to an operator of the query.
            node.uid, node.name = f"{start.query_name}-sink", start.query_name


def _in_turn(edges: tuple[LogicalInput, ...]) -> tuple[LogicalInput, ...]:
    """Returns edges that send rows in turn to the subtasks of what reads them."""
    return tuple(LogicalInput(edge.node, Partitioning.REBALANCE) for edge in edges)


def _changes_nothing(spec: specs.EvaluateSpec, inputs: tuple[LogicalInput, ...]) -> bool:
    """Returns whether a projection gives the columns of its only input as they are."""
    same = all(isinstance(tree, Column) and tree.index == at for at, (_, tree) in enumerate(spec.columns))
    return same and len(inputs) == 1 and spec.schema.equals(inputs[0].node.schema)


def composed(trees: Sequence[Expression], below: Sequence[Expression]) -> list[Expression] | None:
    """Returns expressions over the columns of a projection as expressions over that projection's input.

    None if a value would be computed more often than before, or if a tree became too deep to evaluate by recursion.
    """
    uses = Counter(_read(trees, inside_lambda=False))
    if any(uses[at] > 1 for at, tree in enumerate(below) if not isinstance(tree, Column | Literal)):
        return None
    if max(map(_depth, trees), default=0) + max(map(_depth, below), default=0) > _DEEPEST:
        return None
    return [rewritten(tree, lambda node: below[node.index] if isinstance(node, Column) else None) for tree in trees]


def _read(trees: Iterable[Expression], *, inside_lambda: bool) -> Iterator[int]:
    """Yields the positions of the columns that trees read; twice in a lambda, which is evaluated again and again."""
    for tree in trees:
        match tree:
            case Column():
                yield from (tree.index,) * (1 + inside_lambda)
            case Lambda():
                yield from _read([tree.body], inside_lambda=True)
            case Call():
                yield from _read(tree.arguments, inside_lambda=inside_lambda)


def _depth(tree: Expression) -> int:
    if isinstance(tree, Lambda):
        return 1 + _depth(tree.body)
    return 1 + max(map(_depth, tree.arguments), default=0) if isinstance(tree, Call) else 0


def check_expressions(spec: specs.OperatorSpec, places: Mapping[str, str]) -> None:
    """Raises PlanError for an expression that no worker could evaluate."""
    for tree in expressions_of(spec):
        try:
            compile_expression(tree)
        except UnsupportedExpressionError as error:
            place = places.get(error.what.rpartition(" ")[2], "")
            raise PlanError("expression", str(error.called_in(place))) from error


def expressions_of(spec: specs.OperatorSpec) -> list[Expression]:
    """Returns the typed expressions that an operator evaluates, a generator's excepted."""
    trees = [spec.condition] if isinstance(spec, specs.ConditionSpec) else []
    if isinstance(spec, specs.EvaluateSpec):
        trees = [tree for _, tree in spec.columns]
    if isinstance(spec, ObserveSpec):
        trees = [*spec.arguments, *(tree for _, tree in spec.results)]
    if isinstance(spec, specs.ExpandSpec):
        trees = [tree for row in spec.rows for tree in row]
    if isinstance(spec, specs.JoinSpec) and spec.condition is not None:
        trees = [spec.condition]
    if isinstance(spec, specs.StaticJoinSpec):
        trees = [tree for key in spec.keys for tree in (key.stream, key.table)]
        trees += [*spec.filters, *([] if spec.condition is None else [spec.condition])]
    return trees
