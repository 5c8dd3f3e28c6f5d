"""Waiting for the step of an upgrade that only watches: done when the record has something else to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any

from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.job_log import job_line
from airflow_provider_ckpt.upgrades.actions import Action, Answer, JobMissing, Look, LookAtStop, Seen, StopSeen
from airflow_provider_ckpt.upgrades.executor import watched
from airflow_provider_ckpt.upgrades.machine import action_of, advance
from airflow_provider_ckpt.upgrades.record import Upgrade
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.requests import Call


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: limits of steps outlive processes."""
    return round(time.time() * 1000)


class UpgradeCondition(Condition):
    """The result has the next ``record``."""

    def __init__(self, record: Upgrade, now_ms: Callable[[], int] = wall_clock_ms) -> None:
        super().__init__()
        self._record = record
        self._now_ms = now_ms
        self._action = action_of(record)
        self._forgotten = MissingPolicy()

    @property
    def subject(self) -> str:
        return f"the step {self._record.step} of the {self._record.desired.goal.lower()} of job {self._record.old_job}"

    def poll(self) -> Poll:
        assert self._action is not None
        answer = yield from self._look(self._action)
        if answer is None:
            return None
        changed = advance(self._record, answer, self._now_ms())
        if changed is self._record:
            self.standing = _standing(answer)
            return None
        return Verdict(Status.DONE, result={"record": changed.to_json()})

    def _look(self, action: Action) -> Generator[Call[Any], Any, Answer | None]:
        try:
            answer = yield from watched(action)
        except NotFound as error:
            missing = self.absence.missing(str(error))
            if missing is None:
                return None
            gone = JobMissing(missing.message)
            return StopSeen(gone, known=False) if isinstance(action, LookAtStop) else gone
        self.absence.seen()
        if isinstance(answer, StopSeen) and not answer.known:
            return answer if self._forgotten.missing("") else None
        self._forgotten.seen()
        return answer

    def detail(self) -> Generator[Call[Any], Any, str]:
        if not isinstance(self._action, Look | LookAtStop):
            return ""
        return (yield from job_line(self._action.job))


def _standing(answer: Answer) -> str:
    job = answer.job if isinstance(answer, StopSeen) else answer
    if not isinstance(job, Seen):
        return "it is not known"
    return f"it is {job.state}, {job.completed} checkpoints completed"
