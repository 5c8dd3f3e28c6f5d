"""Programs that are run again and again over what has arrived since, in Structured Streaming and in the engine."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.pipelines import file_increments, incremental_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "incremental_programs.py"
NAMES = ("rows", "windows", "countries", "numbered", "fresh")
DAY = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
ARRIVALS: Sequence[Sequence[tuple[int, str, int]]] = (
    [(0, "de", 0), (1, "fr", 30), (2, "de", 59), (3, "de", 75)],
    [(4, "de", 40), (5, "it", 80), (6, "fr", 110)],  # the first one is late: the last run's watermark is at 65 minutes
    [(7, "fr", 119), (8, "es", 200)],
)
"""The rows that arrive before each run: id, country, and minutes of event time."""
CHANGES = ("", "", "with a filter")
"""How the program of each run differs."""


def arrive(directory: Path, run: int) -> None:
    ids, countries, minutes = zip(*ARRIVALS[run], strict=True)
    times = pa.array([DAY + dt.timedelta(minutes=each) for each in minutes], pa.timestamp("us", tz="UTC"))
    table = pa.table({"id": pa.array(ids, pa.int64()), "country": list(countries), "placed_at": times})
    pq.write_table(table, directory / f"{run}.parquet")


def result(directory: Path, name: str) -> Counter[str]:
    files = (directory / name).glob("[!.]*.parquet")
    return Counter(str(sorted(row.items())) for file in files for row in pq.read_table(file).to_pylist())


@pytest.mark.long
def test_program_that_is_run_again_with_a_new_filter_too_gives_the_rows_of_spark_after_each_run(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    source, in_spark, in_engine = (tmp_path / name for name in ("source", "spark", "engine"))
    source.mkdir()
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    try:
        for run in range(len(ARRIVALS)):
            arrive(source, run)
            changed = CHANGES[run]
            for query in incremental_programs.started(spark, str(source), str(in_spark), changed):
                query.awaitTermination()
            job = cluster.submit(PROGRAM, arguments=[str(source), str(in_engine), changed], parallelism=2)
            cluster.wait_for_status(job, JobStatus.FINISHED)
            for name in NAMES:
                assert result(in_engine, name) == result(in_spark, name), (run, name)
    finally:
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    assert result(in_engine, "rows").total() == sum(map(len, ARRIVALS)) - 1
    assert sorted(path.name for path in (in_engine / "numbered").iterdir()) == ["0.parquet", "1.parquet", "2.parquet"]
    assert [path.name for path in (in_engine / "fresh").iterdir()] == ["0.parquet"]
    kept = [path for path in (in_engine / "state-of-numbered").iterdir() if path.name != "staged"]
    assert [path.name for path in kept] == [job], "only the last run's checkpoint is kept"


FILES: Sequence[Sequence[Sequence[int]]] = (([1, 9], [12, 25, 31], [14, 41]), ([3, 60], [88, 59]))
"""The numbers in each file that arrives before each run. Windows count them as seconds."""
STEPS = ("called-0", "called-1", "written-1", "written-2", "called-3", "written-4")


def calls(directory: Path) -> dict[int, list[str]]:
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


@pytest.mark.row("ps.7")
@pytest.mark.parametrize(
    ("name", "parallelism", "interval", "kills"),
    [
        ("short", 2, "1 h", ()),  # a batch without rows has a call, too
        ("unlimited", 2, "20 ms", ()),  # each run is one batch; that of the first run gives no rows
        pytest.param("once", 2, "20 ms", (), marks=pytest.mark.long),
        pytest.param("reader", 2, "20 ms", STEPS, marks=pytest.mark.long),
        pytest.param("rows", 1, "20 ms", STEPS, marks=pytest.mark.long),
        pytest.param("rows", 3, "20 ms", STEPS, marks=pytest.mark.long),
        pytest.param("short", 2, "20 ms", STEPS, marks=pytest.mark.long),
        pytest.param("counts", 2, "20 ms", STEPS, marks=pytest.mark.long),
        pytest.param("windows", 1, "1 h", STEPS, marks=pytest.mark.long),
    ],
)
def test_function_is_called_with_the_rows_and_ids_of_sparks_batches_and_reports_have_its_offsets(
    spark: SparkSession,
    cluster: MiniCluster,
    tmp_path: Path,
    name: str,
    parallelism: int,
    interval: str,
    kills: Sequence[str],
) -> None:
    source, in_spark, in_engine, faults = (tmp_path / each for each in ("source", "spark", "engine", "faults"))
    for directory in (source, in_spark, in_engine, faults):
        directory.mkdir()
    for step in kills:
        (faults / step).touch()
    for run, files in enumerate(FILES):
        for at, numbers in enumerate(files):
            path = source / f"{run}-{at}.txt"
            path.write_text("".join(f"{number}\n" for number in numbers))
            os.utime(path, (1_000 + 10 * run + at,) * 2)
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", str(name == "windows").lower())
        query = file_increments.started(spark, str(source), str(in_spark), name, "")
        query.awaitTermination()
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        wanted = [json.loads(report.json)["sources"][0] for report in query.recentProgress]
        job = cluster.submit(
            PIPELINES / "file_increments.py",
            arguments=[str(source), str(in_engine), name, str(faults)],
            configuration=fast(execution__checkpointing__interval=interval),
            parallelism=parallelism,
        )
        cluster.wait_for_status(job, JobStatus.FINISHED)
        reports: list[dict[str, Any]] = cluster.call(cluster.dispatcher.jobs[job].progress())
        own = [report for report in reports if report["name"] != "beside"]
        ours = [source for report in own for source in report["sources"] if source["numInputRows"]]
        keys = ("numInputRows",) if name == "reader" else ("numInputRows", "startOffset", "endOffset")
        reported = [[each[key] for key in keys] for each in wanted if each["numInputRows"]]
        assert [[each[key] for key in keys] for each in ours] == reported
    of_spark, of_engine = calls(in_spark), calls(in_engine)
    if name == "windows":  # whose rows move to other subtasks: Spark calls the function without rows, too
        assert [*of_engine.values()] == [values for values in of_spark.values() if values]
    else:
        assert of_engine == of_spark
        assert len(of_engine) == (len(FILES) if name in ("once", "unlimited") else sum(map(len, FILES)))
        assert not [*faults.iterdir()], "each kill has happened"


WRITES = """
def pipeline(spark, directory):
    spark.range(3).write.mode("append").parquet(f"{directory}/log")
    rows = spark.readStream.schema("value STRING").text(f"{directory}/in").dropDuplicates()
    writer = rows.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
    writer.trigger(availableNow=True).start(f"{directory}/out")
"""


@pytest.mark.row("ps.1")
def test_run_that_is_planned_again_with_the_key_groups_of_the_run_before_writes_its_frames_once(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    del spark  # writes the frames
    program = tmp_path / "writes.py"
    program.write_text(WRITES)
    (tmp_path / "in").mkdir()
    for run, key_groups in enumerate(("64", None)):
        (tmp_path / "in" / f"{run}.txt").write_text(f"{run}\n")
        configuration = fast(pipeline__max_parallelism=key_groups)
        job = cluster.submit(program, arguments=[str(tmp_path)], configuration=configuration, parallelism=1)
        cluster.wait_for_status(job, JobStatus.FINISHED)
        assert pq.read_table(tmp_path / "out").num_rows == run + 1
        assert pq.read_table(tmp_path / "log").num_rows == 3 * (run + 1)
