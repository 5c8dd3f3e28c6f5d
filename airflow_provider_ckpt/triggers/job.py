"""Waits for a state of a job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from airflow_provider_ckpt.conditions.job import JobStatusCondition, NameFreeCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptJobTrigger(CkptTrigger):
    """Polls one job.

    :param job_id: the job, 32 hex digits.
    :param expected: states that end the wait well.
    :param all_tasks: RUNNING counts only when every task runs (or has finished).
    :param cancel_on_kill: cancel the job when a person marks the waiting task failed.
    """

    def __init__(
        self,
        *,
        job_id: str,
        expected: Sequence[str],
        all_tasks: bool = False,
        cancel_on_kill: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id
        self.expected = tuple(expected)
        self.all_tasks = all_tasks
        self.cancel_on_kill = cancel_on_kill

    def condition(self) -> JobStatusCondition:
        return JobStatusCondition(self.job_id, self.expected, all_tasks=self.all_tasks)

    def arguments(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "expected": list(self.expected),
            "all_tasks": self.all_tasks,
            "cancel_on_kill": self.cancel_on_kill,
        }

    async def on_kill(self) -> None:
        """Cancel the job if asked to and no other try continues with it, and say in the log what became of it."""
        if not self.cancel_on_kill or not await self.is_given_up():
            self.log.warning("The task was killed; job %s was not cancelled and goes on.", self.job_id)
            return
        await self.cancel(self.job_id, "job")


class CkptNameFreeTrigger(CkptTrigger):
    """Waits until no living job has a name.

    :param name: the name.
    """

    def __init__(self, *, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name = name

    def condition(self) -> NameFreeCondition:
        return NameFreeCondition(self.name)

    def arguments(self) -> dict[str, Any]:
        return {"name": self.name}

    async def on_kill(self) -> None:
        """Say what became of the job that was to be started."""
        self.log.warning("The task was killed; no job was started, and the one named %r goes on.", self.name)
