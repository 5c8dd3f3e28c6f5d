"""Holds back failures that another failure probably caused: those of subtasks that lost the channel to another worker.

Neighbours notice the end of a worker before the driver knows about it. Their failures are held back until then, for a
limited time, so that the first failure of an attempt is its cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.jobmaster.job_host import Cancellable, JobHost
from ckpt_runtime.jobmaster.slots import LOSS_GRACE_S
from ckpt_runtime.scheduler.job_events import FailureInfo

GRACE_MS = (LOSS_GRACE_S + 1.0) * 1000
"""Longer than the notice of the loss itself may take; in milliseconds."""


class Consequences:
    """``deliver`` gets each failure once, in order."""

    def __init__(self, host: JobHost, deliver: Callable[[ExecutionId, FailureInfo], None]) -> None:
        self._host = host
        self._deliver = deliver
        self._held: list[tuple[ExecutionId, FailureInfo]] = []
        self._timer: Cancellable | None = None

    def hold(self, executions: Iterable[ExecutionId], cause: FailureInfo) -> None:
        self._held += [(execution, cause) for execution in executions]
        if self._timer is None:
            self._timer = self._host.call_later(GRACE_MS, self.release)

    def release(self) -> None:
        """Delivers the held failures: the cause is known, or the time for it is over."""
        # Taken and cleared before the first is delivered: a delivery may hold others.
        held = list(self._held)
        self.forget()
        for execution, cause in held:
            self._deliver(execution, cause)

    def forget(self) -> None:
        """Drops the held failures."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
