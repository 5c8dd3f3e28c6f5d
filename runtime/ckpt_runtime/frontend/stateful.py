"""Maps typed stateful relations to operators: aggregations over keys, windows and sessions, and deduplication."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, Variable
from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.frontend.aggregate_calls import TABLES, TRIED
from ckpt_runtime.frontend.complete_mode import add_ordered
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.joins import parts_of
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators, arrow_schema, over_input
from ckpt_runtime.frontend.struct_keys import leaves_of, rebuilt
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Expand,
    Filter,
    Join,
    Limit,
    PlanNode,
    Project,
    Sort,
    StatefulFunction,
    TypedAggregate,
    joins_streams,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.aggregates import AGGREGATES, GroupAggregate, accepts
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput
from ckpt_runtime.graph.output_schemas import SchemaDerivationError, aggregate_output_schema

_RUNNING = {"Sum": "sum", "Count": "count", "Min": "min", "Max": "max", "Average": "avg"}
"""Aggregates that update a key's value in place, without a row of state for each change."""
_LONGEST_NAME = 80


def check_output_mode(mode: str, nodes: Sequence[PlanNode]) -> str:
    """Returns the output mode of a query. Raises PlanError where Spark or the engine does not allow it."""
    groupings = [node for node in nodes if isinstance(node, Aggregate)]
    if mode not in ("append", "update", "complete"):
        raise PlanError("outputMode", f"{mode!r} is not one of append, update, complete")
    endless = [node for node in groupings if node.event_time is None]
    if mode == "append" and any(not node.aggregates for node in endless):
        raise PlanError(
            "SELECT DISTINCT",
            "in append mode SELECT DISTINCT, and GROUP BY without an aggregate, need an event time column, because "
            "it determines when a group ends: call withWatermark and select that column too, use update, or call "
            "dropDuplicates, which emits the first row of each key",
        )
    if mode == "append" and endless:
        raise PlanError(
            "outputMode",
            "an aggregation in append mode needs a key of event time, because it determines when a group ends: call "
            "withWatermark and group by a window of that column, or use update. Name the column by a text or F.col: as "
            "in Spark, df.column of the frame before withWatermark is no event time",
        )
    if mode != "append":
        _check_behind_aggregation(mode, nodes)
    _check_group_states(mode, nodes, aggregates=bool(groupings))
    for node in nodes:
        if isinstance(node, Sort) and mode != "complete":
            raise PlanError(
                "orderBy",
                "a stream has no last row: only the result of an aggregation in output mode complete can have it",
            )
        if isinstance(node, Join) and joins_streams(node, nodes):
            _check_join(mode, node)
        if isinstance(node, Limit) and mode == "update":
            raise PlanError("limit", "it needs output mode append or complete, as in Spark")
    if any(node.session is not None for node in groupings):
        _check_sessions(mode, nodes)
    return mode


def _check_sessions(mode: str, nodes: Sequence[PlanNode]) -> None:
    """Raises PlanError for session windows that Spark does not have in a query of ``mode``, and for what it computes of
    them before it makes them."""
    for node in nodes:
        if isinstance(node, Filter):
            _check_filter_of_sessions(node, nodes)
        if not isinstance(node, Aggregate) or node.session is None:
            continue
        if mode == "update":
            raise PlanError("outputMode", "session windows cannot be updated, as in Spark; use append")
        if len(node.keys) == 1:
            raise PlanError("session_window", "it needs another column in groupBy, as in Spark")
        keys = nodes[node.inputs[0]]
        sets = nodes[keys.inputs[0]] if isinstance(keys, Project) else keys
        if not (isinstance(keys, Project) and isinstance(sets, Expand)):
            continue
        session = keys.expressions[node.session]
        if any(isinstance(row[at], Literal) for row in sets.rows for at in columns_of([session])):
            raise PlanError(
                "session_window",
                "rollup, cube and groupingSets without it make rows that are in no session, with which Spark's query "
                "fails: name it in each set of groupingSets, or write each grouping by a query of its own",
            )


def _check_filter_of_sessions(node: Filter, nodes: Sequence[PlanNode]) -> None:
    """Raises PlanError for a condition over the bounds of sessions and no aggregate.

    Spark's optimizer moves it in front of the aggregation, where it decides which rows sessions are made of.
    """
    # Spark itself adds that windows are not null.
    parts = [part for part in parts_of(node.condition) if not (isinstance(part, Call) and part.function == "IsNotNull")]
    below = nodes[node.inputs[0]]
    while isinstance(below, Project | Filter):
        if isinstance(below, Project):
            parts = over_input(parts, below.expressions)
        below = nodes[below.inputs[0]]
    if not isinstance(below, Aggregate) or below.session is None:
        return
    keys = range(len(below.keys))
    for read in (columns_of([part]) for part in parts):
        if below.session in read and all(column in keys for column in read):
            raise PlanError(
                "filter",
                "Spark applies a condition over the bounds of session_window to the session of each row, before rows "
                "that are close become one session: filter the times of rows in front of groupBy, or the sessions in "
                "foreachBatch",
            )


