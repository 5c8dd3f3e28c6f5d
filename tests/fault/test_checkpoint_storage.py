"""Checkpoint storage that fails while a job runs: checkpoints fail with the reason, and the job keeps running."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.statistics import CheckpointStats
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import ROCKSDB, SequenceJob, fast
from tests.support.outputs import assert_sequence
from tests.support.slow_mount import SlowMount

TOLERANT = fast(
    execution__checkpointing__tolerable_failed_checkpoints="100000",
    state__storage__fs__memory_threshold="0",
    execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
)


def _failed(job: SequenceJob) -> CheckpointStats | None:
    return job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_failed


def _wait_for_failure(job: SequenceJob, reason: str) -> None:
    def named() -> bool:
        failed = _failed(job)
        return failed is not None and reason in (failed.failure_message or "")

    job.cluster.wait_until(named, f"a checkpoint to fail with {reason!r}")


def test_a_checkpoint_directory_that_turns_unusable_and_comes_back(job: SequenceJob) -> None:
    job.start(configuration=TOLERANT)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    own = job.checkpoints / job.job_id
    in_the_way = [own / f"chk-{number}" for number in range(1, 1000)]
    in_the_way = [file for file in in_the_way if not file.exists()]
    for file in in_the_way:
        file.touch()
    _wait_for_failure(job, str(own))
    assert job.cluster.status(job.job_id) is JobStatus.RUNNING
    for file in in_the_way:
        if file.is_file():
            file.unlink()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("map-raise")
    job.restarted(1)
    job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    assert_sequence(job.out)
    job.assert_retained()


def test_job_without_tolerance_restarts_when_a_checkpoint_fails(job: SequenceJob) -> None:
    job.start(
        configuration=fast(restart_strategy__type="none", execution__checkpointing__tolerable_failed_checkpoints="2")
    )
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    _replace_by_a_file(job.checkpoints / job.job_id)
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED, clean_up=False)
    failure = job.cluster.of_job(job.job_id, lambda job: job.result()).failure
    assert failure is not None
    assert "tolerable" in failure.message.lower()


def _replace_by_a_file(directory: Path) -> None:
    """A checkpoint that is being written makes the directory again: that one has to go too."""
    for number in itertools.count():
        directory.rename(directory.with_name(f"away-{number}"))
        try:
            directory.touch(exist_ok=False)
        except FileExistsError:
            continue
        return


def _names(job: SequenceJob) -> list[str]:
    """Of all failures so far."""
    found = job.cluster.of_job(job.job_id, lambda job: job.exception_history(20))
    return [f"{entry.failure.exception}: {entry.failure.message}" for entry in found.entries]


def test_a_mount_that_is_missing_for_a_while_costs_nothing_with_default_options(job: SequenceJob) -> None:
    """Checkpoints fail, the job restarts and finds no state: it comes back when the mount does, and nothing is left."""
    options = {"execution.checkpointing.interval": "250 ms", "state.storage.fs.memory-threshold": "0"}
    job.start(configuration=options)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    away = job.checkpoints.rename(job.checkpoints.with_name("away"))
    job.checkpoints.mkdir()
    job.cluster.wait_until(
        lambda: any("StateUnavailableError" in name for name in _names(job)), "a restore without its files"
    )
    assert job.cluster.restarts(job.job_id) < 8
    assert not list(job.checkpoints.iterdir())
    job.checkpoints.rmdir()
    away.rename(job.checkpoints)
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.canceled()
    job.assert_retained()
    assert_sequence(job.out, cancelled=True)


def test_a_job_that_fails_for_good_keeps_its_last_checkpoint_with_default_options(job: SequenceJob) -> None:
    job.start(configuration={"execution.checkpointing.interval": "250 ms", "restart-strategy.type": "none"})
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("map-raise")
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)
    latest = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_completed
    assert latest is not None
    job.assert_retained(f"chk-{latest.id}")


def _fill(disk: Path) -> Path:
    """Returns the file that takes all that was free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"\0" * 4096)
    return filler


