"""Runs untrusted code in a separate process, with limits on memory, time and output; both sides of it.

The caller's side is :func:`run_limited`. The other side is a module whose ``main`` calls :func:`serve`. Request and
answer are unnamed files that only these two processes have open. The answer is read up to a limit and must be treated
as untrusted, because the code that the process ran could have written it. The process's output is drained and
discarded, except for the end of its standard error.

The process sets its limits itself, before it reads anything untrusted; the code in it cannot raise them again (unless
it runs as root). The kernel's out-of-memory killer picks this process before the driver. It is a session of its own,
which is killed as a whole. Memory is limited on Linux only.

A driver has its processes forked by a template (:func:`keep_templates`), which saves each of them the imports. Other
callers, and systems that cannot fork this way, start a new interpreter for each process.

It uses only the standard library.

A template has imported the modules that limited processes need, and forks them on request. Without it, a planning
process would spend most of its time on imports. The template itself runs no untrusted
code. When a caller ends a process, the process's children are killed as well; when the driver has ended, all processes
are killed. A template ends after some idle time, and when its driver has ended.

Templates exist on Linux only, like :mod:`ckpt_runtime.processes.forking`, on which they are built.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
        # Not in the document: data that the template reads stays in its memory, and in the memory of later processes.
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
    if "numpy.random" in sys.modules:  # otherwise, all processes of one template would draw the same numbers
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


_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_STDERR_BYTES = 4_000
_PIPE_BYTES = 1 << 16
_LOOK_S = 0.02
"""Interval at which to check whether a process has ended, on systems without process descriptors."""
_MOST_TEMPLATES = 2
_NAMES = frozenset({"HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"})
_BEGINNINGS = ("ARROW_", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_")
"""Prefixes of the variables that a template gets: those that affect imports and are not secret."""
_STATM = Path("/proc/self/statm")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""One thread per library: each thread reserves memory in advance, and their default number is that of the cores."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits of a process. ``time_s`` limits both the elapsed time and the processor time.

    ``memory_bytes`` is in addition to the memory of the engine's own modules; ``file_bytes`` applies to each file
    written.
    """

    time_s: float
    memory_bytes: int
    answer_bytes: int
    file_bytes: int = 256 << 20

    def __str__(self) -> str:
        return f"{self.time_s:g} s, {self.memory_bytes >> 20} MiB of memory"


class LimitedProcessError(RuntimeError):
    """The process gave no answer. ``last_words`` is the end of its standard error."""

    def __init__(self, message: str, last_words: str = "") -> None:
        super().__init__(message)
        self.last_words = last_words


class ProcessTimeLimitError(LimitedProcessError):
    """The process took too long and was killed."""


def run_limited(
    module: str, request: bytes, limits: ProcessLimits, environment: Mapping[str, str] | None = None
) -> bytes:
    """Run ``python -m module`` and return its answer. Blocks. Raises :class:`LimitedProcessError`.

    ``environment`` replaces the caller's, so that secrets of the driver need not reach foreign code.
    """
    # Files instead of pipes: neither side can block the other, and the size of an answer is checked before reading.
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(request)
        question.flush()
        process = _begin(module, question.fileno(), answer.fileno(), limits, environment)
        try:
            last_words = _drain(process, time.monotonic() + limits.time_s)
        finally:
            code = process.end()
        if last_words is None:
            raise ProcessTimeLimitError(f"it took longer than the {limits.time_s:g} s allowed")
        return _answer(answer.fileno(), code, limits, last_words.decode(errors="replace"))


