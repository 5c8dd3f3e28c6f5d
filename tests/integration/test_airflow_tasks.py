"""The provider's tasks on jobs that fail, restart and stop: real processes, rows counted at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import assert_sequence
from tests.support.patience import patient
from tests.unit.provider.conftest import Task

if TYPE_CHECKING:
    from airflow_provider_ckpt.operators.base import CkptOperationOperator
    from airflow_provider_ckpt.operators.submit import SubmitJobOperator

ROWS = 4000
SLOW = 100
"""So that a job is there until a test lets it fail."""
FAST = {"deferrable": False, "poll_interval": 0.05}


@pytest.fixture(autouse=True)
def connection(cluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(cluster.rest_url)
    document = {"conn_type": "ckpt", "host": parts.hostname, "port": parts.port}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))


def submission(job: SequenceJob, **configuration: str) -> Callable[[int], SubmitJobOperator]:
    """A task that submits the ``sequence`` pipeline, which gives so many rows a second, and waits for its end."""
    from airflow_provider_ckpt.operators.submit import SubmitJobOperator

    arguments = ["--output", str(job.out), "--rows", str(ROWS), "--batch", "64"]
    arguments += ["--faults", str(job.faults), "--uids=", "--sleep-ms", "0"]
    given = fast(restart_strategy__type="none", **configuration)
    return lambda rate: SubmitJobOperator(
        task_id="t",
        pipeline=str(program_of("sequence")),
        entry="sequence:pipeline",
        args=[*arguments, "--rate", str(rate)],
        parallelism=2,
        configuration={"execution.checkpointing.dir": str(job.checkpoints), **given},
        wait_for_completion=True,
        **FAST,
    )


def fail_after_checkpoints(job: SequenceJob, operator: SubmitJobOperator, context: dict[str, Any]) -> None:
    """One try, whose job completes checkpoints and fails then."""
    from airflow_provider_ckpt.exceptions import CkptJobFailed

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(operator.execute, context)
        job.cluster.wait_until(lambda: operator._waiting_for is not None, "the submission")
        job.job_id = operator._waiting_for
        job.cluster.wait_until(lambda: _known(job), "the job")
        job.running()
        job.has_output()
        job.pause_checkpoints()  # nothing is lost of what a checkpoint covers that no retry finds
        job.inject("processor-raise")
        with pytest.raises(CkptJobFailed, match="injected in processor"):
            running.result(patient(180))
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)


def _known(job: SequenceJob) -> bool:
    from ckpt_runtime.jobmaster.gateway_values import JobNotFound

    try:
        job.cluster.status(job.job_id)
    except JobNotFound:
        return False
    return True


@pytest.mark.row("air.3")
def test_a_retry_neither_doubles_nor_loses_rows(job: SequenceJob) -> None:
    submit, task = submission(job), Task()
    fail_after_checkpoints(job, submit(SLOW), task.context())
    first = job.job_id
    result = submit(0).execute(task.context())
    job.job_id = result["job_id"]
    assert (result["status"], result["job_id"] != first) == ("FINISHED", True)
    job.finished()
    assert_sequence(job.out, ROWS)


@pytest.mark.row("air.3")
def test_a_retry_without_a_retained_checkpoint_writes_nothing_twice(job: SequenceJob) -> None:
    from airflow_provider_ckpt.exceptions import CkptJobNotResumable

    submit, task = submission(job, execution__checkpointing__externalized_checkpoint_retention=(
        "NO_EXTERNALIZED_CHECKPOINTS"
    )), Task()  # fmt: skip
    fail_after_checkpoints(job, submit(SLOW), task.context())
    with pytest.raises(CkptJobNotResumable, match=f"{job.job_id}.*none of them is retained"):
        submit(0).execute(task.context())
    assert_sequence(job.out)


@pytest.mark.row("air.3")
def test_a_savepoint_and_two_stops_at_once_of_a_job_that_is_restarting(job: SequenceJob) -> None:
    from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
    from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator

    def task(kind: type[CkptOperationOperator]) -> Any:
        operator = kind(task_id="t", job=job.job_id, target_directory=str(job.directory / "savepoints"), **FAST)
        return operator.execute(Task().context())

    def restarting(number: int) -> bool:
        """Or over, when this process stood still meanwhile."""
        return job.cluster.status(job.job_id) is JobStatus.RESTARTING or job.cluster.restarts(job.job_id) >= number

    job.start(configuration=fast(restart_strategy__fixed_delay__delay="1500 ms"))
    job.running()
    job.has_output()
    job.inject("processor-raise")
    job.cluster.wait_until(lambda: restarting(1), "the restart to begin")
    assert task(TakeSavepointOperator)["savepoint_path"]
    job.cluster.wait_for_checkpoints(job.job_id, 2)  # the second one commits what the savepoint keeps hidden
    job.inject("processor-raise")
    job.cluster.wait_until(lambda: restarting(2), "the restart to begin")
    with ThreadPoolExecutor(2) as pool:
        stops = [pool.submit(task, StopWithSavepointOperator) for _ in range(2)]
        paths = {stop.result(patient(180))["savepoint_path"] for stop in stops}
    assert len(paths) == 1
    assert job.cluster.status(job.job_id) is JobStatus.FINISHED
    job.cluster.wait_for_clean_up(job.job_id)
    assert_sequence(job.out)
    assert task(StopWithSavepointOperator)["savepoint_path"] in paths
