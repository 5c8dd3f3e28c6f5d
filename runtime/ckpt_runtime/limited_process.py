"""Runs what strangers have sent in a process of its own, with limits on memory, time and output. Both sides of it.

The caller's side is :func:`run_limited`. The other side is a module whose ``main`` calls :func:`serve`. Request and
answer are files without a name that only these two processes have open; the answer is read up to a limit and is to be
taken as foreign, because the code that the process ran could write it too. What the process prints is drained without
being kept, but for the end of its standard error.

The process sets its limits itself, before it looks at anything foreign; what runs in it cannot raise them again (unless
it runs as root). The system's killer for want of memory takes it before the driver. It is a session of its own, which
ends as a whole. Memory is limited on Linux only.

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
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[1])
_STDERR_BYTES = 4_000
_PIPE_BYTES = 1 << 16
_LOOK_S = 0.02
"""How often to look for the end of a process where the system does not tell it."""
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
    with tempfile.TemporaryFile() as question, tempfile.TemporaryFile() as answer:
        question.write(request)
        question.flush()
        process = _start(module, question.fileno(), answer.fileno(), limits, environment)
        try:
            last_words = _drain(process, time.monotonic() + limits.time_s)
        finally:
            _end(process)
        if last_words is None:
            raise ProcessTimeLimitError(f"it took longer than the {limits.time_s:g} s allowed")
        return _answer(answer.fileno(), process.returncode, limits, last_words.decode(errors="replace"))


def _start(
    module: str, question: int, answer: int, limits: ProcessLimits, environment: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    given = dict(os.environ if environment is None else environment)
    paths = [_PACKAGE_ROOT, *filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    variables = {**_ONE_THREAD, **given, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    numbers = (question, answer, limits.memory_bytes, int(limits.time_s) + 1, limits.file_bytes)
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, numbers)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=variables,
        pass_fds=(question, answer),
        start_new_session=True,
    )


def _drain(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Waits for the end, and gives the end of standard error; None when the deadline came first.

    A process that was left behind may hold the pipe open: the end of the process itself is what counts.
    """
    assert process.stderr is not None
    pipe = process.stderr.fileno()
    os.set_blocking(pipe, False)
    tail = b""
    ended = os.pidfd_open(process.pid) if hasattr(os, "pidfd_open") else None
    try:
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
                if ended in ready or (ended is None and process.poll() is not None):
                    return (tail + _read_some(pipe))[-_STDERR_BYTES:]
        return None
    finally:
        if ended is not None:
            os.close(ended)


def _read_some(pipe: int) -> bytes:
    """What is in the pipe now."""
    try:
        return os.read(pipe, _PIPE_BYTES)
    except BlockingIOError:
        return b""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stderr is not None
    process.stderr.close()


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
        Path("/proc/self/oom_score_adj").write_text("1000")
    limits = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
    if _STATM.exists():
        pages = int(_STATM.read_text().split()[0])
        limits[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        allowed = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (allowed, allowed))
