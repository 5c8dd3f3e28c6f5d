"""Slots from Spark: each launch is one barrier stage whose tasks are slot agents.

A barrier stage is scheduled all or nothing, and fails as a whole when one task is lost; Spark does not retry it. The
slot pool then launches a new one, so Spark's retry and ours never fight.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent
from ckpt_runtime.spark.stage_failures import telling_line

if TYPE_CHECKING:
    from pyspark import SparkContext

logger = logging.getLogger(__name__)


class StageFailedError(RuntimeError):
    """A barrier stage failed; one line says why."""


StageEnded = Callable[[int, BaseException | None], None]


class BarrierStageProvider:
    """A ``SlotProvider`` (see ``jobmaster/slot_pool.py``) on a SparkContext; one thread per running stage."""

    def __init__(self, context: SparkContext, driver_host: str) -> None:
        self._context = context
        self._driver_host = driver_host

    def launch(self, stage_id: int, slots: int, control_port: int, secret: str, ended: StageEnded) -> None:
        """Returns at once; ``ended(stage_id, error)`` is called from a thread when the stage is over."""
        parameters = AgentParameters(self._driver_host, control_port, secret, stage_id)
        threading.Thread(
            target=self._run, args=(parameters, slots, ended), name=f"barrier-stage-{stage_id}", daemon=True
        ).start()

    def cancel(self, stage_id: int) -> None:
        """Stops a stage whose agents do not answer."""
        self._context.cancelJobGroup(_group(stage_id))

    def _run(self, parameters: AgentParameters, slots: int, ended: StageEnded) -> None:
        error: BaseException | None = None
        try:
            self._context.setJobGroup(
                _group(parameters.stage_id), f"checkpointing stream engine: {slots} slots", interruptOnCancel=True
            )
            stage = self._context.parallelize(range(slots), slots).barrier()
            stage.mapPartitions(_agent_task(parameters)).collect()
        except Exception as failure:
            error = StageFailedError(telling_line(str(failure)))
            logger.warning("barrier stage %d failed: %s", parameters.stage_id, error)
        ended(parameters.stage_id, error)


def _group(stage_id: int) -> str:
    return f"ckpt-stage-{stage_id}"


def _agent_task(parameters: AgentParameters) -> Callable[[Iterable[int]], Iterable[int]]:
    def task(partition: Iterable[int]) -> Iterable[int]:
        for index in partition:
            run_agent(parameters, index)
            yield index

    return task
