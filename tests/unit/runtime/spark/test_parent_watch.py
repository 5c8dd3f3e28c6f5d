"""A worker's parent_watch, with a pipe for its first agent and small processes for the next ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.process_id import started
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.spark.worker_main import ParentWatch

TIMEOUT_S = 60
FOREVER_S = 1000.0

pytestmark = pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")


class Worker:
    """A parent_watch in this process. ``ended`` is set where a worker would end."""

    def __init__(self, lease_s: float) -> None:
        self.ended = threading.Event()
        pipe, self.agent_end = os.pipe()
        self.parent_watch = ParentWatch(pipe, self._end, lease_s)
        self.parent_watch.start()

    def _end(self) -> None:
        self.ended.set()

    def lose_agent(self) -> None:
        os.close(self.agent_end)

    def until_orphaned(self) -> None:
        for _ in range(TIMEOUT_S * 1000):
            with self.parent_watch._lock:
                if self.parent_watch._agent is None:
                    return
            threading.Event().wait(0.001)
        raise AssertionError("it never noticed")

    def has_ended(self) -> bool:
        return self.ended.wait(TIMEOUT_S)


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def adopt(worker: Worker, agent: subprocess.Popen[bytes]) -> None:
    worker.parent_watch.adopted_by(ProcessIdentity("", agent.pid, started(agent.pid)))


def test_worker_that_has_run_tasks_ends_with_its_agent() -> None:
    worker = Worker(FOREVER_S)
    worker.parent_watch.begin_work()
    worker.lose_agent()
    assert worker.has_ended()


def test_spare_ends_when_its_lease_is_over() -> None:
    worker = Worker(0.001)
    assert not worker.ended.is_set()
    worker.lose_agent()
    assert worker.has_ended()


def test_an_orphan_refuses_to_work() -> None:
    worker = Worker(FOREVER_S)
    worker.lose_agent()
    worker.until_orphaned()
    assert not worker.ended.is_set()
    worker.parent_watch.begin_work()
    assert worker.ended.is_set()


def test_orphan_serves_the_agent_that_adopts_it_and_ends_with_it(agent: subprocess.Popen[bytes]) -> None:
    worker = Worker(FOREVER_S)
    worker.lose_agent()
    worker.until_orphaned()
    adopt(worker, agent)
    worker.parent_watch.begin_work()
    assert not worker.ended.is_set()
    agent.kill()
    assert worker.has_ended()


def test_an_adopted_one_that_never_worked_is_an_orphan_again(agent: subprocess.Popen[bytes]) -> None:
    worker = Worker(FOREVER_S)
    worker.lose_agent()
    worker.until_orphaned()
    adopt(worker, agent)
    agent.kill()
    worker.until_orphaned()
    assert not worker.ended.is_set()


def test_the_end_of_a_former_agent_that_hung_means_nothing(agent: subprocess.Popen[bytes]) -> None:
    worker = Worker(FOREVER_S)
    adopt(worker, agent)
    worker.parent_watch.begin_work()
    worker.lose_agent()
    assert not worker.ended.wait(0.05)
    agent.kill()
    assert worker.has_ended()


def test_worker_ends_if_the_adopting_agent_has_already_ended(agent: subprocess.Popen[bytes]) -> None:
    worker = Worker(FOREVER_S)
    began = started(agent.pid)
    agent.kill()
    agent.wait()
    worker.parent_watch.adopted_by(ProcessIdentity("", agent.pid, began))
    assert worker.ended.is_set()


def test_a_worker_that_ends_with_its_agent_leaves_no_files(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt-worker-x"
    (directory / "program").mkdir(parents=True)
    code = f"from ckpt_runtime.spark.worker_main import _end; _end({str(directory)!r})"
    assert subprocess.run([sys.executable, "-c", code], timeout=TIMEOUT_S, check=False).returncode == 1
    for _ in range(TIMEOUT_S * 100):
        if not directory.exists():
            return
        time.sleep(0.01)
    raise AssertionError("the files are still there")
