"""PySpark's ``TaskContext`` for user classes: in Spark every task is a process, here subtasks are threads of one.

User readers and writers ask ``TaskContext.get().partitionId()``; the object answers for the thread that asks.
"""

# PySpark has no public way to set its task context.
# ruff: noqa: SLF001

from __future__ import annotations

import threading
from dataclasses import dataclass
from decimal import Decimal

from pyspark import TaskContext
from pyspark.resource import ResourceInformation


@dataclass(frozen=True, slots=True)
class SubtaskIdentity:
    """What a task context tells."""

    partition_id: int
    attempt_number: int
    task_attempt_id: int


_NOBODY = SubtaskIdentity(0, 0, 0)
_of_thread = threading.local()
_install_lock = threading.Lock()


class _ThreadTaskContext(TaskContext):
    """Answers by thread."""

    def _identity(self) -> SubtaskIdentity:
        identity: SubtaskIdentity = getattr(_of_thread, "identity", _NOBODY)
        return identity

    def stageId(self) -> int:
        return 0

    def partitionId(self) -> int:
        return self._identity().partition_id

    def attemptNumber(self) -> int:
        return self._identity().attempt_number

    def taskAttemptId(self) -> int:
        return self._identity().task_attempt_id

    def getLocalProperty(self, key: str) -> str | None:
        return None

    def cpus(self) -> int:
        return 1

    def cpuAmount(self) -> Decimal:
        return Decimal(1)

    def resources(self) -> dict[str, ResourceInformation]:
        return {}


def identify_thread(subtask_index: int, parallelism: int, attempt: int) -> None:
    """Makes ``TaskContext.get()`` in this thread tell this subtask; leaves a real Spark task's context alone."""
    _of_thread.identity = SubtaskIdentity(subtask_index, attempt, attempt * parallelism + subtask_index)
    with _install_lock:
        if TaskContext._taskContext is None:
            TaskContext._taskContext = object.__new__(_ThreadTaskContext)
