"""The compiler: chaining, edges, uids, parallelisms, and the plans that it refuses."""

import re
from dataclasses import MISSING, fields, replace
from typing import Any, get_args

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Literal
from ckpt_runtime.graph.compiler import CompiledPlan, compile_plan
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import COMMITTABLE_SCHEMA, SPLIT_SCHEMA
from ckpt_runtime.graph.job_graph import BATCHES, JobGraph, Partitioning
from ckpt_runtime.graph.logical import Chaining, LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import (
    Aggregate,
    AggregateSpec,
    CommitterSpec,
    ConditionSpec,
    DrillSinkSpec,
    EnumeratorSpec,
    EvaluateSpec,
    GenerateSpec,
    JoinSide,
    MapInArrowSpec,
    ObserveSpec,
    OperatorSpec,
    PythonFunctionsSpec,
    RangeReaderSpec,
    SinkSpec,
    SourceSpec,
    StaticJoinSpec,
    WatermarkSpec,
)
from ckpt_runtime.sources import Source

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
FORWARD, HASH = Partitioning.FORWARD, Partitioning.HASH
POSITIVE = Call("GreaterThan", (Column(0, "long"), Literal("0", "long")), "boolean")


class FakeDataSource:
    """Stands for a user's class; the compiler only asks whether it is one."""


def source(plan: LogicalPlan, uid: str | None = "source", format_: Any = "numbers", **settings: Any) -> LogicalNode:
    return plan.add(LogicalNode(SourceSpec(format_), (), SCHEMA, uid, **settings))


def operator(
    plan: LogicalPlan, *inputs: LogicalNode, uid: str | None = None, how: Partitioning = FORWARD, **settings: Any
) -> LogicalNode:
    edges = tuple(LogicalInput(node, how) for node in inputs)
    return plan.add(LogicalNode(ConditionSpec(POSITIVE), edges, SCHEMA, uid, **settings))


def aggregate(plan: LogicalPlan, node: LogicalNode, uid: str | None = "agg", **settings: Any) -> LogicalNode:
    spec = AggregateSpec(("k",), (Aggregate("count", None, "n"),))
    return plan.add(LogicalNode(spec, (LogicalInput(node, HASH, ("k",)),), SCHEMA, uid, **settings))


def sink(
    plan: LogicalPlan, *inputs: LogicalNode, uid: str | None = "sink", format_: Any = "noop", **settings: Any
) -> LogicalNode:
    edges = tuple(LogicalInput(node) for node in inputs)
    return plan.add(LogicalNode(SinkSpec(format_), edges, None, uid, **settings))


def chains(plan: CompiledPlan) -> list[list[str]]:
    return [[node.uid for node in vertex.operators] for vertex in plan.job_graph.vertices]


def edges(plan: CompiledPlan) -> list[tuple[str, str, str]]:
    graph = plan.job_graph
    return [
        (graph.vertex(e.source).operators[-1].uid, graph.vertex(e.target).operators[0].uid, e.partitioning.value)
        for e in graph.edges
    ]


def test_forward_operators_are_chained_and_keyed_ones_start_a_vertex() -> None:
    plan = LogicalPlan("job", default_parallelism=2)
    sink(plan, aggregate(plan, operator(plan, source(plan), uid="filter")))
    compiled = compile_plan(plan)
    assert chains(compiled) == [["source", "filter"], ["agg", "sink"]]
    assert edges(compiled) == [("filter", "agg", "HASH")]
    assert compiled.job_graph.edges[0].keys == ("k",)
    assert compiled.job_graph.slots == 2
    assert compiled.input_schemas.keys() == {"filter", "agg", "sink"}
    assert compiled.output_schemas.keys() == {"source", "filter", "agg"}
    assert compiled.warnings == ()


def test_an_output_with_two_consumers_is_not_chained() -> None:
    plan = LogicalPlan("job")
    read = source(plan)
    sink(plan, operator(plan, read, uid="a"), uid="s1")
    sink(plan, operator(plan, read, uid="b"), uid="s2")
    compiled = compile_plan(plan)
    assert chains(compiled) == [["source"], ["a", "s1"], ["b", "s2"]]
    assert edges(compiled) == [("source", "a", "FORWARD"), ("source", "b", "FORWARD")]


