"""Moves filters in front of ``withWatermark``, as Spark's optimizer does: they decide which rows event time sees.

A row that a later filter drops does not advance event time then. The filter may stand behind a union, a join, or an
aggregation by the filtered key, and Spark infers further ones, such as that the key of a join is not null. Conditions
over event time itself, and those that are not deterministic, stay behind it.

Spark's own rules find the conditions in a copy of the plan. The plan itself only gets filters, each between two equal
watermarks: the first one has the event time of all rows, which other queries may read, the second one that of this
query. Filters also stay where the author has put them.

A join of two streams needs an equality. Spark's optimizer also moves one from a filter into the join before it, or
finds one inside a condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ckpt_runtime.frontend.catalyst import companion, items, jvm_name
from ckpt_runtime.frontend.stateful_analysis import is_event_time

_WATERMARK = "EventTimeWatermark"
PLACEHOLDERS = frozenset({"StreamingRelation", "StreamingRelationV2"})
"""Sources of streams, under a projection that gives them their columns as constants."""
_MOVED_FROM = frozenset({"Filter", "Join", "LateralJoin", "Generate"})
"""Relations with conditions that the optimizer moves, or from which it infers some."""
_BEFORE = ("EliminateSubqueryAliases", "EliminateView")
"""Rules that remove relations which stand in the way of others."""
_PUSH = ("EliminateOuterJoin", "PushDownPredicates", "BooleanSimplification")
_INFER = (("InferFiltersFromGenerate", "InferFiltersFromConstraints"), ("PushExtraPredicateThroughJoin",))
"""Rules after which conditions are pushed again, in Spark's order."""
_INTO_JOINS = ("ReorderJoin", "PushPredicateThroughJoin", "BooleanSimplification")
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


def joins_streams(plan: Any) -> bool:
    """Whether a plan is a join of two streams."""
    return jvm_name(plan) == "Join" and all(side.isStreaming() for side in (plan.left(), plan.right()))


def _joins(plan: Any, pattern: Any) -> Iterator[Any]:
    if plan.containsPattern(pattern):
        if joins_streams(plan):
            yield plan
        for child in items(plan.children()):
            yield from _joins(child, pattern)


def with_equalities_of_joins(jvm: Any, patterns: Any, plan: Any) -> Any:
    """Returns an analyzed plan whose joins of streams have the equalities that Spark's optimizer gives them.

    ``FROM a, b WHERE a.k = b.k`` has one in a filter, ``NOT (a.k <> b.k)`` and ``a.k = b.k AND x OR a.k = b.k AND y``
    are equal to a condition with one. A plan in which no join lacks one is not rewritten.
    """
    catalyst = jvm.org.apache.spark.sql.catalyst
    equalities = companion(catalyst.planning, "ExtractEquiJoinKeys")
    if all(equalities.unapply(join).isDefined() for join in _joins(plan, patterns.JOIN())):
        return plan
    plan = until_stable([companion(catalyst.analysis, name) for name in _BEFORE], plan)
    return until_stable([companion(catalyst.optimizer, name) for name in _INTO_JOINS], plan)


def with_moved_filters(jvm: Any, patterns: Any, plan: Any) -> Any:
    """Returns an analyzed plan with the filters that Spark moves in front of its watermarks.

    ``patterns`` are Spark's marks of what a plan contains. Most plans have nothing to move, and are not rewritten: each
    question to the JVM takes time.
    """
    mark = patterns.EVENT_TIME_WATERMARK()
    return _Mover(jvm, patterns, mark).moved(plan) if plan.containsPattern(mark) else plan


class _Found(NamedTuple):
    """A watermark of a plan. ``height`` counts the watermarks below it, one below the other. ``behind`` is true if a
    relation behind it may have conditions."""

    plan: Any
    node_id: str
    height: int
    behind: bool


class _Condition(NamedTuple):
    """What Spark moves in front of one watermark, None for nothing, over columns of its input."""

    tree: Any
    columns: Any


