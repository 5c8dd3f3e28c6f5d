"""Processes of a slot that watch one another: parents, orphans, and supervisors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import pytest

from ckpt_runtime.client.process_id import started
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.spark.worker_main import ParentWatch
from tests.support.processes import living

pytestmark = pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")
TIMEOUT_S = 60
SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
from ckpt_runtime.spark.template_main import keep

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a suite that runs under nohup hands on that it is ignored
directory, ending = sys.argv[1:]
children = Path(directory).parent / "children"

def detached():
    here, there = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(there, str(os.getpid()).encode())
            os.execvp("sleep", ["sleep", "600"])
        os._exit(0)
    os.wait()
    return int(os.read(here, 100))

def work():
    plain = subprocess.Popen(["sh", "-c", "sleep 600 & sleep 600"])
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    children.write_text(f"{plain.pid}\\n{grandchild.pid}\\n{detached()}\\n")
    Path(f"{children}.ready").touch()
    if ending == "exit":
        os._exit(7)
    if ending == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(600)

reported, telling = os.pipe()
supervisor = os.fork()
if supervisor == 0:
    keep(work, lambda worker: os.write(telling, str(worker).encode()), directory)
os.close(telling)
print(json.dumps([supervisor, int(os.read(reported, 100))]), flush=True)
_, status = os.waitpid(supervisor, 0)
print(os.waitstatus_to_exitcode(status), flush=True)
"""


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


class Kept:
    """A supervisor with its worker, and what the worker has started."""

    def __init__(self, directory: Path, ending: str) -> None:
        self.directory = directory / "work"
        self.directory.mkdir()
        (self.directory / "file").touch()
        arguments = [sys.executable, "-c", SCRIPT, str(self.directory), ending]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.supervisor, self.worker = json.loads(self.output.readline())
        until((directory / "children.ready").exists)
        self.left = [int(line) for line in (directory / "children").read_text().split()]

    def ended(self) -> int:
        """The exit code that the supervisor hands on."""
        code = int(self.output.readline())
        self.output.close()
        assert self.process.wait(TIMEOUT_S) == 0
        return code


@pytest.mark.parametrize(
    ("ending", "code"), [("exit", 7), ("crash", -signal.SIGSEGV), ("kill", -signal.SIGKILL), ("term", -signal.SIGTERM)]
)
def test_processes_started_by_a_worker_end_with_it(tmp_path: Path, ending: str, code: int) -> None:
    kept = Kept(tmp_path, ending)
    if ending in ("kill", "term"):
        assert living(kept.left) == kept.left
        os.kill(kept.worker, signal.SIGKILL if ending == "kill" else signal.SIGTERM)
    assert kept.ended() == code
    assert len(kept.left) == 3
    assert living([*kept.left, kept.worker]) == []
    assert not kept.directory.exists()


def test_a_supervisor_outlives_signals_to_its_process_group(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "wait")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        os.kill(kept.supervisor, number)
    os.kill(kept.worker, signal.SIGHUP)
    assert kept.ended() == -signal.SIGHUP
    assert living(kept.left) == []


def test_a_worker_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "wait")
    os.kill(kept.supervisor, signal.SIGKILL)
    assert kept.ended() == -signal.SIGKILL
    until(lambda: not living([kept.worker]))
    left = living(kept.left)
    for pid in [*chain.from_iterable(map(handles.descendants, left)), *left]:
        os.kill(pid, signal.SIGKILL)


def test_descendants_are_found_below_one_process_only() -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 600; true"])
    try:
        until(lambda: len(handles.descendants(child.pid)) == 1)
        below = handles.descendants(os.getpid())
        assert below.index(child.pid) < below.index(handles.descendants(child.pid)[0])
        assert os.getpid() not in below
    finally:
        for pid in [*handles.descendants(child.pid), child.pid]:
            os.kill(pid, signal.SIGKILL)
        child.wait()


FOREVER_S = 1000.0


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


def test_worker_that_has_run_tasks_ends_with_its_agent_and_a_spare_with_its_lease() -> None:
    worker = Worker(FOREVER_S)
    worker.parent_watch.begin_work()
    worker.lose_agent()
    assert worker.has_ended()
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
