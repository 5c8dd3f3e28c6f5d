"""PySpark's ``TaskContext`` for user code: Spark runs each task in a process, here tasks are threads of one process.

``TaskContext.get()`` returns the task whose user code the calling thread runs, and None in all other threads: as on
Spark's driver where a reader plans and a writer commits, but also in threads that user code has started. User code may
pass its task context to those.

Helper threads run user code on behalf of a subtask.
"""

# PySpark has no public way to set its task context. Names of methods are PySpark's.
# ruff: noqa: N802, SLF001

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from decimal import Decimal
from typing import TypeVar

from pyspark import TaskContext
from pyspark.resource import ResourceInformation

_of_thread = threading.local()
_lock = threading.Lock()
_ID_BITS = 62
"""Number of bits of a worker's first task attempt id; Spark's ids have 63 bits."""

_task_attempt_ids: Iterator[int] | None = None

T = TypeVar("T")


class _Task(TaskContext):
    """The properties of one task, the same in every thread."""

    def __new__(cls, *_: object) -> _Task:
        """Bypasses the ``__new__`` of PySpark's class, which allows one object only."""
        return object.__new__(cls)

    def __init__(self, partition_id: int, attempt_number: int, task_attempt_id: int, batch_id: int | None) -> None:
        self._told = (partition_id, attempt_number, task_attempt_id)
        self._batch_id = batch_id

    def stageId(self) -> int:
        return 0

    def partitionId(self) -> int:
        return self._told[0]

    def attemptNumber(self) -> int:
        return self._told[1]

    def taskAttemptId(self) -> int:
        return self._told[2]

    def getLocalProperty(self, key: str) -> str | None:
        return str(self._batch_id) if key == "streaming.sql.batchId" and self._batch_id is not None else None

    def cpus(self) -> int:
        return 1

    def cpuAmount(self) -> Decimal:
        return Decimal(1)

    def resources(self) -> dict[str, ResourceInformation]:
        return {}


class _OfThisThread:
    """Stands for the class attribute that ``TaskContext.get()`` returns."""

    def __get__(self, instance: object, owner: type | None = None) -> TaskContext | None:
        task: TaskContext | None = getattr(_of_thread, "task", None)
        return task


def new_task(partition_id: int, attempt: int, batch_id: int | None = None) -> TaskContext:
    """Returns a new task with a unique ``taskAttemptId``.

    Tasks correspond to Spark's: reading a partition, writing a subtask's rows between two checkpoints, one call of a
    ``mapInArrow`` function; a stateful processor in one subtask is one task. ``attempt`` is the number of earlier
    deployments of the job, ``batch_id`` that of the rows if the task has those of one batch.
    """
    global _task_attempt_ids
    with _lock:
        # Ids of other workers, attempts and jobs differ. A worker is forked after this module has been loaded.
        if _task_attempt_ids is None:
            _task_attempt_ids = itertools.count(secrets.randbits(_ID_BITS))
        return _Task(partition_id, attempt, next(_task_attempt_ids), batch_id)


def copy_for_task(of_user: T) -> T:
    """Returns a copy of a user's object, as each Spark task has one: what one task changes does not affect others.

    An object that cannot be copied, and that Spark could not send to its tasks either, is the same in all tasks.
    """
    try:
        return deepcopy(of_user)
    except Exception:
        return of_user


@contextmanager
def running(task: TaskContext) -> Iterator[None]:
    """Marks this thread as running the task's code. Does not touch the context of a real Spark task in this process."""
    with _lock:
        if TaskContext.__dict__["_taskContext"] is None:
            TaskContext._taskContext = _OfThisThread()  # type: ignore[assignment]
    before, _of_thread.task = getattr(_of_thread, "task", None), task
    try:
        yield
    finally:
        _of_thread.task = before


class HelperThread(threading.Thread):
    """Its work is attributed to the subtask whose thread created it: flame graphs show it there."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]
        self.helps = threading.current_thread()