def test_a_change_of_parallelism_rebalances() -> None:
    plan = LogicalPlan("job", default_parallelism=4)
    sink(plan, operator(plan, source(plan, parallelism=1), uid="f"))
    compiled = compile_plan(plan)
    assert edges(compiled) == [("source", "f", "REBALANCE")]
    assert [vertex.parallelism for vertex in compiled.job_graph.vertices] == [1, 4]


def test_a_union_is_several_edges_into_one_vertex_in_order() -> None:
    plan = LogicalPlan("job")
    left, right = source(plan, "left"), source(plan, "right")
    sink(plan, operator(plan, left, right, uid="both"))
    compiled = compile_plan(plan)
    assert chains(compiled) == [["left"], ["right"], ["both", "sink"]]
    assert edges(compiled) == [("left", "both", "FORWARD"), ("right", "both", "FORWARD")]


@pytest.mark.parametrize(
    ("chaining", "expected"),
    [
        (Chaining.ALWAYS, [["source", "f", "sink"]]),
        (Chaining.HEAD, [["source"], ["f", "sink"]]),
        (Chaining.NEVER, [["source"], ["f"], ["sink"]]),
    ],
)
def test_chaining_can_be_broken(chaining: Chaining, expected: list[list[str]]) -> None:
    plan = LogicalPlan("job")
    sink(plan, operator(plan, source(plan), uid="f", chaining=chaining))
    assert chains(compile_plan(plan)) == expected
    plan.chaining = False
    assert chains(compile_plan(plan)) == [["source"], ["f"], ["sink"]]


def test_a_pyspark_reader_becomes_one_enumerator_and_parallel_readers() -> None:
    plan = LogicalPlan("job", default_parallelism=3)
    sink(plan, source(plan, "in", FakeDataSource))
    compiled = compile_plan(plan)
    assert chains(compiled) == [["in"], ["in.reader", "sink"]]
    assert edges(compiled) == [("in", "in.reader", "REBALANCE")]
    enumerator, reader = compiled.job_graph.vertices
    assert (enumerator.parallelism, reader.parallelism) == (1, 3)
    assert enumerator.operators[0].user_code
    assert isinstance(compiled.specs["in"], EnumeratorSpec)
    assert isinstance(compiled.specs["in.reader"], RangeReaderSpec)
    assert compiled.input_schemas["in.reader"] == SPLIT_SCHEMA
    assert compiled.output_schemas["in.reader"] == SCHEMA


def test_a_pyspark_writer_gets_one_committer() -> None:
    plan = LogicalPlan("job", default_parallelism=3)
    sink(plan, source(plan), uid="out", format_=FakeDataSource)
    compiled = compile_plan(plan)
    assert chains(compiled) == [["source", "out"], ["out.committer"]]
    assert edges(compiled) == [("out", "out.committer", "REBALANCE")]
    committer = compiled.specs["out.committer"]
    assert isinstance(committer, CommitterSpec)
    assert committer.schema == SCHEMA
    assert compiled.output_schemas["out"] == COMMITTABLE_SCHEMA
    assert compiled.job_graph.vertices[1].parallelism == 1


@pytest.mark.row("air.9")
def test_compiled_drill_has_no_external_effects_and_its_snapshot_fits() -> None:
    """The same uids, vertices and edges, derived ones too; but no worker would take the one plan for the other."""

    def planned(*, drill: bool) -> CompiledPlan:
        plan = LogicalPlan("test", drill=drill)
        start = source(plan, format_=FakeDataSource)
        for uid, format_ in (("table", "noop"), (None, "noop"), ("own", FakeDataSource), (None, FakeDataSource)):
            sink(plan, start, uid=uid, format_=format_)
        return compile_plan(plan)

    real, drill = planned(drill=False), planned(drill=True)
    assert chains(drill) == chains(real)
    assert edges(drill) == edges(real)
    kinds = {node.kind for vertex in drill.job_graph.vertices for node in vertex.operators}
    assert kinds == {"enumerator", "range_reader", "drill_sink"}
    enumerator = drill.specs["source"]
    assert isinstance(enumerator, EnumeratorSpec)
    assert not enumerator.acknowledges
    assert sum(spec == DrillSinkSpec() for spec in drill.specs.values()) == 6
    assert drill.job_graph.output_directories == {}
    assert drill.job_graph.fingerprint != real.job_graph.fingerprint


