"""A thread that advances one or several subtasks.

A subtask with user code gets its own thread, since such code may block. The other subtasks of a slot share a thread:
they never block, and passing the interpreter lock from source to operator to sink costs more than it gains.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.structured_log import about
from ckpt_runtime.task.metrics import Activity
from ckpt_runtime.task.subtask import Subtask
from ckpt_runtime.task.wakeup import Wakeup

_LIVE = (TaskState.INITIALIZING, TaskState.RUNNING)


class TaskThread:
    """Runs its subtasks from ``open`` until all have ended. ``wakeup`` is shared with their gates and outputs."""

    def __init__(self, name: str, subtasks: Sequence[Subtask], wakeup: Wakeup) -> None:
        self.subtasks = list(subtasks)
        self._wakeup = wakeup
        # User code that never returns must not keep the process from ending.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def wake(self) -> None:
        self._wakeup.wake()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within the time."""
        self.thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        return not self.thread.is_alive()

    def _run(self) -> None:
        """Runs the subtasks; a thread with one subtask, such as one with user code, adds it to its log lines."""
        alone = self.subtasks[0] if len(self.subtasks) == 1 else None
        with about(**({} if alone is None else {"vertex_id": alone.vertex_id, "subtask": alone.index})):
            self._advance()

    def _advance(self) -> None:
        for subtask in self.subtasks:
            try:
                if subtask.state is TaskState.INITIALIZING:
                    subtask.open()
            except BaseException as error:  # user code may call sys.exit()
                subtask.fail(error)
        clock = time.perf_counter_ns
        live = [subtask for subtask in self.subtasks if subtask.state in _LIVE]
        while live:
            progress = False
            now = clock()
            for subtask in live:
                # Entered before the step, so that a step that does not return counts as busy.
                subtask.metrics.timer.enter(Activity.BUSY, now)
                try:
                    progress |= subtask.step()
                except BaseException as error:
                    subtask.fail(error)
                    progress = True
                now = clock()
                subtask.metrics.timer.enter(None, now)
            if progress:
                if any(subtask.state not in _LIVE for subtask in live):
                    live = [subtask for subtask in live if subtask.state in _LIVE]
            else:
                self._sleep(live)

    def _sleep(self, live: Sequence[Subtask]) -> None:
        # Called before the last check for work, so that work that arrives after the check ends the sleep.
        self._wakeup.prepare()
        if any(subtask.has_work for subtask in live):
            self._wakeup.cancel()
            return
        waits = [wait for wait in (subtask.wait_ms() for subtask in live) if wait is not None]
        start = time.perf_counter_ns()
        for subtask in live:
            subtask.metrics.timer.enter(Activity.BACKPRESSURED if subtask.backpressured else Activity.IDLE, start)
        self._wakeup.wait(min(waits) / 1000 if waits else None)
        end = time.perf_counter_ns()
        for subtask in live:
            subtask.metrics.timer.enter(None, end)
