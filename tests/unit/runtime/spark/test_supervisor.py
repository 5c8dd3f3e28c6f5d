"""What a worker leaves behind: real processes, and no worker's code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from ckpt_runtime.processes import handles
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

told, telling = os.pipe()
supervisor = os.fork()
if supervisor == 0:
    keep(work, lambda worker: os.write(telling, str(worker).encode()), directory)
os.close(telling)
print(json.dumps([supervisor, int(os.read(told, 100))]), flush=True)
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