def test_missing_uids_are_derived_and_warned_about_where_state_is_kept() -> None:
    plan = LogicalPlan("job")
    sink(plan, aggregate(plan, operator(plan, source(plan, None)), uid=None), uid=None)
    compiled = compile_plan(plan)
    assert chains(compiled) == [["source-0", "filter-1"], ["aggregate-0", "sink-0"]]
    assert not any(node.uid_given for vertex in compiled.job_graph.vertices for node in vertex.operators)
    assert [warning.split("'")[3] for warning in compiled.warnings] == ["source-0", "aggregate-0", "sink-0"]


def test_derived_uids_stay_and_never_take_a_given_one() -> None:
    plan, more = LogicalPlan("job"), LogicalPlan("job")
    sink(plan, aggregate(plan, source(plan, None), uid=None), uid=None)
    sink(more, operator(more, aggregate(more, operator(more, source(more, None)), uid=None)), uid=None)
    with_state = {"source-0", "aggregate-0", "sink-0"}
    assert {uid for chain in chains(compile_plan(plan)) for uid in chain} == with_state
    assert {uid for chain in chains(compile_plan(more)) for uid in chain} == {*with_state, "filter-1", "filter-3"}
    plan = LogicalPlan("job")
    sink(plan, operator(plan, source(plan, None), uid="source-0"))
    assert chains(compile_plan(plan)) == [["source-0-derived", "source-0", "sink"]]


def test_watermarks_without_uids_are_numbered_because_they_keep_a_time() -> None:
    plan = LogicalPlan("job")
    read = operator(plan, source(plan, None))
    timed = plan.add(LogicalNode(WatermarkSpec("t", 5), (LogicalInput(read, FORWARD),), SCHEMA))
    sink(plan, timed)
    assert "watermark-0" in {uid for chain in chains(compile_plan(plan)) for uid in chain}


def test_an_operator_without_a_sink_is_left_out_with_a_warning() -> None:
    plan = LogicalPlan("job")
    read = source(plan)
    sink(plan, read)
    operator(plan, read, uid="forgotten")
    compiled = compile_plan(plan)
    assert chains(compiled) == [["source", "sink"]]
    assert compiled.warnings == ("operator 'forgotten' is not connected to a sink and is not part of the job",)


@pytest.mark.parametrize(
    ("parallelism", "expected"), [(1, 128), (128, 256), (85, 128), (86, 256), (20_000, 32_768), (32_768, 32_768)]
)
def test_the_maximum_parallelism_is_derived_as_in_flink(parallelism: int, expected: int) -> None:
    plan = LogicalPlan("job", default_parallelism=parallelism)
    sink(plan, source(plan))
    assert compile_plan(plan).job_graph.vertices[0].max_parallelism == expected


def test_refused_plans_name_the_field() -> None:
    plan = LogicalPlan("job")
    with pytest.raises(PlanError, match="pipeline: it has no source"):
        compile_plan(plan)
    read = source(plan)
    with pytest.raises(PlanError, match="pipeline: it has no sink"):
        compile_plan(plan)
    first = sink(plan, read, uid="same")
    second = sink(plan, read, uid="same")
    with pytest.raises(PlanError, match="uid: 'same' is used by two operators"):
        compile_plan(plan)
    second.uid = "other"
    first.parallelism = 0
    with pytest.raises(PlanError, match="parallelism: 0 of operator 'same' is not between 1 and 32768"):
        compile_plan(plan)
    first.parallelism, plan.default_max_parallelism = 9, 8
    with pytest.raises(PlanError, match="parallelism: 9 of operator 'same' is above its maximum parallelism 8"):
        compile_plan(plan)


