"""Processes that die or freeze: the job restores its latest checkpoint, the output stays exact, nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.processes import children, cut_connections, living, parent, silence_connections

RATE = 2000


@pytest.fixture
def impatient(cluster: MiniCluster) -> Iterator[None]:
    """A silent process is lost after three seconds: too short on a busy machine for tests that freeze none."""
    slots = cluster.cluster.slots
    before = slots._times
    slots._times = replace(before, heartbeat_timeout_s=3.0)
    yield
    slots._times = before


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Whom the end of another one has taken along already is as dead."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def test_killed_workers(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    choice = random.Random(1)
    for restarts in (1, 2, 3):
        job.cluster.wait_for_checkpoints(job.job_id, 1)
        _kill(choice.choice(job.cluster.worker_pids()))
        job.restarted(restarts)
    job.stopped()
    job.assert_retained()
    entries = job.cluster.of_job(job.job_id, lambda job: job.exception_history(10)).entries
    assert len(entries) == 3
    assert all("its process ended with exit code -9 (SIGKILL: killed" in entry.failure.message for entry in entries)


def test_a_worker_killed_while_it_restores(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    first = job.cluster.worker_pids()[0]
    _kill(first)

    def replaced() -> bool:
        present = job.cluster.worker_pids()
        return len(present) == 2 and first not in present

    job.cluster.wait_until(replaced, "the next worker")
    _kill(job.cluster.worker_pids()[0])
    # A job that gets the stop before it knows of the kill would have no worker to send it to. The second of two more
    # checkpoints began after the kill.
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    job.stopped()


@pytest.mark.parametrize("ending", ["killed", "canceled"])
def test_processes_started_by_user_code_end_with_its_worker(job: SequenceJob, ending: str) -> None:
    """Also what has a session of its own, and no parent any more."""
    job.start(rate=RATE)
    job.running()
    before = job.cluster.worker_pids()
    job.inject("map-spawn")
    job.cluster.wait_until(lambda: len(_started(job)) == 2, "processes of user code")
    started = _started(job)
    assert living(started) == started
    if ending == "killed":
        for pid in before:
            _kill(pid)
        job.restarted(1)
    job.canceled()
    job.cluster.wait_until(lambda: not living([*started, *before]), "all that user code has started to end")


def _started(job: SequenceJob) -> list[int]:
    return sorted(int(file.name.removeprefix("started-")) for file in job.faults.glob("started-*"))


def test_a_killed_spare_does_not_disturb_the_job(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_until(lambda: len(job.cluster.spare_pids()) == 2, "two spares")
    spares = job.cluster.spare_pids()
    for spare in spares:
        _kill(spare)
    job.cluster.wait_until(
        lambda: len(job.cluster.spare_pids()) == 2 and not set(spares) & set(job.cluster.spare_pids()), "new spares"
    )
    assert job.cluster.of_job(job.job_id, lambda job: job.metrics())["numRestarts"] == "0"
    job.stopped()


def test_killed_agent_costs_only_its_own_slot_and_another_agent_is_launched(job: SequenceJob) -> None:
    """One restart. The spare that was ready runs in the new slot; the other slot keeps its agent and its worker."""
    job.start(rate=RATE, configuration=fast(restart_strategy__fixed_delay__attempts="1"))
    job.running()
    job.cluster.wait_until(lambda: len(job.cluster.spare_pids()) == 2, "two spares")
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    killed, other = job.cluster.provider.agent_pids()
    (spare,) = set(job.cluster.spare_pids()) & set(children(killed))
    (worker,) = set(job.cluster.worker_pids()) & set(children(other))
    staying = {spare, parent(spare)}

    def leaving() -> list[int]:
        return [pid for pid in (killed, *children(killed)) if pid not in staying]

    # Supervisors of workers that the tests before have killed may take a moment to end.
    what = "an agent, its template, its worker and the worker's supervisor alone"
    job.cluster.wait_until(lambda: len(leaving()) == 4, what)
    before = leaving()
    _kill(killed)
    job.restarted(1)
    job.cluster.wait_until(lambda: not living(before), "the processes of the lost slot to end")
    job.running()
    assert sorted(job.cluster.worker_pids()) == sorted((spare, worker))
    assert living([other, worker]) == [other, worker]
    job.stopped()


def test_agents_killed_one_after_the_other_while_their_workers_are_adopted(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    for restarts in (1, 2, 3):
        job.cluster.wait_for_checkpoints(job.job_id, 1)
        agents = job.cluster.provider.agent_pids()
        _kill(agents[restarts % 2])
        job.restarted(restarts)
        agent = job.cluster.provider.agent_pids()[0]
        adopted = [pid for pid in job.cluster.worker_pids() if pid not in children(agent)]
        job.running()
        assert living(adopted) == adopted
    job.stopped()


def test_an_adopted_worker_ends_with_the_agent_that_adopted_it(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_until(lambda: len(job.cluster.spare_pids()) == 2, "two spares")
    spares = job.cluster.spare_pids()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    for agent in job.cluster.provider.agent_pids():
        _kill(agent)
    job.cluster.wait_until(lambda: sorted(job.cluster.worker_pids()) == sorted(spares), "the spares to be adopted")
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    for agent in job.cluster.provider.agent_pids():
        _kill(agent)
    job.cluster.wait_until(lambda: not living(spares), "the adopted workers to end")
    job.stopped()


@pytest.mark.usefixtures("impatient")
def test_a_worker_that_was_adopted_is_killed_like_any_other(job: SequenceJob) -> None:
    """A frozen one does not answer its driver: its agent has to kill what is not its child."""
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_until(lambda: len(job.cluster.spare_pids()) == 2, "two spares")
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    _kill(job.cluster.provider.agent_pids()[0])
    job.restarted(1)
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    frozen = job.cluster.worker_pids()[-1]
    _kill(frozen, signal.SIGSTOP)
    job.restarted(2)
    job.cluster.wait_until(lambda: not living([frozen]), "the frozen worker to be killed")
    job.stopped()


def test_orphaned_workers_end_with_the_session(tmp_path: Path) -> None:
    with MiniCluster() as cluster:
        job = SequenceJob(cluster, tmp_path)
        job.start(rows=200)
        job.finished()
        cluster.wait_until(lambda: len(cluster.spare_pids()) == 2 == len(cluster.worker_pids()), "fresh workers")
        idle = [*cluster.worker_pids(), *cluster.spare_pids()]
        for agent in cluster.provider.agent_pids():
            _kill(agent)
        cluster.wait_until(lambda: not cluster.provider.agent_pids(), "the agents to end")
        assert living(idle) == idle
    cluster.wait_until(lambda: not living(idle), "the idle workers to end", timeout_s=120)


@pytest.mark.usefixtures("impatient")
def test_a_frozen_worker_is_replaced_after_the_heartbeat_timeout(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    frozen = job.cluster.worker_pids()[1]
    _kill(frozen, signal.SIGSTOP)
    job.restarted(1)
    job.cluster.wait_until(lambda: not living([frozen]), "the frozen worker to be killed")
    job.stopped()


@pytest.mark.usefixtures("impatient")
def test_a_frozen_agent_is_replaced_after_the_heartbeat_timeout(job: SequenceJob) -> None:
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    frozen = job.cluster.provider.agent_pids()[1]
    workers = [pid for pid in children(frozen) if pid in job.cluster.worker_pids()]
    assert len(workers) == 1
    _kill(frozen, signal.SIGSTOP)
    job.restarted(1)
    job.cluster.wait_until(lambda: not living([frozen, *workers]), "the frozen agent and its worker to be killed")
    job.stopped()


def test_a_connection_between_two_slots_is_cut(job: SequenceJob) -> None:
    """Both workers live on: the job restarts in them, over a new connection."""
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    one, other = job.cluster.worker_pids(job.job_id)
    assert cut_connections(one, other) > 0
    job.restarted(1)
    (entry,) = job.cluster.of_job(job.job_id, lambda job: job.exception_history(10)).entries
    assert "ChannelLostError" in entry.failure.exception
    assert "connection to worker" in entry.failure.message
    assert living([one, other]) == [one, other]
    job.stopped()


@pytest.mark.long
@pytest.mark.slow
def test_packets_between_two_slots_vanish(job: SequenceJob) -> None:
    """As behind a firewall that has forgotten a connection: the kernel gives it up, both workers live on."""
    job.start(rate=RATE)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    one, other = job.cluster.worker_pids(job.job_id)
    assert silence_connections(one, other) > 0
    job.cluster.wait_until(lambda: job.cluster.restarts(job.job_id) > 0, "the end of a silent connection", 300)
    job.cluster.wait_for_checkpoints(job.job_id, 2)
    (entry,) = job.cluster.of_job(job.job_id, lambda job: job.exception_history(10)).entries
    assert "ChannelLostError" in entry.failure.exception
    assert "timed out" in entry.failure.message
    assert living([one, other]) == [one, other]
    job.stopped()


def begun_since(threads: set[threading.Thread]) -> list[threading.Thread]:
    """The living threads that are not among these.

    Python lists a native thread that has called it even after its end. The thread of deadlines is one for the process,
    whatever sessions come and go.
    """
    native = {thread.id for thread in psutil.Process().threads()}
    since = [thread for thread in threading.enumerate() if thread not in threads and thread.name != "deadlines"]
    return [thread for thread in since if thread.native_id in native]


def test_a_session_that_ends_leaves_no_process_and_no_thread(job: SequenceJob, tmp_path: Path) -> None:
    # Sessions of one process share the Java machine of Spark and the template of agents, which the first one starts.
    job.start()
    job.running()
    job.stopped()
    threads = set(threading.enumerate())
    with MiniCluster(rest=True) as cluster:
        other = SequenceJob(cluster, tmp_path / "other")
        other.start()
        other.running()
        other.has_output()
        agents = cluster.provider.agent_pids()
        started = [pid for agent in agents for pid in (agent, *children(agent))]
        assert len(living(started)) >= 4
        work = cluster._directory.path
    cluster.wait_until(lambda: not living(started), "all processes to end", timeout_s=120)
    cluster.wait_until(lambda: not begun_since(threads), "all threads to end")
    assert not work.exists()
