"""Slots from Spark: each launch is one barrier stage whose tasks are slot agents.

A barrier stage is scheduled all or nothing, and fails as a whole when one task is lost; Spark does not retry it. The
slot pool then launches a new one, so Spark's retry and ours never fight.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpt_runtime.jobmaster.slot_loss_notifier import hint_of
from ckpt_runtime.spark.protection import CONTROL_SECRET
from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent
from ckpt_runtime.structured_log import PLAIN, LogSettings

if TYPE_CHECKING:
    from pyspark import SparkContext

    from ckpt_runtime.jobmaster.slot_stages import StageEnded

logger = logging.getLogger(__name__)

_EXECUTOR = re.compile(r"ExecutorLostFailure \(executor (\S+) [^)]*\) Reason: (.+)")
_EXIT_CODE = re.compile(r"exited with code (\d+)")
_TASK = re.compile(r"finished unsuccessfully\.\n(.+)|Most recent failure: [^\n]*?\): (.+)")
_CALL = re.compile(r"An error occurred while calling [^\n]*\n:? ?")
_CLASS = re.compile(r"^(?:[\w$]+\.)+[\w$]+: ")
_MAX_CHARS = 500

Task = Callable[[Iterable[int]], Iterable[int]]


class StageFailedError(RuntimeError):
    """A barrier stage failed; one line says why."""


class BarrierStageProvider:
    """A ``SlotProvider`` (see ``jobmaster/slot_stages.py``) on a SparkContext; one thread per running stage."""

    def __init__(self, context: SparkContext, driver_host: str, log: LogSettings = PLAIN) -> None:
        """``log`` is how the agents and their workers log."""
        self._context = context
        self._driver_host = driver_host
        self._log = log
        self._capacity: int = context.defaultParallelism  # cores, unless spark.default.parallelism says otherwise

    @property
    def capacity(self) -> int:
        """The task slots that Spark had when the session began."""
        return self._capacity

    def launch(self, stage_id: int, slots: int, control_port: int, secret: str, ended: StageEnded) -> None:
        """Returns at once; ``ended(stage_id, error)`` is called from a thread when the stage is over."""
        task = agent_task(self._driver_host, control_port, stage_id, self._log)
        threading.Thread(
            target=self._run, args=(stage_id, slots, task, secret, ended), name=f"barrier-stage-{stage_id}", daemon=True
        ).start()

    def cancel(self, stage_id: int) -> None:
        """Stops a stage whose agents do not answer. A JVM that is gone has no stages any more."""
        try:
            self._context.cancelJobGroup(_group(stage_id))
        except Exception as error:
            logger.warning("barrier stage %d cannot be cancelled: %s", stage_id, error)

    def _run(self, stage_id: int, slots: int, task: Task, secret: str, ended: StageEnded) -> None:
        error: BaseException | None = None
        try:
            # The properties are this thread's alone.
            self._context.setLocalProperty(CONTROL_SECRET, secret)
            self._context.setJobGroup(
                _group(stage_id), f"checkpointing stream engine: {slots} slots", interruptOnCancel=True
            )
            stage = self._context.parallelize(range(slots), slots).barrier()
            stage.mapPartitions(task).collect()
        except Exception as failure:
            error = StageFailedError(stage_failure(str(failure)))
            logger.warning("barrier stage %d failed: %s", stage_id, error)
        ended(stage_id, error)


def _group(stage_id: int) -> str:
    return f"ckpt-stage-{stage_id}"


def agent_task(driver_host: str, control_port: int, stage_id: int, log: LogSettings = PLAIN) -> Task:
    """The function of a stage's tasks. It becomes a broadcast, so that no secret may be in it."""

    def task(partition: Iterable[int]) -> Iterable[int]:
        from pyspark import TaskContext

        context = TaskContext.get()
        secret = None if context is None else context.getLocalProperty(CONTROL_SECRET)
        if secret is None:
            raise RuntimeError(f"Spark has not passed on {CONTROL_SECRET}")
        for index in partition:
            run_agent(AgentParameters(driver_host, control_port, secret, stage_id, log), index)
            yield index

    return task


def stage_failure(message: str) -> str:
    """A lost executor with its exit code; else why a task failed; else the first line that is not Py4J's."""
    executor = _EXECUTOR.search(message)
    if executor is not None:
        reason = executor[2].strip()
        code = _EXIT_CODE.search(reason)
        hint = hint_of(int(code[1])) if code is not None else ""
        return f"executor {executor[1]} was lost: {reason}{f' ({hint})' if hint else ''}"[:_MAX_CHARS]
    task = _TASK.search(message)
    text = (task[1] or task[2]) if task is not None else _CALL.sub("", message, count=1).partition("\n")[0]
    return _CLASS.sub("", text.strip())[:_MAX_CHARS] or "Spark gave no reason"
