"""Workers from a template: a process that has imported everything and loaded the kernels, and forks itself.

The first worker of an agent takes as long as a cold one, each further one some hundredths of a second, and they share
the template's memory. Linux only, as :mod:`ckpt_runtime.forking` says.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import msgspec

from ckpt_runtime.forking import ForkedProcess, Template
from ckpt_runtime.spark.worker_processes import WorkerStart, log_descriptor, worker_environment

_CODE_WAIT_S = 1.0
"""The template tells the exit code when the supervisor has ended, which may delete for long behind a worker."""


class ForkedWorker:
    """A worker that the template forks when it is ready. The agent holds the writing end of its ``pipe``."""

    def __init__(self, process: ForkedProcess, pipe: int) -> None:
        self._process = process
        self._pipe: int | None = pipe
        self._lock = threading.Lock()

    def kill(self) -> None:
        """Also one that is still to be forked."""
        self._process.kill()

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
    """Starts a template when the first worker is asked for, unless it has one, and another when that one is gone."""

    def __init__(self, template: Template | None = None) -> None:
        self._template = template

    def start(self, start: WorkerStart) -> ForkedWorker:
        ours: int
        theirs, ours = os.pipe()
        try:
            return ForkedWorker(self._fork(start, theirs), ours)
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def _fork(self, start: WorkerStart, pipe: int) -> ForkedProcess:
        document = msgspec.json.encode(start)
        if self._template is not None:
            with suppress(ConnectionError):
                return self._template.fork(document, [pipe], _CODE_WAIT_S)
            self.close()
        self._template = Template.started("ckpt_runtime.spark.template_main", worker_environment(), log_descriptor())
        return self._template.fork(document, [pipe], _CODE_WAIT_S)

    def close(self) -> None:
        """Also a template that is still importing, or has been asked for workers which nobody wants any more."""
        if self._template is not None:
            self._template.process.kill()
            self._template.close()
            self._template.process.wait()
            self._template = None
