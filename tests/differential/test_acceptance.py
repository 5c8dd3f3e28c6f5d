"""Programs with the behaviour of Spark's own test suites, run by Spark and by the engine over the same files."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.errors.exceptions.base import PySparkException

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import shown
from tests.support.pipelines import (
    acceptance,
    acceptance_aggregations,
    acceptance_batches,
    acceptance_deduplication,
    acceptance_joins,
    acceptance_mixed,
    acceptance_processors,
    acceptance_sql,
)
from tests.support.pipelines.acceptance import PROGRAMS, Program

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FAMILIES = (
    *(acceptance_aggregations, acceptance_batches, acceptance_deduplication, acceptance_joins),
    *(acceptance_mixed, acceptance_processors, acceptance_sql),
)
"""The modules that fill ``PROGRAMS``."""

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def write(program: Program, directory: Path) -> None:
    """Writes each batch of each stream to a file, in the order of the files' times."""
    for name, batches in program.inputs.items():
        columns = [column.split()[0] for column in program.schemas.get(name, "v INT").split(", ")]
        (directory / name).mkdir(parents=True, exist_ok=True)
        for at, batch in enumerate(batches):
            rows = (row if isinstance(row, tuple) else (row,) for row in batch)
            lines = [json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows]
            file = directory / name / f"{at}.json"
            file.write_text("".join(lines))
            os.utime(file, (1_700_000_000 + at,) * 2)


def rows(program: Program, directory: Path) -> list[Counter[str]]:
    """What a query has written: all rows, in mode update those of each batch that has some, in mode complete the last
    batch."""
    files = sorted(directory.glob("[!.]*.parquet"))
    batches = [Counter(str(shown(row)) for row in pq.read_table(file).to_pylist()) for file in files]
    if program.mode == "complete":
        return batches[-1:]
    return list(filter(None, batches)) if program.mode == "update" else [sum(batches, Counter())]


Outcome = tuple[str, Any]
"""``refused`` or ``failed`` with the message, or ``rows`` with the rows."""


def in_spark(spark: SparkSession, program: Program, directory: Path) -> Outcome:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    session.conf.set("spark.sql.shuffle.partitions", "1")
    for key, value in program.settings.items():
        session.conf.set(key, value)
    output = directory / "spark"
    query = None
    try:
        frame = acceptance.frame_of(session, program, str(directory))
        writer = frame.writeStream.outputMode(program.mode).trigger(**{program.trigger: True})
        writer = writer.foreachBatch(acceptance.written_to(output))
        query = writer.option("checkpointLocation", str(directory / "spark-checkpoint")).start()
        query.awaitTermination()
    except PySparkException as error:
        started = query is not None and not _is_analysis(error)
        return "failed" if started else "refused", str(error)
    return "rows", rows(program, output)


def _is_analysis(error: PySparkException) -> bool:
    return "AnalysisException" in f"{type(error).__name__} {error}"


def in_engine(cluster: MiniCluster, program: Program, directory: Path, parallelism: int = 0) -> Outcome:
    output, family = directory / "engine", program.build.__module__.rpartition(".")[2]
    try:
        job = cluster.submit(
            PIPELINES / f"{family}.py",
            entry=f"{family}:pipeline",
            arguments=[program.name, str(directory), str(output)],
            configuration=fast(restart_strategy__type="none"),
            parallelism=parallelism or (2 if family == "acceptance_batches" else 1),
        )
    except SubmissionFailed as error:
        return "refused", str(error)
    status = cluster.wait_for_status(job, JobStatus.FINISHED, JobStatus.FAILED)
    if status is JobStatus.FAILED:
        return "failed", cluster.failure(job)
    return "rows", rows(program, output)


@pytest.mark.row("ps.5")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if made.suite else pytest.mark.long) for name, made in PROGRAMS.items()],
)
def test_program_of_sparks_suites_gives_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str
) -> None:
    program = PROGRAMS[name]
    write(program, tmp_path)
    wanted = in_spark(spark, program, tmp_path)
    given = in_engine(cluster, program, tmp_path)
    if program.differs:
        assert not _same(given, wanted), f"this is equal now: {wanted}"
    else:
        assert _same(given, wanted), f"engine: {given}\nSpark: {wanted}"


@pytest.mark.parametrize(
    "name",
    [
        *("windows_that_no_empty_batch_removes", "windows_with_one_batch_in_each_run"),
        pytest.param("windows_of_late_rows", marks=pytest.mark.long),
    ],
)
def test_event_time_of_the_last_batch_counts_in_the_next_run_as_in_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str
) -> None:
    program = PROGRAMS[name]
    for batches, parallelism in ((2, 2), (3, 3), (5, 1)):
        arrived = replace(program, inputs={"rows": program.inputs["rows"][:batches]})
        write(arrived, tmp_path)
        wanted = in_spark(spark, arrived, tmp_path)
        assert in_engine(cluster, arrived, tmp_path, parallelism) == wanted, batches


@pytest.mark.long
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize(
    "name",
    [
        *("windows_of_late_rows", "processor_of_late_rows"),
        *("windows_of_a_union_with_late_rows", "union_of_windows_of_late_rows"),
    ],
)
def test_runs_that_are_cancelled_between_rows_of_a_batch_and_continued_with_other_subtasks_give_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str, backend: str
) -> None:
    program = PROGRAMS[name]
    write(program, tmp_path)

    def run(parallelism: int, **rates: str) -> str:
        return cluster.submit(
            PIPELINES / "acceptance_batches.py",
            entry="acceptance_batches:paced",
            arguments=[name, str(tmp_path), str(tmp_path / "engine")],
            configuration=fast(restart_strategy__type="none", state__backend__type=backend, **rates),
            parallelism=parallelism,
        )

    paced = ",".join(f"{each}:3" for each in program.inputs)
    for parallelism in (2, 3, 1):
        job = run(parallelism, pipeline__source__rates=paced)
        cluster.wait_for_checkpoints(job, 4)
        cluster.call(cluster.dispatcher.cancel_job(job))
        cluster.wait_for_status(job, JobStatus.CANCELED)
    cluster.wait_for_status(run(2), JobStatus.FINISHED)
    assert ("rows", rows(program, tmp_path / "engine")) == in_spark(spark, program, tmp_path)


def _same(given: Outcome, wanted: Outcome) -> bool:
    """Whether the rows are equal, or neither has any: Spark finds some errors when a query runs."""
    return given == wanted if wanted[0] == "rows" else given[0] != "rows"
