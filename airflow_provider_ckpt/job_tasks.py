"""Base of operators and sensors of one job: the job is found once, and kept until the task has succeeded.

The first try looks up a job that is given by its name, and the result is recorded: a retry, and the part of the task
after a deferral, use the same job although another job may have the name by then. A cleared success looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.progress import Log
from airflow_provider_ckpt.exceptions import CkptJobNotFound
from airflow_provider_ckpt.job_names import is_id, resolve
from airflow_provider_ckpt.operators.journal import Journal
from airflow_provider_ckpt.tasks import CkptTask
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.models import JobLine

if TYPE_CHECKING:
    from airflow.sdk import Context

IF_NOT_FOUND = ("FAIL", "SKIP")
_RECORD = "ckpt_found_job"


class CkptJobTask(CkptTask):
    """Base of operators and sensors of one job, beside Airflow's own.

    ``finds_ended``: without a living job of the name, the one that ended last is meant.
    """

    finds_ended: ClassVar[bool] = False
    job: Templated[str]
    if_not_found: Templated[str]
    _found: str | None = None

    @property
    def found_job(self) -> str:
        """The id of the job; before it is found what was given."""
        return self._found or arguments.job(self.job)

    @property
    def skips(self) -> bool:
        """Whether the task is to be skipped when there is no such job.

        :raises CkptArgumentInvalid: for anything that is neither ``fail`` nor ``skip``.
        """
        return arguments.choice("if_not_found", self.if_not_found, IF_NOT_FOUND) == "SKIP"

    def find_job(
        self, context: Context, connect: Callable[[], AbstractContextManager[CkptClient]], pause: float, log: Log
    ) -> str:
        """The id of the job that is meant by every step of this task, to which its links lead from now on.

        :raises CkptArgumentInvalid: when it can be none.
        :raises CkptJobNotFound: when there is none, and the task is not to be skipped for it.
        :raises CkptJobAmbiguous: when several have the name.
        :raises CkptClientError: what the client raises.
        """
        skips = self.skips
        if skips and self.job in (None, "", "None"):
            raise AirflowSkipException(f"job: {self.job!r}, no task has come to know a job")
        given, journal = arguments.job(self.job), Journal(context, _RECORD)
        record = journal.read()
        if record.get("job") == given:
            self._found = str(record["job_id"])
        elif is_id(given) and not skips:
            self._found = given
        else:
            line = self._looked_up(given, connect, pause, skips=skips)
            self._found = line.job_id
            log.info("Job %r is %s, which is %s", given, line.job_id, line.state)
            journal.write(job=given, job_id=self._found)
        self.publish_job(context, self._found)
        return self._found

    def _looked_up(
        self, given: str, connect: Callable[[], AbstractContextManager[CkptClient]], pause: float, *, skips: bool
    ) -> JobLine:
        try:
            with connect() as client:
                steps = resolve(given, ended=self.finds_ended, pause=pause)
                return client.run(steps, patience_s=client.patience_s)
        except CkptJobNotFound as error:
            if skips:
                raise AirflowSkipException(str(error)) from error
            raise

    def go_on_with(self, context: Context, next_kwargs: dict[str, Any] | None) -> None:
        """After a deferral: the job is the one that was waited for."""
        trigger = ((next_kwargs or {}).get("event") or {}).get("trigger") or {}
        self._found = trigger.get("job_id") or Journal(context, _RECORD).read().get("job_id") or self._found

    def forget_job(self, context: Context) -> None:
        """After a success: a cleared task looks for the job again."""
        Journal(context, _RECORD).forget()
