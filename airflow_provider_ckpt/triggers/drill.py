"""Waits for a restore drill."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.conditions.base import Condition
from airflow_provider_ckpt.conditions.drill import DrillCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptDrillTrigger(CkptTrigger):
    """Polls one drill. A killed task leaves none behind.

    :param job_id: the drill's job, 32 hex digits.
    :param checkpoints: how many have to complete.
    """

    def __init__(self, *, job_id: str, checkpoints: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.checkpoints = checkpoints

    def condition(self) -> Condition:
        return DrillCondition(self.job_id, self.checkpoints)

    def arguments(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "checkpoints": self.checkpoints}

    async def on_kill(self) -> None:
        """Remove the drill, and say in the log what became of it."""
        await self.cancel(self.job_id, "drill")
