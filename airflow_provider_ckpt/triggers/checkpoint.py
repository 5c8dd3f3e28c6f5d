"""Waits for completed checkpoints of a job."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptCheckpointTrigger(CkptTrigger):
    """Polls a job's checkpoint history. It only watches: a killed task changes nothing at the job.

    :param job_id: the job, 32 hex digits.
    :param goal: the fields of a :class:`CheckpointGoal`.
    """

    def __init__(self, *, job_id: str, goal: dict[str, Any] | CheckpointGoal, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.goal = goal if isinstance(goal, CheckpointGoal) else CheckpointGoal(**goal)

    def condition(self) -> CheckpointCondition:
        return CheckpointCondition(self.job_id, self.goal)

    def arguments(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "goal": asdict(self.goal)}
