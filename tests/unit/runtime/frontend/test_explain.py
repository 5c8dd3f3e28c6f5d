"""``explain()`` shows the operators of the engine: no Spark is needed for it once Spark has given the types."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from hashlib import sha256
from io import StringIO
from typing import Any

import msgspec
import pytest
from pyspark.sql.connect.proto import WriteStreamOperationStart

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.captured_session import captured_session
from ckpt_runtime.frontend.explain import explanation
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Analysis,
    AnalysisNeeded,
    Filter,
    PlanNode,
    Project,
    Repartition,
    Source,
    StaticTable,
    TypedAggregate,
    TypedColumn,
    Watermark,
)
from ckpt_runtime.graph.errors import PlanError

COLUMNS = (TypedColumn("country", "string"), TypedColumn("amount", "long"))
COUNTED = (TypedColumn("country", "string"), TypedColumn("orders", "long"))
SOURCE = Source(columns=COLUMNS, plan_id=7)
NEGATED = Call("UnaryMinus", (Column(1, "long"),), "long")
ROWS = Project(columns=COLUMNS, inputs=(0,), expressions=(Column(0, "string"), NEGATED))
COUNT = Aggregate(
    columns=COUNTED, inputs=(1,), plan_id=8, keys=(0,), aggregates=(TypedAggregate("Count", (1,), "long"),)
)


def analysis(*nodes: PlanNode) -> Analysis:
    return Analysis(columns=nodes[-1].columns, nodes=nodes)


def capture(analyses: dict[str, str] | None = None) -> Capture:
    made = Capture(
        analyses or {},
        lambda _: [("country", "string"), ("amount", "bigint")],
        lambda _key, _value: None,
        explain=lambda capture, of, extended: explanation(capture, of, str, 2, extended=extended),
    )
    made.sources[7] = CapturedSource("json", {"path": "/data"}, "country STRING, amount LONG")
    return made


def text_of(*nodes: PlanNode, hints: dict[int, dict[str, str]] | None = None, extended: bool = False) -> str:
    made = capture()
    made.hints = hints or {}
    return explanation(made, analysis(*nodes), str, 2, extended=extended)


def test_frame_shows_operators_with_uid_parallelism_edges_and_state() -> None:
    text = text_of(SOURCE, ROWS, COUNT, hints={8: {"uid": "orders", "parallelism": "4"}})
    assert text.splitlines() == [
        "== Plan of the frame, output mode update ==",
        "(1) source json, no uid, parallelism 2",
        "    keeps state; vectorised",
        "(2) project, no uid, parallelism 2",
        "    input: (1) FORWARD",
        "    vectorised",
        "(3) aggregate, uid orders, parallelism 4",
        "    input: (2) HASH by country",
        "    keeps state; vectorised",
        "(4) project, no uid, parallelism 2",
        "    input: (3) REBALANCE",
        "    vectorised",
    ]


def test_aggregation_reads_its_input_and_an_operator_of_another_parallelism_has_the_edge_of_the_job() -> None:
    rows = msgspec.structs.replace(ROWS, expressions=(Column(0, "string"), Column(1, "long")))
    text = text_of(SOURCE, rows, COUNT, hints={8: {"uid": "orders"}})
    assert "(2) aggregate, uid orders, parallelism 2\n    input: (1) HASH by country" in text
    project = Project(columns=COLUMNS, inputs=(0,), plan_id=8, expressions=(Column(0, "string"), Column(1, "long")))
    assert "input: (1) REBALANCE" in text_of(SOURCE, project, hints={8: {"parallelism": "3"}})
    assert "input: (1) FORWARD" in text_of(SOURCE, project, hints={8: {"uid": "picked"}})


def test_repartitioned_rows_reach_the_next_operator_in_turn_and_its_watermark_in_order() -> None:
    times = (TypedColumn("at", "timestamp"),)
    read = Project(columns=times, inputs=(0,), expressions=(Literal(None, "timestamp"),))
    dealt = Repartition(columns=times, inputs=(1,))
    kept = Filter(columns=times, inputs=(2,), condition=Literal(True, "boolean"))
    assert "input: (2) REBALANCE" in text_of(SOURCE, read, dealt, kept)
    timed = Watermark(columns=times, inputs=(2,), column=0, delay_ms=0)
    text = text_of(SOURCE, read, dealt, timed, msgspec.structs.replace(kept, inputs=(3,)))
    assert "input: (2) FORWARD" in text
    assert "input: (3) REBALANCE" in text


def test_projections_are_merged_unless_a_value_would_be_computed_twice() -> None:
    first = ROWS
    again = msgspec.structs.replace(first, inputs=(1,))
    assert text_of(SOURCE, first, again).count("project") == 1
    twice = Call("Add", (Column(1, "long"), Column(1, "long")), "long")
    doubled = msgspec.structs.replace(again, expressions=(Column(0, "string"), twice))
    assert text_of(SOURCE, first, doubled).count("project") == 2
    named = msgspec.structs.replace(first, plan_id=8)
    assert text_of(SOURCE, named, again, hints={8: {"uid": "mine"}}).count("project") == 2


@pytest.mark.parametrize(
    ("tree", "way"),
    [
        (Call("GreaterThan", (Column(1, "long"), Column(1, "long")), "boolean"), "vectorised"),
        (Call("Hex", (Column(1, "long"),), "string"), "vectorised, but Python computes values of Hex one by one"),
    ],
)
def test_function_that_arrow_does_not_have_is_named(tree: Expression, way: str) -> None:
    project = Project(columns=(TypedColumn("computed", tree.type),), inputs=(0,), expressions=(tree,))
    assert text_of(SOURCE, project).splitlines()[-1].strip() == way


def test_extended_plan_lists_the_columns_of_each_operator() -> None:
    text = text_of(SOURCE, ROWS, COUNT, extended=True)
    assert re.findall("columns: .*", text) == [
        "columns: country string, amount int64",
        "columns: country string, argument1 int64",
        "columns: country string, Count(UnaryMinus(amount)) int64",
        "columns: country string, orders int64",
    ]
    assert "columns" not in text_of(SOURCE, ROWS, COUNT)


def test_query_is_shown_with_its_sink_and_changes_nothing_of_the_program() -> None:
    made = capture()
    start = WriteStreamOperationStart(format="noop", output_mode="update", query_name="counts", available_now=True)
    text = explanation(made, CapturedQuery(start, analysis(SOURCE, ROWS, COUNT)), str, 1, extended=False)
    assert text.startswith("== Plan of the query 'counts', output mode update ==")
    assert "(5) sink noop, uid counts-sink, parallelism 1\n    input: (4) FORWARD" in text
    assert made.sources[7].options == {"path": "/data"}


def test_static_frame_is_said_to_be_computed_by_spark() -> None:
    assert "Spark computes its rows" in text_of(StaticTable(columns=COLUMNS))


def test_frame_that_no_output_mode_allows_is_refused_by_explain_too() -> None:
    twice = Aggregate(columns=COUNTED, inputs=(2,), keys=(0,), aggregates=(TypedAggregate("Count", (1,), "long"),))
    with pytest.raises(PlanError, match="append mode needs a key of event time"):
        text_of(SOURCE, ROWS, COUNT, twice)


def explained(explain: Any) -> tuple[Capture, str]:
    """Runs a program that calls ``explain`` with a frame, as often as Spark's answers need. Returns what it prints."""
    analyses: dict[str, str] = {}
    while True:
        made, printed = capture(analyses), StringIO()
        try:
            with captured_session(made, lambda _: None) as spark, redirect_stdout(printed):
                explain(spark.readStream.format("json").schema("country STRING, amount LONG").load("/data"))
        except AnalysisNeeded as needed:
            source = next(iter(made.sources.keys() - {7}))
            answer = msgspec.json.encode(analysis(msgspec.structs.replace(SOURCE, plan_id=source))).decode()
            for question in msgspec.json.decode(needed.text, type=list[msgspec.Raw]):
                analyses[sha256(bytes(question)).hexdigest()] = answer
        else:
            return made, printed.getvalue()


@pytest.mark.parametrize(
    ("explain", "columns"),
    [
        (lambda frame: frame.explain(), False),
        (lambda frame: frame.explain(True), True),
        (lambda frame: frame.explain(mode="formatted"), True),
        (lambda frame: frame.writeStream.format("noop").start().explain(), False),
        (lambda frame: frame.writeStream.format("noop").start().explain(extended=True), True),
    ],
)
def test_program_prints_what_it_explains_and_the_plan_keeps_it(explain: Any, columns: bool) -> None:
    made, printed = explained(explain)
    assert made.explained == [printed.rstrip("\n")]
    assert "(1) source json" in printed
    assert ("columns: country string, amount int64" in printed) is columns


@pytest.mark.parametrize("mode", ["codegen", "cost"])
def test_mode_about_the_execution_by_spark_is_refused(mode: str) -> None:
    with pytest.raises(PlanError, match=mode):
        explained(lambda frame: frame.explain(mode=mode))
