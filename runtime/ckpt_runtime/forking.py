"""A process that has imported everything, has no threads of Python's, and forks itself on request. Both sides of it.

With each request come a document and descriptors, and a connection of its own: on that the new process says that it has
begun, with a descriptor of itself, and the template its exit code in the end.

Linux only: elsewhere libraries do not survive a fork, and there are no process descriptors.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, NoReturn, Protocol, Self

_MAX_MESSAGE = 64
_MAX_DESCRIPTORS = 8
_BEGUN, _ENDED = b"begun", b"ended"
_PR_SET_PDEATHSIG = 1

_libc = ctypes.CDLL(None, use_errno=True)


# --- the side of the process that asks


class ForkedProcess:
    """One process, as :class:`subprocess.Popen` shows it; may be killed and waited for from several threads.

    ``patience_s`` is for how long the template may take to tell the exit code of one that has ended; None: for ever.
    """

    def __init__(self, told: socket.socket, patience_s: float | None = None) -> None:
        self._told = told
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._is_deaf = False  # nothing more will be told
        self._killed = False
        self.descriptor = -1
        """Readable once the process has ended; below 0 as long as it has not begun."""
        self.pid = 0
        self.returncode: int | None = None
        """Negative for a signal, and that of SIGKILL where the template has not told it."""
        self.knows_code = False
        # Others may be waiting on the descriptors when this thread learns of the end: they are closed with the object.
        weakref.finalize(self, told.close)

    def kill(self) -> None:
        """Also one that is still to be forked."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._killed = self._killed or number == signal.SIGKILL
            if self.descriptor >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.descriptor, number)

    def has_begun(self, timeout: float | None = None) -> bool:
        """Waits until it has; False where it never will, or has not in this time."""
        while self.descriptor < 0 and self.returncode is None and self._take_news(timeout):
            pass
        return self.descriptor >= 0

    def poll(self) -> int | None:
        while self.returncode is None and self._take_news(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._take_news(left_s):
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        return self.returncode

    def _take_news(self, timeout_s: float | None) -> bool:
        """Whether there were any within this time."""
        told = self._told.fileno()
        watched = [] if self._is_deaf else [told]
        if self._is_deaf or self._patience_s is not None:
            watched.append(self.descriptor)
        ready = _readable(watched, timeout_s)
        if ready == {self.descriptor} and not self._is_deaf:
            self._is_deaf = not _readable([told], self._patience_s)
        with self._lock:
            if told in ready:
                self._take_word()
            if self._is_deaf and self.returncode is None and (self.descriptor < 0 or self.descriptor in ready):
                self.returncode = -signal.SIGKILL
        return bool(ready)

    def _take_word(self) -> None:
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            said, descriptors, _, _ = socket.recv_fds(self._told, _MAX_MESSAGE, 1, flags)
        except BlockingIOError:  # another thread has taken it
            return
        except OSError:
            said, descriptors = b"", []
        if not said:
            self._is_deaf = True
            return
        word, number = said.split()
        if word == _ENDED:
            self.knows_code, self.returncode = True, int(number)
        elif descriptors:  # otherwise this process has none left
            self.pid, (self.descriptor,) = int(number), descriptors
            weakref.finalize(self, os.close, self.descriptor)
            if self._killed:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.descriptor, signal.SIGKILL)


def _readable(descriptors: Sequence[int], timeout_s: float | None) -> set[int]:
    poll = select.poll()
    for descriptor in descriptors:
        if descriptor >= 0:
            poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


@contextmanager
def _connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends; the second one is for another process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            yield ours, theirs
        except BaseException:
            ours.close()
            raise


class _TemplateProcess(Protocol):
    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int: ...


@dataclass(frozen=True)
class _Child:
    """A fork of this process. For a single thread."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """However long it takes."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Template:
    """One template. It is told to end by the end of ``connection``."""

    def __init__(self, connection: socket.socket, process: _TemplateProcess) -> None:
        self.connection = connection
        self.process = process

    @classmethod
    def started(
        cls,
        module: str,
        environment: Mapping[str, str],
        stdout: int | None = None,
        *,
        is_session: bool = False,
    ) -> Self:
        """A new process of this module, which has to import everything first. Raises OSError."""
        with _connection() as (ours, theirs):
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=is_session,
            )
        return cls(ours, process)

    @classmethod
    def forked(cls, serve: Callable[[socket.socket], object]) -> Self:
        """A fork of this process, which has no threads. Raises OSError."""
        with _connection() as (ours, theirs):
            pid = os.fork()
            if pid == 0:
                ours.close()
                end_as(lambda: serve(theirs))
        return cls(ours, _Child(pid))

    def fork(self, document: bytes, descriptors: Sequence[int] = (), patience_s: float | None = None) -> ForkedProcess:
        """Returns at once. Raises ConnectionError when the template is gone, OSError when the system is full."""
        with _connection() as (told, theirs), nameless_file(document) as file:
            if self.connection.fileno() < 0:
                raise BrokenPipeError("the template has been told to end")
            socket.send_fds(self.connection, [b"fork"], [file.fileno(), theirs.fileno(), *descriptors])
        return ForkedProcess(told, patience_s)

    def close(self) -> None:
        """It forks no more."""
        self.connection.close()


