"""What transactional sinks have hidden when their job ends early: deleted, or found by the job that resumes."""

from __future__ import annotations

import os
import signal

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.jobmaster.gateway_values import AfterSavepoint, CheckpointKind, SavepointRequest
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence, hidden


def nothing_is_hidden(job: SequenceJob) -> None:
    job.cluster.wait_until(lambda: not hidden(job.out), f"{hidden(job.out)} to be removed")


def has_hidden(job: SequenceJob, ending: str) -> None:
    job.cluster.wait_until(lambda: any(name.endswith(ending) for name in hidden(job.out)), f"a file {ending}")


def test_cancel_with_a_checkpoint_in_progress_leaves_nothing_hidden(job: SequenceJob) -> None:
    """One sink has prepared its files, the other one is behind a slow operator."""
    options = fast(execution__checkpointing__interval="1 h")
    job.start(rate=4000, batch=16, sleep_ms=10, configuration=options)
    job.running()
    job.cluster.call(job.cluster.dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))
    has_hidden(job, ".pending")
    assert job.cluster.completed_checkpoints(job.job_id) == 0
    job.canceled()
    nothing_is_hidden(job)


def test_cancel_before_a_failed_job_is_deployed_again_leaves_nothing_hidden(job: SequenceJob) -> None:
    """Its workers were killed, so no sink has closed; no later attempt will look."""
    options = fast(execution__checkpointing__interval="1 h", restart_strategy__fixed_delay__delay="1 h")
    job.start(configuration=options)
    job.running()
    has_hidden(job, ".inprogress")
    for pid in job.cluster.worker_pids(job.job_id):
        os.kill(pid, signal.SIGKILL)
    job.cluster.wait_for_status(job.job_id, JobStatus.RESTARTING)
    assert hidden(job.out)
    job.canceled()
    nothing_is_hidden(job)


def test_a_job_that_fails_for_good_leaves_nothing_hidden(job: SequenceJob) -> None:
    options = fast(execution__checkpointing__interval="1 h", restart_strategy__type="none")
    job.start(configuration={key: value for key, value in options.items() if "fixed-delay." not in key})
    job.running()
    has_hidden(job, ".inprogress")
    for pid in job.cluster.worker_pids(job.job_id):
        os.kill(pid, signal.SIGKILL)
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)
    nothing_is_hidden(job)


def test_files_covered_by_a_savepoint_are_committed_by_the_job_that_resumes(job: SequenceJob) -> None:
    """The first job is cancelled by its savepoint: no checkpoint of its own ever covers what the savepoint does."""
    cluster = job.cluster
    job.start(rate=1000, configuration=fast(execution__checkpointing__interval="1 h"))
    job.running()
    has_hidden(job, ".inprogress")
    wanted = SavepointRequest(str(job.directory / "savepoints"), AfterSavepoint.CANCEL, SavepointFormat.NATIVE)
    cluster.call(cluster.dispatcher.take_savepoint(job.job_id, wanted))
    cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    [savepoint] = (job.directory / "savepoints").iterdir()
    cluster.wait_until(
        lambda: all(name.endswith(".pending") for name in hidden(job.out)), "what the savepoint does not cover to go"
    )
    assert hidden(job.out)
    job.start(rows=60_000, rate=0, parallelism=3, savepoint=str(savepoint))
    job.finished()
    assert_sequence(job.out, 60_000)


def test_jobs_that_write_to_one_directory_do_not_touch_each_others_files(job: SequenceJob) -> None:
    """The second has the same uids, and is cancelled while the first has files open."""
    job.start(configuration=fast(execution__checkpointing__interval="100 ms"))
    job.running()
    first = job.job_id
    other = SequenceJob(job.cluster, job.directory)
    other.start(rate=10, configuration=fast(execution__checkpointing__interval="1 h"))
    other.running()
    other.canceled()
    job.job_id = first
    job.stopped()
