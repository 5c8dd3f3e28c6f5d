"""Reads Spark's analyzed plans: converts Catalyst's relations in the driver's JVM to the nodes of a typed plan.

In a join of two streams, the column that decides in Spark whether a row of a side is late is the first one with the
mark of event time among those that Spark's optimizer leaves to the join. It prunes a column that neither the join's
condition nor a later operator reads. A side without such a column has no late rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ckpt_runtime.expressions.nodes import Column, Expression
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.catalog_tables import check_static
from ckpt_runtime.frontend.catalyst import PlanNodes, companion, function_number, items, jvm_name, output
from ckpt_runtime.frontend.joins import HOW
from ckpt_runtime.frontend.lateral import read_lateral
from ckpt_runtime.frontend.moved_filters import PLACEHOLDERS, joins_streams, until_stable
from ckpt_runtime.frontend.observe import read_observe
from ckpt_runtime.frontend.stateful_analysis import (
    PROCESSORS,
    STATEFUL,
    event_window,
    has_initial_state,
    is_event_time,
    read_stateful,
)
from ckpt_runtime.frontend.static_joins import STATIC_HOW
from ckpt_runtime.frontend.typed_plan import (
    Analysis,
    Filter,
    Generate,
    Join,
    MapPartitions,
    Project,
    Repartition,
    Source,
    StaticTable,
    Union,
    Watermark,
)

_SKIPPED = frozenset({"SubqueryAlias", "View", "ResolvedHint", "RepartitionByExpression", "LocalLimit", "PipeOperator"})
_RULES = ("EliminateOuterJoin", "PushDownPredicates", "ColumnPruning")
"""Rules that decide which columns a join reads. They keep the joins of a plan and their order."""


def _late_columns(optimizer: Any, plan: Any) -> Iterator[tuple[int | None, int | None]]:
    """Yields Spark's ids of these columns for each join of two streams of an analyzed plan, children first."""
    yield from _of_joins(until_stable([companion(optimizer, name) for name in _RULES], plan))


def _of_joins(plan: Any) -> Iterator[tuple[int | None, int | None]]:
    for child in items(plan.children()):
        yield from _of_joins(child)
    if joins_streams(plan):
        yield _event_time_of(plan.left()), _event_time_of(plan.right())


def _event_time_of(side: Any) -> int | None:
    marked = (attribute for attribute in items(side.output()) if is_event_time(attribute))
    return next((int(attribute.exprId().id()) for attribute in marked), None)


