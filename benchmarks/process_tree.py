"""The processes of a session: their memory, sampled in a thread, which are workers, and their agents. Needs psutil."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped, unused-ignore]

from ckpt_runtime.processes.handles import TEMPLATE, WORKER

SAMPLE_S = 0.5


def processes_of(root_pid: int) -> list[psutil.Process]:
    """The process, everything below it, and what else is of the session that it leads; empty when it has ended.

    An adopted worker is such another one: it outlived the agent that started it.
    """
    try:
        root = psutil.Process(root_pid)
        tree = {root, *root.children(recursive=True)}
    except psutil.NoSuchProcess:
        return []
    return list(tree | {process for process in psutil.process_iter() if _session_of(process) == root_pid})


def _session_of(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None


def resident_mb(root_pid: int) -> float:
    """Resident memory of them all; pages that processes share are counted once for each of them."""
    total = 0
    for process in processes_of(root_pid):
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total / 2**20


def workers_of(root_pid: int) -> list[psutil.Process]:
    """The worker processes of a session, active ones and spares."""
    found = []
    for process in processes_of(root_pid):
        try:
            if process.name() == WORKER:
                found.append(process)
        except psutil.Error:
            continue
    return found


def driver_cpu_s(root_pid: int) -> float:
    """Processor seconds that the driver has used so far, its JVM included: all of the session but what tasks run in."""
    tasks = {child.pid for worker in workers_of(root_pid) for child in (worker, *worker.parents())}
    total = 0.0
    for process in processes_of(root_pid):
        try:
            if process.pid == root_pid or process.pid not in tasks:
                times = process.cpu_times()
                total += times.user + times.system
        except psutil.Error:
            continue
    return total


def agent_of(worker: psutil.Process) -> psutil.Process | None:
    """The slot agent that started or adopted a worker; None when there is none."""
    return next((process for process in processes_of(os.getsid(worker.pid)) if _holds(process, worker)), None)


def _holds(process: psutil.Process, other: psutil.Process) -> bool:
    """Whether one has a process descriptor of the other, as its agent has, and the template that it was forked from."""
    try:
        if process.name() in (WORKER, TEMPLATE):
            return False
        return any(f"Pid:\t{other.pid}\n" in file.read_text() for file in Path(f"/proc/{process.pid}/fdinfo").iterdir())
    except (psutil.Error, OSError):
        return False


def executor_of(worker: psutil.Process) -> psutil.Process | None:
    """The JVM of Spark's executor that a worker is below, or its agent; None in local mode."""
    agent = agent_of(worker)
    above = [*worker.parents(), *([agent, *agent.parents()] if agent else [])]
    return next((process for process in above if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline())), None)


def listening_port(process: psutil.Process) -> int | None:
    """The port of a worker's data exchange; None while it starts, or when it has ended."""
    try:
        ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    return ports[0] if ports else None


class PeakMemory:
    """Samples the memory of a process and all that belongs to it until it is closed."""

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="peak-memory", daemon=True)
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, resident_mb(self._root_pid))
            if self._closing.wait(SAMPLE_S):
                return
