"""The template process: imports everything, loads the kernels, then forks a worker whenever its agent asks for one.

It has a single thread of its own and runs no user code. Its descriptor, named on the command line, is a connection to
the agent; with each request comes the reading end of a pipe that the worker is tethered to. It ends with its agent.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import tempfile
import warnings
from functools import partial
from typing import NoReturn

import msgspec

from ckpt_runtime.client.process_id import started
from ckpt_runtime.spark import processes
from ckpt_runtime.spark.keeper import keep
from ckpt_runtime.spark.worker_main import make_ready, prepare, work
from ckpt_runtime.spark.worker_processes import WorkerStart
from ckpt_runtime.spark.worker_template import MAX_MESSAGE, NotForked, Reaped, TemplateAnswer, WorkerForked

logger = logging.getLogger(__name__)


class ForkServer:
    """``connection`` is the one to the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._workers: dict[int, tuple[int, str]] = {}

    def run(self) -> None:
        """Until the agent is gone."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._workers:
                    self._reap(descriptor)
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, MAX_MESSAGE, 1)
        if not data:
            return False
        start = msgspec.json.decode(data, type=WorkerStart)
        (pipe,) = descriptors
        os.set_inheritable(pipe, False)
        try:
            self._fork(start, pipe)
        except OSError as error:
            self._say(NotForked(start.worker, str(error)))
        finally:
            os.close(pipe)
        return True

    def _fork(self, start: WorkerStart, pipe: int) -> None:
        """Of the two that come, the keeper is this process's child, and ends as the worker did."""
        told, telling = os.pipe()
        try:
            keeper = os.fork()
            if keeper == 0:
                self._become_keeper(start, pipe, told, telling)
        except OSError:
            os.close(told)
            raise
        finally:
            # Held by the keeper alone from now on: reading ends when it has told, or has died.
            os.close(telling)
        try:
            worker = _told_pid(told)
            descriptor = os.pidfd_open(keeper)
        except OSError:
            # Nobody could watch it: it must not live.
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)
            raise
        self._workers[descriptor] = keeper, start.worker
        self._poll.register(descriptor, select.POLLIN)
        self._say(WorkerForked(start.worker, worker, _started(worker)))

    def _become_keeper(self, start: WorkerStart, pipe: int, told: int, telling: int) -> NoReturn:
        try:
            os.close(told)
            # What a fork inherits and has no use for: held open here, it would outlive the template.
            self._connection.close()
            for descriptor in self._workers:
                os.close(descriptor)
            keep(partial(self._become_worker, start, pipe), pipe, telling, start.directory)
        finally:
            # Never back into the template's loop, whatever was raised.
            os._exit(1)

    def _become_worker(self, start: WorkerStart, pipe: int) -> NoReturn:
        """What the agent would have given to a new process; then a worker's life. Never goes back to the loop."""
        try:
            processes.set_name(processes.WORKER)
            os.environ["TMPDIR"] = start.directory
            tempfile.tempdir = None
            work(start, pipe)
        except BaseException:
            logger.exception("worker %s cannot begin", start.worker)
        finally:
            os._exit(1)

    def _reap(self, descriptor: int) -> None:
        pid, worker = self._workers.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._say(Reaped(worker, os.waitstatus_to_exitcode(status)))

    def _say(self, answer: TemplateAnswer) -> None:
        """An agent that is gone is noticed by the next read."""
        try:
            self._connection.send(msgspec.json.encode(answer))
        except OSError:
            return


def _told_pid(told: int) -> int:
    """Raises OSError when the keeper could not fork."""
    with os.fdopen(told, "rb") as reading:
        text = reading.read()
    if not text:
        raise OSError("the worker could not be forked")
    return int(text)


def _started(worker: int) -> int:
    """0 for one that has ended already: nobody can hold it."""
    try:
        return started(worker)
    except ProcessLookupError:
        return 0


def main() -> None:
    """Runs until the agent is gone."""
    processes.set_name(processes.TEMPLATE)
    make_ready()
    prepare()
    serve(socket.socket(fileno=int(sys.argv[1])))


def serve(connection: socket.socket) -> NoReturn:
    """In a process that has imported everything, until the agent is gone."""
    processes.set_name(processes.TEMPLATE)
    # Python counts the threads of OpenBLAS and of Arrow's allocator, which see to themselves in a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    ForkServer(connection).run()
    os._exit(0)


if __name__ == "__main__":
    main()
