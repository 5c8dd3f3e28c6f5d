"""Workers from a template: a process that has imported everything and loaded the kernels, and then forks workers.

The first worker of an agent takes as long to start as a cold one, each further one some hundredths of a second, and
they share the template's memory. Linux only, see :mod:`ckpt_runtime.processes.forking`.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import msgspec

from ckpt_runtime.processes.forking import ForkedProcess, Template
from ckpt_runtime.spark.worker_processes import WorkerStart, log_descriptor, worker_environment

_CODE_WAIT_S = 1.0
"""How long to wait for the exit code, which the template reports only after the supervisor's clean-up."""


class ForkedWorker:
    """A worker that the template forks once it is ready. The agent holds the writing end of its ``pipe``."""

    def __init__(self, template: Template, process: ForkedProcess, pipe: int) -> None:
        self._template = template
        self._process = process
        self._pipe: int | None = pipe
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        return self._process.pid or self._template.process.pid

    def kill(self) -> None:
        """Kill the worker. If it has not been forked yet, kill its template instead, which may hang."""
        self._process.kill()
        if not self._process.has_begun(0.0) and self._process.returncode is None:
            self._template.process.kill()

    def wait(self) -> int | None:
        code = self._process.wait()
        self.release()
        return code if self._process.knows_code else None

    def release(self) -> None:
        with self._lock:
            pipe, self._pipe = self._pipe, None
        if pipe is not None:
            os.close(pipe)


class Forker:
    """Starts a template for the first worker, unless it was given one, and another if the template has ended."""

    def __init__(self, template: Template | None = None) -> None:
        self._template = template

    def start(self, start: WorkerStart) -> ForkedWorker:
        ours: int
        theirs, ours = os.pipe()
        try:
            return ForkedWorker(*self._fork(start, theirs), ours)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def _fork(self, start: WorkerStart, pipe: int) -> tuple[Template, ForkedProcess]:
        document = msgspec.json.encode(start)
        if self._template is not None:
            with suppress(ConnectionError):
                return self._template, self._template.fork(document, [pipe], _CODE_WAIT_S)
            self.close()
        self._template = Template.started("ckpt_runtime.spark.template_main", worker_environment(), log_descriptor())
        return self._template, self._template.fork(document, [pipe], _CODE_WAIT_S)

    def close(self) -> None:
        """End the template, even if it is still importing or has pending requests for workers."""
        if self._template is not None:
            self._template.process.kill()
            self._template.close()
            self._template.process.wait()
            self._template = None
