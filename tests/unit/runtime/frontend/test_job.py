"""A job while its program is planned: whose options count, its sources and sinks, its key groups."""

from __future__ import annotations

import json
import re
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSource

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.frontend.job import DataSources, JobOptions, compiled
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink, source_schema
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning, vertex_id_of
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode, LogicalPlan
from ckpt_runtime.graph.specs import Aggregate, AggregateSpec, MapInArrowSpec, SinkSpec, SourceSpec

SCHEMA = pa.schema([("key", pa.int64()), ("value", pa.int64())])


class Mine(DataSource):
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


def counting() -> LogicalPlan:
    """Numbers that are counted by key."""
    plan = LogicalPlan("counting")
    source = plan.add(LogicalNode(SourceSpec("numbers"), (), SCHEMA, "source"))
    spec, schema = (
        AggregateSpec(("key",), (Aggregate("count", None, "n"),)),
        pa.schema([("key", pa.int64()), ("n", pa.int64())]),
    )
    by_key = (LogicalInput(source, Partitioning.HASH, ("key",)),)
    totals = plan.add(LogicalNode(spec, by_key, schema, "totals"))
    plan.add(LogicalNode(SinkSpec("noop"), (LogicalInput(totals),), None, "sink"))
    return plan


def test_options_of_the_pipeline_give_way_to_those_of_the_submission() -> None:
    options = JobOptions({"parallelism.default": "3"})
    options.set("parallelism.default", 7)
    options.set("pipeline.name", "own")
    graph = compiled(counting(), options).job_graph
    assert (graph.vertices[0].parallelism, graph.name, options.get("parallelism.default")) == (3, "own", "3")


def test_options_of_the_cluster_give_way_to_those_of_the_pipeline() -> None:
    defaults = {"execution.checkpointing.interval": "1 h", "execution.checkpointing.timeout": "1 min"}
    options = JobOptions({"pipeline.name": "given"}, defaults)
    options.set("execution.checkpointing.interval", "5 s")
    options.set("pipeline.name", "own")
    plan = compiled(counting(), options)
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
    options = JobOptions({})
    with pytest.raises(ConfigurationError, match=re.escape(key)):
        options.set(key, value)
    assert options.own == Configuration()


def test_key_groups_of_a_snapshot_hold_where_the_job_sets_none() -> None:
    def maxima(configuration: dict[str, str]) -> list[int]:
        restored = {"$internal.restored-max-parallelism": '{"totals": 256, "sums": 64}', **configuration}
        graph = compiled(counting(), JobOptions(restored)).job_graph
        return [graph.vertex(vertex_id_of(uid)).max_parallelism for uid in ("totals", "sink")]

    assert maxima({"pipeline.operator-chaining.enabled": "false"}) == [256, 128]
    chaining = {"pipeline.operator-chaining.enabled": "false", "pipeline.max-parallelism": "96"}
    assert maxima(chaining) == [96, 96]


@pytest.mark.row("203.14")
def test_a_rescaled_plan_keeps_its_chains_edges_and_key_groups() -> None:
    """What a submission at that parallelism would chain or connect one to one, and how many key groups it would derive,
    does not matter: state and rows on their way have to keep their places.
    """

    def wide() -> LogicalPlan:
        plan = LogicalPlan("wide")
        rows = plan.add(LogicalNode(SourceSpec("numbers"), (), SCHEMA, "rows", parallelism=2))
        mapped = LogicalNode(MapInArrowSpec(iter, SCHEMA), (LogicalInput(rows),), SCHEMA, "map", parallelism=3)
        plan.add(LogicalNode(SinkSpec("noop"), (LogicalInput(plan.add(mapped)),), None, "sink", parallelism=3))
        return plan

    submitted = compiled(wide(), JobOptions({})).job_graph
    rescaled = submitted.with_parallelism(dict.fromkeys((vertex.id for vertex in submitted.vertices), 100))
    again = compiled(wide(), JobOptions(rescaled.configuration)).job_graph
    assert again.fingerprint == rescaled.fingerprint != submitted.fingerprint
    assert again.plan_fingerprint == submitted.plan_fingerprint
    assert again.edges == submitted.edges
    assert {vertex.parallelism for vertex in again.vertices} == {100}
    assert JobGraph.from_json(json.loads(json.dumps(rescaled.to_json()))) == rescaled


def test_a_registered_data_source_is_found_by_name() -> None:
    classes = DataSources()
    classes.register(Mine)
    assert [classes.resolve(name) for name in ("mine", "MINE")] == [Mine, Mine]
    assert classes.resolve(SimpleOnly) is SimpleOnly
    assert classes.resolve("Numbers") == "numbers"
    assert classes.resolve("unknown") == "unknown"


def test_object_that_is_not_a_data_source_and_the_name_of_a_built_in_format_are_refused() -> None:
    class Numbers(Mine):
        @classmethod
        def name(cls) -> str:
            return "numbers"

    classes = DataSources()
    with pytest.raises(PlanError, match="dataSource: expected a subclass"):
        classes.register(int)
    with pytest.raises(PlanError, match="dataSource: 'numbers' is the name of a built-in format"):
        classes.register(Numbers)
    with pytest.raises(PlanError, match="format: expected a name or a DataSource class"):
        classes.resolve(int)


def test_a_data_source_for_batches_only_is_refused_when_the_plan_is_made() -> None:
    with pytest.raises(
        PlanError, match="format: InBatches has no streamReader and no simpleStreamReader: it cannot be rea"
    ):
        source_schema(InBatches, {}, None)
    with pytest.raises(
        PlanError, match="format: InBatches has no streamWriter: it cannot be written as a stream, only in"
    ):
        check_sink(InBatches, {}, SCHEMA)
    assert source_schema(SimpleOnly, {}, None).names == ["id"]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.list_(pa.float16()), pa.date64()])
def test_a_type_that_pyspark_has_not_is_refused_when_the_plan_is_made(kind: pa.DataType) -> None:
    schema = pa.schema([("x", kind)])
    message = re.escape(f"schema: Mine: column 'x' is {kind}, for which PySpark has no type; cast it before")
    with pytest.raises(PlanError, match=message):
        source_schema(Mine, {}, schema)
    with pytest.raises(PlanError, match=message):
        check_sink(Mine, {}, schema)


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
    refusal = f"column 'v': type {view} is not supported; use {view.removesuffix('_view')}$"
    with pytest.raises(PlanError, match=refusal):
        LogicalPlan("job").add(LogicalNode(SourceSpec("replay"), (), pa.schema([("v", kind)])))
