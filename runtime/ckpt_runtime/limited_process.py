"""Runs untrusted code in a separate process, with limits on memory, time and output. Both sides of it.

The caller's side is :func:`run_limited`. The other side is a module whose ``main`` calls :func:`serve`. Request and
answer are files without a name that only these two processes have open; the answer is read up to a limit and is to be
taken as foreign, because the code that the process ran could write it too. What the process prints is drained without
being kept, but for the end of its standard error.

The process sets its limits itself, before it looks at anything foreign; what runs in it cannot raise them again (unless
it runs as root). The system's killer for want of memory takes it before the driver. It is a session of its own, which
ends as a whole. Memory is limited on Linux only.

A driver has its processes forked by a template (:func:`keep_templates`), which spares each of them the imports;
others, and systems where that cannot be, start each anew.

It lies outside the rooms: ``api``, ``storage`` and ``jobmaster`` use it, and it uses the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import resource
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.process_template import Forked, ProcessTemplate

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_STDERR_BYTES = 4_000
_PIPE_BYTES = 1 << 16
_LOOK_S = 0.02
"""How often to look for the end of a process where the system does not tell it."""
_MOST_TEMPLATES = 2
_NAMES = frozenset({"HOME", "LANG", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV"})
_BEGINNINGS = ("ARROW_", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "OMP_", "OPENBLAS_")
"""Of the variables that a template has: what counts while modules are imported, and is no secret."""
_STATM = Path("/proc/self/statm")
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
"""Each thread of a library takes memory in advance, by the number of cores."""


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """``memory_bytes`` counts beside what the engine's own modules take; ``file_bytes`` holds for each file it writes.

    ``time_s`` limits the time on the clock, and the processor time.
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
    """It took too long and was killed."""


def run_limited(
    module: str, request: bytes, limits: ProcessLimits, environment: Mapping[str, str] | None = None
) -> bytes:
    """Runs ``python -m module`` and gives its answer. Blocks. Raises :class:`LimitedProcessError`.

    ``environment`` replaces the caller's, so that secrets of the driver need not reach foreign code.
    """
    # Files and no pipes: neither side can make the other one wait, and an answer is measured before it is read.
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
    for _ in range(2):  # one that nobody has asked for long may be ending
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
    """Of this process; none while no driver runs in it."""

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
        """One for processes of an environment; None where there are none."""
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
    """Python's own variables have no underscore; Spark's secrets begin in the same way."""
    return name in _NAMES or name.startswith(_BEGINNINGS) or (name.startswith("PYTHON") and "_" not in name)


_TEMPLATES = _Templates()


def keep_templates() -> None:
    """A driver begins: its processes are forked, until :func:`drop_templates` has been called as often."""
    _TEMPLATES.begin()


def drop_templates() -> None:
    """A driver ends, and with the last one the templates, with all processes that still run. Blocks."""
    _TEMPLATES.end()


class _Started:
    """A process that is started anew, as :class:`Forked` is one of a template."""

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
            # A group of its own, so that what it starts is killed with it.
            start_new_session=True,
        )
        assert self._process.stderr is not None
        self.stderr = self._process.stderr.fileno()
        self.ended = os.pidfd_open(self._process.pid) if hasattr(os, "pidfd_open") else None

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> int:
        """Ends the process and what it has started; its exit code."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self.ended is not None:
            os.close(self.ended)
        assert self._process.stderr is not None
        self._process.stderr.close()
        return code


def _drain(process: Forked | _Started, deadline: float) -> bytes | None:
    """Waits for the end, and gives the end of standard error; None when the deadline came first.

    A process that was left behind may hold the pipe open: the end of the process itself is what counts.
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
    """What is in the pipe now."""
    try:
        return os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _answer(descriptor: int, code: int, limits: ProcessLimits, last_words: str) -> bytes:
    size = os.fstat(descriptor).st_size
    if size > limits.answer_bytes:
        raise LimitedProcessError(f"its answer of {size} bytes is larger than the {limits.answer_bytes} allowed")
    data = os.pread(descriptor, size, 0) if code == 0 else b""
    if data:
        return data
    how = f"with code {code}" if code >= 0 else f"by signal {-code}"
    raise LimitedProcessError(f"it ended {how} and gave no result; allowed are {limits}", last_words)


def serve(answer: Callable[[bytes], bytes]) -> None:
    """The other side: reads the request, and writes what ``answer`` makes of it, within the limits given.

    Everything that the process needs of the engine is to be imported before: it does not count.
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
        # Should memory run out all the same, the kernel is to take this process and not the driver.
        Path("/proc/self/oom_score_adj").write_text("1000")
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))
