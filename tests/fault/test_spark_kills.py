"""The example pipeline in Spark, through kills of every kind; its output is exact to the row."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from ckpt_runtime.storage.ha_store import HaStore
from tests.support.flights import assert_carriers, assert_rotations, read_flights, write_slice
from tests.support.jobs import ROCKSDB
from tests.support.outputs import hidden, visible
from tests.support.patience import patient
from tests.support.processes import agent_of, command_line, living, members, parent, workers_of
from tests.support.spark_sessions import FlightsJob, wait_until

ROWS = 30_000
RATE = 90
"""The rows last for more than five minutes of a job that is killed; the last job processes those that are left."""
KILLS = ["worker"] * 3 + ["agent"] + ["exception"]
MORE_KILLS = ["worker"] * 11 + ["agent"] * 4 + ["exception"] * 5
SEED = 20260731
BACKENDS = {"hashmap": {**ROCKSDB, "state.backend.type": "hashmap"}, "rocksdb": ROCKSDB}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SessionInfo]:
    """A session in local mode; when it has ended, nothing of it runs any more."""
    started = start_session("local", 2, log_file=tmp_path_factory.mktemp("session") / "session.log")
    try:
        yield started
        processes = members(started.pid)
    finally:
        stopped = stop_session(started)
    assert stopped
    assert not stop_session(started), "it was stopped already"
    wait_until(lambda: not living(processes), "all processes of the session to end", 120)
    assert not Path(started.session_file).exists()


@pytest.fixture
def client(session: SessionInfo) -> Iterator[CkptClient]:
    with CkptClient(session.rest_url, token=session.token) as connected:
        yield connected


def _workers(job: FlightsJob, count: int) -> list[int]:
    """The workers that run a job, after its first checkpoint or the first one after a restart.

    Before that, a worker may have its source closed for a moment: fsspec opens a local file twice.
    """
    found = workers_of(job.session.pid, job.source)
    assert len(found) == count
    return found


def _victim(job: FlightsJob, kind: str, choice: random.Random) -> int:
    """A worker that runs the job, or the agent above it."""
    worker = choice.choice(_workers(job, 2))
    return worker if kind == "worker" else agent_of(worker)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_lost_agent_restarts_only_its_own_job_and_a_job_without_slots_delays_no_other(
    session: SessionInfo, client: CkptClient, tmp_path: Path
) -> None:
    large, one, other = (
        FlightsJob(session, client, write_slice(tmp_path / f"{name}.parquet", ROWS), tmp_path / name)
        for name in ("large", "one", "other")
    )
    large.start(RATE, parallelism=3, expect_slots=False)
    reason = "needs 3 slots, the cluster has 2"
    wait_until(lambda: client.job_details(large.job_id).status_reason == reason, "the reason why the large job waits")
    one.start(RATE, parallelism=1)
    other.start(RATE, parallelism=1)
    overview = client.cluster_overview()
    assert (overview.slots_total, overview.slots_available) == (2, 0)
    assert client.job_details(large.job_id).state == "CREATED"
    assert f"it is CREATED: {reason}" in client.job_health(large.job_id).reasons

    for job in (one, other):
        job.wait_for_checkpoint()
    (worker,), (neighbour,) = (_workers(job, 1) for job in (one, other))
    if len(os.sched_getaffinity(0)) > 1:
        cores = [os.sched_getaffinity(pid) for pid in (worker, neighbour)]
        assert [len(each) for each in cores] == [1, 1]
        assert cores[0] != cores[1]
    os.kill(agent_of(worker), signal.SIGKILL)
    one.restarted(1)
    one.wait_for_checkpoint()
    other.wait_for_checkpoint()
    assert other.restarts() == 0
    assert _workers(other, 1) == [neighbour]
    for job in (large, one, other):
        client.cancel_job(job.job_id)
        client.wait_for_state(job.job_id, ["CANCELED"], timeout_s=patient(180))


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.row("203.2", "io.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("backend", "kinds"),
    [
        pytest.param("rocksdb", KILLS, id="5-rocksdb"),
        pytest.param("rocksdb", MORE_KILLS, id="20-rocksdb", marks=pytest.mark.long),
        pytest.param("hashmap", MORE_KILLS, id="20-hashmap", marks=pytest.mark.long),
    ],
)
def test_kills(session: SessionInfo, client: CkptClient, tmp_path: Path, backend: str, kinds: list[str]) -> None:
    """With increments, of which each restart builds upon the latest. Agents are forked by our daemon."""
    source = write_slice(tmp_path / "flights.parquet", ROWS)
    job = FlightsJob(session, client, source, tmp_path, options=BACKENDS[backend])
    job.start(RATE)
    choice = random.Random(SEED)
    job.wait_for_checkpoint()
    daemon = parent(_victim(job, "agent", choice))
    assert "ckpt_runtime.spark.agent_daemon" in command_line(daemon)
    kills = list(kinds)
    choice.shuffle(kills)
    for number, kind in enumerate(kills, start=1):
        job.wait_for_checkpoint()
        if kind == "exception":
            (job.faults / "map-raise").touch()
        else:
            os.kill(_victim(job, kind, choice), signal.SIGKILL)
        job.restarted(number, f"the end of a {kind}")
    job.wait_for_checkpoint()
    assert list(job.faults.iterdir()) == []
    assert any(known.incremental for known in client.checkpoint_statistics(job.job_id).history)
    savepoint = job.stopped()
    assert 0 < len(visible(job.out / "rotations")) < ROWS
    job.start(0, savepoint=savepoint)
    job.finished()

    flights = read_flights(job.source)
    assert hidden(job.out) == []
    assert_rotations(visible(job.out / "rotations"), flights)
    assert_carriers(visible(job.out / "carrier_delays"), flights)


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_application_leaves_no_worker(tmp_path: Path) -> None:
    """Killed while workers wait for their next agent, and some have been adopted before."""
    started = start_session("local", 2, log_file=tmp_path / "session.log")
    try:
        with CkptClient(started.rest_url, token=started.token) as client:
            job = FlightsJob(started, client, write_slice(tmp_path / "flights.parquet", ROWS), tmp_path)
            _killed_whole(job)
    finally:
        stop_session(started)


def _killed_whole(job: FlightsJob) -> None:
    """Agent and driver at once, behind a restart; returns when no worker is left."""
    session = job.session
    job.start(RATE)
    job.wait_for_checkpoint()
    os.kill(_victim(job, "agent", random.Random(SEED)), signal.SIGKILL)
    job.restarted(1)
    job.wait_for_checkpoint()
    agent = _victim(job, "agent", random.Random(SEED))
    processes = members(session.pid)
    os.kill(agent, signal.SIGKILL)
    os.kill(session.driver.pid, signal.SIGKILL)
    wait_until(lambda: not living([pid for pid in processes if pid != session.pid]), "all workers to end", 120)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_driver_ends_with_its_jvm_and_releases_the_leadership(tmp_path: Path) -> None:
    """What is left of it would renew its lease for ever, without a slot."""
    storage = tmp_path / "ha"
    options = {"high-availability.type": "filesystem", "high-availability.storageDir": str(storage)}
    started = start_session("local", 1, log_file=tmp_path / "session.log", conf=options)
    try:
        os.kill(started.pid, signal.SIGKILL)
        wait_until(lambda: not started.driver.is_alive, "the driver to end", 120)
    finally:
        stop_session(started)
    store = HaStore(str(storage)).leader
    leader = store.current()
    assert leader is not None
    assert store.lease(leader.epoch).released
    assert "Spark's JVM is gone" in Path(started.log_file).read_text().splitlines()[-1]
    assert not Path(started.session_file).exists()
