"""Template processes that have imported everything, run no Python threads and fork on request; both sides of it.

Each request carries a document, descriptors and a connection of its own. On that connection the new process reports
that it has begun, with a descriptor of itself, and the template later reports its exit code.

Linux only: on other systems libraries do not survive a fork, and there are no process descriptors.
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


# --- the requesting side


class ForkedProcess:
    """A forked process with the interface of :class:`subprocess.Popen`; several threads may kill it and wait for it.

    ``report_timeout_s`` is how long the template may take to report the exit code of an ended process; None: no limit.
    """

    def __init__(self, notices: socket.socket, report_timeout_s: float | None = None) -> None:
        self._notices = notices
        self._report_timeout_s = report_timeout_s
        self._lock = threading.Lock()
        self._is_deaf = False  # no further reports will arrive
        self._killed = False
        self.descriptor = -1
        """Becomes readable when the process has ended; below 0 until the process has begun."""
        self.pid = 0
        self.returncode: int | None = None
        """The exit code: negative for a signal, and that of SIGKILL if the template did not report one."""
        self.knows_code = False
        # The descriptors are closed when the object is garbage-collected: when one thread learns that the process has
        # ended, others may still wait on them.
        weakref.finalize(self, notices.close)

    def kill(self) -> None:
        """Kill the process, also if it has not been forked yet."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._killed = self._killed or number == signal.SIGKILL
            if self.descriptor >= 0:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.descriptor, number)

    def has_begun(self, timeout: float | None = None) -> bool:
        """Wait until the process has begun; False if it never will, or did not within the timeout."""
        while self.descriptor < 0 and self.returncode is None and self._take_news(timeout):
            pass
        return self.descriptor >= 0

    def poll(self) -> int | None:
        while self.returncode is None and self._take_news(0.0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._take_news(left_s):
                raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        return self.returncode

    def _take_news(self, timeout_s: float | None) -> bool:
        """Whether any report arrived within this time."""
        notices = self._notices.fileno()
        watched = [] if self._is_deaf else [notices]
        if self._is_deaf or self._report_timeout_s is not None:
            watched.append(self.descriptor)
        ready = _readable(watched, timeout_s)
        if ready == {self.descriptor} and not self._is_deaf:
            self._is_deaf = not _readable([notices], self._report_timeout_s)
        with self._lock:
            if notices in ready:
                self._take_word()
            if self._is_deaf and self.returncode is None and (self.descriptor < 0 or self.descriptor in ready):
                self.returncode = -signal.SIGKILL
        return bool(ready)

    def _take_word(self) -> None:
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        try:
            said, descriptors, _, _ = socket.recv_fds(self._notices, _MAX_MESSAGE, 1, flags)
        except BlockingIOError:  # another thread has received it
            return
        except OSError:
            said, descriptors = b"", []
        if not said:
            self._is_deaf = True
            return
        word, number = said.split()
        if word == _ENDED:
            self.knows_code, self.returncode = True, int(number)
        elif descriptors:  # otherwise this process has no descriptors left
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
    """Yields both ends of a connection; the second one is for another process."""
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
    """A fork of this process. Not thread-safe."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code; the timeout is ignored."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Template:
    """One template process. Closing ``connection`` makes it end."""

    def __init__(self, connection: socket.socket, process: _TemplateProcess) -> None:
        self.connection = connection
        self.process = process

    @classmethod
    def started(
        cls, module: str, environment: Mapping[str, str], stdout: int | None = None, *, is_session: bool = False
    ) -> Self:
        """Start a new process of this module, which has to import everything first. Raises OSError."""
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
        """Fork this process, which must have no threads. Raises OSError."""
        with _connection() as (ours, theirs):
            pid = os.fork()
            if pid == 0:
                ours.close()
                end_as(lambda: serve(theirs))
        return cls(ours, _Child(pid))

    def fork(
        self, document: bytes, descriptors: Sequence[int] = (), report_timeout_s: float | None = None
    ) -> ForkedProcess:
        """Request a fork and return at once.

        Raises ConnectionError when the template has ended, OSError when the system is out of resources.
        """
        with _connection() as (notices, theirs), nameless_file(document) as file:
            if self.connection.fileno() < 0:
                raise BrokenPipeError("the template process was asked to end")
            socket.send_fds(self.connection, [b"fork"], [file.fileno(), theirs.fileno(), *descriptors])
        return ForkedProcess(notices, report_timeout_s)

    def close(self) -> None:
        """Close the connection: the template accepts no further requests."""
        self.connection.close()


# --- the template's side


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """The request that a new process receives. The process owns the descriptors and must report that it has begun."""

    document: bytes
    descriptors: list[int]
    notices: socket.socket

    def begun(self, pid: int | None = None) -> None:
        """Report this process, or its child that does the work, to the requester; exit if the requester has ended."""
        pid = os.getpid() if pid is None else pid
        try:
            descriptor = os.pidfd_open(pid)
            with self.notices:
                socket.send_fds(self.notices, [b"%s %d" % (_BEGUN, pid)], [descriptor])
            os.close(descriptor)
        except OSError:  # the requester has ended: no process could end this one or notice its end
            os._exit(1)


class ForkServer:
    """Serves the fork requests of ``connection``. The template calls ``prepare`` before each fork."""

    def __init__(
        self,
        connection: socket.socket,
        prepare: Callable[[bytes], None] | None = None,
        *,
        binds: bool = True,
        idle_s: float | None = None,
    ) -> None:
        """With ``binds``, the forked processes are killed when the template ends."""
        # Python counts the threads of OpenBLAS and of Arrow's allocator, which handle a fork themselves.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        self._connection = connection
        self._prepare = prepare
        self._binds = binds
        self._idle_ms = None if idle_s is None else idle_s * 1000
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._children: dict[int, tuple[int, socket.socket]] = {}
        """Pids and connections of the forked processes, by process descriptor."""

    def run(self) -> ForkRequest | None:
        """Return the request in each new process, and None in the template when no further requests can arrive."""
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
        """Wait for all forked processes to end, once no further requests can arrive."""
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
        document, notices, *descriptors = given
        return ForkRequest(content_of(document), descriptors, socket.socket(fileno=notices))

    def _fork(self, request: ForkRequest) -> bool:
        """Fork; returns whether this is the new process."""
        template = os.getpid()
        try:
            if self._prepare is not None:
                self._prepare(request.document)
            pid = os.fork()
            if pid == 0:
                self._become(template)
                return True
            self._follow(pid, request.notices)
        except Exception:  # an import failed, or the system is out of resources
            if os.getpid() != template:
                raise
            traceback.print_exc()
            request.notices.close()
        for descriptor in request.descriptors:
            os.close(descriptor)
        return False

    def _become(self, template: int) -> None:
        """Close everything in the new process that belongs to the template or to other processes."""
        if self._binds:
            end_with(template)
        self._connection.close()
        for descriptor, (_, notices) in self._children.items():
            os.close(descriptor)
            notices.close()

    def _follow(self, pid: int, notices: socket.socket) -> None:
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # its end could not be detected, so it must not keep running
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[descriptor] = pid, notices
        self._poll.register(descriptor, select.POLLIN)

    def _reap(self, descriptor: int) -> None:
        """Wait for a process that has ended or is about to, and kill its group.

        The pid cannot be reused before the process has been waited for.
        """
        pid, notices = self._children.pop(descriptor)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        with notices, suppress(OSError):  # the requester has ended
            notices.send(b"%s %d" % (_ENDED, os.waitstatus_to_exitcode(status)))


# --- for both


def nameless_file(content: bytes) -> BinaryIO:
    """An open file in memory, visible only to processes that receive its descriptor. Raises OSError."""
    file = os.fdopen(os.memfd_create("content"), "w+b")
    file.write(content)
    file.flush()
    return file


def content_of(descriptor: int) -> bytes:
    """Read the whole file and close it."""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        return file.read()


def end_as(work: Callable[[], object]) -> NoReturn:
    """Run the work and end the process, so that a fork never continues its parent's code."""
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
    """Have this process killed when its parent ends. Raises OSError."""
    control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before the signal was requested.
    if os.getppid() != parent:
        os._exit(1)


def control(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError."""
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")
