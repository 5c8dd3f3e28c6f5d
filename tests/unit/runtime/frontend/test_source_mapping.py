"""What the queries of a program share: a source that reads as all of them say, and frames that are computed once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pyspark.sql.connect.proto import WriteStreamOperationStart

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.frontend.capture import Capture, CapturedQuery, CapturedSource
from ckpt_runtime.frontend.mapping import add_queries, check_pruned
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Analysis,
    Filter,
    PlanNode,
    Project,
    Source,
    TypedAggregate,
    TypedColumn,
    Watermark,
)
from ckpt_runtime.graph.compiler import compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.logical import LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import ConditionSpec, SourceSpec

COLUMNS = (TypedColumn("value", "string"),)


def source_of(*triggers: dict[str, Any], source: str = "text", settings: dict[str, str] | None = None) -> SourceSpec:
    """The source of a program with a query for each trigger, all over one stream."""
    capture = Capture({}, lambda _: [("value", "string")], lambda _key, _value: None)
    capture.configuration |= settings or {}
    capture.sources[7] = CapturedSource(source, {"path": "/data"}, "value STRING")
    for trigger in triggers:
        start = WriteStreamOperationStart(format="noop", output_mode="append", **trigger)
        analysis = Analysis(columns=COLUMNS, nodes=(Source(columns=COLUMNS, plan_id=7),))
        capture.queries.append(CapturedQuery(start, analysis))
    plan = LogicalPlan("job")
    add_queries(capture, plan, lambda name: name)
    [spec] = [node.spec for node in plan.nodes if isinstance(node.spec, SourceSpec)]
    return spec


@pytest.mark.parametrize("trigger", [{"available_now": True}, {"once": True}])
def test_source_ends_with_what_is_there_if_the_trigger_of_its_queries_says_so(trigger: dict[str, Any]) -> None:
    assert source_of(trigger, trigger).options["availableNow"] == "true"


@pytest.mark.parametrize("trigger", [{}, {"processing_time_interval": "1 second"}])
def test_source_has_no_end_with_any_other_trigger(trigger: dict[str, Any]) -> None:
    assert "availableNow" not in source_of(trigger).options


def test_queries_over_one_stream_with_and_without_an_end_are_refused() -> None:
    with pytest.raises(PlanError, match="need one trigger"):
        source_of({"available_now": True}, {})


def test_source_that_ends_or_reads_json_has_the_options_of_the_session() -> None:
    assert dict(source_of({"available_now": True}, source="replay").options) == {"path": "/data"}
    settings = {"spark.sql.session.timeZone": "Europe/Vienna", "spark.sql.files.ignoreMissingFiles": "true"}
    options = source_of({}, source="json", settings=settings).options
    assert (options["timeZone"], options["ignoreMissingFiles"]) == ("Europe/Vienna", "true")
    assert "ignoreMissingFiles" not in source_of({}, source="replay", settings=settings).options
    assert source_of({}, source="json").options["timeZone"] == "UTC"


def projection(plan_id: int, name: str, below: int) -> Project:
    return Project(
        columns=(TypedColumn(name, "string"),), inputs=(below,), plan_id=plan_id, expressions=(Column(0, "string"),)
    )


def plan_of(*queries: tuple[PlanNode, ...], hints: dict[int, dict[str, str]], mode: str = "append") -> LogicalPlan:
    capture = Capture({}, lambda _: [("value", "string")], lambda _key, _value: None, hints=hints)
    capture.sources[7] = CapturedSource("text", {"path": "/data"}, "value STRING")
    source = Source(columns=COLUMNS, plan_id=7)
    for number, nodes in enumerate(queries):
        start = WriteStreamOperationStart(format="noop", output_mode=mode, query_name=f"query-{number}")
        capture.queries.append(CapturedQuery(start, Analysis(columns=nodes[-1].columns, nodes=(source, *nodes))))
    plan = LogicalPlan("job")
    add_queries(capture, plan, lambda name: name)
    return plan


def test_frame_of_two_queries_is_computed_once_and_has_one_uid() -> None:
    shared = projection(8, "shared", 0)
    plan = plan_of((shared,), (shared, projection(9, "more", 1)), hints={7: {"uid": "source"}, 8: {"uid": "shared"}})
    assert [node.uid for node in plan.nodes if node.uid] == ["source", "shared", "query-0-sink", "query-1-sink"]
    [node] = [node for node in plan.nodes if node.uid == "shared"]
    assert sum(edge.node is node for other in plan.nodes for edge in other.inputs) == 2
    assert compile_plan(plan).warnings == ()


def test_projections_of_a_frame_that_another_query_has_merged_are_all_reached() -> None:
    first, second, third = projection(8, "first", 0), projection(9, "second", 1), projection(10, "third", 2)
    for other in ((first, second), (first,), (first, second, third, projection(11, "fourth", 3))):
        plan = plan_of((first, second, third), other, hints={7: {"uid": "source"}})
        compiled = compile_plan(plan)
        assert compiled.warnings == ()
        names = {schema.names[0] for uid, schema in compiled.input_schemas.items() if uid.startswith("query-")}
        assert names == {"third", other[-1].columns[0].name}


def counted(plan_id: int, name: str, function: str = "Upper") -> tuple[PlanNode, ...]:
    """Counts the rows of each text in capitals."""
    text = Call(function, (Column(0, "string"),), "string", "ansi")
    key = Project(columns=COLUMNS, inputs=(0,), expressions=(text,))
    count = TypedAggregate("Count", (0,), "long")
    columns = (TypedColumn(name, "string"), TypedColumn("num", "long"))
    return key, Aggregate(columns=columns, inputs=(1,), plan_id=plan_id, keys=(0,), aggregates=(count,))


def test_aggregation_whose_results_are_read_under_different_names_is_computed_once() -> None:
    def aggregates(*queries: tuple[PlanNode, ...], hints: dict[int, dict[str, str]]) -> list[LogicalNode]:
        plan = plan_of(*queries, hints=hints, mode="update")
        names = {schema.names[0] for uid, schema in compile_plan(plan).input_schemas.items() if uid.startswith("query")}
        assert names == {query[-1].columns[0].name for query in queries}
        return [node for node in plan.nodes if node.kind == "aggregate"]

    assert len(aggregates(counted(8, "one"), counted(10, "two"), hints={})) == 1
    assert len(aggregates(counted(8, "one"), counted(10, "two", "Lower"), hints={})) == 2
    assert [node.uid for node in aggregates(counted(8, "one"), counted(10, "two"), hints={10: {"uid": "named"}})] == [
        None,
        "named",
    ]


TIMES = (TypedColumn("value", "string"), TypedColumn("at", "timestamp"))
KNOWN = Call("IsNotNull", (Column(0, "string"),), "boolean")


def timed(*conditions: Expression, behind: int = 9) -> tuple[PlanNode, ...]:
    """Event time of frame 8 behind moved filters, one for each condition, and a filter of the author's, frame 9."""
    expressions = (Column(0, "string"), Call("CurrentTimestamp", (), "timestamp"))
    nodes: list[PlanNode] = [Project(columns=TIMES, inputs=(0,), plan_id=6, expressions=expressions)]
    mark = Watermark(columns=TIMES, inputs=(1,), plan_id=8, column=1, delay_ms=1000)
    nodes.append(mark)
    for condition in conditions:
        nodes += [
            Filter(columns=TIMES, inputs=(len(nodes),), condition=condition),
            msgspec.structs.replace(mark, inputs=(len(nodes) + 1,)),
        ]
    return *nodes, Filter(columns=TIMES, inputs=(len(nodes),), plan_id=behind, condition=KNOWN)