def test_a_plan_compiles_to_the_same_graph_each_time_and_survives_json() -> None:
    def build() -> JobGraph:
        plan = LogicalPlan("job", {"a": "b"}, default_parallelism=2)
        sink(plan, aggregate(plan, source(plan)), uid="out", format_=FakeDataSource)
        return compile_plan(plan).job_graph

    first, second = build(), build()
    assert first == second
    assert JobGraph.from_json(first.to_json()) == first
    assert first.fingerprint == second.fingerprint
    assert replace(first, explained=("a text",)).fingerprint == first.fingerprint


def watermark(plan: LogicalPlan, *inputs: LogicalNode, uid: str = "time", **settings: Any) -> LogicalNode:
    how = settings.pop("how", FORWARD)
    edges = tuple(LogicalInput(node, how) for node in inputs)
    return plan.add(LogicalNode(WatermarkSpec("v", 10), edges, SCHEMA, uid, **settings))


def by_ranges(plan: LogicalPlan) -> list[str]:
    """The operators whose event time moves between ranges of a reader."""
    specs = compile_plan(plan).specs
    return [uid for uid, spec in specs.items() if isinstance(spec, WatermarkSpec) and spec.by_ranges]


def reader(plan: LogicalPlan, uid: str = "source", **settings: Any) -> LogicalNode:
    return source(plan, uid, FakeDataSource, **settings)


@pytest.mark.parametrize("chaining", [True, False])
def test_event_time_moves_between_the_ranges_of_a_stream_reader(chaining: bool) -> None:
    """Also where two streams are made of one: then it is no chain any more."""
    plan = LogicalPlan("job", default_parallelism=2, chaining=chaining)
    read = reader(plan)
    left = watermark(plan, operator(plan, read, uid="left"), uid="left-time")
    right = watermark(plan, operator(plan, read, uid="right"), uid="right-time")
    sink(plan, aggregate(plan, left, "counted"), uid="one")
    sink(plan, watermark(plan, right, uid="again"), uid="other")
    assert by_ranges(plan) == ["left-time", "right-time", "again"]


class OwnSource(Source):
    """Spark has no such sources, and no batches of them."""


@pytest.mark.parametrize(
    ("format_", "ends", "has_batches"),
    [(FakeDataSource, True, True), (FakeDataSource, False, False), (OwnSource, True, False)],
)
def test_batches_follow_each_other_where_a_source_of_spark_ends_with_what_is_there(
    format_: type, ends: bool, has_batches: bool
) -> None:
    plan = LogicalPlan("job")
    spec = SourceSpec(format_, {"availableNow": str(ends)})
    read = plan.add(LogicalNode(spec, (), SCHEMA, "source"))
    sink(plan, watermark(plan, operator(plan, read, uid="between")))
    made = compile_plan(plan).specs["time"]
    assert isinstance(made, WatermarkSpec)
    assert (made.by_ranges, made.by_batches) == (True, has_batches)


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("united", [True, False])
def test_sources_whose_batches_or_subtasks_meet_are_in_step_by_query(ends: bool, united: bool) -> None:
    """One whose subtasks meet no others runs by itself, and so do all that do not end.

    One that leaves its last batch to the next run may not meet another one. Where they are ``united``, event time is
    that of the rows of both; it needs batches.
    """
    plan = LogicalPlan("job")
    spec = SourceSpec(FakeDataSource, {"availableNow": str(ends)})
    first, second, third, alone, last = (
        watermark(plan, plan.add(LogicalNode(spec, (), SCHEMA, uid)), uid=f"{uid}-time") for uid in "bacde"
    )
    met = operator(plan, first, second, uid="met")
    if united:
        met.spec = WatermarkSpec("t", 1000, united=True)
    last.spec = replace(last.spec, keeps_last=True)
    sink(plan, aggregate(plan, met, "counted"), uid="one")
    sink(plan, aggregate(plan, third, "other"), uid="two")
    sink(plan, operator(plan, alone, uid="kept"), uid="three")
    sink(plan, aggregate(plan, last, "without-last"), uid="four")
    if united and not ends:
        with pytest.raises(PlanError, match="because several streams meet at operator 'met': event time would advance"):
            compile_plan(plan)
        return
    compiled = compile_plan(plan)
    if ends:
        first.spec = replace(first.spec, keeps_last=True)
        with pytest.raises(PlanError, match="where streams meet"):
            compile_plan(plan)
    assert not united or compiled.specs["met"] == replace(met.spec, by_ranges=True, by_batches=True)
    sources = {uid: each for uid, each in compiled.specs.items() if isinstance(each, EnumeratorSpec)}
    assert [uid for uid, each in sources.items() if each.in_step] == (["b", "a", "c", "e"] if ends else [])
    # Each subtask in which they meet gets the times of all subtasks of both.
    into_met = [partitioning for _, target, partitioning in edges(compiled) if target == "met"]
    assert into_met == [Partitioning.REBALANCE if ends else FORWARD] * 2
    assert [uid for uid, each in sources.items() if each.keeps_last] == (["e"] if ends else [])
    heads = {vertex.id: vertex.operators[0].uid for vertex in compiled.job_graph.vertices}
    groups = compiled.job_graph.alignment_groups.items()
    found = {group: sorted(heads[vertex] for vertex, _ in members) for group, members in groups}
    queries = {
        f"{BATCHES}a": ["a", "b", "counted", "met"],
        f"{BATCHES}c": ["c", "other"],
        f"{BATCHES}e": ["e", "without-last"],
    }
    assert found == (queries if ends else {})


