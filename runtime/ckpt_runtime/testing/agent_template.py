"""Slot agents from a template: one process that has imported everything, from which a session's agents are forked.

A session in Spark starts its agents once and lives for days; one in tests starts and ends them all the time, and each
of them would have its own template import everything for a second and a half. Here the first agent of a test run does.
What comes of it is as in Spark: each agent is a process with a template of its own, and workers below that.

Both sides. The template ends with the process that asks it, once its agents have ended. Linux only, like the template
of workers.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
from msgspec import Struct

from ckpt_runtime.spark import processes
from ckpt_runtime.spark.slot_agent import AgentParameters, SlotAgent, begin_log
from ckpt_runtime.spark.worker_processes import worker_environment
from ckpt_runtime.spark.worker_template import Forker, WorkerTemplate
from ckpt_runtime.testing.forked_children import ForkedChildren
from ckpt_runtime.user_environment import user_environment

AGENT = "ckpt-agent"
_TEMPLATE = "ckpt-agents"
_MAX_MESSAGE = 64
_TOLD_TO_END_S = 0.05


class AgentStart(Struct, frozen=True):
    """What a new agent needs to know. ``environment`` is for it alone: workers inherit the template's."""

    parameters: AgentParameters
    index: int
    environment: dict[str, str]


# --- the side of the process that asks