def test_query_that_filters_has_an_event_time_of_its_own_behind_that_of_all_rows() -> None:
    """The filter of the author stays if it has a hint; elsewhere the moved one is enough."""
    wide = {"parallelism": "2"}
    hints = {6: wide, 7: wide, 8: {"uid": "time", **wide}, 10: {"uid": "known"}}
    plan = plan_of(timed(KNOWN), timed(KNOWN, behind=10), timed(), hints=hints)
    uids = {node.uid: vertex for vertex in compile_plan(plan).job_graph.vertices for node in vertex.operators}
    marks = ["time", "time.filtered.query-0", "time.filtered.query-0.filter", "time.filtered.query-1"]
    assert sorted(uid for uid in uids if uid.startswith("time")) == marks
    assert [uids[mark].parallelism for mark in marks] == [2, 2, 2, 2]
    conditions = [node for node in plan.nodes if isinstance(node.spec, ConditionSpec)]
    assert [node.uid for node in conditions] == [None, "known", None], "moved for both, kept with a hint, not moved"
    assert compile_plan(plan_of(timed(KNOWN), hints=hints)).specs.keys() >= {*marks[:2]}


def test_second_filter_of_the_author_is_not_evaluated_again_if_it_has_moved() -> None:
    short = Call("EqualTo", (Column(0, "string"), Literal("a", "string")), "boolean")
    both = Call("And", (KNOWN, short), "boolean")
    for moved, left in ((both, []), (KNOWN, [short]), (short, [KNOWN])):
        nodes = timed(moved)
        second = Filter(columns=TIMES, inputs=(len(nodes),), plan_id=10, condition=short)
        specs = [node.spec for node in plan_of((*nodes, second), hints={}).nodes]
        assert [spec.condition for spec in specs if isinstance(spec, ConditionSpec)] == [moved, *left]


