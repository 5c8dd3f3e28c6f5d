"""Processes that fork themselves on request: real templates, which are forks of this process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ckpt_runtime.processes.forking import ForkServer, Template, end_as
from tests.support.processes import children, living

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no process descriptors here")
TIMEOUT_S = 60


def serve(connection: socket.socket) -> None:
    """Each process runs the code that it is given; ``begun`` is among its names."""
    server = ForkServer(connection)
    request = server.run()
    if request is None:
        server.end_all()
    else:
        end_as(lambda: exec(request.document, {"begun": request.begun, "os": os, "given": request.descriptors}))


def until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while living(pids):
        assert time.monotonic() < deadline


def template() -> Template:
    return Template.forked(serve)


def test_forked_process_reports_its_start_and_end_and_has_no_other_descriptors() -> None:
    asked = template()
    reading, writing = os.pipe()
    process = asked.fork(b"begun(); os.write(given[0], str(len(given)).encode()); os._exit(7)", [writing])
    os.close(writing)
    assert process.wait(TIMEOUT_S) == 7
    assert process.knows_code
    assert process.poll() == 7
    assert process.pid > 0
    with os.fdopen(reading) as file:
        assert file.read() == "1"
    asked.close()
    assert asked.process.wait() == 0


def test_process_that_is_killed_before_its_start_ends_at_its_start() -> None:
    asked = template()
    process = asked.fork(b"begun(); __import__('time').sleep(600)")
    process.kill()
    assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert process.knows_code
    asked.close()
    asked.process.wait()


def test_an_abandoned_request_does_not_begin(tmp_path: Path) -> None:
    asked = template()
    go, came = tmp_path / "go", tmp_path / "came"
    code = f"while not os.path.exists({str(go)!r}): pass\nbegun()\nopen({str(came)!r}, 'w').close()"
    process = asked.fork(code.encode())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)
    del process
    go.touch()
    until_gone([pid for pid in children(asked.process.pid) if pid != asked.process.pid])
    assert not came.exists()
    asked.close()
    asked.process.wait()


def test_several_threads_wait_for_one_that_loses_its_template() -> None:
    asked = template()
    process = asked.fork(b"begun(); __import__('time').sleep(600)")
    assert process.has_begun(TIMEOUT_S)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(process.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    asked.process.kill()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert codes == [-signal.SIGKILL] * 4
    assert not process.knows_code
    assert not living([process.pid])
    asked.process.wait()
    with pytest.raises(ConnectionError):
        asked.fork(b"")
    asked.close()
