"""A process that has imported what limited processes need, and forks one whenever it is asked to. Both sides of it.

Most of the time of a process that plans would go into imports. The template runs nothing foreign itself. A process goes
with all that it has started when its caller ends it, and all do when the driver is gone. A template that nobody has
asked for a while ends, and so does one whose driver has.

Linux only, like :mod:`ckpt_runtime.forking`, which it stands on.
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

from ckpt_runtime.forking import (
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
"""A module that serves may have a tuple of this name: modules which are imported before its first process is forked."""
OFTEN_NEEDED = "OFTEN_NEEDED"
"""As :data:`NEEDED`, before the second one: for a single one they may be in vain."""


class Forked:
    """A process of a template, as its caller sees it. ``ended`` is readable once it has ended."""

    def __init__(self, process: ForkedProcess, stderr: int) -> None:
        self._process = process
        self.ended = process.descriptor
        self.stderr = stderr

    def end(self) -> int:
        """Ends the process and what it has started; its exit code, negative for a signal."""
        self._process.kill()
        os.close(self.stderr)
        return self._process.wait()


class ProcessTemplate:
    """The driver's side. ``environment`` is the template's own, which each process can look at: it holds no secret."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._template = Template.started(__name__, environment, subprocess.DEVNULL, is_session=True)
        self.process = self._template.process

    def fork(
        self, module: str, arguments: Sequence[str], question: int, answer: int, environment: Mapping[str, str]
    ) -> Forked | None:
        """A process that runs ``main`` of a module in this environment, None where none could be forked.

        Raises ConnectionError when the template has ended.
        """
        document = json.dumps([module, list(arguments)]).encode()
        # Not in the document: the template keeps in its memory what it reads, and so would processes after this one.
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
        """Ends it with all its processes."""
        self._template.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:  # it imports
            self.process.kill()
            self.process.wait()


# --- the template's side


class _Modules:
    """What has been asked for."""

    def __init__(self) -> None:
        self._asked: Counter[str] = Counter()

    def prepare(self, document: bytes) -> None:
        """Imports before the first process of a module all what that one needs; before the second what many do."""
        name = json.loads(document)[0]
        module = importlib.import_module(name)
        self._asked[name] += 1
        wanted = [*getattr(module, NEEDED, ()), *(getattr(module, OFTEN_NEEDED, ()) if self._asked[name] > 1 else ())]
        missing = [needed for needed in wanted if needed not in sys.modules]
        for needed in missing:
            importlib.import_module(needed)
        if missing or self._asked[name] == 1:
            gc.freeze()  # so that a process's first collection does not copy the memory of all of it


def _run(request: ForkRequest) -> None:
    """In the new process, which ends with this."""
    question, answer, errors, variables = request.descriptors
    os.setsid()  # what it starts is killed with it
    os.dup2(errors, 2)
    os.close(errors)
    request.begun()
    gc.enable()
    name, arguments = json.loads(request.document)
    os.environ.clear()
    os.environ.update(json.loads(content_of(variables)))
    module = sys.modules[name]
    sys.argv = [module.__file__ or name, str(question), str(answer), *arguments]
    if "numpy.random" in sys.modules:  # processes of one template would draw the same numbers
        sys.modules["numpy.random"].seed()
    module.main()


def main() -> None:
    """Of the template, and of each process."""
    gc.disable()
    server = ForkServer(socket.socket(fileno=int(sys.argv[1])), _Modules().prepare, idle_s=_IDLE_S)
    request = server.run()
    if request is None:
        server.end_all()
    else:
        end_as(lambda: _run(request))


if __name__ == "__main__":
    main()
