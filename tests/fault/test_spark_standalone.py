"""A standalone Spark cluster: an executor comes late, one is lost, then a host, and nothing of the output."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.processes.handles import WORKER
from ckpt_runtime.spark.launch import SessionStartError, start_session, stop_session
from tests.support.flights import assert_carriers, assert_rotations, read_flights, write_slice
from tests.support.outputs import hidden, visible
from tests.support.patience import patient
from tests.support.processes import children, command_line, command_name
from tests.support.spark_sessions import FlightsJob, SparkCluster, standalone_cluster, wait_until

ROWS = 16_000
SECRET = "spark.authenticate.secret"
SETTINGS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}


REASON = re.compile(r"slot \S+ was lost: executor \d was lost: .*exited with code 137 \(SIGKILL")


def _told(job: FlightsJob) -> list[str]:
    return [entry.stack_trace for entry in job.client.job_exceptions(job.job_id).entries]


def _executors(cluster: SparkCluster) -> list[int]:
    """The executor JVMs."""
    below = [pid for worker in cluster.workers for pid in children(worker.pid)]
    return [pid for pid in below if "CoarseGrainedExecutorBackend" in command_line(pid)]


def _through_a_lost_executor(job: FlightsJob, cluster: SparkCluster) -> None:
    """Waits until the job runs on two executors, kills one of them and waits until the job has restarted."""
    job.client.wait_for_state(job.job_id, ["RUNNING"], timeout_s=patient(180))
    assert job.client.job_details(job.job_id).status_reason is None
    assert job.client.cluster_overview().slots_total == 2
    job.wait_for_checkpoint()
    executors = _executors(cluster)
    assert len(executors) == 2
    assert all(any(command_name(pid) == WORKER for pid in children(executor)) for executor in executors)
    known = job.restarts()
    os.kill(executors[0], signal.SIGKILL)
    wait_until(lambda: job.restarts() > known, "the restart")
    # The other worker may miss its peer before Spark misses the executor.
    wait_until(lambda: any(REASON.search(text) for text in _told(job)), "the reason to be reported")
    job.wait_for_checkpoint()


def _lose_a_host(cluster: SparkCluster) -> None:
    """Spark's daemon there, its executor, and all that runs below it, at once."""
    hosts = [(worker.pid, children(worker.pid)) for worker in cluster.workers]
    pid, below = next((pid, below) for pid, below in hosts if set(below) & set(_executors(cluster)))
    for lost in (pid, *below):
        with suppress(ProcessLookupError):
            os.kill(lost, signal.SIGKILL)


@contextmanager
def _job(directory: Path, cluster: SparkCluster) -> Iterator[FlightsJob]:
    """A job that is not started yet, in a session that needs two slots. The output is complete in the end."""
    source = write_slice(directory / "flights.parquet", ROWS)
    session = start_session(cluster.url, 2, spark_conf=SETTINGS | cluster.settings, log_file=directory / "session.log")
    try:
        with CkptClient(session.rest_url, token=session.token) as client:
            job = FlightsJob(session, client, source, directory)
            yield job
            job.finished()
    finally:
        stop_session(session)
    flights = read_flights(source)
    assert hidden(job.out) == []
    assert_rotations(visible(job.out / "rotations"), flights)
    assert_carriers(visible(job.out / "carrier_delays"), flights)


def _waits(job: FlightsJob, reason: str) -> None:
    """Starts a job that has to wait for its slots."""
    job.start(1000, expect_slots=False)
    wait_until(lambda: job.client.job_details(job.job_id).status_reason == reason, "the reason why the job waits")


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.row("io.3")
def test_executors_that_come_late_get_the_job_and_a_lost_one_costs_no_row(tmp_path: Path) -> None:
    with standalone_cluster(tmp_path, workers=0, cores=2) as cluster, _job(tmp_path, cluster) as job:
        _waits(job, "needs 2 slots, the cluster has 0")
        cluster.start_worker()
        _through_a_lost_executor(job, cluster)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.row("io.3")
def test_an_executor_and_a_host_that_are_lost_one_after_the_other_cost_no_row(tmp_path: Path) -> None:
    with standalone_cluster(tmp_path, workers=1) as cluster, _job(tmp_path, cluster) as job:
        wait_until(lambda: job.client.cluster_overview().slots_total == 1, "the slot of the first executor", 120)
        _waits(job, "needs 2 slots, the cluster has 1")
        for _ in range(2):
            cluster.start_worker()
        _through_a_lost_executor(job, cluster)
        known = job.restarts()
        _lose_a_host(cluster)
        wait_until(lambda: job.restarts() > known, "the restart on the hosts that are left", 120)


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_master_without_authentication_is_refused(tmp_path: Path) -> None:
    """Spark gives up after a minute and continues as if it had not; the session ends."""
    settings = SETTINGS | {SECRET: "the cluster's, if it had one"}
    with (
        standalone_cluster(tmp_path, workers=0, authenticated=False) as cluster,
        pytest.raises(SessionStartError, match="does not accept the application"),
    ):
        start_session(cluster.url, 1, spark_conf=settings, log_file=tmp_path / "session.log", ready_timeout_s=180)
