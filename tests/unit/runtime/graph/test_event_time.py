"""Which column is event time: followed through a plan, and refused where the end of a batch is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.graph.compiler import compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column, has_watermark, uses_event_time
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.output_schemas import join_output_schema
from ckpt_runtime.graph.specs import (
    Aggregate,
    AggregateSpec,
    ConditionSpec,
    DeduplicateSpec,
    EvaluateSpec,
    GroupSpec,
    JoinSide,
    JoinSpec,
    MapInArrowSpec,
    ProcessSpec,
    SinkSpec,
    SourceSpec,
    WatermarkSpec,
)

TIME = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("id", pa.int64()), ("at", TIME)])
OUTPUT = pa.schema([("id", pa.int64()), ("then", TIME)])
ID, AT = Column(0, "long"), Column(1, "timestamp")
POSITIVE = Call("GreaterThan", (ID, Literal("0", "long")), "boolean")


class Reader:
    """Stands for a PySpark reader; the compiler only asks whether the format is a class."""


class Rows:
    """The rows of one or more nodes, with their columns."""

    def __init__(self, plan: LogicalPlan, *nodes: LogicalNode) -> None:
        self.plan = plan
        self.nodes = nodes

    @property
    def inputs(self) -> tuple[LogicalInput, ...]:
        return tuple(LogicalInput(node) for node in self.nodes)

    @property
    def schema(self) -> pa.Schema:
        schema = self.nodes[0].schema
        assert schema is not None
        return schema

    def then(self, spec: Any, schema: pa.Schema, uid: str | None = None, *keys: str) -> Rows:
        how = Partitioning.HASH if keys else Partitioning.FORWARD
        edges = tuple(LogicalInput(node, how, keys) for node in self.nodes)
        return Rows(self.plan, self.plan.add(LogicalNode(spec, edges, schema, uid)))

    def select(self, **columns: Expression) -> Rows:
        schema = pa.schema([(name, TIME if tree.type == "timestamp" else pa.int64()) for name, tree in columns.items()])
        return self.then(EvaluateSpec(tuple(columns.items()), schema), schema)

    def filter(self) -> Rows:
        return self.then(ConditionSpec(POSITIVE), self.schema)

    def watermark(self, column: str, uid: str | None = None) -> Rows:
        return self.then(WatermarkSpec(column, 1000), self.schema, uid)

    def count(self, *keys: str) -> Rows:
        schema = pa.schema([*(self.schema.field(key) for key in keys), pa.field("n", pa.int64())])
        return self.then(AggregateSpec(keys, (Aggregate("count", None, "n"),)), schema, None, *keys)

    def processed(self, uid: str | None = None, output_event_time: str | None = None) -> Rows:
        spec = ProcessSpec(("id",), object(), OUTPUT, output_event_time=output_event_time)
        return self.then(spec, OUTPUT, uid, "id")

    def union(self, other: Rows) -> Rows:
        return Rows(self.plan, *self.nodes, *other.nodes)

    def sink(self) -> None:
        self.plan.add(LogicalNode(SinkSpec("noop"), self.inputs, None))


@pytest.fixture
def rows() -> Rows:
    plan = LogicalPlan("job")
    return Rows(plan, plan.add(LogicalNode(SourceSpec(Reader), (), SCHEMA, "source")))


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def test_the_column_is_followed_through_the_plan(rows: Rows) -> None:
    timed = rows.watermark("at")
    shifted = Call("TimestampAddInterval", (AT, Literal("1", "interval day to second")), "timestamp")
    kept, other = timed.select(id=ID, at=AT), timed.select(id=ID, at=shifted)
    cases: list[tuple[Rows, str | None]] = [
        (kept, "at"),
        (timed.select(id=ID, moment=AT).filter(), "moment"),
        (timed.select(id=ID, moment=AT).watermark("moment"), "moment"),
        (timed.select(id=ID), None),
        (other, None),
        (kept.union(timed.select(id=ID, at=AT).filter()), "at"),
        (kept.union(other), None),
        (timed.then(MapInArrowSpec(same, SCHEMA), SCHEMA), None),
        (timed.count("id", "at"), "at"),
        (timed.count("id"), None),
        (timed.processed(), None),
        (timed.processed(output_event_time="then").filter(), "then"),
    ]
    for number, (case, column) in enumerate(cases):
        assert event_time_column(case.inputs) == column, number
        assert has_watermark(case.inputs)
    assert not has_watermark(rows.inputs)
    assert not has_watermark(timed.union(rows).inputs)


def test_united_streams_with_different_columns_are_refused(rows: Rows) -> None:
    timed = rows.watermark("at").select(id=ID, at=AT, late=AT)
    with pytest.raises(PlanError, match=r"united streams have different event time columns \['at', 'late'\]"):
        event_time_column(timed.union(timed.watermark("late")).inputs)


@pytest.mark.parametrize(
    ("how", "expected"),
    [("inner", "at"), ("left_outer", "at"), ("left_semi", "at"), ("right_outer", "then"), ("full_outer", None)],
)
def test_event_time_after_a_join_is_the_column_of_the_side_that_is_never_null(
    rows: Rows, how: str, expected: str | None
) -> None:
    sides = (
        JoinSide(SCHEMA, ("id",), "at"),
        JoinSide(pa.schema([("key", pa.int64()), ("then", TIME)]), ("key",), "then"),
    )
    bounded = JoinSpec(how, *sides, (0, 1000))
    joined = rows.watermark("at").then(bounded, join_output_schema(bounded), None, "id")
    assert event_time_column(joined.inputs) == expected
    unbounded = JoinSpec("inner", JoinSide(SCHEMA, ("id",)), JoinSide(OUTPUT, ("id",)))
    assert event_time_column(rows.watermark("at").then(unbounded, SCHEMA, None, "id").inputs) is None


def test_second_watermark_after_a_processor_is_refused_with_the_alternative(rows: Rows) -> None:
    rows.watermark("at", "first-time").processed("processor").watermark("then", "second-time").sink()
    with pytest.raises(PlanError, match=r"'second-time' .* 'processor' \(process\) .* in eventTimeColumnName"):
        compile_plan(rows.plan)


def test_a_watermark_between_a_processor_and_a_join_is_refused(rows: Rows) -> None:
    late = rows.processed("distinct").watermark("then", "late")
    timed = rows.select(other=ID, at=AT).watermark("at")
    left, right = JoinSide(late.schema, ("id",), "then"), JoinSide(timed.schema, ("other",), "at")
    spec = JoinSpec("left_outer", left, right, (0, 1000))
    edges = tuple(
        LogicalInput(side.nodes[0], Partitioning.HASH, (key,)) for side, key in ((late, "id"), (timed, "other"))
    )
    joined = rows.plan.add(LogicalNode(spec, edges, join_output_schema(spec), "join"))
    Rows(rows.plan, joined).sink()
    with pytest.raises(PlanError, match=r"withWatermark: operator 'late' .* directly after load\(\)"):
        compile_plan(rows.plan)


LEFT = JoinSide(SCHEMA, ("id",))
TIMED = JoinSide(SCHEMA, ("id",), "at")


@pytest.mark.parametrize(
    ("spec", "uses"),
    [
        (ConditionSpec(POSITIVE), False),
        (AggregateSpec(("id",), (Aggregate("count", None, "n"),)), False),
        (GroupSpec(SCHEMA, ("id",), (), "update"), False),
        (GroupSpec(SCHEMA, ("id", "at"), (), "update", "at"), True),
        (GroupSpec(SCHEMA, ("id",), (), "append", session=("start", "end")), True),
        (GroupSpec(SCHEMA, ("id",), (), "complete"), True),
        (JoinSpec("inner", LEFT, LEFT), False),
        (JoinSpec("inner", LEFT, JoinSide(SCHEMA, ("id",), late_by="at")), True),
        (JoinSpec("inner", TIMED, TIMED, (0, 1)), True),
        (DeduplicateSpec(SCHEMA, ("id",)), False),
        (DeduplicateSpec(SCHEMA, ("id",), "at"), True),
        (SinkSpec("noop"), False),
        (SinkSpec("noop", table=SCHEMA), True),
        (WatermarkSpec("at", 0), True),
    ],
)
def test_operator_uses_event_time_where_rows_may_be_late_or_wait_for_a_watermark(spec: Any, uses: bool) -> None:
    assert uses_event_time(spec) is uses