def _check_join(mode: str, node: Join) -> None:
    """Raises PlanError for a join of two streams in an output mode that Spark does not allow for it."""
    if mode == "complete" or (mode == "update" and node.how != "Inner"):
        raise PlanError(
            "outputMode",
            f"two streams can be joined in output mode append, and an inner join in update too, but not {mode}, as in "
            "Spark",
        )


def _check_group_states(mode: str, nodes: Sequence[PlanNode], *, aggregates: bool) -> None:
    """Raises PlanError for a function with state in an output mode that Spark does not allow in a query of ``mode``."""
    for node in nodes:
        if isinstance(node, StatefulFunction) and node.kind == "group_state":
            own = node.output_mode.lower()
            if own == "update" if aggregates else own != mode:
                beside = "an aggregation" if aggregates else f"a query in output mode {mode}"
                raise PlanError("applyInPandasWithState", f"output mode {own} does not go with {beside}, as in Spark")


def _check_behind_aggregation(mode: str, nodes: Sequence[PlanNode]) -> None:
    """Raises PlanError for stateful operations behind an aggregation, whose rows change in these output modes."""
    behind: set[int] = set()
    """The places of aggregations, and of everything that reads one."""
    for at, node in enumerate(nodes):
        if not behind.isdisjoint(node.inputs):
            behind.add(at)
            if isinstance(node, Deduplicate):
                raise PlanError(
                    "dropDuplicates",
                    f"behind an aggregation dropDuplicates and distinct need output mode append, not {mode}, because "
                    "in other modes the rows of an aggregation change: call them in foreachBatch",
                )
            kind = _stateful_kind(node, nodes)
            if kind is not None:
                raise PlanError("outputMode", f"{kind} behind an aggregation needs append, not {mode}, as in Spark")
        if isinstance(node, Aggregate):
            behind.add(at)


def _stateful_kind(node: PlanNode, nodes: Sequence[PlanNode]) -> str | None:
    """What Spark does not run behind an aggregation whose rows change, None for everything else."""
    if isinstance(node, Aggregate):
        return "an aggregation"
    if isinstance(node, StatefulFunction):
        return "a function with state"
    return "a join of streams" if isinstance(node, Join) and joins_streams(node, nodes) else None


def add_stateful(
    operators: QueryOperators,
    node: Aggregate | Expand | Deduplicate | Sort | Limit,
    nodes: Sequence[PlanNode],
    inputs: Inputs,
) -> Inputs:
    """Adds the operators of a node and returns the origin of their rows. Raises PlanError."""
    below = nodes[node.inputs[0]]
    schema = arrow_schema(node.columns)
    if isinstance(node, Expand):
        return operators.apply(specs.ExpandSpec(node.rows, schema), inputs, schema, node.plan_id)
    if isinstance(node, Sort | Limit):
        return add_ordered(operators, node, inputs, schema)
    if isinstance(node, Deduplicate):
        return _deduplicate(operators, node, below, inputs)
    assert isinstance(below, Project)
    names = [column.name for column in nodes[below.inputs[0]].columns]
    return _Grouping(node, below, names).add(operators, inputs)


