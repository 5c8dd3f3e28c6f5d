"""Waits for a pending checkpoint that is nearly done and about to expire."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from airflow_provider_ckpt.conditions.rescue import RescueCondition, RescueRule
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptRescueTrigger(CkptTrigger):
    """Polls a job's pending checkpoints. It only watches: a killed task changes nothing at the job.

    :param job_id: the job, 32 hex digits.
    :param rule: the fields of a :class:`RescueRule`.
    """

    def __init__(self, *, job_id: str, rule: dict[str, Any] | RescueRule, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.rule = rule if isinstance(rule, RescueRule) else RescueRule(**rule)

    def condition(self) -> RescueCondition:
        return RescueCondition(self.job_id, self.rule, lambda: round(time.time() * 1000))

    def arguments(self) -> dict[str, Any]:
        return {"job_id": self.job_id, "rule": asdict(self.rule)}

    async def on_kill(self) -> None:
        """Say what stays."""
        text = "The task was killed; a timeout of job %s that it has extended stays as it is."
        self.log.warning(text, self.job_id)
