"""Moves filters in front of ``withWatermark``, as Spark's optimizer does: they decide which rows event time sees.

A row that a later filter drops does not advance event time then. The filter may stand behind a union, a join, or an
aggregation by the filtered key, and Spark infers further ones, such as that the key of a join is not null. Conditions
over event time itself, and those that are not deterministic, stay behind it.

Spark's own rules find the conditions in a copy of the plan. The plan itself only gets filters, each between two equal
watermarks: the first one has the event time of all rows, which other queries may read, the second one that of this
query. Filters also stay where the author has put them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_runtime.frontend.catalyst import companion, items, jvm_name

_WATERMARK = "EventTimeWatermark"
PLACEHOLDERS = frozenset({"StreamingRelation", "StreamingRelationV2"})
"""Sources of streams, under a projection that gives them their columns as constants."""
_MOVED_FROM = frozenset({"Filter", "Join", "LateralJoin", "Generate"})
"""Relations with conditions that the optimizer moves, or from which it infers some."""
_BEFORE = ("EliminateSubqueryAliases", "EliminateView")
"""Rules that remove relations which stand in the way of others."""
_PUSH = ("EliminateOuterJoin", "PushDownPredicates", "BooleanSimplification")
_ROUNDS = (
    _PUSH,
    ("InferFiltersFromGenerate", "InferFiltersFromConstraints"),
    _PUSH,
    ("PushExtraPredicateThroughJoin",),
    _PUSH,
)
"""Rules in Spark's order, each group until it changes nothing."""
_MOST_ROUNDS = 100  # Spark's own limit
_OF_THE_BATCH = ("CurrentTimestamp", "LocalTimestamp", "CurrentDate")
"""Expressions that have the time of a batch in a stream: Spark replaces them by others, which are not deterministic,
before it optimizes. No condition moves through a relation that computes or compares with one."""


def until_stable(rules: Sequence[Any], plan: Any) -> Any:
    """Returns a plan after rules of Spark's, which are applied until they change nothing."""
    for _ in range(_MOST_ROUNDS):
        before = plan
        for rule in rules:
            plan = rule.apply(plan)
        if plan.fastEquals(before):
            break
    return plan


def with_moved_filters(jvm: Any, plan: Any) -> Any:
    """Returns an analyzed plan with the filters that Spark moves in front of its watermarks."""
    return _Mover(jvm).moved(plan)


class _Found(NamedTuple):
    """A watermark of a plan. ``height`` counts the watermarks below it, one below the other. ``behind`` is true if a
    relation behind it may have conditions."""

    plan: Any
    node_id: str
    frame: str
    height: int
    behind: bool


class _Condition(NamedTuple):
    """What Spark moves in front of one watermark, None for nothing, over columns of its input."""

    tree: Any
    columns: Any


