"""PySpark's ``TaskContext`` for user classes: in Spark every task is in a process, here tasks are in threads of one.

User readers and writers ask ``TaskContext.get().partitionId()``; the object answers for the thread that asks.
"""

# PySpark has no public way to set its task context.
# ruff: noqa: SLF001

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal

from pyspark import TaskContext
from pyspark.resource import ResourceInformation


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """What a task context tells."""

    partition_id: int
    attempt_number: int
    task_attempt_id: int


_NOBODY = TaskIdentity(0, 0, 0)
_of_thread = threading.local()
_lock = threading.Lock()
_ID_BITS = 62
"""Of the first id of a worker; Spark's ids are numbers of 63 bits."""

_task_attempt_ids: Iterator[int] | None = None


class _ThreadTaskContext(TaskContext):
    """Answers by thread."""

    def _identity(self) -> TaskIdentity:
        identity: TaskIdentity = getattr(_of_thread, "identity", _NOBODY)
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


def begin_task(partition_id: int, attempt: int) -> None:
    """Makes ``TaskContext.get()`` in this thread tell a task that begins now; leaves a real Spark task's context alone.

    What is a task in Spark is one here: reading a partition, writing a subtask's rows between two checkpoints. Its
    ``taskAttemptId`` is told once; ``attempt`` is how often the job has been deployed before.
    """
    _of_thread.identity = TaskIdentity(partition_id, attempt, _next_task_attempt_id())
    with _lock:
        if TaskContext._taskContext is None:
            TaskContext._taskContext = object.__new__(_ThreadTaskContext)


def _next_task_attempt_id() -> int:
    """Counts from a random number in each worker: ids of other workers, attempts and jobs lie elsewhere.

    The count begins with the first task: a worker is forked after this module has been loaded.
    """
    global _task_attempt_ids
    with _lock:
        if _task_attempt_ids is None:
            _task_attempt_ids = itertools.count(secrets.randbits(_ID_BITS))
        return next(_task_attempt_ids)
