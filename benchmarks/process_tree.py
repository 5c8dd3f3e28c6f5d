"""The processes of a session: their memory, sampled in a thread, and which of them are workers. Needs psutil."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped, unused-ignore]

WORKER_MODULE = "ckpt_runtime.spark.worker_main"
SAMPLE_S = 0.5


def processes_of(root_pid: int) -> list[psutil.Process]:
    """The process and everything below it; empty when it is gone."""
    try:
        root = psutil.Process(root_pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def resident_mb(root_pid: int) -> float:
    """Resident memory of the tree; pages that processes share are counted once for each of them."""
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
            if WORKER_MODULE in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening_port(process: psutil.Process) -> int | None:
    """The port of a worker's data exchange; None while it starts, or when it is gone."""
    try:
        ports = [c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    except psutil.Error:
        return None
    return ports[0] if ports else None


class PeakMemory:
    """Samples the memory of a process tree until it is closed."""

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
