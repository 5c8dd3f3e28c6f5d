"""The pipeline author's interface: what it builds, and errors that name the offending field at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.datasource import DataSource
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from ckpt_runtime.api import PlanError, Stream, StreamSession, avg, count, max, min, sum  # noqa: A004
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import ConfigurationError
from ckpt_runtime.graph.job_graph import Partitioning, vertex_id_of
from ckpt_runtime.graph.specs import AggregateSpec, ProcessSpec, ProjectSpec, SinkSpec, SourceSpec
from ckpt_runtime.state.stored_rows import KEY_PREFIX


class Processor(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return iter(())

    def close(self) -> None: ...


class MySource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "mine"

    def schema(self) -> str:
        return "id BIGINT, at TIMESTAMP"

    def streamReader(self, schema: Any) -> Any:
        raise AssertionError("a plan makes no reader")

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        raise AssertionError("a plan makes no writer")


class InBatches(DataSource):
    def schema(self) -> str:
        raise AssertionError("refused before")

    def reader(self, schema: Any) -> Any:
        return None

    def writer(self, schema: Any, overwrite: bool) -> Any:
        return None


class SimpleOnly(DataSource):
    def schema(self) -> str:
        return "id BIGINT"

    def simpleStreamReader(self, schema: Any) -> Any:
        return None


def numbers(session: StreamSession, **options: Any) -> Stream:
    return session.readStream.format("numbers").options(**options).load()


def test_a_pipeline_reads_like_pyspark() -> None:
    session = StreamSession({"parallelism.default": "2", "execution.checkpointing.interval": "1 s"}, "demo")
    (
        numbers(session, keys=10, rowNumber=True)
        .uid("source")
        .filter(pc.field("value") > 3)
        .withColumn("half", pc.divide(pc.field("value"), 2))
        .select("key", "value", double=pc.field("half") * 4)
        .groupBy("key")
        .agg(count(), sum("value").alias("total"), min("value"), max("double"), avg("value"))
        .uid("totals")
        .name("totals per key")
        .writeStream.format("noop")
        .outputMode("Update")
        .uid("sink")
        .start()
        .setParallelism(1)
    )
    plan = session.compile()
    graph = plan.job_graph
    assert graph.name == "demo"
    assert graph.configuration == {"parallelism.default": "2", "execution.checkpointing.interval": "1 s"}
    assert [vertex.name for vertex in graph.vertices] == [
        "source -> filter-1 -> project-2 -> project-3",
        "totals per key",
        "sink",
    ]
    assert [edge.partitioning for edge in graph.edges] == [Partitioning.HASH, Partitioning.REBALANCE]
    assert plan.output_schemas["totals"].names == ["key", "count", "total", "min(value)", "max(double)", "avg(value)"]
    assert isinstance(plan.specs["totals"], AggregateSpec)
    assert isinstance(plan.specs["project-3"], ProjectSpec)


def test_transform_with_state_takes_pyspark_arguments() -> None:
    session = StreamSession()
    stream = session.readStream.format(MySource).load().withWatermark("at", "10 seconds")
    result = stream.groupBy("id").transformWithState(
        statefulProcessor=Processor(), outputStructType="id BIGINT, n INT", outputMode="update", timeMode="eventtime"
    )
    result.uid("state").writeStream.format("noop").start()
    spec = session.compile().specs["state"]
    assert isinstance(spec, ProcessSpec)
    assert (spec.output_mode, spec.time_mode, spec.keys) == ("Update", "EventTime", ("id",))
    assert (spec.event_time_column, spec.output_event_time) == ("at", None)
    assert spec.output_schema.equals(pa.schema([("id", pa.int64()), ("n", pa.int32())]))


def processed(stream: Stream, **arguments: str) -> Stream:
    output = "id BIGINT, then TIMESTAMP"
    return stream.groupBy("id").transformWithState(Processor(), output, "append", "none", **arguments)


def test_the_event_time_column_is_followed_through_the_plan() -> None:
    session = StreamSession()
    stream = session.readStream.format(MySource).load().withWatermark("at", "10 seconds").uid("w")
    same = stream.select("id", "at")
    shifted = pc.add(pc.field("at"), pa.scalar(timedelta(days=1)))
    other = stream.select("id", "at").withColumn("at", shifted)
    again = stream.select("id", at="at").filter(pc.field("id") > 1)
    cases: list[tuple[Stream, str | None]] = [
        (same, "at"),
        (stream.select("id", moment="at").filter(pc.field("id") > 0), "moment"),
        (stream.select("id", moment="at").withWatermark("moment", "1 h"), "moment"),
        (stream.select("id"), None),
        (other, None),
        (same.union(again), "at"),
        (same.union(other), None),
        (stream.mapInArrow(lambda batches: batches, stream.schema), None),
        (stream.groupBy("id", "at").count(), "at"),
        (stream.groupBy("id").count(), None),
        (processed(stream), None),
        (processed(stream, eventTimeColumnName="then").filter(pc.field("id") > 0), "then"),
    ]
    for number, (case, column) in enumerate(cases):
        uid = f"state-{number}"
        result = case.groupBy("id").transformWithState(Processor(), "id BIGINT", "append", "eventTime").uid(uid)
        result.writeStream.format("noop").start()
        assert session.compile().specs[uid].event_time_column == column, number  # type: ignore[union-attr]
    keyed = stream.select("id", "at", late="at")
    two = keyed.union(keyed.withWatermark("late", "1 h")).groupBy("id")
    with pytest.raises(PlanError, match=r"united streams have different event time columns \['at', 'late'\]"):
        two.transformWithState(Processor(), "id BIGINT", "append", "eventTime")


def test_a_second_watermark_behind_a_processor_is_refused_and_says_what_takes_its_place() -> None:
    session = StreamSession()
    stream = session.readStream.format(MySource).load().withWatermark("at", "10 seconds").uid("first-time")
    again = processed(stream).uid("processor").withWatermark("then", "10 seconds").uid("second-time")
    again.writeStream.format("noop").start()
    with pytest.raises(PlanError, match=r"'second-time' .* 'processor' \(process\) .* in its eventTimeColumnName"):
        session.compile()


def test_a_watermark_between_a_deduplication_and_a_join_is_refused() -> None:
    session = StreamSession()
    stream = session.readStream.format(MySource).load()
    output = "id BIGINT, then TIMESTAMP"
    distinct = stream.groupBy("id").transformWithState(Processor(), output, "append", "none").uid("distinct")
    timed = distinct.withWatermark("then", "1 s").uid("late")
    other = stream.select(other="id", at="at").withWatermark("at", "1 s")
    joined = timed.join(other, on=[("id", "other")], how="left", within=("0 s", "1 s"))
    joined.writeStream.format("noop").start()
    with pytest.raises(PlanError, match=r"withWatermark: operator 'late' .* right behind load\(\)"):
        session.compile()


@pytest.mark.parametrize(
    ("kind", "view"),
    [
        (pa.string_view(), "string_view"),
        (pa.list_(pa.binary_view()), "binary_view"),
        (pa.list_view(pa.int8()), "list_view"),
        (pa.struct([("a", pa.map_(pa.string(), pa.string_view()))]), "string_view"),
    ],
)
def test_views_are_refused_where_the_plan_gets_them(kind: pa.DataType, view: str) -> None:
    reader = StreamSession().readStream.format("replay").option("path", "/in")
    refusal = f"column 'v': type {view} is not supported; use {view.removesuffix('_view')}$"
    with pytest.raises(PlanError, match=refusal):
        reader.schema(pa.schema([("v", kind)])).load()
    numbers = StreamSession().readStream.format("numbers").load()
    with pytest.raises(PlanError, match=refusal):
        numbers.mapInArrow(lambda batches: batches, pa.schema([("v", kind)]))


def test_a_registered_data_source_is_found_by_name() -> None:
    session = StreamSession()
    session.dataSource.register(MySource)
    session.readStream.format("mine").option("a", True).load().writeStream.format("mine").option("b", 1).start("/out")
    compiled = session.compile()
    formats = {uid: getattr(spec, "format", None) for uid, spec in compiled.specs.items()}
    assert set(formats.values()) == {MySource}
    sink = next(spec for spec in compiled.specs.values() if isinstance(spec, SinkSpec))
    assert sink.options == {"b": "1", "path": "/out"}


def test_options_given_twice_in_another_case_replace_each_other() -> None:
    session = StreamSession()
    session.readStream.format("numbers").option("ROWS", 1).option("rows", 2).option("keys", 3).option(
        "KEYS", None
    ).load()
    spec = session.plan.nodes[0].spec
    assert isinstance(spec, SourceSpec)
    assert spec.options == {"rows": "2"}


def test_options_of_the_pipeline_give_way_to_those_of_the_submission() -> None:
    session = StreamSession({"parallelism.default": "3"})
    session.conf.set("parallelism.default", 7)
    session.conf.set("pipeline.name", "own")
    numbers(session).writeStream.format("noop").start()
    graph = session.compile().job_graph
    assert (graph.vertices[0].parallelism, graph.name, session.conf.get("parallelism.default")) == (3, "own", "3")


def test_options_of_the_cluster_give_way_to_those_of_the_pipeline() -> None:
    defaults = {"execution.checkpointing.interval": "1 h", "execution.checkpointing.timeout": "1 min"}
    session = StreamSession({"pipeline.name": "given"}, defaults=defaults)
    session.conf.set("execution.checkpointing.interval", "5 s")
    session.conf.set("pipeline.name", "own")
    numbers(session).writeStream.format("noop").start()
    plan = session.compile()
    assert plan.job_graph.configuration == {
        "execution.checkpointing.interval": "5 s",
        "execution.checkpointing.timeout": "1 min",
        "pipeline.name": "given",
    }
    assert plan.own_configuration == {"execution.checkpointing.interval": "5 s", "pipeline.name": "own"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("execution.checkpointing.interval", "often"),
        ("execution.checkpointing.intervall", "5 s"),
        ("execution.savepoint.path", "/savepoint"),
        ("heartbeat.timeout", "5 s"),
        ("$internal.restored-max-parallelism", "{}"),
        ("acme.list", []),
    ],
)
def test_an_option_that_code_cannot_set_is_refused_where_it_is_set(key: str, value: Any) -> None:
    session = StreamSession()
    with pytest.raises(ConfigurationError, match=re.escape(key)):
        session.conf.set(key, value)
    assert session.conf.own == Configuration()


def test_key_groups_of_a_snapshot_hold_where_the_job_sets_none() -> None:
    def maxima(configuration: dict[str, str], own: int | None = None) -> list[int]:
        session = StreamSession({"$internal.restored-max-parallelism": '{"totals": 256, "sums": 64}', **configuration})
        totals = numbers(session).groupBy("key").agg(count().alias("n")).uid("totals")
        if own is not None:
            totals.setMaxParallelism(own)
        totals.writeStream.format("noop").uid("sink").start()
        return [session.compile().job_graph.vertex(vertex_id_of(uid)).max_parallelism for uid in ("totals", "sink")]

    assert maxima({"pipeline.operator-chaining.enabled": "false"}) == [256, 128]
    assert maxima({"pipeline.operator-chaining.enabled": "false"}, own=32) == [32, 128]
    chaining = {"pipeline.operator-chaining.enabled": "false", "pipeline.max-parallelism": "96"}
    assert maxima(chaining) == [96, 96]


def test_union_rebalance_and_broadcast_say_how_rows_travel() -> None:
    session = StreamSession({"parallelism.default": "2"})
    left, right = numbers(session).uid("l"), numbers(session).uid("r")
    both = left.union(right.rebalance())
    both.filter(pc.field("key") > 0).uid("f").broadcast().filter(pc.field("key") > 1).uid("g").writeStream.format(
        "noop"
    ).start()
    graph = session.compile().job_graph
    assert [edge.partitioning.value for edge in graph.edges] == ["FORWARD", "REBALANCE", "BROADCAST"]


def test_a_stream_united_with_itself_has_an_edge_for_each_side() -> None:
    session = StreamSession({"parallelism.default": "2"})
    same = numbers(session).uid("n")
    same.union(same).filter(pc.field("key") > 0).uid("f").writeStream.format("noop").uid("s").start()
    graph = session.compile().job_graph
    assert [vertex.name for vertex in graph.vertices] == ["n", "f -> s"]
    assert graph.edges[0] == graph.edges[1]
    assert len(graph.inputs(graph.vertices[1].id)) == 2


Step = Callable[[Stream], Any]

MISTAKES: list[tuple[Step, str]] = [
    (lambda s: s.filter(pc.field("nope") > 1), r"filter: .*No match for FieldRef.Name\(nope\).*columns are key, value"),
    (lambda s: s.filter(pc.field("key") + 1), "filter: .* is int64, not boolean"),
    (lambda s: s.filter(pc.field("key") > "a"), "filter: .*greater"),
    (lambda s: s.filter("key"), "filter: key is int64, not boolean"),
    (lambda s: s.filter(42), "filter: expected a pyarrow.compute expression .*, not int"),
    (lambda s: s.select("key", "nope"), "select: column 'nope' does not exist; columns are key, value"),
    (lambda s: s.select(), "select: no column given"),
    (lambda s: s.select("key", key=pc.field("value")), "select: column 'key' is given twice"),
    (lambda s: s.withColumn("x", pc.field("nope")), "withColumn: column 'x': .*nope"),
    (lambda s: s.withColumn("", pc.field("key")), "withColumn: '' is not a text"),
    (lambda s: s.groupBy(), "groupBy: no column given"),
    (lambda s: s.groupBy("nope"), "groupBy: column 'nope' does not exist"),
    (lambda s: s.groupBy("key", "key"), "groupBy: column 'key' is given twice"),
    (lambda s: s.groupBy(3), "groupBy: expected a column name, not int"),
    (lambda s: s.groupBy("key").agg(), "agg: no aggregate given"),
    (lambda s: s.groupBy("key").agg("count"), "agg: expected count"),
    (lambda s: s.groupBy("key").agg(sum("nope")), "agg: sum: column 'nope' does not exist"),
    (lambda s: s.groupBy("key").agg(sum("value"), sum("value")), r"agg: two result columns are called 'sum\(value\)'"),
    (lambda s: s.groupBy("key").agg(count().alias("key")), "agg: two result columns are called 'key'"),
    (lambda s: s.groupBy("key").agg(count().alias(f"{KEY_PREFIX}x")), "agg: .*: a name that begins"),
    (
        lambda s: s.groupBy("key").agg(avg("value").alias("x"), count().alias("x#sum")),
        "agg: aggregate 'x#sum': state keeps a part of an average under this name",
    ),
    (lambda s: s.withColumn("t", pc.field("key").cast(pa.string())).groupBy("key").agg(sum("t")), "agg: .*'t'.*string"),
    (lambda s: s.withWatermark("key", "1 s"), "withWatermark: column 'key' is int64, not a timestamp"),
    (lambda s: s.mapInArrow(3, "a INT"), "mapInArrow: expected a function"),
    (lambda s: s.mapInArrow(lambda i: i, "a INTT"), "mapInArrow schema: unknown type 'intt'"),
    (lambda s: s.setParallelism(0), "parallelism: 0 is not a whole number from 1 to 32768"),
    (lambda s: s.setParallelism(True), "parallelism: True is not a whole number"),
    (lambda s: s.setMaxParallelism(40_000), "maxParallelism: 40000 is not a whole number"),
    (lambda s: s.uid(" "), "uid: ' ' is not a text of 1 to 255 characters"),
    (lambda s: s.rebalance().uid("x"), "uid: call it right behind an operator"),
    (lambda s: s.rebalance().groupBy("key"), "groupBy: rows are already distributed by rebalance"),
    (lambda s: s.union(3), "union: expected a stream of the same session"),
    (lambda s: s.union(s.select("key")), "union: schemas differ: key: int64, value: int64 and key: int64"),
    (lambda s: s.writeStream.start(), "format: not given"),
    (lambda s: s.writeStream.start("/o", "parquet", partitionBy="key"), "partitionBy: not supported; add a sink for"),
    (lambda s: s.select("*", "key"), "select: column 'key' is given twice"),
    (lambda s: s.writeStream.format("nope").start(), "format: 'nope' is not one of"),
    (lambda s: s.writeStream.outputMode("complete"), "outputMode: 'complete' is not one of append, update"),
    (lambda s: s.writeStream.format(int), "format: expected a name or a DataSource class"),
    (lambda s: s.writeStream.option("a", []), "option 'a': expected a text, a number or a boolean, not list"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "message"), MISTAKES)
def test_a_mistake_is_named_where_it_is_made(step: Step, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        step(numbers(StreamSession()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputMode": "Complete"}, "outputMode: 'Complete' is not one of Append, Update"),
        ({"timeMode": "Never"}, "timeMode: 'Never' is not one of None, ProcessingTime, EventTime"),
        ({"timeMode": "EventTime"}, "timeMode: EventTime needs .withWatermark"),
        ({"initialState": 1}, "initialState: not supported; start the job from a savepoint"),
        ({"eventTimeColumnName": "at"}, "eventTimeColumnName: column 'at' does not exist; columns are id"),
        ({"eventTimeColumnName": "id"}, "eventTimeColumnName: column 'id' is int32, not a timestamp"),
        (
            {"eventTimeColumnName": "at", "outputStructType": "id INT, at TIMESTAMP"},
            "eventTimeColumnName: 'at' needs .withWatermark",
        ),
        ({"statefulProcessor": Processor}, "statefulProcessor: expected an instance"),
        ({"statefulProcessor": object()}, "statefulProcessor: expected an instance"),
        ({"outputStructType": 3}, "outputStructType: expected an Arrow schema"),
    ],
)
def test_wrong_processor_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    given = {"statefulProcessor": Processor(), "outputStructType": "id INT", "outputMode": "Append", "timeMode": "None"}
    with pytest.raises(PlanError, match=message):
        numbers(StreamSession()).groupBy("key").transformWithState(**{**given, **arguments})


def test_a_reader_without_a_format_and_a_wrong_class_are_named() -> None:
    session = StreamSession()
    with pytest.raises(PlanError, match="format: not given"):
        session.readStream.load()
    with pytest.raises(PlanError, match="dataSource: expected a subclass"):
        session.dataSource.register(int)

    class Numbers(MySource):
        @classmethod
        def name(cls) -> str:
            return "numbers"

    with pytest.raises(PlanError, match="dataSource: 'numbers' is the name of a built-in format"):
        session.dataSource.register(Numbers)


def test_streams_of_two_sessions_do_not_mix() -> None:
    with pytest.raises(PlanError, match="union: expected a stream of the same session"):
        numbers(StreamSession()).union(numbers(StreamSession()))


def test_a_data_source_for_batches_only_is_refused_when_the_plan_is_made() -> None:
    session = StreamSession()
    with pytest.raises(
        PlanError, match="format: InBatches has no streamReader and no simpleStreamReader: it cannot be rea"
    ):
        session.readStream.format(InBatches).load()
    with pytest.raises(
        PlanError, match="format: InBatches has no streamWriter: it cannot be written as a stream, only in"
    ):
        numbers(session).writeStream.format(InBatches).start()
    assert session.readStream.format(SimpleOnly).load().columns == ["id"]


def test_what_is_pysparks_own_is_named_with_what_to_use_here() -> None:
    class Column:
        """As a session of Spark Connect makes them, without a JVM."""

    Column.__module__ = "pyspark.sql.connect.column"
    column: Any = Column()
    stream = numbers(StreamSession())
    theirs = "PySpark's Column, which only Spark can work with"
    with pytest.raises(PlanError, match=rf"filter: expected a pyarrow.compute expression such as .*, not {theirs}"):
        stream.filter(column)
    with pytest.raises(
        PlanError, match=rf"withColumn: .*expected a pyarrow.compute expression such as .*, not {theirs}"
    ):
        stream.withColumn("x", column)
    with pytest.raises(PlanError, match=f"select: expected a column name, not {theirs}"):
        stream.select(column)
    with pytest.raises(PlanError, match=rf"agg: expected count\(\), .* of ckpt_runtime.api, not {theirs}"):
        stream.groupBy("key").agg(column)


def test_arguments_in_all_of_pysparks_forms() -> None:
    session = StreamSession()
    session.dataSource.register(MySource)
    stream = session.readStream.load("/in", "MINE", "id BIGINT, at TIMESTAMP", a=1)
    assert session.readStream.load(format="Numbers", rows=3).columns == ["key", "value"]
    assert stream.select(["at", "id"]).columns == ["at", "id"]
    assert stream.select("*", again="id").columns == ["id", "at", "again"]
    assert stream.groupBy(["id", "at"]).count().columns == stream.groupby("id", "at").count().columns
    sink = stream.writeStream.start("/out", format="Mine", outputMode="append", queryName="q", b=True)
    specs = [node.spec for node in session.plan.nodes]
    assert isinstance(specs[0], SourceSpec)
    assert isinstance(specs[-1], SinkSpec)
    assert (specs[0].format, dict(specs[0].options)) == (MySource, {"a": "1", "path": "/in"})
    assert (specs[-1].format, dict(specs[-1].options)) == (MySource, {"b": "true", "path": "/out"})
    assert session.plan.nodes[-1].name == "q"
    assert sink.name("r") is sink


@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.float16()), pa.date64()])
def test_a_type_that_pyspark_has_not_is_refused_when_the_plan_is_made(kind: pa.DataType) -> None:
    session = StreamSession()
    schema = pa.schema([("x", kind)])
    message = re.escape(f"schema: MySource: column 'x' is {kind}, which PySpark has no type for; cast it before")
    with pytest.raises(PlanError, match=message):
        session.readStream.format(MySource).schema(schema).load()
    stream = session.readStream.format("replay").option("path", "/in").schema(schema).load()
    with pytest.raises(PlanError, match=message):
        stream.writeStream.format(MySource).start()


@pytest.mark.parametrize(
    ("step", "instead"),
    [
        (lambda s: s.drop("key"), "call select"),
        (lambda s: s.dropDuplicates(["key"]), "call groupBy.*transformWithState"),
        (lambda s: s.groupBy("key").sum("value"), "call agg"),
        (lambda s: s.writeStream.trigger(processingTime="1 s"), "the option execution.checkpointing.interval"),
        (lambda s: s.writeStream.foreachBatch(print), "write a PySpark DataSource with a streamWriter"),
        (lambda s: s.writeStream.format("noop").start().awaitTermination(), "nothing runs while a pipeline"),
        (lambda s: StreamSession().readStream.json("/in"), "call format"),
        (lambda s: StreamSession().read, "a pipeline has no Spark session"),
    ],
)
def test_a_method_of_pyspark_that_is_missing_says_what_to_do(step: Step, instead: str) -> None:
    stream = numbers(StreamSession())
    with pytest.raises(AttributeError, match=f"other than in PySpark: {instead}"):
        step(stream)
    with pytest.raises(AttributeError, match="'Stream' object has no attribute 'nonsense'$"):
        stream.nonsense  # type: ignore[attr-defined]  # noqa: B018
