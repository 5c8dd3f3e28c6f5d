"""Reports of progress and observed metrics of queries, beside those of the same queries in Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.pipelines import progress_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

Report = dict[str, Any]
OWN_METRICS = ("numDroppedDuplicateRows",)
"""The custom metrics that are not about the inside of Spark's state stores."""


def reports_of_spark(spark: SparkSession, orders: str, directory: Path, names: str) -> dict[str, list[Report]]:
    """Those of queries that end with what is there, and with a last batch without rows in which windows end."""
    stream = spark.readStream.schema(progress_programs.SCHEMA).parquet(orders)
    found = {}
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    try:
        queries = progress_programs.queries(stream)
        for name in names.split():
            frame = queries[name]
            writer = frame.writeStream.format("noop").queryName(name).trigger(availableNow=True)
            query = writer.option("checkpointLocation", str(directory / name)).start()
            query.awaitTermination()
            found[name] = [json.loads(report.json) for report in query.recentProgress]
    finally:
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    return found


def rounded(value: Any) -> Any:
    """Floats to twelve digits: subtasks and Spark's tasks add their parts up in another order."""
    if isinstance(value, dict):
        return {key: rounded(element) for key, element in value.items()}
    return float(f"{value:.12g}") if isinstance(value, float) else value


def summed(reports: list[Report], part: str, key: str) -> int:
    return sum(each[key] for report in reports for each in report[part])


def summed_metric(reports: list[Report], key: str) -> int:
    return sum(each["customMetrics"][key] for report in reports for each in report["stateOperators"])


def assert_same(ours: list[Report], wanted: list[Report]) -> None:
    """The reports of one query: equal keys, and equal sums of all counts that batches do not decide."""
    first, spark_first = ours[0], wanted[0]
    assert set(first) == set(spark_first)
    for part in ("sources", "stateOperators"):
        assert [set(each) - {"metrics"} for each in first[part]] == [set(each) for each in spark_first[part]]
    assert set(first["sink"]) == set(spark_first["sink"])
    assert rounded(first.get("observedMetrics")) == rounded(spark_first.get("observedMetrics"))
    assert sum(report["sink"]["numOutputRows"] for report in ours) == sum(
        report["sink"]["numOutputRows"] for report in wanted
    )
    for state, of_spark in zip(ours[-1]["stateOperators"], wanted[-1]["stateOperators"], strict=True):
        assert state["operatorName"] == of_spark["operatorName"]
        joins = state["operatorName"] == "symmetricHashJoin"  # which keeps no row at the end of bounded input
        assert joins or state["numRowsTotal"] == of_spark["numRowsTotal"]
        for key in ("numRowsDroppedByWatermark", "numRowsUpdated" if joins else "numRowsRemoved"):
            assert summed(ours, "stateOperators", key) == summed(wanted, "stateOperators", key), key
        for key in set(OWN_METRICS) & set(of_spark["customMetrics"]):
            assert summed_metric(ours, key) == summed_metric(wanted, key) > 0, key
    if "eventTime" in first:
        assert ours[-1]["eventTime"]["watermark"] == wanted[-1]["eventTime"]["watermark"]


@pytest.mark.row("ps.7")
@pytest.mark.parametrize("names", ["observed windows", pytest.param("distinct joined", marks=pytest.mark.long)])
def test_reports_of_progress_have_the_keys_counts_and_observed_metrics_of_spark(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, names: str
) -> None:
    wanted = reports_of_spark(spark, orders, tmp_path / "checkpoints", names)
    job = cluster.submit(
        PIPELINES / "progress_programs.py",
        arguments=[orders, str(tmp_path)],
        configuration=fast(execution__checkpointing__interval="1 h"),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    found = cluster.call(cluster.dispatcher.jobs[job].progress())
    for name, reports in wanted.items():
        ours = [report for report in found if report["name"] == name]
        assert_same(ours, reports)
        if name == "joined":  # Spark reads the source of both sides twice
            continue
        assert sum(report["numInputRows"] for report in ours) == sum(report["numInputRows"] for report in reports)
        if "eventTime" in ours[0]:
            for key in ("min", "max", "avg"):
                assert ours[0]["eventTime"][key] == reports[0]["eventTime"][key]
