"""The columns that come out of a join of streams, its operator in a job, and joins that are refused."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from ckpt_runtime.graph.compiler import CompiledPlan, compile_plan
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.output_schemas import SchemaDerivationError, join_output_schema
from ckpt_runtime.graph.specs import JoinSide, JoinSpec, SinkSpec, SourceSpec

TIME = pa.timestamp("us", "UTC")


def side(
    *columns: str, key: str = "k", time: str | None = None, nullable: bool = False, kind: pa.DataType = TIME
) -> JoinSide:
    fields = [pa.field(name, kind if name == time else pa.int64(), nullable) for name in columns]
    return JoinSide(pa.schema(fields), (key,), time)


ORDERS, PAYMENTS = side("k", "value", "ordered", time="ordered"), side("k", "paid", "price", time="paid")


@pytest.mark.parametrize(
    ("how", "names", "nullable"),
    [
        ("inner", ["k", "value", "ordered", "paid", "price"], []),
        ("left_outer", ["k", "value", "ordered", "paid", "price"], ["paid", "price"]),
        ("right_outer", ["k", "value", "ordered", "paid", "price"], ["value", "ordered"]),
        ("full_outer", ["k", "value", "ordered", "paid", "price"], ["value", "ordered", "paid", "price"]),
        ("left_semi", ["k", "value", "ordered"], []),
    ],
)
def test_columns_that_may_miss_are_nullable_and_others_stay_as_they_were(
    how: str, names: list[str], nullable: list[str]
) -> None:
    schema = join_output_schema(JoinSpec(how, ORDERS, PAYMENTS, (0, 0)))
    assert schema.names == names
    assert [field.name for field in schema if field.nullable] == nullable


@pytest.mark.parametrize(
    ("how", "nullable"),
    [("inner", False), ("left_outer", False), ("right_outer", True), ("full_outer", True), ("left_semi", False)],
)
def test_a_key_that_either_side_may_bring_is_nullable_if_either_is(how: str, nullable: bool) -> None:
    right = side("k", "paid", time="paid", nullable=True)
    assert join_output_schema(JoinSpec(how, ORDERS, right, (0, 0))).field("k").nullable is nullable


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (JoinSpec("anti", ORDERS, PAYMENTS, (0, 1)), "join type 'anti' is unknown, allowed are"),
        (
            JoinSpec("left_outer", ORDERS, PAYMENTS),
            r"join type 'left_outer' needs within=\(lower, upper\) and a watermark",
        ),
        (
            JoinSpec("inner", ORDERS, replace(PAYMENTS, keys=("paid",)), (0, 1)),
            r"key column 'k' is int64 on the left and 'paid' is timestamp\[us, tz=UTC\] on the right",
        ),
        (
            JoinSpec("inner", ORDERS, replace(PAYMENTS, event_time=None), (0, 1)),
            "event time on both sides, but the right one",
        ),
        (
            JoinSpec("inner", ORDERS, side("k", "value", "paid", time="paid"), (0, 1)),
            r"both sides have columns \['value'\]; rename them on one side",
        ),
        (
            JoinSpec("inner", ORDERS, side("k", "paid", time="paid", kind=pa.timestamp("ms", "UTC")), (0, 1)),
            "both must have one unit, and both a time zone or neither",
        ),
        (
            JoinSpec("inner", ORDERS, side("k", "paid", time="paid", kind=pa.timestamp("us")), (0, 1)),
            "both must have one unit, and both a time zone or neither",
        ),
        (
            JoinSpec("inner", *(side("k", name, time=name, kind=pa.timestamp("s")) for name in ("a", "b")), (100, 900)),
            "time bounds 100 ms to 900 ms cannot be represented in columns of type",
        ),
        (JoinSpec("inner", ORDERS, PAYMENTS, (0, 2**62)), "time bounds .* cannot be represented in columns"),
    ],
)
def test_a_join_that_cannot_be_is_refused(spec: JoinSpec, message: str) -> None:
    with pytest.raises(SchemaDerivationError, match=message):
        join_output_schema(spec)


def planned(spec: JoinSpec, *left: str) -> CompiledPlan:
    """A job with the join of ``left`` sources with one more."""
    plan = LogicalPlan("job", default_parallelism=2)
    edges = []
    for uid in (*left, "right"):
        schema = (spec.left if uid in left else spec.right).schema
        source = plan.add(LogicalNode(SourceSpec("numbers"), (), schema, uid))
        edges.append(LogicalInput(source, Partitioning.HASH, ("k",)))
    join = plan.add(LogicalNode(spec, tuple(edges), join_output_schema(spec), "join"))
    plan.add(LogicalNode(SinkSpec("noop"), (LogicalInput(join),), None, "sink"))
    return compile_plan(plan)


def test_a_join_is_one_operator_with_a_hashed_gate_for_each_input() -> None:
    compiled = planned(JoinSpec("left_outer", replace(ORDERS, gates=2), PAYMENTS, (0, 1000)), "left", "more")
    assert compiled.warnings == ()
    graph = compiled.job_graph
    vertex = graph.vertices[-1]
    assert vertex.name == "join -> sink"
    join = vertex.operators[0]
    assert (join.kind, join.stateful, join.user_code) == ("join", True, False)
    assert [(edge.partitioning, edge.keys) for edge in graph.inputs(vertex.id)] == [(Partitioning.HASH, ("k",))] * 3
    assert [graph.vertex(edge.source).name for edge in graph.inputs(vertex.id)] == ["left", "more", "right"]
    assert all(graph.overtakes(edge) for edge in graph.inputs(vertex.id))
    assert JobGraph.from_json(graph.to_json()) == graph
    spec = compiled.specs["join"]
    assert isinstance(spec, JoinSpec)
    assert [spec.side_of_gate(gate) for gate in range(3)] == [0, 0, 1]


def test_an_unbounded_join_is_warned_about_by_its_uid() -> None:
    unbounded = JoinSpec("inner", replace(ORDERS, event_time=None), replace(PAYMENTS, event_time=None))
    [warning] = planned(unbounded, "left").warnings
    assert warning.startswith("operator 'join' joins without time bounds: it keeps every row for ever; add bounds")
