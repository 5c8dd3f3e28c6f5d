"""Lists the jobs of a session, so that other tasks can be mapped over them, and cancels a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json, Status
from airflow_provider_ckpt.conditions.job import STATES, JobStatusCondition, job_facts
from airflow_provider_ckpt.exceptions import CkptJobFailed
from airflow_provider_ckpt.operators.base import CkptJobOperator, CkptOperator
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context


_LIVING = tuple(state for state in STATES if state not in TERMINAL_STATES)


class ListJobsOperator(CkptOperator):
    """Lists jobs, for ``.expand``: the mapped task has one independent instance for each job.

    Returns a list of ``{"job_id", "name", "status", "start_time_ms"}``, ordered by name. Each entry can be given as the
    argument ``job`` of other tasks. Restore drills are left out. With an empty list, the mapped tasks are skipped.

    :param name: only jobs whose names match this pattern, in which ``*`` matches any text, ``?`` any character
        and ``[ab]`` for one of several. (templated)
    :param states: only jobs in one of these states; by default all that live. (templated)
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "name", "states")

    def __init__(
        self, *, name: Templated[str] = "*", states: Templated[str | Sequence[str]] = _LIVING, **kwargs: Any
    ) -> None:
        # The result is a list, whose entries can be no XComs with names.
        super().__init__(multiple_outputs=False, **kwargs)
        self.name = name
        self.states = states

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """List them once."""
        deadline = self.deadline()
        pattern, states = arguments.text("name", self.name), arguments.choices("states", self.states, STATES)
        with self.connected(deadline) as client:
            lines = self.ask(client, requests.list_jobs())
        found = [
            {"job_id": line.job_id, "name": line.name, "status": line.state, "start_time_ms": line.start_time_ms}
            for line in sorted(lines, key=lambda line: (line.name, line.start_time_ms))
            if line.state in states and not line.drill and fnmatchcase(line.name, pattern)
        ]
        self.log.info("%d of %d jobs: %s", len(found), len(lines), ", ".join(str(job["name"]) for job in found))
        return found


class CancelJobOperator(CkptJobOperator):
    """Ends a job at once, without a savepoint. Repeating it is harmless.

    Returns the job's facts: ``{"job_id", "name", "status", "start_time_ms", "end_time_ms", "duration_ms"}``.

    :param job: the job, by id or unique name. (templated)
    :param already_ended_ok: a job that has FINISHED or FAILED by itself does not fail this task.
    :raises CkptJobFailed: the job has finished or failed, and was not cancelled
    """

    template_fields: Collection[str] = CkptJobOperator.template_fields

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

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        self.publish_job(context, self.found_job)
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event, CkptJobFailed)
        return self._ended(context, event["result"])

    def _ended(self, context: Context, facts: Json) -> Json:
        if facts["status"] != "CANCELED" and not self.already_ended_ok:
            raise CkptJobFailed(f"job {self.found_job} was not cancelled, it is {facts['status']}")
        self.forget_job(context)
        self.log.info("Job %s is %s", self.found_job, facts["status"])
        return facts

    def after_timeout(self, context: Context, event: Json | None) -> str:
        return f"Job {self.found_job} has been asked to cancel and may still be cancelling"
