"""How a slot agent starts and holds worker processes, and the starter that uses a cold interpreter for each."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Protocol

import msgspec
from msgspec import Struct

from ckpt_runtime.client.process_id import started
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.user_environment import user_environment
from ckpt_runtime.spark.installation import import_path


def own_identity() -> ProcessIdentity:
    """The identity by which another process can open this one. ``started`` is 0 if that is not possible."""
    here = handles.machine()
    return ProcessIdentity(here, os.getpid(), started(os.getpid()) if here else 0)


class WorkerStart(Struct, frozen=True):
    """The parameters that an agent passes to a new worker. ``directory`` is for temporary files."""

    driver: tuple[str, int]
    secret: str
    slot: str
    worker: str
    directory: str
    data_ports: tuple[int, int] | None = None


class WorkerProcess(Protocol):
    """A process that the agent started or adopted."""

    @property
    def pid(self) -> int:
        """The pid of the worker, or of the template as long as the worker has not been forked."""

    def kill(self) -> None: ...

    def wait(self) -> int | None:
        """Wait for the exit code; None if it is unknown."""

    def release(self) -> None:
        """Stop watching the worker, which may keep running without this agent."""


class WorkerStarter(Protocol):
    """One way to start workers."""

    def start(self, start: WorkerStart) -> WorkerProcess:
        """Start a worker and return at once. Raises OSError if processes, memory or descriptors are exhausted."""

    def close(self) -> None:
        """Stop starting workers. Running workers are not affected."""


class SpawnedProcess:
    """A child process. Its standard input stays open as long as the agent holds it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        self._pipe = process.stdin

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        code = self._process.wait()
        self._pipe.close()
        return code

    def release(self) -> None:
        self._pipe.close()


class Spawner:
    """Works on every system; a worker takes seconds to import everything and to load its kernels."""

    def start(self, start: WorkerStart) -> SpawnedProcess:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckpt_runtime.spark.worker_main"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=log_descriptor(),
            env=worker_environment() | {"TMPDIR": start.directory},
        )
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(start) + b"\n")
        return SpawnedProcess(process)

    def close(self) -> None:
        """There is nothing to close."""


def log_descriptor() -> int | None:
    """The descriptor for a worker's output: the agent's log, never the agent's standard output, which Spark reads."""
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else None


def worker_environment() -> dict[str, str]:
    """This process's environment without the secrets of REST, Spark and Airflow; the time zone of user code is UTC."""
    return user_environment() | {"PYTHONPATH": os.pathsep.join(import_path()), "TZ": "UTC"}
