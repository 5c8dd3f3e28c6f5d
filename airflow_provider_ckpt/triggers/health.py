"""Waits for the health of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_provider_ckpt.conditions.health import HealthCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptHealthTrigger(CkptTrigger):
    """Polls a job's health. It only watches: a killed task changes nothing at the job.

    :param job_id: the job, 32 hex digits.
    :param expected: verdicts that end the wait well.
    :param failing: verdicts that end it badly.
    :param ended: so many checkpoints have to have ended.
    :param times: so many looks in a row have to find it.
    """

    def __init__(
        self,
        *,
        job_id: str,
        expected: Sequence[str],
        failing: Sequence[str] = (),
        ended: int = 1,
        times: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.expected = tuple(expected)
        self.failing = tuple(failing)
        self.ended = ended
        self.times = times

    def condition(self) -> HealthCondition:
        return HealthCondition(self.job_id, self.expected, self.failing, ended=self.ended, times=self.times)

    def arguments(self) -> dict[str, Any]:
        lists = {"expected": list(self.expected), "failing": list(self.failing)}
        return {"job_id": self.job_id, "ended": self.ended, "times": self.times} | lists
