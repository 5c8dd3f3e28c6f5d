"""A process that has imported what limited processes need, and forks one whenever it is asked to. Both sides of it.

Most of the time of a process that plans would go into imports. The template runs nothing foreign itself: with each
request come descriptors of the process to be, and a connection on which the template says that it lives, and in the end
its exit code. When the far end of that is closed, the process is killed with all that it has started; and all are when
the driver is gone. A template that nobody has asked for a while ends, and so does one whose driver has.

Linux only: elsewhere libraries do not survive a fork, and there are no process descriptors.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

_MAX_MESSAGE = 1 << 14
_FORKED, _NOT_FORKED = b"forked", b"not forked"
_START_TIMEOUT_S = 120.0
_IDLE_S = 300.0
_PR_SET_PDEATHSIG = 1

NEEDED = "NEEDED"
"""A module that serves may have a tuple of this name: modules which are imported before its first process is forked."""
OFTEN_NEEDED = "OFTEN_NEEDED"
"""As :data:`NEEDED`, before the second one: for a single one they may be in vain."""


class TemplateGoneError(OSError):
    """The template has ended. Nothing was begun."""


class NotForkedError(OSError):
    """The template lives and could not. Nothing was begun."""


class Forked:
    """A process of a template, as its caller sees it. ``ended`` is readable once it has ended."""

    def __init__(self, reply: socket.socket, stderr: int) -> None:
        self._reply = reply
        self.stderr = stderr

    @property
    def ended(self) -> int:
        return self._reply.fileno()

    def end(self) -> int:
        """Ends the process and what it has started; its exit code, negative for a signal."""
        with self._reply:
            with suppress(OSError):
                self._reply.shutdown(socket.SHUT_WR)
            try:
                told = self._reply.recv(_MAX_MESSAGE)
            except OSError:
                told = b""
        os.close(self.stderr)
        return int(told) if told else -signal.SIGKILL


class ProcessTemplate:
    """The driver's side. ``environment`` is the template's own, which each process can look at: it holds no secret."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def fork(
        self, module: str, arguments: Sequence[str], question: int, answer: int, environment: Mapping[str, str]
    ) -> Forked:
        """A process that runs ``main`` of a module in this environment. Raises TemplateGoneError or NotForkedError."""
        with tempfile.TemporaryFile() as variables:
            variables.write(json.dumps(dict(environment)).encode())
            variables.flush()
            return self._fork([module, *arguments], [question, answer, variables.fileno()])

    def _fork(self, request: list[str], descriptors: list[int]) -> Forked:
        reading, writing = os.pipe()
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                given = [*descriptors, writing, theirs.fileno()]
                socket.send_fds(self._connection, [json.dumps(request).encode()], given)
            reply.settimeout(_START_TIMEOUT_S)
            told = reply.recv(_MAX_MESSAGE)
            reply.settimeout(None)
        except OSError as error:
            os.close(reading)
            reply.close()
            raise TemplateGoneError(str(error)) from error
        finally:
            os.close(writing)
        if told == _FORKED:
            return Forked(reply, reading)
        os.close(reading)
        reply.close()
        raise NotForkedError if told == _NOT_FORKED else TemplateGoneError

    def close(self) -> None:
        """Ends it with all its processes."""
        self._connection.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # it imports
            self._process.kill()
            self._process.wait()


# --- the template's side


@dataclass(slots=True, eq=False)
class _Child:
    pid: int
    descriptor: int
    reply: socket.socket


class _Server:
    """``connection`` is the one to the driver."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._children: dict[int, _Child] = {}
        self._asked: Counter[str] = Counter()

    def run(self) -> None:
        """Until the driver is gone, or asks no more."""
        goes_on = True
        while goes_on:
            ready = self._poll.poll(None if self._children else _IDLE_S * 1000)
            goes_on = bool(ready)
            for descriptor, _ in ready:
                if descriptor == self._connection.fileno():
                    goes_on = self._take()
                elif descriptor in self._children:
                    self._end(self._children[descriptor])
        for child in {child.pid: child for child in self._children.values()}.values():
            self._end(child)

    def _take(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_MESSAGE, 5)
        if not data:
            return False
        question, answer, variables, errors, told = descriptors
        reply = socket.socket(fileno=told)
        module, *arguments = json.loads(data)
        try:
            self._import(module)
            template = os.getpid()
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    self._become(template, reply, errors)
                    code = _run(module, [str(question), str(answer), *arguments], variables)
                finally:
                    os._exit(code)
            self._watch(pid, reply)
        except Exception:  # of imports, or of a system that is full
            traceback.print_exc()
            with reply, suppress(OSError):
                reply.send(_NOT_FORKED)
        finally:
            for descriptor in (question, answer, variables, errors):
                os.close(descriptor)
        return True

    def _import(self, name: str) -> None:
        """Before the first process of all what that one needs; before the second what many do."""
        module = importlib.import_module(name)
        self._asked[name] += 1
        wanted = [*getattr(module, NEEDED, ()), *(getattr(module, OFTEN_NEEDED, ()) if self._asked[name] > 1 else ())]
        missing = [needed for needed in wanted if needed not in sys.modules]
        for needed in missing:
            importlib.import_module(needed)
        if missing or self._asked[name] == 1:
            gc.freeze()  # so that a process's first collection does not copy the memory of all of it

    def _watch(self, pid: int, reply: socket.socket) -> None:
        try:
            child = _Child(pid, os.pidfd_open(pid), reply)
        except OSError:  # nobody could tell its end: it must not live
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        for descriptor in (child.descriptor, reply.fileno()):
            self._children[descriptor] = child
            self._poll.register(descriptor, select.POLLIN)
        with suppress(OSError):  # who has asked is gone, as the next look will show
            reply.send(_FORKED)

    def _end(self, child: _Child) -> None:
        """It has ended, or is to end. Its number is not given to another one before it is waited for."""
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        for descriptor in (child.descriptor, child.reply.fileno()):
            self._poll.unregister(descriptor)
            del self._children[descriptor]
        os.close(child.descriptor)
        with child.reply, suppress(OSError):
            child.reply.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _become(self, template: int, reply: socket.socket, errors: int) -> None:
        """What foreign code runs in: nothing of the template's or of other processes is open in it."""
        os.setsid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != template:
            os._exit(1)  # it ended before it could be followed
        self._connection.close()
        reply.close()
        for descriptor, child in self._children.items():
            if descriptor == child.descriptor:
                os.close(descriptor)
                child.reply.close()
        os.dup2(errors, 2)
        os.close(errors)
        gc.enable()


def _take_environment(descriptor: int) -> None:
    with os.fdopen(descriptor, "rb") as file:
        file.seek(0)
        environment = json.loads(file.read())
    os.environ.clear()
    os.environ.update(environment)


def _run(name: str, arguments: list[str], variables: int) -> int:
    """The exit code."""
    _take_environment(variables)
    module = sys.modules[name]
    sys.argv = [module.__file__ or name, *arguments]
    if "numpy.random" in sys.modules:  # processes of one template would draw the same numbers
        sys.modules["numpy.random"].seed()
    try:
        module.main()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        with suppress(OSError, ValueError):
            sys.stderr.flush()
    return 0


def main() -> None:
    """Of the template."""
    # Python counts the threads of OpenBLAS and of Arrow's allocator, which see to themselves in a fork.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    gc.disable()
    _Server(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
