"""``left.join(right, ...)``: the plan that it makes, the columns that come out, and mistakes named at once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ckpt_runtime.api import Stream, StreamSession, count
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning
from ckpt_runtime.graph.specs import JoinSpec

HOUR = 3_600_000


def numbers(session: StreamSession, time: str = "", uid: str = "", kind: pa.DataType | None = None) -> Stream:
    """Columns key and value; with ``time`` also an event time column of that name."""
    stream = session.readStream.format("numbers").load().uid(f"{uid or time}-source")
    if not time:
        return stream
    timed = stream.withColumn(time, pc.field("value").cast(kind or pa.timestamp("us"))).uid(f"{time}-column")
    return timed.withWatermark(time, "1 min").uid(f"{time}-watermark")


def sides(session: StreamSession) -> tuple[Stream, Stream]:
    """(key, value, ordered) and (key, price, paid), both with event time."""
    orders = numbers(session, "ordered")
    return orders, numbers(session, "paid").select("key", "paid", price="value").uid("payments")


def spec_of(stream: Stream) -> JoinSpec:
    [edge] = stream.inputs
    assert isinstance(edge.node.spec, JoinSpec)
    return edge.node.spec


def test_a_join_is_one_operator_with_a_hashed_gate_for_each_side() -> None:
    session = StreamSession({"parallelism.default": "2"}, "demo")
    orders, payments = sides(session)
    joined = orders.join(payments, "key", "left", within=("0 s", "1 hour")).uid("join")
    joined.select("key", "price").uid("columns").writeStream.format("noop").uid("sink").start()
    plan = session.compile()
    assert plan.warnings == ()
    graph = plan.job_graph
    assert [vertex.name for vertex in graph.vertices][-1] == "join -> columns -> sink"
    vertex = graph.vertices[-1]
    assert (vertex.operators[0].kind, vertex.operators[0].stateful, vertex.operators[0].user_code) == (
        "join",
        True,
        False,
    )
    assert [(edge.partitioning, edge.keys) for edge in graph.inputs(vertex.id)] == [(Partitioning.HASH, ("key",))] * 2
    assert [graph.vertex(edge.source).operators[0].uid for edge in graph.inputs(vertex.id)] == [
        "ordered-source",
        "paid-source",
    ]
    assert all(graph.overtakes(edge) for edge in graph.inputs(vertex.id))
    assert JobGraph.from_json(graph.to_json()) == graph
    spec = plan.specs["join"]
    assert isinstance(spec, JoinSpec)
    assert (spec.how, spec.within_ms) == ("left_outer", (0, HOUR))
    assert [side.event_time for side in spec.sides] == ["ordered", "paid"]


@pytest.mark.parametrize(
    ("how", "names", "not_null"),
    [
        ("inner", ["key", "value", "ordered", "paid", "price"], []),
        ("left", ["key", "value", "ordered", "paid", "price"], ["paid", "price"]),
        ("right_outer", ["key", "value", "ordered", "paid", "price"], ["value", "ordered"]),
        ("outer", ["key", "value", "ordered", "paid", "price"], ["value", "ordered", "paid", "price"]),
        ("leftsemi", ["key", "value", "ordered"], []),
    ],
)
def test_columns_come_out_as_in_pyspark_and_those_that_may_miss_are_nullable(
    how: str, names: list[str], not_null: list[str]
) -> None:
    orders, payments = sides(StreamSession())
    joined = orders.join(payments, ["key"], how, within=("0 s", "0 s"))
    assert joined.columns == names
    assert all(joined.schema.field(name).nullable for name in not_null)


def test_columns_that_cannot_miss_stay_as_they_were() -> None:
    session = StreamSession()
    schema = pa.schema([pa.field("a", pa.int64(), False), pa.field("t", pa.timestamp("us"), False)])
    other = pa.schema([pa.field("b", pa.int64(), False), pa.field("u", pa.timestamp("us"), False)])

    def stream(columns: pa.Schema, time: str) -> Stream:
        return numbers(session).mapInArrow(lambda batches: batches, columns).withWatermark(time, "1 s")

    def nullable(how: str) -> list[bool]:
        joined = stream(schema, "t").join(stream(other, "u"), [("a", "b")], how, within=("0 s", "0 s"))
        assert joined.columns == ["a", "t", "b", "u"]
        return [field.nullable for field in joined.schema]

    assert nullable("inner") == [False] * 4
    assert nullable("left") == [False, False, True, True]
    assert nullable("full_outer") == [True] * 4


def test_a_key_that_either_side_may_bring_is_nullable_if_either_is() -> None:
    session = StreamSession()
    schemas = [
        pa.schema([pa.field("k", pa.int64(), nullable), pa.field(time, pa.timestamp("us"))])
        for nullable, time in ((False, "t"), (True, "u"))
    ]
    left, right = (
        numbers(session).mapInArrow(lambda batches: batches, schema).withWatermark(schema.names[1], "1 s")
        for schema in schemas
    )
    for how, nullable in {"inner": False, "left": False, "right": True, "full": True, "semi": False}.items():
        assert left.join(right, "k", how, within=("0 s", "0 s")).schema.field("k").nullable is nullable, how


def test_bounds_are_texts_or_timedeltas() -> None:
    orders, payments = sides(StreamSession())
    given: list[tuple[Any, Any]] = [
        (("-5 min", "1 hour"), (-300_000, HOUR)),
        (("interval -1 minute -30 seconds", "1 hour 30 minutes"), (-90_000, 3 * HOUR // 2)),
        ((" - 5s", "0"), (-5_000, 0)),
        ([timedelta(minutes=-5), timedelta(milliseconds=1)], (-300_000, 1)),
    ]
    for within, expected in given:
        assert spec_of(orders.join(payments, "key", within=within)).within_ms == expected


def test_a_stream_can_be_joined_with_itself_and_behind_unions() -> None:
    session = StreamSession()
    orders, payments = sides(session)
    renamed = orders.select("key", later="ordered").uid("renamed")
    twice = orders.union(orders).join(renamed.union(renamed), "key", within=("1 s", "5 s")).uid("pairs")
    twice.writeStream.format("noop").uid("sink").start()
    direct = orders.select("key", "ordered").uid("short")
    direct.join(direct, [("key", "key"), ("ordered", "ordered")]).uid("self").writeStream.format("noop").uid(
        "s"
    ).start()
    plan = session.compile()
    pairs, itself = plan.specs["pairs"], plan.specs["self"]
    assert isinstance(pairs, JoinSpec)
    assert isinstance(itself, JoinSpec)
    assert [pairs.side_of_gate(gate) for gate in range(4)] == [0, 0, 1, 1]
    vertex = next(vertex for vertex in plan.job_graph.vertices if vertex.operators[0].uid == "self")
    assert len(plan.job_graph.inputs(vertex.id)) == 2
    assert plan.output_schemas["self"].names == ["key", "ordered"]
    assert payments.columns == ["key", "paid", "price"]


def test_an_unbounded_join_is_warned_about_by_its_uid() -> None:
    session = StreamSession()
    left, right = numbers(session, uid="a"), numbers(session, uid="b").select("key", other="value").uid("c")
    left.join(right, "key").uid("join").writeStream.format("noop").uid("sink").start()
    [warning] = session.compile().warnings
    assert warning.startswith("operator 'join' joins without time bounds: it keeps every row for ever; add bounds")


@pytest.mark.parametrize(
    ("how", "expected"),
    [("inner", "ordered"), ("left", "ordered"), ("semi", "ordered"), ("right", "paid"), ("full", None)],
)
def test_event_time_advances_after_a_join_by_the_side_that_is_always_there(how: str, expected: str | None) -> None:
    orders, payments = sides(StreamSession())
    joined = orders.join(payments, "key", how, within=("0 s", "1 s"))
    assert event_time_column(joined.inputs) == expected
    assert event_time_column(orders.join(payments, "key").inputs) is None


def same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    return batches


def forgotten(stream: Stream) -> Stream:
    """The same rows, whose event time column nobody knows."""
    return stream.mapInArrow(same, stream.schema)


BOUNDS = ("0 s", "1 s")
MISTAKES: list[tuple[Any, str]] = [
    (lambda o, p: o.join(3, "key"), "join: expected a stream of the same session"),
    (lambda o, p: o.join(sides(StreamSession())[1], "key"), "join: expected a stream of the same session"),
    (lambda o, p: o.groupBy("key")._stream.join(p, "key"), "join: rows are already distributed by hash"),
    (lambda o, p: o.join(p.broadcast(), "key"), "join: rows are already distributed by broadcast"),
    (lambda o, p: o.join(p, []), r"join: on: \[\]; expected a column name, a list of names, or of pairs"),
    (lambda o, p: o.join(p, 3), "join: on: 3; expected a column name"),
    (lambda o, p: o.join(p, ["key", 3]), "join: on: 3; expected a column name"),
    (lambda o, p: o.join(p, [("key", "key", "key")]), "join: on: .*expected a column name"),
    (lambda o, p: o.join(p, "value"), "join: on, right side: column 'value' does not exist; .* key, paid, price"),
    (lambda o, p: o.join(p, [("nope", "key")]), "join: on, left side: column 'nope' does not exist"),
    (lambda o, p: o.join(p, ["key", "key"]), "join: on, left side: column 'key' is given twice"),
    (lambda o, p: o.join(p, [("key", "paid")]),
     r"join: key column 'key' is int64 on the left and 'paid' is timestamp\[us\] on the right; .* cast one"),
    (lambda o, p: o.join(p, "key", "anti"), "join: how: 'anti' is not one of inner, left_outer, right_outer, "),
    (lambda o, p: o.join(p, "key", None), "join: how: None is not one of"),
    (lambda o, p: o.join(p, "key", "left"), r"join: join type 'left_outer' needs within=\(lower, upper\) and a"),
    (lambda o, p: o.join(p, "key", within="1 s"), r"join: within: '1 s'; expected \(lower, upper\) such as"),
    (lambda o, p: o.join(p, "key", within=("1 s", 5)), "join: within: bound 5; expected"),
    (lambda o, p: o.join(p, "key", within=("1 s", "soon")), "join: within: bound 'soon': one or more numbers"),
    (lambda o, p: o.join(p, "key", within=(timedelta(microseconds=1), timedelta(1))), "not a whole number of milli"),
    (lambda o, p: o.join(p, "key", within=("2 s", "1 s")), "join: within: the lower bound '2 s' is above .* '1 s'"),
    (lambda o, p: o.join(p, "key", within=("0 s", f"{2**62} ms")), "join: time bounds .* hold no moment of columns"),
    (lambda o, p: o.join(forgotten(p), "key", within=BOUNDS),
     r"join: within needs event time on both sides, the right one has none; call .withWatermark\(column, delay\)"),
    (lambda o, p: o.join(p.select("key", "paid", value="price"), "key", within=BOUNDS),
     r"join: both sides have columns \['value'\]; rename them on one side, e.g. .select\(..., new_name='value'\)"),
    (lambda o, p: o.select("ordered", k=pc.make_struct(pc.field("key"))).join(p, [("k", "key")]),
     "join: key column 'k' is nested and cannot be a key"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "message"), MISTAKES)
def test_a_mistake_is_named_where_it_is_made(step: Any, message: str) -> None:
    orders, payments = sides(StreamSession())
    with pytest.raises(PlanError, match=message):
        step(orders, payments)


@pytest.mark.parametrize(
    ("kind", "within", "message"),
    [
        (pa.timestamp("ms"), BOUNDS, "both must have one unit, and both a time zone or neither"),
        (pa.timestamp("us", "UTC"), BOUNDS, "both must have one unit, and both a time zone or neither"),
    ],
)
def test_event_times_of_two_kinds_are_refused(kind: pa.DataType, within: Any, message: str) -> None:
    session = StreamSession()
    later = numbers(session, "later", kind=kind).select("key", "later")
    with pytest.raises(PlanError, match=f"join: event time column 'ordered' is .* and 'later' is .*{message}"):
        numbers(session, "ordered").join(later, "key", within=within)


def test_bounds_between_two_whole_seconds_hold_nothing() -> None:
    session = StreamSession()
    streams = [numbers(session, name, kind=pa.timestamp("s")).select("key", name) for name in ("a", "b")]
    with pytest.raises(PlanError, match=r"join: time bounds 100 ms to 900 ms hold no moment of columns of type"):
        streams[0].join(streams[1], "key", within=("100 ms", "900 ms"))


def test_a_joined_stream_can_be_grouped() -> None:
    session = StreamSession()
    orders, payments = sides(session)
    joined = orders.join(payments, "key", within=("0 s", "1 hour")).uid("join")
    joined.groupBy("key").agg(count()).uid("count").writeStream.format("noop").uid("sink").start()
    assert [vertex.operators[0].uid for vertex in session.compile().job_graph.vertices][-2:] == ["join", "count"]
