"""Real processes that are held without being children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ckpt_runtime.client.process_id import started
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.spark.worker_processes import own_identity

pytestmark = pytest.mark.skipif(not handles.machine(), reason="no process descriptors here")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-IS", "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_process_identity_has_machine_pid_and_start_time() -> None:
    own = own_identity()
    assert (own.machine, own.pid) == (handles.machine(), os.getpid())
    assert own.started == started(os.getpid())


def test_workers_are_not_adopted_without_process_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert own_identity() == ProcessIdentity("", os.getpid(), 0)


def test_an_adopted_process_is_killed_and_waited_for(sleeper: subprocess.Popen[bytes]) -> None:
    adopted = handles.AdoptedProcess(sleeper.pid, started(sleeper.pid))
    adopted.kill()
    adopted.wait()
    assert sleeper.wait() == -9
    adopted.kill()
    adopted.wait()


def test_process_that_reuses_a_pid_is_not_mistaken_for_the_earlier_one(sleeper: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ProcessLookupError, match="now belongs to another process"):
        handles.AdoptedProcess(sleeper.pid, started(sleeper.pid) - 1)


def test_handle_of_an_ended_process_is_not_found(sleeper: subprocess.Popen[bytes]) -> None:
    began = started(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    with pytest.raises(ProcessLookupError):
        handles.hold(sleeper.pid, began)
    with pytest.raises(ProcessLookupError):
        started(sleeper.pid)
