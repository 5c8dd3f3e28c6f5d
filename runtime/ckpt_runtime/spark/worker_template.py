"""Workers from a template: a process that has imported everything and loaded the kernels, and forks itself.

The first worker of an agent takes as long as a cold one, each further one some hundredths of a second, and they share
the template's memory. Linux only: elsewhere libraries do not survive a fork, and there are no process descriptors.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from typing import Protocol

import msgspec
from msgspec import Struct

from ckpt_runtime.spark.processes import AdoptedProcess
from ckpt_runtime.spark.worker_processes import WorkerStart, log_descriptor, worker_environment

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1 << 16
_CODE_WAIT_S = 1.0
"""The template reaps a worker and tells its exit code as soon as it has ended."""


class _Answer(Struct, frozen=True, tag=True, tag_field="type"):
    worker: str


class WorkerForked(_Answer, frozen=True):
    """The worker lives, or has lived."""

    pid: int
    started: int


class NotForked(_Answer, frozen=True):
    """There will be no such worker."""

    reason: str


class Reaped(_Answer, frozen=True):
    """The worker has ended."""

    code: int


TemplateAnswer = WorkerForked | NotForked | Reaped
_ANSWERS = msgspec.json.Decoder[TemplateAnswer](TemplateAnswer)


class ForkedProcess:
    """A worker that the template forks when it is ready. The agent holds the writing end of its ``pipe``."""

    def __init__(self, pipe: int) -> None:
        self._pipe: int | None = pipe
        self._lock = threading.Lock()
        self._answered = threading.Event()
        self._reaped = threading.Event()
        self._process: AdoptedProcess | None = None
        self._killed = False
        self._code: int | None = None

    def begun(self, pid: int, started: int) -> None:
        """The template has forked it."""
        try:
            process = AdoptedProcess(pid, started)
        except OSError:
            process = None  # it has ended already, as the template will say
        with self._lock:
            self._process = process
            # It was wished dead before the template had forked it.
            if self._killed and process is not None:
                process.kill()
        self._answered.set()

    def ended(self, code: int | None) -> None:
        """The template has reaped it, never had it, or is gone and can say nothing more: None."""
        self._code = code
        self._reaped.set()
        self._answered.set()

    def kill(self) -> None:
        """Also one that is still to be forked."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def wait(self) -> int | None:
        self._answered.wait()
        if self._process is not None:
            self._process.wait()
        self._reaped.wait(_CODE_WAIT_S)
        self.let_go()
        return self._code

    def let_go(self) -> None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


class TemplateProcess(Protocol):
    """The process, which this one has started."""

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class WorkerTemplate:
    """The agent's side of one template process (see ``template_main.py``), which ends with the connection to it."""

    def __init__(self, connection: socket.socket, process: TemplateProcess) -> None:
        self._lock = threading.Lock()
        self._workers: dict[str, ForkedProcess] = {}
        self._lost = False
        self._connection = connection
        self._process = process
        threading.Thread(target=self._listen, name="worker-template", daemon=True).start()

    @classmethod
    def start(cls) -> WorkerTemplate:
        """A new process, which has to import everything first. Raises OSError."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "ckpt_runtime.spark.template_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log_descriptor(),
                env=worker_environment(),
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            connection.close()
            raise
        finally:
            theirs.close()
        return cls(connection, process)

    @property
    def lost(self) -> bool:
        """Whether the process is gone: it forks no more. Its workers live on."""
        return self._lost

    def fork(self, start: WorkerStart) -> ForkedProcess:
        """Asks for a worker. Raises OSError when the process is gone or there are no descriptors left."""
        ours: int
        theirs, ours = os.pipe()
        worker = ForkedProcess(ours)
        try:
            with self._lock:
                if self._lost:
                    raise BrokenPipeError("the template process is gone")
                # Before it is asked for: the answer may come before this thread goes on.
                self._workers[start.worker] = worker
            socket.send_fds(self._connection, [msgspec.json.encode(start)], [theirs])
        except OSError:
            with self._lock:
                self._workers.pop(start.worker, None)
            worker.let_go()
            raise
        finally:
            os.close(theirs)
        return worker

    def close(self) -> None:
        """Also one that is still importing, or that has been asked for workers which nobody wants any more."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        while True:
            try:
                data = self._connection.recv(MAX_MESSAGE)
            except OSError:
                data = b""
            if not data:
                break
            self._take(_ANSWERS.decode(data))
        with self._lock:
            self._lost = True
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.ended(None)
        self._connection.close()
        self._process.wait()

    def _take(self, answer: TemplateAnswer) -> None:
        with self._lock:
            worker = self._workers.get(answer.worker)
        if worker is None:
            return
        if isinstance(answer, WorkerForked):
            worker.begun(answer.pid, answer.started)
            return
        if isinstance(answer, NotForked):
            logger.warning("worker %s cannot be forked: %s", answer.worker, answer.reason)
        worker.ended(answer.code if isinstance(answer, Reaped) else None)
        with self._lock:
            self._workers.pop(answer.worker, None)


class Forker:
    """Starts a template when the first worker is asked for, unless it has one, and another when that one is lost."""

    def __init__(self, template: WorkerTemplate | None = None) -> None:
        self._template = template

    def start(self, start: WorkerStart) -> ForkedProcess:
        if self._template is None or self._template.lost:
            self._template = WorkerTemplate.start()
        return self._template.fork(start)

    def close(self) -> None:
        if self._template is not None:
            self._template.close()
            self._template = None