class _Mover:
    def __init__(self, jvm: Any, patterns: Any, mark: Any) -> None:
        self._jvm = jvm
        self._patterns = patterns
        self._mark = mark
        # These are asked for only if there is something to move.
        self._catalyst: Any = None
        self._logical: Any = None
        self._list: Any = None
        self._to_sequence: Any = None
        self._has_times = False

    def moved(self, plan: Any) -> Any:
        found = list(self._watermarks(plan, behind=False))
        if not any(each.behind for each in found):
            return plan
        self._catalyst = self._jvm.org.apache.spark.sql.catalyst
        self._logical = self._catalyst.plans.logical
        self._list = self._jvm.java.util.ArrayList
        self._to_sequence = self._jvm.org.apache.spark.api.python.PythonUtils.toSeq
        # One frame of the program may be several watermarks of a plan: its event time is that of all their rows.
        tag = companion(self._logical, "LogicalPlan").PLAN_ID_TAG()
        frames: dict[str, list[_Found]] = {}
        for each in found:
            frame = each.plan.getTagValue(tag)
            frames.setdefault(str(frame.get()) if frame.isDefined() else each.node_id, []).append(each)
        wanted = [copies for copies in frames.values() if all(each.behind for each in copies)]
        moved: dict[str, _Condition] = {}
        for height in sorted({copies[0].height for copies in wanted}):
            conditions = self._conditions(plan, {each.node_id for each in found if each.height == height})
            for copies in wanted:
                if copies[0].height == height:
                    ids = dict.fromkeys(each.node_id for each in copies)
                    condition = self._any_of([one for node_id in ids for one in conditions[node_id]])
                    if condition.tree is not None:
                        moved.update(dict.fromkeys(ids, condition))
        return self._with_filters(plan, moved) if moved else plan

    def _watermarks(self, plan: Any, *, behind: bool) -> Iterator[_Found]:
        """Yields the watermarks of a plan, those below others first."""
        if not plan.containsPattern(self._mark):
            return
        below: list[_Found] = []
        behind_children = behind or _has_conditions(plan)
        for child in items(plan.children()):
            below += self._watermarks(child, behind=behind_children)
        yield from below
        if plan.nodeName() == _WATERMARK:
            yield _Found(plan, _node_id(plan), 1 + max((found.height for found in below), default=-1), behind)

    def _conditions(self, plan: Any, level: set[str]) -> dict[str, list[_Condition]]:
        """Returns what Spark moves in front of watermarks, none of which is below another one, by their ids."""
        self._has_times = plan.containsPattern(self._patterns.CURRENT_LIKE())
        analysis, optimizer = self._catalyst.analysis, self._catalyst.optimizer
        push, *rest = ([companion(optimizer, name) for name in names] for names in (_PUSH, *_INFER))
        whole = until_stable([companion(analysis, name) for name in _BEFORE], self._walled(plan, level))
        whole = until_stable(push, whole)
        for rules in rest:
            inferred = until_stable(rules, whole)
            if not inferred.fastEquals(whole):
                whole = until_stable(push, inferred)
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
        made = self._list()
        for element in elements:
            made.add(element)
        return self._to_sequence(made)


def _has_conditions(plan: Any) -> bool:
    """Whether Spark may move conditions from a relation. The only one that a window adds is over event time."""
    name = plan.nodeName()
    if name != "Filter" or plan.condition().nodeName() != "IsNotNull":
        return name in _MOVED_FROM
    return not is_event_time(plan.condition().child())


def _node_id(watermark: Any) -> str:
    return str(watermark.nodeId().toString())


def _parts_of(condition: Any) -> Iterator[Any]:
    """Yields the conditions that all have to be true for a condition to be true."""
    if jvm_name(condition) == "And":
        yield from _parts_of(condition.left())
        yield from _parts_of(condition.right())
    else:
        yield condition
