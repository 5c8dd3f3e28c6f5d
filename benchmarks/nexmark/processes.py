"""The processor time of processes that start and end: sampled in a thread, because it cannot be read afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import psutil  # type: ignore[import-untyped, unused-ignore]

SAMPLE_S = 0.1


@dataclass(frozen=True)
class Timed:
    """One run: seconds by the clock, and processor seconds of all processes."""

    seconds: float
    cpu_s: float


def own_processes(without: psutil.Process | None = None) -> list[psutil.Process]:
    """This process and all below it, apart from one."""
    root = psutil.Process(os.getpid())
    return [process for process in (root, *root.children(recursive=True)) if process != without]


class CpuTime:
    """The processor seconds that some processes use while this is entered."""

    def __init__(self, processes: Callable[[], list[psutil.Process]] = own_processes) -> None:
        self._processes = processes
        self._first: dict[psutil.Process, float] = {}
        self._last: dict[psutil.Process, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-time", daemon=True)

    @property
    def seconds(self) -> float:
        """The time that they have used so far."""
        return sum(self._last.values()) - sum(self._first.values())

    def __enter__(self) -> Self:
        self._sample()
        self._first = dict(self._last)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join()
        self._sample()

    def _run(self) -> None:
        while not self._closing.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._last[process] = times.user + times.system