@pytest.mark.parametrize(
    ("options", "format_", "calls"),
    [
        ({"availableNow": "true", "maxFilesPerTrigger": "2"}, "foreachBatch", ["a", "a.reader", "b", "b.reader"]),
        ({"availableNow": "true", "maxbytespertrigger": "9"}, "foreachBatch", ["a", "a.reader", "b", "b.reader"]),
        ({"availableNow": "true"}, "foreachBatch", ["a", "a.reader", "b", "b.reader"]),
        ({"maxFilesPerTrigger": "2"}, "foreachBatch", []),
        ({"availableNow": "true", "maxFilesPerTrigger": "2"}, "noop", []),
    ],
)
def test_function_is_called_with_each_batch_of_files_that_are_there(
    options: dict[str, str], format_: str, calls: list[str]
) -> None:
    """The files of a source without a limit are a single batch."""

    def files(plan: LogicalPlan, uid: str, options: dict[str, str]) -> LogicalNode:
        spec = SourceSpec("parquet", {"path": "/in", **options})
        return plan.add(LogicalNode(spec, (), SCHEMA, uid))

    def in_calls(plan: LogicalPlan) -> list[str]:
        compiled = compile_plan(plan)
        marked = [uid for uid, each in compiled.specs.items() if getattr(each, "in_calls", False)]
        found = [uid for uid in marked if not isinstance(compiled.specs[uid], CommitterSpec)]
        assert bool(found) == (len(marked) > len(found))
        with_empty = [each for each in compiled.specs.values() if isinstance(each, SinkSpec) and each.batch is not None]
        assert bool(with_empty) == (bool(found) and len(plan.nodes) == 2), "of one source"
        heads = [each.operators[0].uid for each in compiled.job_graph.vertices]
        of_group = [heads.index(uid) for uid in found]
        members = {vertex for group in compiled.job_graph.alignment_groups.values() for vertex, _ in group}
        assert members == {compiled.job_graph.vertices[at].id for at in of_group}
        return found

    unlimited = {key: value for key, value in options.items() if key == "availableNow"}
    plan = LogicalPlan("job", default_parallelism=2)
    both = operator(plan, files(plan, "a", options), files(plan, "b", unlimited), uid="both")
    sink(plan, aggregate(plan, both), format_=format_)
    sink(plan, files(plan, "c", options), uid="other")
    assert sorted(in_calls(plan)) == calls
    plan = LogicalPlan("job")
    sink(plan, operator(plan, files(plan, "a", options), source(plan), uid="both"), format_=format_)
    assert in_calls(plan) == []
    plan = LogicalPlan("job")
    sink(plan, plan.add(LogicalNode(SourceSpec(FakeDataSource, unlimited), (), SCHEMA, "reader")), format_=format_)
    assert bool(in_calls(plan)) == (format_ == "foreachBatch" and bool(unlimited))