NAMED = (TypedColumn("n", "integer"), TypedColumn("name", "string"), TypedColumn("bad", "string"))
N_OF = Column(0, "integer")
GREATER = Call("GreaterThan", (N_OF, Literal("1", "integer")), "boolean")


@pytest.mark.parametrize(
    ("nodes", "left_out"),
    [
        ((), ""),
        ((Project(columns=NAMED[:2], inputs=(0,), expressions=(N_OF, Column(1, "string"))),), ""),
        ((Project(columns=NAMED[:1], inputs=(0,), expressions=(N_OF,)),), "name"),
        (
            (
                Filter(columns=NAMED, inputs=(0,), condition=GREATER),
                Project(columns=NAMED[1:2], inputs=(1,), expressions=(Column(1, "string"),)),
            ),
            "",
        ),
        (
            (
                Project(columns=NAMED[:2], inputs=(0,), expressions=(N_OF, Column(1, "string"))),
                Project(columns=NAMED[:1], inputs=(1,), expressions=(N_OF,)),
            ),
            "name",
        ),
        (
            (Aggregate(columns=NAMED[:2], inputs=(0,), keys=(1,), aggregates=(TypedAggregate("Sum", (0,), "long"),)),),
            "",
        ),
    ],
)
@pytest.mark.parametrize("options", [{"columnNameOfCorruptRecord": "bad"}, {"mode": "FAILFAST"}], ids=str)
def test_bad_records_of_json_are_refused_for_a_query_that_leaves_out_columns(
    options: dict[str, str], nodes: tuple[PlanNode, ...], left_out: str
) -> None:
    """Spark's reader does not look at columns that a query leaves out, and what is wrong there is not bad."""
    of_source = Source(columns=NAMED, plan_id=7)
    columns = {"columnNameOfCorruptRecord": "bad", **options}
    source = CapturedSource("json", columns, "")
    if not left_out:
        check_pruned(source, 0, (of_source, *nodes))
        return
    with pytest.raises(PlanError, match=f"does not read {left_out}: remove them from the schema"):
        check_pruned(source, 0, (of_source, *nodes))
    check_pruned(CapturedSource("json", {**columns, "badRows": "drop"}, ""), 0, (of_source, *nodes))
    check_pruned(CapturedSource("csv", columns, ""), 0, (of_source, *nodes))


def test_files_that_spark_writes_for_an_object_store_need_a_directory_for_staged_rows() -> None:
    def planned(format_: str, location: str) -> LogicalPlan:
        capture = Capture({}, lambda _: [("value", "string")], lambda _key, _value: None)
        capture.sources[7] = CapturedSource("text", {"path": "/data"}, "value STRING")
        options = {"checkpointLocation": location}
        start = WriteStreamOperationStart(format=format_, path="s3://b/out", output_mode="append", options=options)
        analysis = Analysis(columns=COLUMNS, nodes=(Source(columns=COLUMNS, plan_id=7),))
        capture.queries.append(CapturedQuery(start, analysis))
        plan = LogicalPlan("job")
        add_queries(capture, plan, lambda name: name)
        return plan

    assert planned("xml", "/state").nodes[-1].spec.options == {"path": "/state/staged"}  # type: ignore[union-attr]
    assert planned("text", "s3://b/state").nodes
    with pytest.raises(
        PlanError, match=r"'path': Spark writes format 'orc' to a directory .* not to 's3://b/state', or"
    ):
        planned("orc", "s3://b/state")
