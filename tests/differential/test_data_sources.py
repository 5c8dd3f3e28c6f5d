"""The same readers and writers in Spark and in the engine, where every failure restarts the engine's job."""

from __future__ import annotations

import importlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors.exceptions.captured import StreamingQueryException
from pyspark.sql import DataFrame

from ckpt_runtime.jobmaster.gateway_values import ExecutionState
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast, program_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = {"stateful": 15, "unordered": 180, "typed": 5, "leaving": 8, "few": 10}


@dataclass
class Outcome:
    """What one system made of the sources: the directory that their reader and the writer left."""

    directory: Path

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "calls").read_text().splitlines()]

    def committed(self) -> list[list[Any]]:
        """What the writer saw: partition, attempt number, task attempt, rows, file, kind of id, task attempt again."""
        return [entry for file in (self.directory / "parts").glob("commit-*") for entry in json.loads(file.read_text())]

    def rows(self) -> Counter[str]:
        parts = [self.directory / "parts" / entry[4] for entry in self.committed()]
        return Counter(line for part in parts for line in part.read_text().splitlines())


@pytest.fixture(scope="module")
def in_spark(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    """The module has the name under which Spark's workers find it. On a busy machine these start too late at times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINES))
        sources: Any = importlib.import_module("planned_sources")
        for source in (*sources.READERS, sources.Parts):
            spark.dataSource.register(source)
        for last_try in (False, False, False, True):
            outcome = Outcome(tmp_path_factory.mktemp("spark-sources"))
            (outcome.directory / "parts").mkdir()
            try:
                _query(spark, outcome.directory)
                break
            except StreamingQueryException as error:
                if last_try or "Python worker failed to connect back" not in str(error):
                    raise
        yield outcome
    for name in ("planned_sources", "injected"):
        sys.modules.pop(name, None)


def _query(spark: SparkSession, directory: Path) -> None:
    """All readers, united, into the writer."""
    readers = [spark.readStream.format(name).option("directory", str(directory)).load() for name in ROWS]
    writer = reduce(DataFrame.union, readers).writeStream.format("parts").option("directory", str(directory))
    query = writer.option("checkpointLocation", str(directory / "state")).trigger(availableNow=True).start()
    assert query.awaitTermination(300)


@pytest.fixture(scope="module")
def in_the_engine(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Fails in the middle of the only range of one source, when the enumerators have finished, between checkpoints."""
    directory = tmp_path_factory.mktemp("engine-sources")
    faults = directory / "faults"
    for folder in (faults, directory / "parts"):
        folder.mkdir()
    slow = faults / "read-slow"
    slow.touch()
    outcome = Outcome(directory)
    job = cluster.submit(
        program_of("planned_sources"),
        entry="planned_sources:pipeline",
        arguments=[str(directory), str(faults)],
        configuration=fast(execution__checkpointing__interval="1 s"),
        parallelism=2,
    )

    def enumerators_finished() -> bool:
        vertices = cluster.call(cluster.dispatcher.job_details(job)).vertices
        heads = [vertex.status for vertex in vertices if vertex.name.endswith("offsets")]
        return len(heads) == len(ROWS) and set(heads) == {ExecutionState.FINISHED}

    cluster.wait_for_status(job, JobStatus.RUNNING, timeout_s=200)
    cluster.wait_until(enumerators_finished, "the enumerators to finish")
    cluster.wait_until(lambda: len(outcome.rows()) > 0, "rows of a checkpoint")
    assert len(outcome.rows()) < sum(ROWS.values()), "the range was read as a whole"
    (faults / "read-raise").touch()
    cluster.wait_until(lambda: not (faults / "read-raise").exists(), "the failure")
    slow.unlink()
    cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=180)
    assert cluster.restarts(job) == 1
    return outcome


@pytest.mark.row("io.2")
@pytest.mark.parametrize("name", ROWS)
def test_rows(in_spark: Outcome, in_the_engine: Outcome, name: str) -> None:
    """A reader that keeps its ranges; partitions in any order; objects of many types; one that keeps rows in the
    object that reads; a simple reader."""
    found = {row: number for row, number in in_the_engine.rows().items() if row.startswith(name)}
    assert found == {row: number for row, number in in_spark.rows().items() if row.startswith(name)}
    assert set(found.values()) == {1}
    assert len(found) == ROWS[name]


def test_one_reader_object_plans_an_attempt_in_sparks_order(in_spark: Outcome, in_the_engine: Outcome) -> None:
    """Commits come when checkpoints complete, at any time after the range was planned."""
    theirs, ours = in_spark.calls(), in_the_engine.calls()
    assert len({call["object"] for call in theirs}) == 1
    first = [call for call in ours if call["object"] == ours[0]["object"]]
    assert _planning(first) == _planning(theirs)
    commits = [call["offsets"][0] for call in first if call["method"] == "commit"]
    assert commits == sorted(set(commits))
    assert commits[-1] == 15
    later = {call["method"] for call in ours if call not in first}
    assert later <= {"prepareForTriggerAvailableNow", "commit"}, "a range was planned again"


def _planning(calls: list[dict[str, Any]]) -> list[tuple[str, list[int]]]:
    """Each call once: Spark asks for the first offset again when there is a first range."""
    made = [(call["method"], tuple(call["offsets"])) for call in calls if call["method"] != "commit"]
    return [(method, list(offsets)) for method, offsets in dict.fromkeys(made)]


def test_files_named_by_a_task_attempt_are_not_overwritten_by_another_attempt(
    in_spark: Outcome, in_the_engine: Outcome
) -> None:
    for outcome in (in_spark, in_the_engine):
        commits = outcome.committed()
        assert len({entry[2] for entry in commits}) == len(commits)
        assert [entry[6] for entry in commits] == [entry[2] for entry in commits], "a thread has its task's context"
        assert sum(entry[3] for entry in commits) == sum(ROWS.values())
        assert {entry[5] for entry in commits} == {4}, "ids of messages are UUIDs of version 4"
    assert {entry[0] for entry in in_the_engine.committed()} == {0, 1}
    assert {entry[1] for entry in in_spark.committed()} == {0}
    assert {entry[1] for entry in in_the_engine.committed()} == {0, 1}
