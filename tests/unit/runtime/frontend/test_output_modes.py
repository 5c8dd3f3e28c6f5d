"""Which output modes a plan allows, and how plans are looked through."""

from __future__ import annotations

import msgspec
import pytest
from pyspark.sql.connect.proto import Relation

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.frontend.analysis import _checked
from ckpt_runtime.frontend.stateful import check_output_mode
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Expand,
    Filter,
    Join,
    Limit,
    PlanNode,
    Project,
    Source,
    StaticTable,
)
from ckpt_runtime.graph.errors import PlanError

SOURCE = Source(columns=())
DISTINCT = Deduplicate(columns=(), keys=(0,))
TOTALS = Aggregate(columns=(), keys=(0,), aggregates=())
TRUE = Literal("true", "boolean")


@pytest.mark.parametrize("mode", ["update", "complete"])
@pytest.mark.parametrize(
    ("first", "second", "allowed"),
    [(DISTINCT, TOTALS, True), (DISTINCT, DISTINCT, True), (TOTALS, TOTALS, False), (TOTALS, DISTINCT, False)],
)
def test_mode_other_than_append_allows_stateful_operations_in_front_of_an_aggregation_only(
    mode: str, first: PlanNode, second: PlanNode, allowed: bool
) -> None:
    assert check_output_mode(mode, (first, second)) == mode, "neither reads the other"
    nodes = (first, Filter(columns=(), inputs=(0,), condition=TRUE), msgspec.structs.replace(second, inputs=(1,)))
    if allowed:
        assert check_output_mode(mode, nodes) == mode
        return
    with pytest.raises(PlanError, match="behind an aggregation"):
        check_output_mode(mode, nodes)


@pytest.mark.parametrize(("mode", "how"), [("update", "LeftOuter"), ("update", "LeftSemi"), ("complete", "Inner")])
def test_streams_are_joined_in_the_modes_that_spark_allows_and_a_table_in_each_mode(mode: str, how: str) -> None:
    join = Join(columns=(), inputs=(0, 1), how=how, condition=None)
    with pytest.raises(PlanError, match="two streams can be joined in output mode append, and an inner join in update"):
        check_output_mode(mode, (SOURCE, SOURCE, join, TOTALS))
    inner = msgspec.structs.replace(join, how="Inner")
    assert check_output_mode("update", (SOURCE, SOURCE, inner, TOTALS)) == "update"
    assert check_output_mode(mode, (SOURCE, StaticTable(columns=()), join, TOTALS)) == mode


def test_join_of_streams_behind_an_aggregation_is_refused_in_mode_update_as_in_spark() -> None:
    join = Join(columns=(), inputs=(2, 1), how="Inner", condition=None)
    nodes = (SOURCE, SOURCE, msgspec.structs.replace(TOTALS, inputs=(0,)), join)
    with pytest.raises(PlanError, match="a join of streams behind an aggregation needs append, not update"):
        check_output_mode("update", nodes)
    with_table = (SOURCE, StaticTable(columns=()), *nodes[2:])
    assert check_output_mode("update", with_table) == "update"


def test_distinct_rows_in_mode_append_without_event_time_are_refused_with_the_ways_out() -> None:
    with pytest.raises(PlanError, match="SELECT DISTINCT.*withWatermark.*use update.*dropDuplicates"):
        check_output_mode("append", (SOURCE, TOTALS))
    assert check_output_mode("append", (SOURCE, msgspec.structs.replace(TOTALS, event_time=0))) == "append"


@pytest.mark.parametrize(
    ("function", "read", "allowed"),
    [
        *(("GreaterThan", (0,), False), ("GreaterThan", (2, 0), False), ("IsNotNull", (0,), True)),
        *(("GreaterThan", (1,), True), ("GreaterThan", (0, 3), True)),
    ],
)
def test_condition_over_the_bounds_of_sessions_and_no_aggregate_is_refused(
    function: str, read: tuple[int, ...], allowed: bool
) -> None:
    grouped = Aggregate(columns=(), inputs=(0,), keys=(0, 1), aggregates=(), event_time=0, session=0)
    columns = Project(columns=(), inputs=(1,), expressions=tuple(Column(at, "integer") for at in (0, 1, 1, 2)))
    condition = Call("And", (TRUE, Call(function, tuple(Column(at, "integer") for at in read), "boolean")), "boolean")
    nodes = (SOURCE, grouped, columns, Filter(columns=(), inputs=(2,), condition=condition))
    if allowed:
        assert check_output_mode("append", nodes) == "append"
        return
    with pytest.raises(PlanError, match="before rows that are close become one session"):
        check_output_mode("append", nodes)


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_sets_of_groupings_of_which_one_lacks_the_session_are_refused(mode: str) -> None:
    key, session = Column(0, "integer"), Column(1, "timestamp")
    keys = Project(columns=(), inputs=(1,), expressions=(session, key))
    grouped = Aggregate(columns=(), inputs=(2,), keys=(0, 1), aggregates=(), event_time=0, session=0)

    def plan(*rows: tuple[Expression, ...]) -> tuple[PlanNode, ...]:
        return SOURCE, Expand(columns=(), inputs=(0,), rows=rows), keys, grouped

    assert check_output_mode(mode, plan((key, session), (Literal(None, "integer"), session))) == mode
    with pytest.raises(PlanError, match="session_window.*rollup, cube.*name it in each set of groupingSets"):
        check_output_mode(mode, plan((key, session), (key, Literal(None, "timestamp"))))


@pytest.mark.parametrize(("mode", "allowed"), [("append", True), ("update", False), ("complete", True)])
def test_limit_of_a_stream_is_allowed_in_the_modes_that_spark_allows(mode: str, allowed: bool) -> None:
    nodes = (SOURCE, *((TOTALS,) if mode == "complete" else ()), Limit(columns=(), inputs=(0,), rows=3))
    if allowed:
        assert check_output_mode(mode, nodes) == mode
        return
    with pytest.raises(PlanError, match="needs output mode append or complete"):
        check_output_mode(mode, nodes)


def test_message_with_a_field_that_is_called_values_is_looked_through() -> None:
    relation = Relation(
        unpivot={"input": {"range": {"end": 1, "step": 1}}, "values": {"values": [{"literal": {"integer": 1}}]}}
    )
    assert _checked("Relation", relation.SerializeToString()) == relation.SerializeToString()
