"""Waiting for a pending checkpoint that is nearly done and about to expire, or for what has become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from airflow_provider_ckpt.conditions.base import Json, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job import OfJob
from airflow_provider_ckpt.conditions.job_log import failure_of
from ckpt_runtime.client import requests
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.models import TERMINAL_STATES

EXPIRING: Final = "EXPIRING"
JOB_ENDED: Final = "JOB_ENDED"
UNKNOWN: Final = "UNKNOWN"


@dataclass(frozen=True, slots=True)
class RescueRule:
    """When a pending checkpoint is to get more time: ``min_progress`` percent of its subtasks have acknowledged it, and
    it would expire within ``within_ms``. ``checkpoint_id``: that one only, whose end is waited for too."""

    min_progress: float
    within_ms: int
    checkpoint_id: int | None = None

    def applies(self, item: Checkpoint, now_ms: int) -> bool:
        """Whether this one is to get more time now."""
        if item.status != "IN_PROGRESS" or item.deadline_ms is None or not item.num_subtasks:
            return False
        return progress_of(item) >= self.min_progress and item.deadline_ms - now_ms <= self.within_ms


def progress_of(item: Checkpoint) -> float:
    """Percent of the subtasks that have acknowledged it."""
    return 100 * item.num_acknowledged / item.num_subtasks if item.num_subtasks else 0.0


class RescueCondition(OfJob):
    """Done when the rule applies (``what`` is EXPIRING), when the checkpoint that it names has ended (COMPLETED,
    FAILED, or UNKNOWN when it is not shown any more), or when the job has FINISHED or was CANCELED (JOB_ENDED).

    :param now_ms: the present in milliseconds since the epoch, as the driver's clock has it too.
    """

    def __init__(self, job_id: str, rule: RescueRule, now_ms: Callable[[], int]) -> None:
        super().__init__(job_id)
        self._rule = rule
        self._now_ms = now_ms

    @property
    def subject(self) -> str:
        which = "a checkpoint" if self._rule.checkpoint_id is None else f"checkpoint {self._rule.checkpoint_id}"
        return f"{which} of job {self._job_id} that is nearly done and about to expire"

    def look(self) -> Poll:
        # The state first: a job that had ended before its history was read has all of its history written.
        job = yield from self._details()
        statistics: CheckpointStatistics = yield requests.checkpoint_statistics(self._job_id)
        watched = self._rule.checkpoint_id
        candidates = [item for item in statistics.history if watched is None or item.id == watched]
        for item in candidates:
            if self._rule.applies(item, self._now_ms()):
                return Verdict(Status.DONE, result=self._facts(item, EXPIRING))
            if watched is not None and item.status != "IN_PROGRESS":
                return Verdict(Status.DONE, result=self._facts(item, item.status))
        if watched is not None and not candidates and any(item.id > watched for item in statistics.history):
            return Verdict(Status.DONE, result={"job_id": self._job_id, "what": UNKNOWN, "checkpoint_id": watched})
        if job.state in TERMINAL_STATES:
            cause = yield from failure_of(job)
            if job.state == "FAILED":
                return Verdict(Status.FAILED, f"job {self._job_id} is FAILED{cause.clause}", trace=cause.trace)
            return Verdict(Status.DONE, result={"job_id": self._job_id, "what": JOB_ENDED, "state": job.state})
        self._state = job.state
        pending = [item for item in candidates if item.status == "IN_PROGRESS"]
        self.standing = ", ".join(self._line(item) for item in pending) or f"none is pending, the job is {job.state}"
        return None

    def _line(self, item: Checkpoint) -> str:
        # Without figures that change with every look: each new standing is a line in the log.
        return f"checkpoint {item.id} is pending, {item.num_acknowledged} of {item.num_subtasks} subtasks are done"

    def _facts(self, item: Checkpoint, what: str) -> Json:
        return {
            "job_id": self._job_id,
            "what": what,
            "checkpoint_id": item.id,
            "progress": round(progress_of(item), 1),
            "persisted": item.progress_size or item.checkpointed_size,
            "left_ms": None if item.deadline_ms is None else max(0, item.deadline_ms - self._now_ms()),
            "failure": item.failure_message,
        }