def test_event_time_of_other_sources_moves_with_every_buffer() -> None:
    plan = LogicalPlan("job", default_parallelism=2)
    both = operator(plan, source(plan), source(plan, "more"), uid="both")
    one = watermark(plan, aggregate(plan, both), uid="one", parallelism=1)
    sink(plan, watermark(plan, one, uid="again", how=Partitioning.REBALANCE))
    assert by_ranges(plan) == []


def spec_of(kind: type) -> Any:
    """A description of that kind; the compiler looks at none of its parts."""
    required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    side = JoinSide(SCHEMA, ("k",))
    known = {"format": "numbers", "how": "inner", "left": side, "right": side, "keys": ("k",)}
    return kind(**{name: known.get(name) for name in required})


PASS_RANGES_ON = {
    *(WatermarkSpec, ConditionSpec, ObserveSpec, EvaluateSpec, MapInArrowSpec),
    *(GenerateSpec, PythonFunctionsSpec, StaticJoinSpec),
}


@pytest.mark.parametrize("kind", [kind for kind in get_args(OperatorSpec) if kind not in PASS_RANGES_ON])
def test_event_time_after_an_operator_that_does_not_forward_ranges_is_refused(kind: type) -> None:
    """Whatever kinds of operators there are: those that the compiler is not sure of are among them."""
    plan = LogicalPlan("job")
    between = LogicalNode(spec_of(kind), (LogicalInput(reader(plan)),), SCHEMA, "between")
    plan.add(between)
    sink(plan, watermark(plan, operator(plan, between, uid="kept")))
    if kind is RangeReaderSpec:  # whose rows are those of ranges again
        assert by_ranges(plan) == ["time"]
        return
    with pytest.raises(PlanError, match=r"withWatermark: operator 'time' cannot know .* because operator 'between' \("):
        compile_plan(plan)


MIXED = {
    "union": "several streams meet at operator 'both'",
    "union with another source": "several streams meet at operator 'time'",
    "rebalance": "rows are distributed over other subtasks before operator 'time' (REBALANCE, parallelism 2 to 2)",
    "broadcast": "rows are distributed over other subtasks before operator 'time' (BROADCAST, parallelism 2 to 2)",
    "parallelism": "rows are distributed over other subtasks before operator 'one' (REBALANCE, parallelism 2 to 1)",
}


@pytest.mark.parametrize("mixed", MIXED)
def test_event_time_after_a_union_of_streams_or_subtasks_is_refused(mixed: str) -> None:
    plan = LogicalPlan("job", default_parallelism=2)
    read = reader(plan)
    match mixed:
        case "union":
            late = watermark(plan, operator(plan, read, reader(plan, "more"), uid="both"))
        case "union with another source":
            late = watermark(plan, read, source(plan, "numbers"))
        case "parallelism":
            late = watermark(plan, operator(plan, read, uid="one", parallelism=1))
        case _:
            late = watermark(plan, read, how=Partitioning(mixed.upper()))
    sink(plan, late)
    with pytest.raises(
        PlanError, match=re.escape(f"because {MIXED[mixed]}: event time would advance within the batch")
    ):
        compile_plan(plan)


@pytest.mark.parametrize(
    ("rates", "problem"),
    [
        ("in:10,other:0", "no source whose rate can be limited has the uid 'other'; those are: in"),
        ("in:-1", "'-1' of 'in' is not a number of rows per second"),
        ("in:fast", "'fast' of 'in' is not a number of rows per second"),
    ],
)
def test_rates_of_sources_that_cannot_be_kept_are_refused(rates: str, problem: str) -> None:
    plan = LogicalPlan("job", configuration={"pipeline.source.rates": rates})
    sink(plan, operator(plan, source(plan, "in", "text"), reader(plan, "other")))
    with pytest.raises(PlanError, match=re.escape(problem)):
        compile_plan(plan)


def test_readers_of_a_source_without_a_uid_are_found_by_the_uid_of_the_source() -> None:
    plan = LogicalPlan("job", configuration={"pipeline.source.rates": "enumerator-0:5"})
    sink(plan, plan.add(LogicalNode(SourceSpec("text", {}), (), SCHEMA)))
    assert list(compile_plan(plan).specs)[:2] == ["enumerator-0", "enumerator-0.reader"]


ALIGNED = {"scan.watermark.alignment.group": "g", "scan.watermark.alignment.max-drift": "1 min"}


