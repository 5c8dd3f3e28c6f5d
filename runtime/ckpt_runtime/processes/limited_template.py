"""A template that has imported the modules limited processes need, and forks them on request; both sides of it.

Without a template, a planning process would spend most of its time on imports. The template itself runs no untrusted
code. When a caller ends a process, the process's children are killed as well; when the driver is gone, all processes
are killed. A template ends after some idle time, and when its driver has ended.

Linux only, like :mod:`ckpt_runtime.processes.forking`, on which it is built.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from ckpt_runtime.processes.forking import (
    ForkedProcess,
    ForkRequest,
    ForkServer,
    Template,
    content_of,
    end_as,
    nameless_file,
)

_START_TIMEOUT_S = 120.0
_IDLE_S = 300.0

NEEDED = "NEEDED"
"""Name of an optional tuple in a serving module: modules that are imported before its first process is forked."""
OFTEN_NEEDED = "OFTEN_NEEDED"
"""Like :data:`NEEDED`, but imported before the second process, because a single one may not use them."""


class Forked:
    """The caller's handle of a forked process. ``ended`` becomes readable when the process has ended."""

    def __init__(self, process: ForkedProcess, stderr: int) -> None:
        self._process = process
        self.ended = process.descriptor
        self.stderr = stderr

    def end(self) -> int:
        """Kill the process and its children; returns its exit code, negative for a signal."""
        self._process.kill()
        os.close(self.stderr)
        return self._process.wait()


class ProcessTemplate:
    """The driver's side. ``environment`` is the template's own; every process can read it, so it holds no secret."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._template = Template.started(__name__, environment, subprocess.DEVNULL, is_session=True)
        self.process = self._template.process

    def fork(
        self, module: str, arguments: Sequence[str], question: int, answer: int, environment: Mapping[str, str]
    ) -> Forked | None:
        """Fork a process that runs ``main`` of a module in this environment; None if it could not be forked.

        Raises ConnectionError when the template has ended.
        """
        document = json.dumps([module, list(arguments)]).encode()
        # Not in the document: what the template reads stays in its memory, and in the memory of later processes.
        variables = nameless_file(json.dumps(dict(environment)).encode())
        reading, writing = os.pipe()
        try:
            process = self._template.fork(document, [question, answer, writing, variables.fileno()])
            if process.has_begun(_START_TIMEOUT_S):
                return Forked(process, os.dup(reading))
        finally:
            variables.close()
            os.close(reading)
            os.close(writing)
        return None

    def close(self) -> None:
        """End the template with all its processes."""
        self._template.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # it is still importing
            self.process.kill()
            self.process.wait()


# --- the template's side


class _Modules:
    """Imports the needed modules, and counts how often each serving module was requested."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def prepare(self, document: bytes) -> None:
        """Import the module's :data:`NEEDED` before its first process, and :data:`OFTEN_NEEDED` before its second."""
        name = json.loads(document)[0]
        module = importlib.import_module(name)
        self._asked[name] += 1
        wanted = [*getattr(module, NEEDED, ()), *(getattr(module, OFTEN_NEEDED, ()) if self._asked[name] > 1 else ())]
        missing = [needed for needed in wanted if needed not in sys.modules]
        for needed in missing:
            importlib.import_module(needed)
        if missing or self._asked[name] == 1:
            gc.freeze()  # so that the first collection in a process does not copy all this memory


def _run(request: ForkRequest) -> None:
    """Run the request in the new process, which ends afterwards."""
    question, answer, errors, variables = request.descriptors
    os.setsid()  # so that its children are killed with it
    os.dup2(errors, 2)
    os.close(errors)
    request.begun()
    gc.enable()
    name, arguments = json.loads(request.document)
    os.environ.clear()
    os.environ.update(json.loads(content_of(variables)))
    module = sys.modules[name]
    sys.argv = [module.__file__ or name, str(question), str(answer), *arguments]
    if "numpy.random" in sys.modules:  # else all processes of one template would draw the same numbers
        sys.modules["numpy.random"].seed()
    module.main()


def main() -> None:
    """The main function of the template and of each forked process."""
    gc.disable()
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])), _Modules().prepare, idle_s=_IDLE_S)
    request = server.run()
    if request is None:
        server.end_all()
    else:
        end_as(lambda: _run(request))


if __name__ == "__main__":
    main()
