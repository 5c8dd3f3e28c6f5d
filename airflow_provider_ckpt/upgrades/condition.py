"""The condition on a step of an upgrade that looks again and again: done when there is something to keep or request."""

from __future__ import annotations

import time
from dataclasses import dataclass

from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict
from airflow_provider_ckpt.conditions.job import job_line
from airflow_provider_ckpt.upgrades.actions import Action, Answer, JobMissing, LookAtStop, Seen, StopSeen
from airflow_provider_ckpt.upgrades.executor import looked_at
from airflow_provider_ckpt.upgrades.record import Step, Upgrade, standing
from airflow_provider_ckpt.upgrades.steps import REPEAT_AFTER_MS, ChangeIsDue, watch_step
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound


def wall_clock_ms() -> int:
    """Milliseconds since the epoch: limits of steps outlive processes."""
    return round(time.time() * 1000)


class _InDoubt(Exception):
    """Something seems to be missing: only several such answers in a row are believed."""


@dataclass(eq=False)
class UpgradeCondition(Condition):
    """The result has the next ``record``, or the same one when the task is to take the step again.

    ``asked`` is the last change that the task has requested in this step, and ``asked_at_ms`` when: the effect may take
    a while to show.
    """

    record: Upgrade
    asked: str = ""
    asked_at_ms: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._forgotten = MissingPolicy()

    @property
    def subject(self) -> str:
        return f"the step {self.record.step} of the {self.record.desired.goal.lower()} of job {self.record.old_job}"

    async def poll(self, client: AsyncCalls) -> Verdict | None:
        async def look(action: Action) -> Answer:
            return await self._look(client, action)

        now_ms = wall_clock_ms()
        try:
            changed = await watch_step(self.record, look, now_ms)
        except _InDoubt:
            return None
        except ChangeIsDue as change:
            if str(change) == self.asked and now_ms < self.asked_at_ms + REPEAT_AFTER_MS:
                return None
            changed = self.record
        return None if changed is None else Verdict(Status.DONE, result={"record": changed.to_json()})

    async def _look(self, client: AsyncCalls, action: Action) -> Answer:
        try:
            answer = await looked_at(client, action)
        except NotFound as error:
            missing = self.absence.missing(str(error))
            if missing is None:
                raise _InDoubt from error
            gone = JobMissing(missing.message)
            return StopSeen(gone, known=False) if isinstance(action, LookAtStop) else gone
        self.absence.seen()
        if isinstance(answer, StopSeen) and not answer.known:
            if not self._forgotten.missing(""):
                raise _InDoubt
        else:
            self._forgotten.seen()
        job = answer.job if isinstance(answer, StopSeen) else answer
        if isinstance(job, Seen):
            self.standing = f"it is {job.state}, {job.completed} checkpoints completed"
        return answer

    async def detail(self, client: AsyncCalls) -> str:
        record = self.record
        started = record.restarted_job if record.restarted else record.new_job
        return await job_line(client, record.old_job if record.step is Step.SAVEPOINT else started)

    def left_over(self) -> str:
        return (
            f"it stood at the step {self.record.step}: {standing(self.record)}. Nothing is undone; a cleared task "
            "continues from there"
        )
