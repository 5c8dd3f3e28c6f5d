"""Waiting for the health of a job."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from msgspec import to_builtins

from airflow_provider_ckpt.conditions.base import Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import JobCondition
from airflow_provider_ckpt.conditions.job_log import failure_of
from ckpt_runtime.client import requests
from ckpt_runtime.client.models import TERMINAL_STATES, JobHealth

VERDICTS: Final = ("HEALTHY", "DEGRADED", "UNHEALTHY")


class HealthCondition(JobCondition):
    """Done when the verdict is one of ``expected`` and so many checkpoints have ended; FAILED when it is one of
    ``failing``, or the job has ended in an unintended way.

    ``times``: how many looks in a row have to find it.
    """

    def __init__(
        self, job_id: str, expected: Collection[str], failing: Collection[str] = (), *, ended: int = 1, times: int = 1
    ) -> None:
        super().__init__(job_id)
        self._expected = frozenset(expected)
        self._failing = frozenset(failing)
        self._ended = ended
        self._times = times
        self._found = 0

    @property
    def subject(self) -> str:
        return f"job {self._job_id} to be {' or '.join(sorted(self._expected))}"

    def look(self) -> Poll:
        health: JobHealth = yield requests.job_health(self._job_id)
        reasons = "; ".join(health.reasons) or "no reasons"
        result = {"job_id": self._job_id, **to_builtins(health)}
        good = health.verdict in self._expected and health.checkpoints.ended >= self._ended
        self._found = self._found + 1 if good else 0
        if self._found >= self._times:
            return Verdict(Status.DONE, result=result)
        if health.verdict in self._failing:
            return Verdict(Status.FAILED, f"job {self._job_id} is {health.verdict}: {reasons}", result)
        if health.state in TERMINAL_STATES and not good:
            job = yield from self._details()
            cause = yield from failure_of(job)
            text = f"job {self._job_id} is {job.state}, it was not {' or '.join(sorted(self._expected))}{cause.clause}"
            return Verdict(Status.FAILED, text, result, cause.trace)
        self._state = health.state
        self.standing = f"it is {health.verdict} ({reasons}), {health.checkpoints.ended} checkpoints have ended"
        return None
