"""The condition on a step of an upgrade that only watches: done when the record has something else to do."""

from __future__ import annotations

import time
from dataclasses import dataclass

from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict
from airflow_provider_ckpt.conditions.job import job_line
from airflow_provider_ckpt.upgrades.actions import Action, Answer, JobMissing, Look, LookAtStop, Seen, StopSeen
from airflow_provider_ckpt.upgrades.executor import watched
from airflow_provider_ckpt.upgrades.machine import action_of, advance
from airflow_provider_ckpt.upgrades.record import Upgrade, standing
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: limits of steps outlive processes."""
    return round(time.time() * 1000)


@dataclass(eq=False)
class UpgradeCondition(Condition):
    """The result has the next ``record``."""

    record: Upgrade

    def __post_init__(self) -> None:
        super().__post_init__()
        self._action = action_of(self.record)
        self._forgotten = MissingPolicy()

    @property
    def subject(self) -> str:
        return f"the step {self.record.step} of the {self.record.desired.goal.lower()} of job {self.record.old_job}"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        assert self._action is not None
        answer = await self._look(client, self._action)
        if answer is None:
            return None
        changed = advance(self.record, answer, wall_clock_ms())
        if changed is self.record:
            self.standing = _standing(answer)
            return None
        return Verdict(Status.DONE, result={"record": changed.to_json()})

    async def _look(self, client: AsyncCalls, action: Action) -> Answer | None:
        try:
            answer = await watched(client, action)
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

    async def detail(self, client: AsyncCalls) -> str:
        return await job_line(client, self._action.job) if isinstance(self._action, Look | LookAtStop) else ""

    def left_over(self) -> str:
        return (
            f"it stood at the step {self.record.step}: {standing(self.record)}. Nothing is undone; a cleared task "
            "continues from there"
        )


def _standing(answer: Answer) -> str:
    job = answer.job if isinstance(answer, StopSeen) else answer
    if not isinstance(job, Seen):
        return "it is not known"
    return f"it is {job.state}, {job.completed} checkpoints completed"
