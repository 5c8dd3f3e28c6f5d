"""Which column of each side of a join of two streams decides in Spark whether a row of that side is late.

It is the first column with the mark of event time among those that Spark's optimizer leaves to the join. It prunes
a column that neither the join's condition nor anything behind the join reads. A side without such a column has no late
rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckpt_runtime.frontend.catalyst import companion, items, jvm_name
from ckpt_runtime.frontend.stateful_analysis import is_event_time

_RULES = ("EliminateOuterJoin", "PushDownPredicates", "ColumnPruning")
"""Rules that decide which columns a join reads. They keep the joins of a plan and their order."""
_MOST_ROUNDS = 100  # Spark's own limit


def late_columns(optimizer: Any, plan: Any) -> Iterator[tuple[int | None, int | None]]:
    """Yields Spark's ids of these columns for each join of two streams of an analyzed plan, children first."""
    rules = [companion(optimizer, name) for name in _RULES]
    for _ in range(_MOST_ROUNDS):
        before = plan
        for rule in rules:
            plan = rule.apply(plan)
        if plan.fastEquals(before):
            break
    yield from _of_joins(plan)


def _of_joins(plan: Any) -> Iterator[tuple[int | None, int | None]]:
    for child in items(plan.children()):
        yield from _of_joins(child)
    if joins_streams(plan):
        yield _event_time_of(plan.left()), _event_time_of(plan.right())


def joins_streams(plan: Any) -> bool:
    """Whether a plan is a join of two streams."""
    return jvm_name(plan) == "Join" and all(side.isStreaming() for side in (plan.left(), plan.right()))


def _event_time_of(side: Any) -> int | None:
    marked = (attribute for attribute in items(side.output()) if is_event_time(attribute))
    return next((int(attribute.exprId().id()) for attribute in marked), None)