class ForkedAgent:
    """One agent, as :class:`subprocess.Popen` shows a process. The template says first its pid, in the end its code."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        self._lock = threading.Lock()
        self._descriptor = -1
        self._killed = False
        self.pid: int | None = None
        self.returncode: int | None = None

    def kill(self) -> None:
        """Also one that is still to be forked."""
        with self._lock:
            self._killed = True
            self._kill()

    def poll(self) -> int | None:
        self._listen(0.0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired("slot agent", timeout)
            self._listen(min(left_s, _TOLD_TO_END_S))
        return self.returncode

    def _listen(self, timeout_s: float) -> None:
        with self._lock:
            while self.returncode is None and select.select([self._told], [], [], timeout_s)[0]:
                try:
                    said, descriptors, _, _ = socket.recv_fds(self._told, _MAX_MESSAGE, 1)
                except OSError:
                    said, descriptors = b"", []
                self._take(said.decode(), descriptors)
                timeout_s = 0.0

    def _take(self, said: str, descriptors: list[int]) -> None:
        if descriptors:
            self.pid, (self._descriptor,) = int(said), descriptors
            if self._killed:
                self._kill()
            return
        self._kill()  # nobody would tell its end when the template is gone
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._told.close()
        self.returncode = int(said) if said else -signal.SIGKILL

    def _kill(self) -> None:
        if self._descriptor >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)


@dataclass(frozen=True)
class _Inherited:
    """What the processes of a template have from it: one that asks with something else needs another template."""

    owner: int
    directory: str
    path: tuple[str, ...]
    environment: dict[str, str]

    @classmethod
    def of_this_process(cls) -> _Inherited:
        environment = user_environment()
        environment.pop("PYTEST_CURRENT_TEST", None)  # no two tests have the same
        return cls(os.getpid(), os.getcwd(), tuple(path for path in sys.path if path), environment)

    def variables(self) -> dict[str, str]:
        """The environment of the template."""
        return {**self.environment, "PYTHONPATH": os.pathsep.join(self.path)}


class AgentTemplate:
    """The template of this process."""

    def __init__(self, inherited: _Inherited, connection: socket.socket, wait: Callable[[], object]) -> None:
        """``wait`` returns when it has ended."""
        self.inherited = inherited
        self._connection = connection
        threading.Thread(target=wait, name="agent-template", daemon=True).start()
        atexit.register(self.close)

    @classmethod
    def spawned(cls, inherited: _Inherited) -> AgentTemplate:
        """A new process, which has to import everything first. Raises OSError."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "ckpt_runtime.testing.local_slot_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=inherited.variables(),
                pass_fds=[theirs.fileno()],
            )
        return cls(inherited, connection, process.wait)

    @classmethod
    def forked(cls, inherited: _Inherited) -> AgentTemplate:
        """A fork of this process. Raises OSError."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

        def become() -> None:
            connection.close()
            os.environ.clear()
            os.environ.update(inherited.variables())
            serve_agents(theirs.detach())

        with theirs:
            pid = _in_fork(become)
        return cls(inherited, connection, _ChildProcess(pid).wait)

    def fork(self, start: AgentStart) -> ForkedAgent:
        """Returns at once. Raises OSError when the template is gone."""
        told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        document = os.memfd_create("agent")
        try:
            os.write(document, msgspec.json.encode(start))
            with theirs:
                socket.send_fds(self._connection, [b"fork"], [document, 1, 2, theirs.fileno()])
        except BaseException:
            told.close()
            raise
        finally:
            os.close(document)
        return ForkedAgent(told)

    def close(self) -> None:
        """It forks no more."""
        atexit.unregister(self.close)
        self._connection.close()


_lock = threading.Lock()
_template: AgentTemplate | None = None


def forked_agent(parameters: AgentParameters, index: int) -> ForkedAgent:
    """From the template of this process, or a new one. Raises OSError when there can be none."""
    global _template
    start = AgentStart(parameters, index, dict(os.environ))
    inherited = _Inherited.of_this_process()
    with _lock:
        if _template is not None:
            if _template.inherited == inherited:
                with suppress(OSError):  # somebody has killed it
                    return _template.fork(start)
            _template.close()
        _template = AgentTemplate.spawned(inherited)
        return _template.fork(start)


def fork_template() -> None:
    """For a process that has imported what workers need, and has no threads yet: its template is a fork of it."""
    global _template
    with _lock:
        _template = AgentTemplate.forked(_Inherited.of_this_process())


# --- the template's side


class _Server:
    """``connection`` is the one to the process that asks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._children = ForkedChildren(self._poll)

    def run(self) -> None:
        asked = True
        while asked or self._children:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._children.reap(descriptor)
                elif not self._take():
                    asked = False
                    self._poll.unregister(self._connection)

    def _take(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._connection, _MAX_MESSAGE, 4)
        if not data:
            return False
        document, output, errors, told = descriptors
        reply = socket.socket(fileno=told)
        with os.fdopen(document, "rb") as file:
            file.seek(0)
            start = msgspec.json.decode(file.read(), type=AgentStart)
        try:
            pid = _in_fork(lambda: self._become(start, output, errors, reply))
            self._children.add(pid, reply)
        except OSError:  # a machine that is full
            traceback.print_exc()
            reply.close()
        finally:
            os.close(output)
            os.close(errors)
        return True

    def _become(self, start: AgentStart, output: int, errors: int, told: socket.socket) -> None:
        """An agent, whose own template is forked before the agent has threads."""
        self._connection.close()
        told.close()
        self._children.close()
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.close(output)
        os.close(errors)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start.parameters.log.for_children()
        template = _in_fork(lambda: _become_template(ours, theirs))
        theirs.close()
        processes.set_name(AGENT)
        os.environ.clear()
        os.environ.update(start.environment)
        begin_log(start.parameters, start.index)
        starter = Forker(WorkerTemplate(ours, _ChildProcess(template)))
        SlotAgent(start.parameters, start.index, starter).run()


class _ChildProcess:
    """A forked child, killed and waited for from several threads."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._lock = threading.Lock()
        self._code: int | None = None

    def kill(self) -> None:
        with self._lock:
            if self._code is None:
                os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int:
        with suppress(ChildProcessError):  # another thread has
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            if self._code is None:
                self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            return self._code


def _become_template(agents: socket.socket, connection: socket.socket) -> None:
    """As one that the agent has started with the environment of workers; what it writes goes to the agent's log."""
    from ckpt_runtime.spark.template_main import serve
    from ckpt_runtime.spark.worker_main import make_ready

    agents.close()
    os.dup2(2, 1)
    environment = worker_environment()
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    make_ready()
    serve(connection)


def _in_fork(work: Callable[[], None]) -> int:
    """The pid of a child that does this and ends. Raises OSError."""
    pid = os.fork()
    if pid == 0:
        _run(work)
    return pid


def _run(work: Callable[[], None]) -> NoReturn:
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


def serve_agents(descriptor: int) -> None:
    """The template's life. An interrupt from the terminal is for the agents and for whoever has asked for them."""
    from ckpt_runtime.spark.worker_main import prepare

    processes.set_name(_TEMPLATE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepare()
    _Server(socket.socket(fileno=descriptor)).run()