class _Grouping:
    """One aggregation. Keys that are structs, such as windows, are grouped by their fields."""

    def __init__(self, node: Aggregate, below: Project, names: Sequence[str]) -> None:
        self._node = node
        self._below = below
        self._names = UniqueNames()
        self._flat: list[tuple[str, Expression]] = []
        self._keys: list[str] = []
        self._leaf_names: list[str] = []
        self._session: tuple[str, str] | None = None
        self._event_time: str | None = None
        self._texts = [described(expression, names) for expression in below.expressions]
        for position in node.keys:
            self._add_key(position)
        if not self._keys:
            self._keys.append("all")
            self._flat.append(("all", Literal("0", "integer")))
        arguments = sorted({at for aggregate in node.aggregates for at in self._arguments_of(aggregate)})
        inputs = UniqueNames([name for name, _ in self._flat])
        self._arguments = {at: inputs.of(self._argument_name(at, names)) for at in arguments}
        self._flat += [(self._arguments[at], Column(at, below.columns[at].type)) for at in arguments]
        self._schema = pa.schema([(name, arrow_type(expression.type)) for name, expression in self._flat])

    def _argument_name(self, position: int, names: Sequence[str]) -> str:
        """Returns the name of an input column that is an argument itself: no projection is needed if all are."""
        expression = self._below.expressions[position]
        if isinstance(expression, Column) and names.count(names[expression.index]) == 1:
            return names[expression.index]
        return f"argument{position}"

    def _add_key(self, position: int) -> None:
        leaves = [
            (self._names.of(self._texts[position] + path), leaf)
            for path, leaf in leaves_of(Column(position, self._below.columns[position].type))
        ]
        names = [name for name, _ in leaves]
        self._leaf_names += names
        self._flat += leaves
        if position == self._node.event_time:
            self._event_time = names[-1]  # the end of a window
        if position == self._node.session:
            self._session = (names[0], names[1])
        else:
            self._keys += names

    def add(self, operators: QueryOperators, inputs: Inputs) -> Inputs:
        node, keys = self._node, tuple(self._keys)
        prepared = operators.apply(specs.EvaluateSpec(tuple(self._flat), self._schema), inputs, self._schema, None)
        by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, keys) for edge in prepared)
        running = self._running(operators.output_mode)
        spec: specs.AggregateSpec | specs.GroupSpec
        if running is not None:
            spec, output = running
        else:
            aggregates = tuple(self._group_aggregate(aggregate) for aggregate in node.aggregates)
            keeps_late_rows = operators.output_mode == "complete" and self._session is None
            event_time = None if keeps_late_rows else self._event_time
            total = not node.keys and operators.output_mode == "update"
            spec = specs.GroupSpec(
                self._schema, keys, aggregates, operators.output_mode, event_time, self._session, total
            )
            output = spec.output_schema
        grouped = operators.known(spec, by_key, node.plan_id) or operators.apply(spec, by_key, output, node.plan_id)
        if isinstance(spec, specs.GroupSpec) and spec.mode == "complete":
            table = specs.TableSpec(spec, total=not node.keys)
            grouped, output = operators.apply_table(table, grouped), table.schema
        elif operators.emits_latest and operators.output_mode == "update":
            grouped = operators.apply_latest(keys, grouped, output)
        places = iter(self._leaf_names)
        columns = [
            rebuilt(self._below.columns[position].type, lambda: output.names.index(next(places)))
            for position in node.keys
        ]
        first = len(output.names) - len(node.aggregates)
        columns += [Column(first + at, aggregate.type) for at, aggregate in enumerate(node.aggregates)]
        outcome = arrow_schema(node.columns)
        result = specs.EvaluateSpec(tuple(zip(outcome.names, columns, strict=True)), outcome)
        return operators.apply(result, grouped, outcome, None)

    def _running(self, mode: str) -> tuple[specs.AggregateSpec, pa.Schema] | None:
        """Returns equivalent running aggregates, which cost less; None when there are none.

        They emit keys as they come, where Spark's groups have ``0.0`` for ``-0.0``.
        """
        node = self._node
        if mode != "update" or node.event_time is not None or not node.keys:
            return None
        if any(pa.types.is_floating(self._schema.field(key).type) for key in self._keys):
            return None
        aggregates = []
        names = UniqueNames(self._keys)
        for aggregate in node.aggregates:
            function = _RUNNING.get(aggregate.function)
            if function is None or len(aggregate.arguments) > 1 or aggregate.filtered or aggregate.mode != "ansi":
                return None
            if aggregate.settings.get("distinct"):
                return None
            column = None if self._counts_rows(aggregate) else self._arguments[aggregate.arguments[0]]
            text = f"{aggregate.function}({', '.join(self._texts[place] for place in aggregate.arguments)})"
            aggregates.append(specs.Aggregate(function, column, names.of(text)))
        spec = specs.AggregateSpec(tuple(self._keys), tuple(aggregates))
        try:
            return spec, aggregate_output_schema(self._schema, spec)
        except SchemaDerivationError:
            return None

    def _arguments_of(self, aggregate: TypedAggregate) -> tuple[int, ...]:
        """The columns that an aggregate reads: not the constant of ``count(*)``."""
        return aggregate.arguments if aggregate.filtered or not self._counts_rows(aggregate) else ()

    def _counts_rows(self, aggregate: TypedAggregate) -> bool:
        """Whether a count counts rows: its argument is a constant, as in Spark's form of ``count(*)``."""
        if aggregate.function != "Count":
            return False
        arguments = [self._below.expressions[at] for at in aggregate.arguments]
        return all(isinstance(argument, Literal) and argument.value is not None for argument in arguments)

    def _group_aggregate(self, aggregate: TypedAggregate) -> GroupAggregate:
        if aggregate.function not in AGGREGATES:
            raise PlanError(
                "agg",
                f"the aggregate {aggregate.function} is not supported: collect the values with collect_list, "
                "and aggregate them in foreachBatch, whose frames are Spark's",
            )
        condition = aggregate.arguments[-1:] if aggregate.filtered else ()
        own = aggregate.arguments[: len(aggregate.arguments) - len(condition)]
        types = tuple(arrow_type(self._below.columns[at].type) for at in own)
        if not accepts(aggregate.function, types, distinct=bool(aggregate.settings.get("distinct"))):
            given = ", ".join(map(str, types))
            way = "cast it to a type" if pa.null() in types else "pass to_json of it, or one of its fields"
            problem = f"the aggregate {aggregate.function} does not take columns of type {given}"
            raise PlanError("agg", problem + (f": {way}" if any(map(_has_no_order, types)) else ""))
        text = f"{aggregate.function}({', '.join(self._texts[at] for at in own)})"
        text += "".join(f" filter ({self._texts[at]})" for at in condition)
        if meaning := {key: value for key, value in aggregate.settings.items() if key not in (TABLES, TRIED)}:
            text += f" {msgspec.json.encode(meaning, order='sorted').decode()}"
        own = () if self._counts_rows(aggregate) and not aggregate.filtered else own
        return GroupAggregate(
            aggregate.function,
            tuple(self._arguments[at] for at in (*own, *condition)),
            self._names.of(text),
            arrow_type(aggregate.type),
            aggregate.mode == "ansi",
            aggregate.filtered,
            aggregate.settings,
        )


