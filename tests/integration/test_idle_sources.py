"""A subtask without rows does not hold event time, if the job says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, all_run, fast
from tests.support.outputs import visible


def write(directory: Path, name: str, *seconds: int) -> None:
    """A file that appears as a whole: one split, which one of the two subtasks reads."""
    hidden = directory / f".{name}"
    hidden.write_text("\n".join(map(str, seconds)))
    hidden.rename(directory / name)


def counts(output: Path) -> list[tuple[int, int]]:
    found = visible(output)
    return sorted(zip(found.start, found["count"], strict=True)) if len(found) else []


@pytest.mark.row("ends.3")
def test_windows_end_although_one_subtask_has_no_rows_and_rows_that_come_later_count(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write(source, "a", 1, 2, 25)
    job = cluster.submit(
        PIPELINES / "idle_windows.py",
        arguments=[str(source), str(output)],
        configuration={
            **fast(),
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "pipeline.source.idle-timeout": "500 ms",
        },
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING)
    cluster.wait_until(lambda: counts(output) == [(0, 2)], "the first window to end")
    # The second file is the other subtask's, the first subtask is idle by now.
    write(source, "b", 26, 47)
    cluster.wait_until(lambda: counts(output) == [(0, 2), (20, 2)], "the second window to end")
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    again = cluster.submit(
        PIPELINES / "idle_windows.py",
        arguments=[str(source), str(output)],
        configuration={**fast(), "pipeline.source.idle-timeout": "500 ms"},
        parallelism=3,
        savepoint=savepoint,
    )
    cluster.wait_for_status(again, JobStatus.RUNNING)
    write(source, "c", 48, 61)
    cluster.wait_until(lambda: counts(output) == [(0, 2), (20, 2), (40, 2)], "the third window to end")
    cluster.wait_until(lambda: all_run(cluster, again), "all subtasks to run")
    cluster.call(cluster.dispatcher.cancel_job(again))
    cluster.wait_for_status(again, JobStatus.CANCELED)