class PlanReader(PlanNodes):
    """Reads an analyzed plan, from its leaves to the root."""

    def __init__(self, jvm: Any, ansi: bool, static: dict[int, Any] | None = None, zone: str = "UTC") -> None:
        """``static`` gets the plans of static tables by the positions of their nodes."""
        super().__init__(jvm, ansi, zone)
        self._jvm = jvm
        self._static = {} if static is None else static
        self._late_columns: Iterator[tuple[int | None, int | None]] = iter(())

    def read(self, plan: Any) -> Analysis:
        self._late_columns = _late_columns(self._jvm.org.apache.spark.sql.catalyst.optimizer, plan)
        self._node(plan)
        return Analysis(columns=self.nodes[-1].columns, nodes=tuple(self.nodes), places=self.places)

    def _node(self, plan: Any) -> int:
        """Adds the nodes of a plan and returns the position of its last one."""
        name = jvm_name(plan)
        if not plan.isStreaming():
            while jvm_name(plan) == "ResolvedHint":  # Spark would warn that the hint does not apply to a join
                plan = plan.child()
            check_static(self._jvm, plan)
            columns, ids = output(plan.output())
            self._static[len(self.nodes)] = plan
            return self.add(StaticTable(columns=columns), ids)
        if name == "Project" and jvm_name(plan.child()) in PLACEHOLDERS:
            return self.represent(Source, plan)
        children = items(plan.children())
        if name in PROCESSORS and not has_initial_state(name, plan):
            children = children[:1]  # Spark adds an empty initial state
        inputs = tuple(self._node(child) for child in children)
        return inputs[0] if name in _SKIPPED else self._relation(name, plan, inputs)

    def _relation(self, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
        """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
        if name in STATEFUL:
            return read_stateful(self, name, plan, inputs)
        read = _READERS.get(name)
        if read is None:
            why = "the engine does not run it on streams"
            if name.startswith("FlatMapGroups"):
                why = "its groups would be those of a micro-batch: use transformWithState, or call it in foreachBatch"
            raise UnsupportedExpressionError(f"the operation {name}", why)
        return read(self, plan, inputs)

    def _project(self, plan: Any, inputs: tuple[int, ...]) -> int:
        input_, expressions = self._with_subqueries(items(plan.projectList()), inputs[0])
        return self.represent(Project, plan, input_, expressions=expressions)

    def _watermark(self, plan: Any, inputs: tuple[int, ...]) -> int:
        [column] = self.expressions([plan.eventTime()], inputs[0])
        assert isinstance(column, Column)
        delay_ms = companion(self._jvm.org.apache.spark.sql.catalyst.plans.logical, "EventTimeWatermark").getDelayMs(
            plan.delay()
        )
        return self.represent(Watermark, plan, *inputs, column=column.index, delay_ms=delay_ms)

    def _repartition(self, plan: Any, inputs: tuple[int, ...]) -> int:
        if not plan.shuffle():  # coalesce, which sends no rows to other subtasks
            return inputs[0]
        return self.represent(Repartition, plan, *inputs)

    def _generate(self, plan: Any, inputs: tuple[int, ...]) -> int:
        columns, ids = output(plan.output())
        [function] = self.expressions([plan.generator()], inputs[0])
        return self.add(Generate(columns=columns, inputs=inputs, function=function, outer=bool(plan.outer())), ids)

    def _join(self, plan: Any, inputs: tuple[int, ...]) -> int:
        how = jvm_name(plan.joinType())
        allowed = STATIC_HOW if any(isinstance(self.nodes[at], StaticTable) for at in inputs) else HOW
        if how not in allowed:
            raise UnsupportedExpressionError(f"a join of type {how}", f"streams have {', '.join(allowed)}")
        conditions = [plan.condition().get()] if plan.condition().isDefined() else []
        condition = next(iter(self.expressions(conditions, *inputs)), None)
        fields: dict[str, Any] = {}
        left, right = event_window(plan.left()), event_window(plan.right())
        if left is not None or right is not None:
            fields["windows"] = (left, right)
        if joins_streams(plan):
            first, second = next(self._late_columns)
            fields["late"] = (_position(self.ids[inputs[0]], first), _position(self.ids[inputs[1]], second))
        return self.represent(Join, plan, *inputs, how=how, condition=condition, **fields)

    def _map(self, plan: Any, inputs: tuple[int, ...]) -> int:
        name = jvm_name(plan)
        if plan.isBarrier():
            raise UnsupportedExpressionError(
                f"{name} with barrier", "tasks of a stream never wait for each other; remove barrier"
            )
        function = function_number(plan.functionExpr().func())
        return self.represent(MapPartitions, plan, *inputs, function=function, in_pandas=name == "MapInPandas")

    def _filter(self, plan: Any, inputs: tuple[int, ...]) -> int:
        """Adds a filter; the values of subqueries in its condition are dropped after it."""
        [below] = inputs
        input_, [condition] = self._with_subqueries([plan.condition()], below)
        if input_ == below:
            return self.represent(Filter, plan, input_, condition=condition)
        columns = self.nodes[input_].columns
        kept = self.add(Filter(columns=columns, inputs=(input_,), condition=condition), self.ids[input_])
        trees = tuple(Column(at, column.type) for at, column in enumerate(output(plan.output())[0]))
        return self.represent(Project, plan, kept, expressions=trees)

    def _with_subqueries(self, expressions: Sequence[Any], input_: int) -> tuple[int, tuple[Expression, ...]]:
        """Reads expressions that may have subqueries with one value over static tables.

        Returns the node that they are over: the input, or its join with the tables of those values.
        """
        subqueries: list[Any] = []
        trees = self.expressions(expressions, input_, subqueries=subqueries)
        return self.with_values(subqueries, input_), trees

    def with_values(self, subqueries: Sequence[Any], input_: int) -> int:
        """Adds joins with the values of subqueries, and returns the position of the last one. Its columns are those of
        the input, then the values."""
        for plan in subqueries:
            if plan.isStreaming():
                raise UnsupportedExpressionError("a scalar subquery", "it must read static tables, not a stream")
            if not plan.maxRows().isDefined() or int(plan.maxRows().get()) > 1:
                raise UnsupportedExpressionError(
                    "a scalar subquery", "it may have several rows: select an aggregate without GROUP BY, or LIMIT 1"
                )
            table = self._node(plan)
            columns, ids = (*self.nodes[input_].columns, *self.nodes[table].columns), self.ids[input_] + self.ids[table]
            joined = Join(columns=columns, inputs=(input_, table), how="LeftOuter", condition=None)
            input_ = self.add(joined, ids)
        return input_


def _position(ids: tuple[int, ...], wanted: int | None) -> int | None:
    """Returns the place of a column by Spark's id of it; None for one that the optimizer has made of a column."""
    return ids.index(wanted) if wanted in ids else None


_READERS: dict[str, Callable[[PlanReader, Any, tuple[int, ...]], int]] = {
    "CollectMetrics": lambda reader, plan, inputs: read_observe(reader, plan, inputs[0]),
    "EventTimeWatermark": PlanReader._watermark,
    "Filter": PlanReader._filter,
    "Generate": PlanReader._generate,
    "Join": PlanReader._join,
    "LateralJoin": lambda reader, plan, inputs: read_lateral(reader, plan, inputs[0]),
    **dict.fromkeys(("MapInPandas", "MapInArrow", "PythonMapInArrow"), PlanReader._map),
    "Project": PlanReader._project,
    "Repartition": PlanReader._repartition,
    "Union": lambda reader, plan, inputs: reader.represent(Union, plan, *inputs),
}
"""How the nodes of a relation without state are read, by its name."""
