"""What a mark of a process proves, and what it does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ckpt_runtime.client.process_id import started
from ckpt_runtime.processes.process_mark import RELEASED, is_gone, is_here, machine, own_mark

pytestmark = pytest.mark.skipif(not machine(), reason="the system does not tell")


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def mark_of(pid: int) -> str:
    return f"{machine()}/{pid}/{started(pid)}"


def test_running_or_stopped_process_does_not_count_as_ended(child: subprocess.Popen[bytes]) -> None:
    own = own_mark()
    assert is_here(own)
    assert not is_gone(own)
    assert not is_gone(mark_of(child.pid))
    os.kill(child.pid, signal.SIGSTOP)
    assert not is_gone(mark_of(child.pid))


def test_killed_process_counts_as_ended_before_and_after_its_parent_waits_for_it(
    child: subprocess.Popen[bytes],
) -> None:
    mark = mark_of(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(mark)
    child.wait()
    assert is_gone(mark)


def test_only_a_well_formed_mark_of_this_host_proves_that_a_process_is_gone() -> None:
    own = own_mark()
    assert own is not None
    place, _, began = own.rpartition("/")
    assert is_gone(f"{place}/{int(began) + 1}")
    for mark in (None, "", "other-boot/pid:[1]/4194304/1", f"{machine()}/x/1", f"{machine()}/4194304/x", "a/b"):
        assert not is_gone(mark)
    assert is_gone(RELEASED)
    assert not is_here(RELEASED)
