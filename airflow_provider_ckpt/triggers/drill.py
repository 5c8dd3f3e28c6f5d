"""Waits for a restore drill."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.conditions.base import Condition
from airflow_provider_ckpt.conditions.drill import DrillCondition
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.triggers.base import ON_KILL_PATIENCE_SECONDS, CkptTrigger
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptClientError


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
        try:
            async with await CkptHook(self.ckpt_conn_id).aget_conn(patience=ON_KILL_PATIENCE_SECONDS) as client:
                await client.execute(requests.cancel_job(self.job_id))
        except CkptClientError as error:
            self.log.error("The task was killed; cancelling drill %s failed, it may go on: %s", self.job_id, error)
        else:
            self.log.warning("The task was killed; drill %s is being cancelled.", self.job_id)
