"""Diagnostics of a worker on request: thread dumps, its log, and the code in which its subtasks spend time.

A task's thread never answers, because it may be the subject of the question.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckpt_runtime.failure_report import log_failure
from ckpt_runtime.network.control_messages import (
    DumpThreads,
    ReadLog,
    RecentLog,
    SampledStack,
    SampledStacks,
    SampleStacks,
    ThreadDump,
    WorkerAnswer,
    WorkerQuestion,
)
from ckpt_runtime.operators.helper_thread import HelperThread
from ckpt_runtime.processes.thread_dump import dump_threads, frames_of
from ckpt_runtime.structured_log import recent_lines
from ckpt_runtime.task.deployed_job import DeployedJob
from ckpt_runtime.task.metrics import Activity
from ckpt_runtime.task.subtask import Subtask

logger = logging.getLogger(__name__)

_SAMPLERS = 2
_MAX_STACKS = 2_000


class Diagnosis:
    """Answers the driver's questions. ``send`` may be called from any thread; ``present`` returns the deployment."""

    def __init__(self, send: Callable[[WorkerAnswer], None], present: Callable[[], DeployedJob | None]) -> None:
        self._send = send
        self._present = present
        self._samplers = ThreadPoolExecutor(_SAMPLERS, thread_name_prefix="sampler")
        self._closing = threading.Event()

    def close(self) -> None:
        """Ends all sampling."""
        self._closing.set()
        self._samplers.shutdown(wait=False, cancel_futures=True)

    def answer(self, question: WorkerQuestion) -> None:
        """Answers a question without blocking; if no answer can be made, the driver stops waiting for it."""
        match question:
            case DumpThreads():
                self._send(ThreadDump(question.question, dump_threads()))
            case ReadLog():
                self._send(RecentLog(question.question, recent_lines()))
            case SampleStacks():
                self._samplers.submit(self._sample, question)

    def _sample(self, order: SampleStacks) -> None:
        try:
            sampler = StackSampler(_threads_of(self._present(), order))
            for _ in range(order.samples):
                if sampler.is_empty or self._closing.wait(order.interval_ms / 1000):
                    break
                sampler.look()
            self._send(SampledStacks(order.question, sampler.stacks()))
        except Exception as error:
            log_failure(logger, logging.WARNING, f"vertex {order.vertex_id} could not be sampled", error)


def _threads_of(job: DeployedJob | None, order: SampleStacks) -> list[tuple[Subtask, threading.Thread]]:
    if job is None or job.job_id != order.job_id:
        return []
    return [
        (subtask, thread.thread)
        for thread in job.threads
        for subtask in thread.subtasks
        if subtask.vertex_id == order.vertex_id
    ]


class StackSampler:
    """Repeatedly samples the stacks of the threads that work for some subtasks.

    A stack counts as on a processor when its thread has run for at least half of the time since the last sample.
    A thread that several subtasks share counts for the one that it currently runs.
    """

    def __init__(self, threads: Sequence[tuple[Subtask, threading.Thread]]) -> None:
        self._threads = threads
        self._seen: dict[tuple[int, tuple[str, ...]], list[int]] = {}
        self._looked_ns = time.perf_counter_ns()
        self._ran_ns: dict[int, int] = {
            thread.native_id: _ran_ns(thread.native_id) or 0 for _, thread in threads if thread.native_id is not None
        }

    @property
    def is_empty(self) -> bool:
        return not self._threads

    def look(self) -> None:
        """Takes one sample."""
        now_ns = time.perf_counter_ns()
        passed_ns, self._looked_ns = now_ns - self._looked_ns, now_ns
        frames = sys._current_frames()  # noqa: SLF001 -- there is no public way
        helpers = [thread for thread in threading.enumerate() if isinstance(thread, HelperThread)]
        ran: dict[int, bool] = {}
        for subtask, own in self._threads:
            activity = subtask.metrics.timer.activity
            for thread in (own, *(helper for helper in helpers if helper.helps is own)):
                # The subtask's thread may currently work for another subtask, or for none.
                if thread.ident is None or thread.ident not in frames or (thread is own and activity is None):
                    continue
                if thread.ident not in ran:
                    ran[thread.ident] = self._has_run(thread, passed_ns, activity)
                self._count(subtask.index, tuple(frames_of(frames[thread.ident])), ran[thread.ident])

    def stacks(self) -> tuple[SampledStack, ...]:
        """The stacks seen so far."""
        return tuple(SampledStack(index, frames, on, off) for (index, frames), (on, off) in self._seen.items())

    def _has_run(self, thread: threading.Thread, passed_ns: int, activity: Activity | None) -> bool:
        ran_ns = None if thread.native_id is None else _ran_ns(thread.native_id)
        if thread.native_id is None or ran_ns is None:
            return activity is Activity.BUSY
        before, self._ran_ns[thread.native_id] = self._ran_ns.get(thread.native_id, ran_ns), ran_ns
        return 2 * (ran_ns - before) >= passed_ns

    def _count(self, index: int, frames: tuple[str, ...], has_run: bool) -> None:
        key = (index, frames)
        if key not in self._seen and len(self._seen) >= _MAX_STACKS:
            key = (index, ("(further stacks)",))
        self._seen.setdefault(key, [0, 0])[0 if has_run else 1] += 1


def _ran_ns(thread: int) -> int | None:
    """CPU time of a thread of this process in ns, by the kernel; None where it is unknown (other than Linux)."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return None
