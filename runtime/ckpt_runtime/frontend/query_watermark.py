"""The event time of a query: as in Spark, all operators with state have that of all streams of their query.

The watermarks of the streams that an operator reads reach it with their rows. Those of other streams reach it over an
edge of its own, which no row passes, so that it takes them for further inputs of a union.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.expressions.nodes import Literal
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators, arrow_schema
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Join,
    PlanNode,
    StatefulFunction,
    Watermark,
    joins_streams,
    watermark_of_all_rows,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.event_time import NO_ROWS


def _is_stateful(node: PlanNode, nodes: Sequence[PlanNode]) -> bool:
    return isinstance(node, Aggregate | Deduplicate | StatefulFunction) or (
        isinstance(node, Join) and joins_streams(node, nodes)
    )


def _reads_event_time(node: PlanNode, mode: str) -> bool:
    """Whether event time decides which rows are late for a stateful node, or what it removes from its state."""
    match node:
        case Aggregate():
            return node.event_time is not None and (mode != "complete" or node.session is not None)
        case Deduplicate():
            return node.event_time is not None
        case StatefulFunction():
            return "EventTime" in node.time
    return True


class QueryWatermarks:
    """Knows which streams of a query each of its nodes reads. ``order`` is that in which nodes can be added."""

    def __init__(self, nodes: Sequence[PlanNode], mode: str) -> None:
        self._nodes = nodes
        self._mode = mode
        self._above: list[frozenset[int]] = []
        self._plain: list[bool] = []
        for at, node in enumerate(nodes):
            self._above.append(frozenset([at]).union(*(self._above[place] for place in node.inputs)))
            self._plain.append(not _is_stateful(node, nodes) and all(self._plain[place] for place in node.inputs))
        self.order = sorted(range(len(nodes)), key=lambda at: not self._plain[at])
        self.of_all_rows = {at: front for at in self.order if (front := watermark_of_all_rows(at, nodes)) is not None}
        """The watermarks in front of moved filters, by those behind them. The query only has the time of these."""
        marks = {at for at, node in enumerate(nodes) if isinstance(node, Watermark)}
        self._marks = marks.difference(self.of_all_rows.values())

    def has_no_effect(self, at: int) -> bool:
        """Whether a node is the only watermark of its rows, which come from state, and no state depends on it."""
        if not isinstance(self._nodes[at], Watermark) or self._plain[at]:
            return False
        above = self._above[at] - {at}
        readers = (node for place, node in enumerate(self._nodes) if at in self._above[place])
        return self._marks.isdisjoint(above) and not any(_is_stateful(node, self._nodes) for node in readers)

    def others(self, at: int) -> list[int]:
        """Returns the positions of the watermarks that a node needs besides those of its own streams."""
        node, above = self._nodes[at], self._above[at]
        if (
            self._marks.isdisjoint(above)
            or not _is_stateful(node, self._nodes)
            or not _reads_event_time(node, self._mode)
        ):
            return []
        # Nothing can know the event time that an operator with state leads to before that operator.
        return [place for place in sorted(self._marks - above) if self._plain[place]]


def only_event_time(operators: QueryOperators, node: PlanNode, inputs: Inputs, wanted: PlanNode) -> Inputs:
    """Adds operators that give the watermarks of a node, and no rows with the columns of another one."""
    passed = operators.apply(NO_ROWS, inputs, arrow_schema(node.columns), None)
    schema = arrow_schema(wanted.columns)
    nulls = (Literal(None, column.type) for column in wanted.columns)
    return operators.apply(
        specs.EvaluateSpec(tuple(zip(schema.names, nulls, strict=True)), schema), passed, schema, None
    )
