"""Slots from Spark: each slot is a barrier stage with a single task, the slot's agent.

Each slot has its own stage because Spark fails all tasks of a stage when one of them is lost; so the loss of a slot
does not affect other slots. It is a barrier stage because Spark never reruns the task of a barrier stage: the slot pool
decides what replaces a lost slot.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpt_runtime.jobmaster.slots import hint_of
from ckpt_runtime.spark.protection import CONTROL_SECRET
from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent
from ckpt_runtime.structured_log import PLAIN, LogSettings

if TYPE_CHECKING:
    from pyspark import SparkContext

    from ckpt_runtime.jobmaster.slots import SlotEnded

logger = logging.getLogger(__name__)

_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\) Reason: (.+)")
_EXIT_CODE = re.compile(r"exited with code (\d+)")
_TASK = re.compile(r"finished unsuccessfully\.\n(.+)|Most recent failure: [^\n]*?\): (.+)")
_CALL = re.compile(r"An error occurred while calling [^\n]*\n:? ?")
_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")
_MAX_CHARS = 500
CAPACITY_POLL_S = 0.5

Task = Callable[[Iterable[str]], Iterable[str]]


class StageFailedError(RuntimeError):
    """A barrier stage failed; one line gives the reason."""


class BarrierStageProvider:
    """A ``SlotProvider`` (see ``jobmaster/slots.py``) on a SparkContext; one thread per running stage."""

    def __init__(self, context: SparkContext, driver_host: str, log: LogSettings = PLAIN) -> None:
        """``log`` is how the agents and their workers log."""
        self._context = context
        self._driver_host = driver_host
        self._log = log
        self.capacity = self._task_slots()
        """The number of task slots of Spark's executors, as of the last poll."""

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        """Poll in a thread, because an unresponsive JVM must not block the driver's event loop."""
        threading.Thread(target=self._poll_capacity, args=(changed,), name="spark-capacity", daemon=True).start()

    def _poll_capacity(self, changed: Callable[[], None]) -> None:
        while True:
            time.sleep(CAPACITY_POLL_S)
            try:
                capacity = self._task_slots()
            except Exception as error:  # the application is over, which ApplicationWatch reports
                logger.debug("Spark no longer reports its capacity: %s", error)
                return
            if capacity != self.capacity:
                logger.info("Spark has %d task slots, before %d", capacity, self.capacity)
                self.capacity = capacity
                changed()

    def _task_slots(self) -> int:
        """The number that Spark compares with the size of a barrier stage; PySpark has no public call for it."""
        spark = self._context._jsc.sc()  # noqa: SLF001
        slots: int = spark.maxNumConcurrentTasks(spark.resourceProfileManager().defaultResourceProfile())
        return slots

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        """Start the stage and return at once; ``ended(slot_id, error)`` is called from a thread when it is over."""
        task = agent_task(self._driver_host, control_port, slot_id, self._log)
        threading.Thread(
            target=self._run, args=(slot_id, task, secret, ended), name=f"slot-{slot_id}", daemon=True
        ).start()

    def cancel(self, slot_id: str) -> None:
        """Cancel a stage whose agent does not answer. If the JVM has ended, its stages have ended as well."""
        try:
            self._context.cancelJobGroup(_group(slot_id))
        except Exception as error:
            logger.warning("the stage of slot %s cannot be cancelled: %s", slot_id, error)

    def _run(self, slot_id: str, task: Task, secret: str, ended: SlotEnded) -> None:
        error: BaseException | None = None
        try:
            # Local properties apply to this thread only.
            self._context.setLocalProperty(CONTROL_SECRET, secret)
            self._context.setJobGroup(
                _group(slot_id), f"checkpointing stream engine: slot {slot_id}", interruptOnCancel=True
            )
            self._context.parallelize([slot_id], 1).barrier().mapPartitions(task).collect()
        except Exception as failure:
            error = StageFailedError(stage_failure(str(failure)))
            logger.warning("the stage of slot %s failed: %s", slot_id, error)
        ended(slot_id, error)


def _group(slot_id: str) -> str:
    return f"ckpt-slot-{slot_id}"


def agent_task(driver_host: str, control_port: int, slot_id: str, log: LogSettings = PLAIN) -> Task:
    """The function of a stage's task. It becomes a broadcast, so it must not contain a secret."""

    def task(partition: Iterable[str]) -> Iterable[str]:
        from pyspark import TaskContext

        context = TaskContext.get()
        secret = None if context is None else context.getLocalProperty(CONTROL_SECRET)
        if secret is None:
            raise RuntimeError(f"Spark has not passed {CONTROL_SECRET} to the driver")
        run_agent(AgentParameters(driver_host, control_port, secret, slot_id, log))
        return partition

    return task


def stage_failure(message: str) -> str:
    """One line: the lost executor and its exit code, else the task's error, else the first line without Py4J's part."""
    executor = _EXECUTOR.search(message)
    if executor is not None:
        reason = executor[2].strip()
        code = _EXIT_CODE.search(reason)
        hint = hint_of(int(code[1])) if code is not None else ""
        return f"executor {executor[1]} was lost: {reason}{f' ({hint})' if hint else ''}"[:_MAX_CHARS]
    task = _TASK.search(message)
    text = (task[1] or task[2]) if task is not None else _CALL.sub("", message, count=1).partition("\n")[0]
    return _CLASS.sub("", text.strip())[:_MAX_CHARS] or "Spark gave no reason"
