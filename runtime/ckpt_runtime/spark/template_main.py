"""The template process: imports everything, loads the kernels, then forks a worker for each request of its agent.

It has a single thread of its own and runs no user code. The descriptor on its command line is a connection to the
agent; each request carries the reading end of a pipe that ties the worker to the agent. The template ends with its
agent, while its workers keep running.

The supervisor of a worker is its parent: it is forked from the template, forks the worker, and adopts every process
below the worker whose own parent ends (``PR_SET_CHILD_SUBREAPER``), even one in a session of its own. When the worker
has ended for any reason, the supervisor kills all descendants, removes the worker's directory, and ends with the
worker's exit code or signal. It does not depend on the template or the agent. Linux only, like the template.
"""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import msgspec

from ckpt_runtime.processes import handles
from ckpt_runtime.processes.forking import ForkRequest, ForkServer, control, end_with
from ckpt_runtime.spark.worker_main import make_ready, prepare, work
from ckpt_runtime.spark.worker_processes import WorkerStart

_PR_SET_CHILD_SUBREAPER = 36
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
"""Signals that a terminal or Spark sends to whole process groups. The supervisor has to outlive the worker."""


def keep(become_worker: Callable[[], NoReturn], begun: Callable[[int], None], directory: str) -> NoReturn:
    """Fork the worker, report its pid by ``begun`` and supervise it. ``begun`` is not called if the fork fails."""
    code = 1
    try:
        handles.set_name(handles.SUPERVISOR)
        # Before the fork, so that processes that the worker starts immediately are adopted as well.
        control(_PR_SET_CHILD_SUBREAPER, 1)
        supervisor = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with(supervisor)
            become_worker()
        begun(pid)
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        code = _wait_for(pid)
        end_descent()
        shutil.rmtree(directory, ignore_errors=True)
        # By the same signal, so that the process that waits for the supervisor sees the signal that ended the worker.
        if code < 0:
            _end_by_signal(-code)
    finally:
        os._exit(code & 0xFF)


def end_descent() -> None:
    """Kill all descendants until none is left; those whose parents end become children of this process."""
    while True:
        for pid in handles.descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            # After each reaped process the tree is read again: a process may have started others before it was killed.
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _wait_for(worker: int) -> int:
    """Wait for the exit code of the worker; other children that end are reaped."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == worker:
            return os.waitstatus_to_exitcode(status)


def _end_by_signal(number: int) -> None:
    # The worker has already written a core dump, if one is wanted.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


logger = logging.getLogger(__name__)


def main() -> None:
    """Runs until the agent has ended."""
    handles.set_name(handles.TEMPLATE)
    make_ready("template")
    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(connection: socket.socket) -> NoReturn:
    """Serve requests until the agent has ended, in a process that has imported everything."""
    code = 1
    try:
        handles.set_name(handles.TEMPLATE)
        request = ForkServer(connection, binds=False).run()
        if request is not None:
            _become_supervisor(request)
        code = 0
    except BaseException:
        logger.exception("a template or supervisor process has ended")
    finally:
        os._exit(code)


def _become_supervisor(request: ForkRequest) -> NoReturn:
    """Become the supervisor of a new worker: the template's child, which ends with the worker's exit code or signal."""
    start = msgspec.json.decode(request.document, type=WorkerStart)
    (pipe,) = request.descriptors

    def begun(worker: int) -> None:
        os.close(pipe)
        request.begun(worker)

    keep(partial(_become_worker, start, pipe, request.notices), begun, start.directory)


def _become_worker(start: WorkerStart, pipe: int, notices: socket.socket) -> NoReturn:
    """Set up the parts that the agent would have given to a new process, then run as a worker."""
    try:
        notices.close()
        handles.set_name(handles.WORKER)
        os.environ["TMPDIR"] = start.directory
        tempfile.tempdir = None
        work(start, pipe)
    except BaseException:
        logger.exception("worker %s cannot be started", start.worker)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
