"""Cancels a job and waits until it has ended."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import JobStatusCondition, job_facts
from airflow_provider_ckpt.exceptions import CkptJobFailed
from airflow_provider_ckpt.operators.base import CkptJobOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context


class CancelJobOperator(CkptJobOperator):
    """Ends a job at once, without a savepoint. Repeating it is harmless.

    Returns the job's facts: ``{"job_id", "name", "status", "start_time_ms", "end_time_ms", "duration_ms"}``.

    :param job: the job, by id or unique name. (templated)
    :param already_ended_ok: a job that has FINISHED or FAILED by itself does not fail this task.
    :raises CkptJobFailed: the job has finished or failed, and was not cancelled
    """

    template_fields: Collection[str] = CkptJobOperator.template_fields
    failed_wait: ClassVar[type[Exception]] = CkptJobFailed

    def __init__(self, *, job: Templated[str], already_ended_ok: bool = True, **kwargs: Any) -> None:
        super().__init__(job=job, **kwargs)
        self.already_ended_ok = arguments.flag("already_ended_ok", already_ended_ok)

    def execute(self, context: Context) -> Any:
        deadline = self.deadline()
        job_id = self.find_job(context, deadline)
        with self.connected(deadline) as client:
            try:
                self.ask(client, requests.cancel_job(job_id))
            except Conflict as error:
                self.log.info("Job %s was not cancelled: %s", job_id, error)
                return self._ended(context, job_facts(self.ask(client, requests.job_details(job_id))))
        self.log.info("Job %s is being cancelled", job_id)
        return self.wait_for(context, JobStatusCondition(job_id, sorted(TERMINAL_STATES)), deadline)

    def reached(self, context: Context, event: Json) -> Any:
        return self._ended(context, event["result"])

    def _ended(self, context: Context, facts: Json) -> Json:
        if facts["status"] != "CANCELED" and not self.already_ended_ok:
            raise CkptJobFailed(f"job {self.found_job} was not cancelled, it is {facts['status']}")
        self.forget_job(context)
        self.log.info("Job %s is %s", self.found_job, facts["status"])
        return facts

    def after_timeout(self, context: Context, event: Json | None) -> str:
        return f"Job {self.found_job} has been asked to cancel and may still be cancelling"