def _begin(
    module: str, question: int, answer: int, limits: ProcessLimits, environment: Mapping[str, str] | None
) -> Forked | _Started:
    given = dict(os.environ if environment is None else environment)
    paths = [_PACKAGE_ROOT, *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**_ONE_THREAD, **given, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    numbers = [str(number) for number in (limits.memory_bytes, int(limits.time_s) + 1, limits.file_bytes)]
    for _ in range(2):  # a template that has been idle for a long time may be ending at this moment
        template = _TEMPLATES.of(variables)
        if template is None:
            break
        try:
            forked = template.fork(module, numbers, question, answer, variables)
        except ConnectionError:
            _TEMPLATES.lost(template)
            continue
        if forked is not None:
            return forked
        break
    return _Started(module, [str(question), str(answer), *numbers], (question, answer), variables)


class _Templates:
    """The templates of this process; there are none while no driver runs in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drivers = 0
        self._living: dict[frozenset[tuple[str, str]], ProcessTemplate] = {}

    def begin(self) -> None:
        with self._lock:
            self._drivers += 1

    def end(self) -> None:
        with self._lock:
            self._drivers -= 1
            ended = [] if self._drivers else list(self._living.values())
            if ended:
                self._living = {}
        for template in ended:
            template.close()

    def of(self, environment: Mapping[str, str]) -> ProcessTemplate | None:
        """The template for processes of an environment; None if no driver runs or the system has no templates."""
        own = {name: value for name, value in environment.items() if _counts_for_imports(name)}
        key = frozenset(own.items())
        with self._lock:
            if not self._drivers or not hasattr(os, "pidfd_open"):
                return None
            template = self._living.pop(key, None) or ProcessTemplate(own)
            self._living[key] = template
            oldest = list(self._living)[:-_MOST_TEMPLATES]
            ended = [self._living.pop(environment) for environment in oldest]
        for former in ended:
            former.close()
        return template

    def lost(self, template: ProcessTemplate) -> None:
        with self._lock:
            self._living = {key: known for key, known in self._living.items() if known is not template}
        template.close()


def _counts_for_imports(name: str) -> bool:
    """Whether a variable affects imports: Python's own have no underscore, unlike Spark's secrets with that prefix."""
    return name in _NAMES or name.startswith(_BEGINNINGS) or (name.startswith("PYTHON") and "_" not in name)


_TEMPLATES = _Templates()


def keep_templates() -> None:
    """Called when a driver begins: processes are forked until :func:`drop_templates` was called as many times."""
    _TEMPLATES.begin()


def drop_templates() -> None:
    """Called when a driver ends; with the last driver, the templates and all their running processes end. Blocks."""
    _TEMPLATES.end()


class _Started:
    """A process started by a new interpreter, with the interface of :class:`Forked`."""

    def __init__(
        self, module: str, arguments: list[str], descriptors: tuple[int, int], environment: Mapping[str, str]
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment),
            pass_fds=descriptors,
            # A process group of its own, so that its children are killed with it.
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self.stderr = self._process.stderr.fileno()
        self.ended = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """Kill the process and its children; returns its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self.ended is not None:
            os.close(self.ended)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code


def _drain(process: Forked | _Started, deadline: float) -> bytes | None:
    """Wait for the process to end and return the end of its standard error; None if the deadline passed first.

    The wait is for the process itself, not for the end of the pipe, which a leftover child may hold open.
    """
    pipe, ended = process.stderr, process.ended
    os.set_blocking(pipe, False)
    tail = b""
    with selectors.DefaultSelector() as selector:
        if ended is not None:
            selector.register(ended, selectors.EVENT_READ)
        selector.register(pipe, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(remaining if ended is not None else _LOOK_S)}
            if pipe in ready:
                chunk = _read_some(pipe)
                if not chunk:
                    selector.unregister(pipe)
                tail = (tail + chunk)[-_STDERR_BYTES:]
            if ended in ready or (isinstance(process, _Started) and ended is None and process.has_ended()):
                return (tail + _read_some(pipe))[-_STDERR_BYTES:]
    return None


def _read_some(pipe: int) -> bytes:
    """Read the present content of the pipe, without blocking."""
    try:
        return os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _answer(descriptor: int, code: int, limits: ProcessLimits, last_words: str) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > limits.answer_bytes:
        raise LimitedProcessError(f"its result of {size} bytes is larger than the {limits.answer_bytes} allowed")
    data = os.pread(descriptor, size, 0) if code == 0 else b""
    if data:
        return data
    how = f"with code {code}" if code >= 0 else f"by signal {-code}"
    raise LimitedProcessError(f"it ended {how} and gave no result; allowed are {limits}", last_words)


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The other side: read the request and write the result of ``answer``, within the given limits.

    Import everything that the process needs of the engine before the call: it does not count towards the limits.
    """
    parser = argparse.ArgumentParser()
    for name in ("question", "answer", "memory", "seconds", "file_bytes"):
        parser.add_argument(name, type=int)
    given = parser.parse_args()
    _limit(given.memory, given.seconds, given.file_bytes)
    with os.fdopen(given.question, "rb") as file:
        file.seek(0)
        request = file.read()
    sys.argv = [sys.argv[0]]
    content = answer(request)
    with os.fdopen(given.answer, "wb") as file:
        file.write(content)


def _limit(memory: int, seconds: int, file_bytes: int) -> None:
    with suppress(OSError):
        # If memory runs out nevertheless, the kernel should kill this process and not the driver.
        Path("/proc/self/oom_score_adj").write_text("1000")
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))
