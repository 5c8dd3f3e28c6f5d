"""How rows travel between operators, and user classes at both ends of a job, through failures."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of, wait_for_restarts
from tests.support.outputs import assert_batches, batch_rows, hidden, visible

ROWS = 2500
LIMIT = 6000
LAST_RANGE = 2000


def _inject(cluster: MiniCluster, file: Path) -> None:
    file.touch()
    cluster.wait_until(lambda: not file.exists(), f"user code to act on {file.name}")


def test_unions_and_rows_in_turn_deliver_each_row_through_a_failure(cluster: MiniCluster, tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.mkdir()
    out = tmp_path / "out"
    job = cluster.submit(
        program_of("edges"),
        entry="edges:pipeline",
        arguments=[str(out), str(ROWS), "400", str(faults)],
        configuration=fast(),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    cluster.wait_for_checkpoints(job, 1)
    _inject(cluster, faults / "map-raise")
    cluster.wait_for_status(job, JobStatus.FINISHED)
    united = visible(out / "united")
    assert hidden(out) == []
    first = united[united.source < 1000]
    second = united[united.source >= 1000]
    for frame in (first, second):
        assert len(frame) == ROWS
        assert not frame.duplicated().any()
    assert set(zip(second.source - 1000, second.n, strict=True)) == set(zip(first.source, first.n, strict=True))
    doubled, totals = visible(out / "doubled"), visible(out / "totals")
    assert (doubled.groupby(["source", "n"]).size() == 2).all()
    assert len(doubled) == len(totals) == 2 * ROWS
    assert sorted(totals.groupby("source")["rows"].max()) == sorted(doubled.groupby("source").size())


@pytest.mark.row("io.2")
def test_readers_and_writers_of_structured_streaming_run_unchanged_through_kills(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    faults = tmp_path / "faults"
    (tmp_path / "batches").mkdir()
    faults.mkdir()

    def read_up_to(rows: int) -> None:
        """Replaced as a whole: the readers look all the time."""
        (tmp_path / "next").write_text(str(rows))
        (tmp_path / "next").rename(tmp_path / "limit")

    read_up_to(LIMIT // 2)
    job = cluster.submit(
        program_of("user_sources"),
        entry="user_sources:pipeline",
        arguments=[str(tmp_path), str(faults)],
        configuration=fast(),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    choice = random.Random(7)
    for number, fault in enumerate(("write", "kill", "snapshot", "commit", "kill"), start=1):
        file = faults / f"{fault}-raise"
        if fault == "kill":
            os.kill(choice.choice(cluster.worker_pids(job)), signal.SIGKILL)
        else:
            file.touch()
        # All rows up to the last limit may have been read: the fault is met by those that come now.
        read_up_to(LIMIT // 2 + number * LIMIT // 20)
        cluster.wait_until(lambda file=file: not file.exists(), f"user code to act on {file.name}")  # type: ignore[misc]
        wait_for_restarts(cluster, job, number)
    read_up_to(LIMIT)
    cluster.wait_until(lambda: batch_rows(tmp_path) >= 2 * LIMIT, "all rows")
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    assert_batches(tmp_path, LIMIT)


@pytest.mark.row("io.2")
def test_checkpoints_come_into_the_middle_of_a_long_range(cluster: MiniCluster, tmp_path: Path) -> None:
    """Two kills within one range whose three partitions take long, and are read at once in the end."""
    out, quick = tmp_path / "out", tmp_path / "quick"
    job = cluster.submit(
        program_of("bulk_source"),
        entry="bulk_source:pipeline",
        arguments=[str(out), str(quick)],
        configuration=fast(),
        parallelism=2,
    )
    expected = 3 * 60 * 20
    cluster.wait_for_status(job, JobStatus.RUNNING)
    for restarts in (1, 2):
        before = len(visible(out))
        cluster.wait_until(lambda before=before: len(visible(out)) > before, "rows of a checkpoint")
        assert len(visible(out)) < expected, "the range was read as a whole"
        os.kill(cluster.worker_pids(job)[restarts - 1], signal.SIGKILL)
        wait_for_restarts(cluster, job, restarts)
    quick.touch()
    cluster.wait_until(lambda: len(visible(out)) >= expected, "all rows")
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    frame = visible(out)
    assert len(frame) == expected
    assert not frame.duplicated().any()
    assert hidden(out) == []


@pytest.mark.row("147.1")
def test_checkpoints_complete_while_the_last_range_is_read(cluster: MiniCluster, tmp_path: Path) -> None:
    """The enumerator has finished by then, and a restart continues in the middle of the range."""
    faults = tmp_path / "faults"
    faults.mkdir()
    job = cluster.submit(
        program_of("bounded_reader"),
        entry="bounded_reader:pipeline",
        arguments=[str(tmp_path / "out"), str(LAST_RANGE), str(faults)],
        configuration=fast(execution__checkpointing__interval="100ms"),
        parallelism=2,
    )
    cluster.wait_for_checkpoints(job, 5)
    cluster.wait_until(lambda: len(visible(tmp_path / "out")) > 0, "rows of a checkpoint")
    before = len(visible(tmp_path / "out"))
    assert before < LAST_RANGE
    _inject(cluster, faults / "read-raise")
    cluster.wait_for_checkpoints(job, 2)
    cluster.wait_until(lambda: len(visible(tmp_path / "out")) > before, "rows of the range's rest")
    assert len(visible(tmp_path / "out")) < LAST_RANGE
    (faults / "read-quick").touch()
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert sorted(visible(tmp_path / "out").n) == list(range(LAST_RANGE))
    assert hidden(tmp_path / "out") == []
