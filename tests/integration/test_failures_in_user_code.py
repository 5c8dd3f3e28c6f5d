"""User code that fails: the job restarts or ends as its strategy says, and the output stays exact."""

from __future__ import annotations

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.jobs import SequenceJob, fast


def test_exceptions_in_operators_restart_the_job_and_lose_nothing(job: SequenceJob) -> None:
    job.start(rate=3000)
    job.running()
    for restarts, fault in enumerate(("map-raise", "processor-raise", "map-exit", "processor-raise"), start=1):
        job.inject(fault)
        job.restarted(restarts)
    job.stopped()
    history = job.cluster.of_job(job.job_id, lambda job: job.exception_history(10)).entries
    assert ["InjectedError" in entry.failure.exception for entry in history] == [True, False, True, True]
    assert "injected in map" in history[-1].failure.stack_trace
    assert history[-1].task_name is not None


def test_exceptions_that_cannot_be_printed_restart_the_job_like_any_other(job: SequenceJob) -> None:
    job.start(rate=3000)
    job.running()
    for restarts, fault in enumerate(("map-unprintable", "processor-surrogate", "map-huge"), start=1):
        job.inject(fault)
        job.restarted(restarts)
    job.stopped()
    entries = job.cluster.of_job(job.job_id, lambda job: job.exception_history(10)).entries
    huge, surrogate, unprintable = (entry.failure for entry in entries)
    assert "UnprintableError" in unprintable.exception
    assert "__str__() raised ValueError" in unprintable.message
    assert surrogate.message == r"half a pair \ud800"
    assert huge.message.startswith("xxx")
    assert len(huge.message) + len(huge.stack_trace) < 50_000


def test_an_exception_that_cannot_be_printed_ends_a_job_that_does_not_restart(job: SequenceJob) -> None:
    job.start(configuration=fast(restart_strategy__type="none"))
    job.running()
    job.inject("processor-unprintable")
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)


def test_code_that_never_returns_does_not_outlive_its_cancellation(job: SequenceJob) -> None:
    """The worker is replaced, and the job restarts from its latest checkpoint."""
    # Longer than the other worker stands still with its machine, or it would be replaced too.
    job.start(rate=3000, configuration=fast(task__cancellation__timeout="5s"))
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.pause_checkpoints()  # the processor would wait for a barrier that does not come
    before = set(job.cluster.worker_pids(job.job_id))
    job.inject("map-block")
    job.inject("processor-raise")
    job.restarted(1)
    assert len(before - set(job.cluster.worker_pids(job.job_id))) == 1
    job.stopped()


def test_code_that_never_returns_cannot_prevent_the_end_of_the_job(job: SequenceJob) -> None:
    job.start(configuration=fast(task__cancellation__timeout="500ms"))
    job.running()
    job.inject("map-block")
    job.canceled()


@pytest.mark.row("571.3")
def test_a_checkpoint_that_cannot_complete_expires_and_the_job_keeps_running(job: SequenceJob) -> None:
    configuration = fast(
        execution__checkpointing__timeout="400ms",
        execution__checkpointing__tolerable_failed_checkpoints="1000",
        task__cancellation__timeout="500ms",
    )
    job.start(configuration=configuration)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    (job.faults / "map-slow").touch()
    job.inject("processor-block")

    def expired() -> bool:
        statistics = job.cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics())
        failed = statistics.latest_failed
        return failed is not None and "expired" in (failed.failure_message or "").lower()

    job.cluster.wait_until(expired, "a checkpoint to expire")
    assert job.cluster.status(job.job_id) is JobStatus.RUNNING
    job.canceled()