class _Mover:
    def __init__(self, jvm: Any) -> None:
        self._jvm = jvm
        self._catalyst = jvm.org.apache.spark.sql.catalyst
        self._logical = self._catalyst.plans.logical
        self._patterns = companion(self._catalyst.trees, "TreePattern")
        self._mark = self._patterns.EVENT_TIME_WATERMARK()
        self._tag = companion(self._logical, "LogicalPlan").PLAN_ID_TAG()
        self._has_times = False

    def moved(self, plan: Any) -> Any:
        found = list(self._watermarks(plan, behind=False))
        # One frame of the program may be several watermarks of a plan: its event time is that of all their rows.
        frames = {each.frame: [other for other in found if other.frame == each.frame] for each in found}
        wanted = [frame for frame in frames.values() if all(each.behind for each in frame)]
        moved: dict[str, _Condition] = {}
        for height in sorted({frame[0].height for frame in wanted}):
            conditions = self._conditions(plan, {each.node_id for each in found if each.height == height})
            for frame in wanted:
                if frame[0].height == height:
                    ids = dict.fromkeys(each.node_id for each in frame)
                    condition = self._any_of([one for node_id in ids for one in conditions[node_id]])
                    if condition.tree is not None:
                        moved.update(dict.fromkeys(ids, condition))
        return self._with_filters(plan, moved) if moved else plan

    def _watermarks(self, plan: Any, *, behind: bool) -> Iterator[_Found]:
        """Yields the watermarks of a plan, those below others first."""
        if not plan.containsPattern(self._mark):
            return
        name = jvm_name(plan)
        below: list[_Found] = []
        for child in items(plan.children()):
            below += self._watermarks(child, behind=behind or name in _MOVED_FROM)
        yield from below
        if name == _WATERMARK:
            height = 1 + max((found.height for found in below), default=-1)
            tag = plan.getTagValue(self._tag)
            node_id = _node_id(plan)
            yield _Found(plan, node_id, str(tag.get()) if tag.isDefined() else node_id, height, behind)

    def _conditions(self, plan: Any, level: set[str]) -> dict[str, list[_Condition]]:
        """Returns what Spark moves in front of watermarks, none of which is below another one, by their ids."""
        self._has_times = plan.containsPattern(self._patterns.CURRENT_LIKE())
        analysis, optimizer = self._catalyst.analysis, self._catalyst.optimizer
        whole = self._walled(plan, level)
        whole = until_stable([companion(analysis, name) for name in _BEFORE], whole)
        for names in _ROUNDS:
            whole = until_stable([companion(optimizer, name) for name in names], whole)
        found: dict[str, list[_Condition]] = {}
        for each in self._watermarks(whole, behind=False):
            if each.node_id in level:
                below, parts = each.plan.child(), []
                while jvm_name(below) == "Filter":
                    parts += [part for part in _parts_of(below.condition()) if not self._has_time_of_batch(part)]
                    below = below.child()
                tree = parts[0] if parts else None
                for part in parts[1:]:
                    tree = self._catalyst.expressions.And(tree, part)
                found.setdefault(each.node_id, []).append(_Condition(tree, below.output()))
        return found

    def _walled(self, plan: Any, level: set[str]) -> Any:
        """Returns a plan whose watermarks of a level have walls below them, through which no condition moves.

        What is known of the rows below stays known. Of those of sources, whose placeholders have constants, nothing is.
        """
        name = jvm_name(plan)
        if name == _WATERMARK and _node_id(plan) in level:
            below = plan.child()
            patterns = (self._patterns.FILTER, self._patterns.JOIN, self._patterns.GENERATE)
            known = any(below.containsPattern(pattern()) for pattern in patterns)
            wall = self._limited(self._walled(below, level)) if known else self._rows(below.output())
            return plan.withNewChildren(self._sequence([wall]))
        children = items(plan.children())
        if len(children) == 1 and jvm_name(children[0]) in PLACEHOLDERS:
            return self._rows(plan.output())
        if not children or not plan.isStreaming():
            return plan
        whole = plan.withNewChildren(self._sequence([self._walled(child, level) for child in children]))
        has_times = self._has_times and any(self._has_time_of_batch(each) for each in items(plan.expressions()))
        return self._limited(whole) if has_times else whole

    def _limited(self, plan: Any) -> Any:
        """Returns a plan below a relation through which no condition moves."""
        return self._logical.LocalLimit(companion(self._catalyst.expressions, "Literal").apply(1), plan)

    def _rows(self, columns: Any) -> Any:
        """Returns a relation with columns, of whose rows nothing is known."""
        return self._logical.LocalRelation(columns, self._sequence([]), True, companion(self._jvm.scala, "None"))

    def _has_time_of_batch(self, expression: Any) -> bool:
        if not self._has_times or not expression.containsPattern(self._patterns.CURRENT_LIKE()):
            return False
        text = expression.toJSON()
        return any(f'.{name}"' in text for name in _OF_THE_BATCH)

    def _any_of(self, conditions: list[_Condition]) -> _Condition:
        """Returns a condition that is true for the rows of each of the watermarks of one frame."""
        first, *others = conditions
        if any(each.tree is None for each in conditions):
            return _Condition(None, first.columns)
        trees = [first.tree]
        for other in others:
            tree = self._over(other, first.columns)
            if not any(tree.semanticEquals(known) for known in trees):
                trees.append(tree)
        whole = trees[0]
        for tree in trees[1:]:
            whole = self._catalyst.expressions.Or(whole, tree)
        return _Condition(whole, first.columns)

    def _over(self, condition: _Condition, columns: Any) -> Any:
        """Returns a condition over the same columns of another copy of its watermark."""
        pairs = companion(self._catalyst.expressions, "AttributeMap").apply(condition.columns.zip(columns))
        rows = self._rows(condition.columns)
        return self._logical.Filter(condition.tree, rows).rewriteAttrs(pairs).condition()

    def _with_filters(self, plan: Any, moved: dict[str, _Condition]) -> Any:
        """Returns a plan with conditions in front of its watermarks, by the ids of these."""
        if not plan.containsPattern(self._mark):
            return plan
        plan = plan.withNewChildren(
            self._sequence([self._with_filters(each, moved) for each in items(plan.children())])
        )
        if jvm_name(plan) != _WATERMARK or _node_id(plan) not in moved:
            return plan
        tree = self._over(moved[_node_id(plan)], plan.child().output())
        return plan.withNewChildren(self._sequence([self._logical.Filter(tree, plan)]))

    def _sequence(self, elements: Sequence[Any]) -> Any:
        made = self._jvm.java.util.ArrayList()
        for element in elements:
            made.add(element)
        return self._jvm.org.apache.spark.api.python.PythonUtils.toSeq(made)


def _node_id(watermark: Any) -> str:
    return str(watermark.nodeId().toString())


def _parts_of(condition: Any) -> Iterator[Any]:
    """Yields the conditions that all have to be true for a condition to be true."""
    if jvm_name(condition) == "And":
        yield from _parts_of(condition.left())
        yield from _parts_of(condition.right())
    else:
        yield condition