# --- the template's side


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """What a new process is given: it owns the descriptors, and has to say that it has begun."""

    document: bytes
    descriptors: list[int]
    told: socket.socket

    def begun(self, pid: int | None = None) -> None:
        """Tells who has asked of this process, or of its child that does the work; ends it when that one is gone."""
        pid = os.getpid() if pid is None else pid
        try:
            descriptor = os.pidfd_open(pid)
            with self.told:
                socket.send_fds(self.told, [b"%s %d" % (_BEGUN, pid)], [descriptor])
            os.close(descriptor)
        except OSError:  # nobody could end it, or see its end
            os._exit(1)


class ForkServer:
    """``connection`` is the one to the process that asks. ``prepare`` is done in the template before each fork."""

    def __init__(
        self,
        connection: socket.socket,
        prepare: Callable[[bytes], None] | None = None,
        *,
        binds: bool = True,
        idle_s: float | None = None,
    ) -> None:
        """Processes that are bound are killed with the template."""
        # Python counts the threads of OpenBLAS and of Arrow's allocator, which see to themselves in a fork.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        self._connection = connection
        self._prepare = prepare
        self._binds = binds
        self._idle_ms = None if idle_s is None else idle_s * 1000
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """By their process descriptors."""

    def run(self) -> ForkRequest | None:
        """Returns in each new process with what that one is given, and here when nobody asks any more."""
        while ready := self._poll.poll(None if self._children else self._idle_ms):
            for descriptor, _ in ready:
                if descriptor in self._children:
                    self._reap(descriptor)
                    continue
                request = self._request()
                if request is None or self._fork(request):
                    return request
        return None

    def wait_for_all(self) -> None:
        """When nobody asks any more."""
        self._poll.unregister(self._connection)
        while self._children:
            for descriptor, _ in self._poll.poll():
                self._reap(descriptor)

    def end_all(self) -> None:
        for descriptor, (pid, _) in list(self._children.items()):
            os.kill(pid, signal.SIGKILL)
            self._reap(descriptor)

    def _request(self) -> ForkRequest | None:
        flags = socket.MSG_CMSG_CLOEXEC
        data, given, _, _ = socket.recv_fds(self._connection, _MAX_MESSAGE, _MAX_DESCRIPTORS, flags)
        if not data:
            return None
        document, told, *descriptors = given
        return ForkRequest(content_of(document), descriptors, socket.socket(fileno=told))

    def _fork(self, request: ForkRequest) -> bool:
        """Whether this is the new process."""
        template = os.getpid()
        try:
            if self._prepare is not None:
                self._prepare(request.document)
            pid = os.fork()
            if pid == 0:
                self._become(template)
                return True
            self._follow(pid, request.told)
        except Exception:  # of imports, or of a system that is full
            if os.getpid() != template:
                raise
            traceback.print_exc()
            request.told.close()
        for descriptor in request.descriptors:
            os.close(descriptor)
        return False

    def _become(self, template: int) -> None:
        """Nothing of the template's or of other processes is open in the new one."""
        if self._binds:
            end_with(template)
        self._connection.close()
        for descriptor, (_, told) in self._children.items():
            os.close(descriptor)
            told.close()

    def _follow(self, pid: int, told: socket.socket) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # nobody could tell its end: it must not live
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[descriptor] = pid, told
        self._poll.register(descriptor, select.POLLIN)

    def _reap(self, descriptor: int) -> None:
        """It has ended, or is about to; with it goes its group. No pid is another's before it is waited for."""
        pid, told = self._children.pop(descriptor)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with told, suppress(OSError):  # who has asked is gone
            told.send(b"%s %d" % (_ENDED, os.waitstatus_to_exitcode(status)))


# --- for both


def nameless_file(content: bytes) -> BinaryIO:
    """An open file in memory that only those see who are given its descriptor. Raises OSError."""
    file = os.fdopen(os.memfd_create("content"), "w+b")
    file.write(content)
    file.flush()
    return file


def content_of(descriptor: int) -> bytes:
    """All of such a file, which this closes."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def end_as(work: Callable[[], object]) -> NoReturn:
    """Does this and ends the process, so that a fork never goes on with what its parent was at."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def end_with(parent: int) -> None:
    """This process is killed when its parent ends. Raises OSError."""
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before the signal was asked for.
    if os.getppid() != parent:
        os._exit(1)


def control(option: int, value: int) -> None:
    """Calls prctl(2). Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
