"""The supervisor of one worker: its parent, which kills the processes that the worker's user code has left behind.

It is forked from the template, forks the worker, and adopts every process below the worker whose own parent ends
(``PR_SET_CHILD_SUBREAPER``), even one in a session of its own. When the worker has ended for any reason, the supervisor
kills all descendants, removes the worker's directory, and ends with the worker's exit code or signal. It does not
depend on the template or the agent. Linux only, like the template.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ckpt_runtime.processes import handles
from ckpt_runtime.processes.forking import control, end_with

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
        # By the same signal, so that the process that waits for the supervisor learns what ended the worker.
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
