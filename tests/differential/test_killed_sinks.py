"""Every built-in sink that is exact: killed at each step and at random moments, and restored beside its own job.

The targets are read by libraries that the sinks do not use: DuckDB, deltalake's own reader of the log, psycopg, for
Kafka a reader of the broker's log, and for JSON in an object store the store's own client.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import all_run
from tests.support.sink_targets import FORMATS, ROWS, Numbers, numbers_once, target

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = ("write", "prepare", "notify", "publish", "commit", "clean-up")
KILLS = 20


@pytest.fixture
def numbers(
    spark: SparkSession, cluster: MiniCluster, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Numbers]:
    with target(request.param, tmp_path) as place:
        yield Numbers(cluster, request.param, place, tmp_path)


def each_format(*quick: str) -> list[object]:
    """All formats; those that are not quick run in ``make test-long``."""
    return [format_ if format_ in quick else pytest.param(format_, marks=pytest.mark.long) for format_ in FORMATS]


@pytest.mark.row("ends.1", "ends.5")
@pytest.mark.parametrize("numbers", each_format("delta", "postgresql"), indirect=True)
def test_target_has_every_row_once_when_the_process_is_killed_at_each_step(numbers: Numbers) -> None:
    job = numbers.start(20)
    numbers.cluster.wait_for_checkpoints(job, 2)
    for step in STEPS:
        numbers.kill_at(job, step)
    savepoint = numbers.stopped(job)
    assert 0 < len(numbers_once(numbers.target)) < ROWS
    numbers.finish(savepoint)
    assert numbers_once(numbers.target) == list(range(ROWS))
    assert numbers.left() == []


@pytest.mark.long
@pytest.mark.row("ends.1", "ends.5")
@pytest.mark.parametrize("numbers", FORMATS, indirect=True)
def test_target_has_every_row_once_when_workers_are_killed_at_random_moments(numbers: Numbers) -> None:
    job, moments = numbers.start(10), random.Random(28)
    numbers.cluster.wait_for_checkpoints(job, 1)
    for _ in range(KILLS):
        numbers.kill_at_random(job, moments)
    numbers.finish(numbers.stopped(job))
    assert numbers_once(numbers.target) == list(range(ROWS))
    assert numbers.left() == []


@pytest.mark.long
@pytest.mark.row("ends.1", "ends.5")
@pytest.mark.parametrize("numbers", FORMATS, indirect=True)
def test_savepoint_that_two_jobs_restore_has_its_rows_committed_once(numbers: Numbers) -> None:
    """Rows behind the savepoint come from both jobs, which are independent of each other from there on."""
    job = numbers.start(50)
    numbers.cluster.wait_until(lambda: len(numbers.target.numbers()) > 0, "visible rows")
    before = numbers_once(numbers.target)
    savepoint = numbers.cluster.savepoint(job, numbers.directory / "savepoints")
    other = numbers.start(0, savepoint, fork=True)
    numbers.cluster.wait_for_checkpoints(job, 2)
    numbers.cluster.wait_for_status(other, JobStatus.FINISHED)
    numbers.finish(numbers.stopped(job))
    counts = Counter(numbers.target.numbers())
    assert sorted(counts) == list(range(ROWS))
    assert set(counts.values()) == {1, 2}
    assert {counts[number] for number in before} == {1}
    assert numbers.left() == []


@pytest.mark.long
@pytest.mark.row("ends.5")
@pytest.mark.parametrize("numbers", ["parquet", "delta"], indirect=True)
def test_no_row_is_lost_in_mode_at_least_once_when_workers_are_killed_at_random_moments(numbers: Numbers) -> None:
    job, moments = numbers.start(10, mode="AT_LEAST_ONCE"), random.Random(4)
    numbers.cluster.wait_for_checkpoints(job, 1)
    for _ in range(8):
        numbers.kill_at_random(job, moments)
    numbers.cluster.wait_for_status(numbers.start(0, numbers.stopped(job), "AT_LEAST_ONCE"), JobStatus.FINISHED)
    assert sorted(set(numbers.target.numbers())) == list(range(ROWS))
    assert numbers.left() == []


@pytest.mark.long
@pytest.mark.row("ends.1", "ends.5")
@pytest.mark.parametrize(
    ("numbers", "outage"),
    [
        ("kafka", "silent"),  # a broker of the tests that is killed does not finish a commit that it had noted
        *((format_, outage) for format_ in ("postgresql", "postgresql-prepared") for outage in ("silent", "down")),
    ],
    indirect=["numbers"],
)
def test_target_has_every_row_once_when_its_server_is_away_longer_than_checkpoints_take(
    numbers: Numbers, outage: str
) -> None:
    """Once the job only waits for the server, and once a worker is killed meanwhile."""
    job = numbers.start(20)
    numbers.cluster.wait_until(lambda: len(numbers.target.numbers()) > 0, "visible rows")
    for kills in (False, True):
        before = numbers.cluster.restarts(job)
        with getattr(numbers.target.server, outage)():
            if kills:
                os.kill(numbers.cluster.worker_pids(job)[0], signal.SIGKILL)
                numbers.cluster.wait_until(lambda: numbers.cluster.restarts(job) > before, "a restart")  # noqa: B023
            over = time.monotonic() + 2.0
            numbers.cluster.wait_until(lambda: time.monotonic() > over, "ten intervals of checkpoints")  # noqa: B023
        seen = len(numbers.target.numbers())
        numbers.cluster.wait_until(lambda: len(numbers.target.numbers()) > seen, "more rows")  # noqa: B023
        # The rows may come from a task that runs before the others do.
        numbers.cluster.wait_until(lambda: all_run(numbers.cluster, job), "all subtasks to run")
    numbers.finish(numbers.stopped(job))
    assert numbers_once(numbers.target) == list(range(ROWS))
    assert numbers.left() == []