def aligned_plan(options: dict[str, str], *, chaining: bool = True, behind: bool = True) -> LogicalPlan:
    plan = LogicalPlan("job", chaining=chaining)
    read = plan.add(LogicalNode(SourceSpec("rate", options), (), SCHEMA, "in"))
    sink(plan, watermark(plan, read) if behind else read)
    return plan


@pytest.mark.row("ends.3")
def test_readers_of_aligned_sources_are_in_their_group() -> None:
    graph = compile_plan(aligned_plan(ALIGNED)).job_graph
    [(group, [member])] = graph.alignment_groups.items()
    assert (group, graph.vertex(member[0]).operators[0].kind) == ("g", "range_reader")
    assert JobGraph.from_json(graph.to_json()) == graph
    assert graph.fingerprint == compile_plan(aligned_plan({})).job_graph.fingerprint


@pytest.mark.row("ends.3")
def test_aligned_source_is_read_by_queries_that_filter_differently() -> None:
    """It has the event time of all rows."""
    plan = aligned_plan(ALIGNED)
    [time] = [node for node in plan.nodes if node.kind == "watermark"]
    for query in ("one", "two"):
        kept = plan.add(LogicalNode(ConditionSpec(Literal(True, "boolean")), (LogicalInput(time),), SCHEMA))
        own = plan.add(LogicalNode(WatermarkSpec("v", 10), (LogicalInput(kept),), SCHEMA, filtered_for=query))
        sink(plan, own, uid=query)
    graph = compile_plan(plan).job_graph
    [(_, [member])] = graph.alignment_groups.items()
    assert [operator.uid for operator in graph.vertex(member[0]).operators] == ["in.reader", "time"]
    uids = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
    assert uids >= {"time.filtered.one", "time.filtered.two"}


def test_moved_filters_do_not_change_the_uids_of_other_operators() -> None:
    def uids(*moved: str) -> list[str]:
        plan = LogicalPlan("job")
        node = source(plan)
        for query in (None, *moved):
            node = operator(plan, node, filtered_for=query)
            node = plan.add(LogicalNode(WatermarkSpec("v", 10), (LogicalInput(node),), SCHEMA, filtered_for=query))
        sink(plan, operator(plan, node))
        return [uid for chain in chains(compile_plan(plan)) for uid in chain]

    own = ["watermark-0.filtered.shown.filter", "watermark-0.filtered.shown"]
    assert uids() == ["source", "filter-1", "watermark-0", "filter-3", "sink"]
    assert uids("shown") == ["source", "filter-1", "watermark-0", *own, "filter-3", "sink"]


@pytest.mark.row("ends.3")
@pytest.mark.parametrize(
    ("options", "where", "problem"),
    [
        ({"scan.watermark.alignment.group": "g"}, {}, "'scan.watermark.alignment.max-drift': alignment of watermarks"),
        ({"scan.watermark.idle-timeout": "1 s"}, {}, "'scan.watermark.alignment.group': alignment of watermarks needs"),
        ({**ALIGNED, "scan.watermark.alignment.update-interval": "1 ms"}, {}, "'1 ms' is less than 10 ms"),
        ({**ALIGNED, "scan.watermark.alignment.max-drift": "soon"}, {}, "'soon' is not a duration"),
        (ALIGNED, {"behind": False}, "needs exactly one withWatermark in its own vertex, and has 0"),
        (ALIGNED, {"chaining": False}, "leave pipeline.operator-chaining.enabled at true"),
    ],
)
def test_alignment_that_cannot_work_is_refused(options: dict[str, str], where: dict[str, bool], problem: str) -> None:
    with pytest.raises(PlanError, match=re.escape(problem)):
        compile_plan(aligned_plan(options, **where))


def test_alignment_of_a_data_source_of_pyspark_is_refused() -> None:
    plan = LogicalPlan("job")
    read = plan.add(LogicalNode(SourceSpec(FakeDataSource, ALIGNED), (), SCHEMA, "in"))
    sink(plan, watermark(plan, read))
    with pytest.raises(PlanError, match="source 'in' is a PySpark DataSource, whose readers cannot be made to wait"):
        compile_plan(plan)
