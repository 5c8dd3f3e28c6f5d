"""The life of a job in a session without Spark: from submission to each of its ends, and on from its savepoints."""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd
import pytest

from ckpt_runtime.checkpoint.statistics import CheckpointStatsStatus
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence, hidden, visible

ROWS = 4000


@pytest.mark.row("147.4")
def test_a_bounded_job_commits_everything_without_periodic_checkpoints(job: SequenceJob) -> None:
    job.start(rows=ROWS, rate=0, configuration=fast(execution__checkpointing__interval=None))
    job.finished()
    assert_sequence(job.out, ROWS)
    assert job.cluster.completed_checkpoints(job.job_id) == 1


@pytest.mark.row("147.7")
@pytest.mark.parametrize("interval", [None, "250ms"])
def test_bounded_job_commits_everything_without_checkpoints_after_the_first_end(
    job: SequenceJob, interval: str | None
) -> None:
    off = {"execution__checkpointing__checkpoints_after_tasks_finish": "false"}
    job.start(rows=ROWS, rate=0, configuration=fast(execution__checkpointing__interval=interval, **off))
    job.finished()
    assert_sequence(job.out, ROWS)


@pytest.mark.row("147.3")
def test_a_job_that_commits_nothing_takes_no_checkpoint_at_its_end(job: SequenceJob) -> None:
    job.job_id = job.cluster.submit(
        program_of("bounded"), entry="bounded:pipeline", arguments=["--rows", "10"], parallelism=2
    )
    job.finished()
    counts = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).counts
    assert (counts.total, counts.failed) == (0, 0)


@pytest.mark.row("147.8")
def test_savepoint_that_is_restored_while_its_job_runs_commits_pending_files_once(job: SequenceJob) -> None:
    """Both hold the same files as pending; which of them commits first makes no difference."""
    job.start(configuration=fast(execution__checkpointing__interval=None))
    job.running()
    job.has_rows()
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "savepoints")
    beside = SequenceJob(job.cluster, job.directory)
    beside.start(rows=30_000, rate=0, savepoint=savepoint, fork=True)
    beside.finished()
    job.canceled()
    job.cluster.wait_until(lambda: hidden(job.out) == [], "the sinks to give up their files")
    assert_sequence(job.out, 30_000)


@pytest.mark.row("147.1")
def test_a_bounded_job_with_periodic_checkpoints_finishes(job: SequenceJob) -> None:
    (job.faults / "map-slow").touch()  # until there have been some
    job.start(rows=ROWS, rate=0, batch=8)
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    (job.faults / "map-slow").unlink()
    job.finished()
    assert_sequence(job.out, ROWS)
    assert job.cluster.completed_checkpoints(job.job_id) > 2, "the last one is that of the end"
    job.assert_retained()


@pytest.mark.parametrize(("retention", "kept"), [("RETAIN_ON_CANCELLATION", 2), ("DELETE_ON_CANCELLATION", 0)])
def test_a_cancelled_job_keeps_what_retention_says(job: SequenceJob, retention: str, kept: int) -> None:
    configuration = fast(
        execution__checkpointing__externalized_checkpoint_retention=retention,
        execution__checkpointing__num_retained="2",
    )
    job.start(configuration=configuration)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 3)
    job.canceled()
    history = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).history
    completed = [f"chk-{known.id}" for known in history if known.status is CheckpointStatsStatus.COMPLETED]
    job.assert_retained(*sorted(completed[:kept]))
    job.cluster.wait_until(
        lambda: not [name for name in hidden(job.out) if name.endswith(".inprogress")],
        "the sinks to give up their files",
    )


def test_cancel_and_retain_outweighs_the_options(job: SequenceJob) -> None:
    """What is kept is what the last answer names; a job that starts from it continues without a gap."""
    job.start(rows=ROWS, rate=100, configuration=fast(execution__checkpointing__interval="100 ms"))
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    dispatcher = job.cluster.dispatcher
    assert job.cluster.call(dispatcher.cancel_job(job.job_id, retain=True)) is not None
    job.cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    kept = job.cluster.call(dispatcher.cancel_job(job.job_id, retain=True))
    assert kept is not None
    assert kept.external_path is not None
    job.assert_retained(kept.external_path.rpartition("/")[2])
    job.start(rows=ROWS, rate=2_000, savepoint=kept.external_path)
    job.finished()
    assert_sequence(job.out, ROWS)


@pytest.mark.row("147.5")
@pytest.mark.parametrize("drain", [False, True])
def test_stop_with_savepoint_commits_the_rows_up_to_the_savepoint(job: SequenceJob, drain: bool) -> None:
    job.start()
    job.running()
    job.has_output()
    job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True, drain=drain)
    assert job.cluster.status(job.job_id) is JobStatus.FINISHED
    assert assert_sequence(job.out) > 0
    job.assert_retained()


@pytest.mark.row("203.7")
@pytest.mark.parametrize(
    ("before", "after"),
    [*(pytest.param(*pair, marks=pytest.mark.long) for pair in ((2, 2), (1, 2), (2, 1))), (2, 3)],
)
def test_a_job_resumes_from_its_savepoint(job: SequenceJob, before: int, after: int) -> None:
    job.start(parallelism=before)
    job.running()
    job.has_output()
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    stopped_at = assert_sequence(job.out)
    job.start(rows=stopped_at + 3000, rate=2_000, parallelism=after, savepoint=savepoint)
    job.finished()
    assert_sequence(job.out, stopped_at + 3000)


@pytest.mark.row("203.3")
def test_savepoint_of_a_running_job_restores_after_its_checkpoints_are_deleted(
    job: SequenceJob, tmp_path: Path
) -> None:
    job.start(configuration=fast(execution__checkpointing__externalized_checkpoint_retention="DELETE_ON_CANCELLATION"))
    job.running()
    job.has_output()
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "savepoints")
    job.cluster.wait_for_checkpoints(job.job_id, 2)  # the second one commits what the savepoint covers
    job.canceled()
    job.assert_retained()
    before = visible(job.out / "order")
    rows = len(before) + ROWS
    copy = SequenceJob(job.cluster, tmp_path / "copy")
    copy.start(rows=rows, rate=0, savepoint=savepoint)
    copy.finished()
    after = visible(copy.out / "order")
    assert (after.seen == after.n + 1).all()
    first = after.groupby("source").n.min().reindex(before.source.unique(), fill_value=rows)
    covered = before[before.n < before.source.map(first)]
    assert len(covered) > 0
    together = pd.concat([covered, after])
    assert len(together) == rows
    assert not together.duplicated(["source", "n"]).any()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) != 2, reason="counts on two cores")
def test_workers_of_two_jobs_have_a_core_each_and_three_share_both(job: SequenceJob, tmp_path: Path) -> None:
    def cores(of: SequenceJob) -> set[int]:
        (worker,) = of.cluster.worker_pids(of.job_id)
        return os.sched_getaffinity(worker)

    other, third = (SequenceJob(job.cluster, tmp_path / name) for name in ("other", "third"))
    try:
        for each in (job, other):
            each.start(parallelism=1)
            each.running()
        assert sorted([*cores(job), *cores(other)]) == sorted(os.sched_getaffinity(0))
        third.start(parallelism=1)
        third.running()
        assert cores(third) == os.sched_getaffinity(0)
        job.inject("map-raise")
        job.restarted(1)
        job.running()
        assert cores(job) == os.sched_getaffinity(0), "its core is not its own among three workers"
    finally:
        other.end()
        third.end()
