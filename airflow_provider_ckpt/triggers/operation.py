"""Waits for a triggered checkpoint, a savepoint or a stop with savepoint to end, and before that to be possible."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.conditions.job import ReadyForSnapshotCondition
from airflow_provider_ckpt.conditions.operation import Operation, OperationCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger


class CkptOperationTrigger(CkptTrigger):
    """Polls one operation.

    :param operation: ``checkpoint``, ``savepoint`` or ``stop``.
    :param job_id: the job, 32 hex digits.
    :param trigger_id: the operation, 32 hex digits.
    """

    def __init__(self, *, operation: str, job_id: str, trigger_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.operation = Operation(operation)
        self.job_id = job_id
        self.operation_id = trigger_id

    def condition(self) -> OperationCondition:
        return OperationCondition(self.operation, self.job_id, self.operation_id)

    def arguments(self) -> dict[str, Any]:
        # ``trigger_id`` is an attribute of Airflow's base class, hence the other name on this one.
        return {"operation": self.operation.value, "job_id": self.job_id, "trigger_id": self.operation_id}

    async def on_kill(self) -> None:
        """Say what becomes of the operation: the REST API has no way to take one back."""
        self.log.warning(
            "The task was killed; %s was not cancelled and runs to its end at the job manager. "
            "The next try of this task attaches to it.",
            self.condition().subject,
        )


class CkptReadyTrigger(CkptTrigger):
    """Polls a job until a checkpoint, savepoint or stop of it can succeed.

    :param job_id: the job, 32 hex digits.
    """

    def __init__(self, *, job_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id

    def condition(self) -> ReadyForSnapshotCondition:
        return ReadyForSnapshotCondition(self.job_id)

    def arguments(self) -> dict[str, Any]:
        return {"job_id": self.job_id}