def test_a_full_local_disk_of_rocksdb_costs_restarts_until_there_is_room(job: SequenceJob, small_disk: Path) -> None:
    local = {"state.backend.rocksdb.localdir": str(small_disk), "restart-strategy.fixed-delay.delay": "100 ms"}
    durable = {"execution.checkpointing.dir": str(job.directory / "durable")}
    job.start(configuration={**TOLERANT, **ROCKSDB, **local, **durable})
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    filler = _fill(small_disk)
    job.inject("map-raise")
    job.cluster.wait_until(
        lambda: any("No space left" in name for name in _names(job)), "a restore on the disk that is full"
    )
    failed = job.cluster.restarts(job.job_id)
    job.cluster.wait_until(lambda: job.cluster.restarts(job.job_id) > failed, "another attempt")
    filler.unlink()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    assert not any("StateRestoreError" in name for name in _names(job))
    job.canceled()
    assert_sequence(job.out, cancelled=True)


def test_a_full_disk(job: SequenceJob, small_disk: Path) -> None:
    job.start(configuration=TOLERANT)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    filler = _fill(small_disk)
    _wait_for_failure(job, "No space left")
    with pytest.raises(AssertionError, match=f"{small_disk}/savepoints/.*No space left"):
        job.cluster.savepoint(job.job_id, small_disk / "savepoints")
    job.cluster.wait_until(lambda: not list(small_disk.glob("savepoints/*")), "what was written of it to go")
    assert job.cluster.status(job.job_id) is JobStatus.RUNNING
    filler.unlink()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("processor-raise")
    job.restarted(1)
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.canceled()
    latest = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_completed
    assert latest is not None
    job.assert_retained(f"chk-{latest.id}")
    again = SequenceJob(job.cluster, job.directory / "again")
    again.start(savepoint=str(small_disk / job.job_id / f"chk-{latest.id}"))
    again.running()
    again.canceled()


def test_storage_that_does_not_answer_workers(job: SequenceJob, small_disk: Path) -> None:
    """Their checkpoints expire and the jobs keep running: what hung is done later, and then deleted."""
    options = TOLERANT | {"execution.checkpointing.timeout": "2 s"}
    job.start(configuration=options)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    try:
        slow = SlowMount(small_disk, None)
    except OSError as error:
        pytest.skip(f"the kernel does not let opens wait here: {error}")
    try:
        _wait_for_failure(job, "expired")
        rows = _rows_in(job)
        job.cluster.wait_until(lambda: _rows_in(job) > rows, "rows to come through all the same")
    finally:
        slow.release()
    assert slow.delayed > 0
    assert job.cluster.restarts(job.job_id) == 0
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.inject("processor-raise")
    job.restarted(1)
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    assert_sequence(job.out)
    job.assert_retained()


def _rows_in(job: SequenceJob) -> int:
    """Of all subtasks, as reported with the heartbeats of their workers."""
    vertices = job.cluster.call(job.cluster.dispatcher.job_details(job.job_id)).vertices
    measures = [subtask.measures for vertex in vertices for subtask in vertex.subtasks]
    return sum(measured.rows_in for measured in measures if measured is not None)


def test_a_job_that_never_runs_again_leaves_no_incomplete_checkpoint(job: SequenceJob) -> None:
    job.start(configuration=TOLERANT)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.plant_incomplete_checkpoint()
    job.canceled()
    latest = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_completed
    assert latest is not None
    job.assert_retained(f"chk-{latest.id}")


def test_a_suspended_job_keeps_what_another_driver_may_be_writing(tmp_path: Path) -> None:
    with MiniCluster() as cluster:
        job = SequenceJob(cluster, tmp_path)
        job.start(configuration=TOLERANT)
        job.running()
        cluster.wait_for_checkpoints(job.job_id, 1)
        incomplete = job.plant_incomplete_checkpoint()
    assert incomplete.exists()
    assert list(incomplete.parents[1].glob("chk-*/_metadata"))