def _deduplicate(operators: QueryOperators, node: Deduplicate, below: PlanNode, inputs: Inputs) -> Inputs:
    """Adds the keys as columns, passes the first row of each key, and removes the key columns."""
    names = UniqueNames()
    flat: list[tuple[str, Expression]] = [
        (names.of(f"column{at}"), Column(at, column.type)) for at, column in enumerate(below.columns)
    ]
    late: str | None = None
    forget_by: str | None = None
    if node.event_time is not None:
        late = names.of("event time")
        flat.append((late, leaves_of(Column(node.event_time, below.columns[node.event_time].type))[-1][1]))
    keys: list[str] = []
    for position in node.keys:
        column = below.columns[position]
        for path, leaf in leaves_of(Column(position, column.type)):
            keys.append(names.of(column.name + path))
            flat.append((keys[-1], leaf))
        if position == node.event_time:
            forget_by = keys[-1]
    if not keys:  # nulls without a type are all equal
        keys.append(names.of("all"))
        flat.append((keys[-1], Literal("0", "integer")))
    schema = pa.schema([(name, arrow_type(leaf.type)) for name, leaf in flat])
    prepared = operators.apply(specs.EvaluateSpec(tuple(flat), schema), inputs, schema, None)
    by_key = tuple(LogicalInput(edge.node, Partitioning.HASH, tuple(keys)) for edge in prepared)
    spec = specs.DeduplicateSpec(
        schema, tuple(keys), late, forget_by if node.within_ms is None else None, node.within_ms
    )
    passed = operators.apply(spec, by_key, schema, node.plan_id)
    outcome = arrow_schema(node.columns)
    columns = [(name, tree) for name, (_, tree) in zip(outcome.names, flat, strict=False)]
    return operators.apply(specs.EvaluateSpec(tuple(columns), outcome), passed, outcome, None)


def _has_no_order(kind: pa.DataType) -> bool:
    return bool(pa.types.is_null(kind) or pa.types.is_nested(kind))


class UniqueNames:
    """Names of columns in state. They describe the content, so adding or removing other columns does not change
    them."""

    def __init__(self, taken: Sequence[str] = ()) -> None:
        self._taken = set(taken)

    def of(self, text: str) -> str:
        """Returns the text, shortened if it is long, and different from all names before."""
        if len(text) > _LONGEST_NAME:
            text = f"{text[: _LONGEST_NAME - 9]}~{sha256(text.encode()).hexdigest()[:8]}"
        name, number = text, 2
        while name in self._taken:
            name, number = f"{text}#{number}", number + 1
        self._taken.add(name)
        return name


def described(tree: Expression, names: Sequence[str]) -> str:
    """Returns a text for an expression over columns with these names; equal for equal expressions."""
    match tree:
        case Column():
            return names[tree.index]
        case Literal():
            return str(tree.value)
        case Variable():
            return "_"
        case Lambda():
            return described(tree.body, names)
    text = f"{tree.function}({', '.join(described(argument, names) for argument in tree.arguments)})"
    if tree.function == "Cast":
        text += f":{tree.type}"
    return text + (f" {msgspec.json.encode(tree.settings, order='sorted').decode()}" if tree.settings else "")
