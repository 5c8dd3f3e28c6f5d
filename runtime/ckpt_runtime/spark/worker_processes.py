"""How a slot agent starts a worker process and holds on to it. Here: each one by itself, from a cold interpreter."""

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
from ckpt_runtime.spark import processes
from ckpt_runtime.spark.import_path import import_path
from ckpt_runtime.user_environment import user_environment


def own_identity() -> ProcessIdentity:
    """What others need to hold this process. ``started`` is 0 where nobody can."""
    here = processes.machine()
    return ProcessIdentity(here, os.getpid(), started(os.getpid()) if here else 0)


class WorkerStart(Struct, frozen=True):
    """What an agent tells a worker that it starts. ``directory`` is for temporary files."""

    driver: tuple[str, int]
    secret: str
    slot: str
    worker: str
    directory: str


class WorkerProcess(Protocol):
    """A process that the agent started or adopted."""

    def kill(self) -> None: ...

    def wait(self) -> int | None:
        """Its exit code, None when that is unknown."""

    def release(self) -> None:
        """It may live on without this agent."""


class WorkerStarter(Protocol):
    """One way to start workers."""

    def start(self, start: WorkerStart) -> WorkerProcess:
        """Returns at once. Raises OSError when the machine has no processes, memory or descriptors left."""

    def close(self) -> None:
        """Nothing more is started. The workers are not affected."""


class SpawnedProcess:
    """A child. Its standard input stays open as long as the agent holds it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        self._pipe = process.stdin

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
    """Where a worker's output goes: to the log of its agent, never to the agent's output, which Spark reads."""
    return sys.__stderr__.fileno() if sys.__stderr__ is not None else None


def worker_environment() -> dict[str, str]:
    """This process's, without the secrets of REST, Spark and Airflow; times of user code are UTC's."""
    return user_environment() | {"PYTHONPATH": os.pathsep.join(import_path()), "TZ": "UTC"}
