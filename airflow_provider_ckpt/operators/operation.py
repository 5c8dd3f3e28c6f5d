"""The life of an asynchronous operation as a task: written down, started once, found again.

1. The trigger id is written to the journal before the request, and the request is idempotent on it: there is no moment
   at which a crash loses or doubles an operation.
2. A later try asks after the operation: in progress - attach; succeeded - return its result; failed - start another;
   unknown - the request never arrived, or the record of it expired: repeat it under the same id.
3. If an operation that was found again fails (it was started by an earlier try, perhaps one that a person has cleared
   meanwhile), one more is started within the same deadline.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt.conditions.base import Json, Status, Verdict
from airflow_provider_ckpt.conditions.driver import poll_once
from airflow_provider_ckpt.conditions.operation import Operation, OperationCondition
from airflow_provider_ckpt.operators.base import CkptJobOperator, Event
from airflow_provider_ckpt.operators.journal import Journal, new_id
from airflow_provider_ckpt.triggers.operation import CkptOperationTrigger
from ckpt_runtime.client import CkptClient
from ckpt_runtime.client.requests import Call

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_operation"
_NOTHING = Verdict(Status.MISSING, "no earlier try has started an operation")


class CkptOperationOperator(CkptJobOperator):
    """Base of the operators that start an operation of a job and wait for its end; not for use in DAGs."""

    operation: ClassVar[Operation]

    @abstractmethod
    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        """The request that starts the operation, with the arguments checked."""

    def finished_earlier(self, client: CkptClient, job_id: str) -> Json | None:
        """The result of an operation that must have succeeded although its record is gone, where that can be told."""
        return None

    def still_holds(self, client: CkptClient, job_id: str) -> bool:
        """Whether the result of an earlier try's operation is what this try is to return."""
        return True

    def execute(self, context: Context) -> Any:
        job_id = self.checked_job_id()
        request = self.request(job_id, new_id(context, self.operation.value))
        self.publish_links(context, job_id)
        journal, deadline = Journal(context, _RECORD), self.deadline()
        record = journal.read()
        known = record.get("job_id") == job_id and record.get("operation") == self.operation.value
        with self.connected() as client:
            verdict = self._look_up(client, journal, record, deadline) if known else _NOTHING
            if verdict is None:
                trigger_id = record["trigger_id"]
            elif verdict.status is not Status.DONE:
                trigger_id = self._start(client, context, request, deadline, "")
        if verdict is not None and verdict.status is Status.DONE:
            return self._succeed(context, verdict.result)
        return self._attend(context, trigger_id, deadline, inherited=verdict is None)

    def _look_up(self, client: CkptClient, journal: Journal, record: Json, deadline: float) -> Verdict | None:
        """What became of the operation of an earlier try; ``None`` when it runs (again)."""
        job_id, trigger_id = record["job_id"], record["trigger_id"]
        condition = OperationCondition(self.operation, job_id, trigger_id)
        verdict = poll_once(condition, client)
        if verdict is None:
            self.log.info("Attaching to the %s, which an earlier try started", condition.subject)
            return None
        if verdict.status is Status.DONE:
            if self.still_holds(client, job_id):
                self.log.info("The %s, which an earlier try started, has succeeded", condition.subject)
                return verdict
            return Verdict(Status.FAILED, "superseded")
        if verdict.status is Status.FAILED:
            self.log.warning("The %s of an earlier try failed (%s)", condition.subject, verdict.message)
            return verdict
        result = self.finished_earlier(client, job_id)
        if result is not None:
            return Verdict(Status.DONE, result=result)
        self.log.info("The job manager does not know the %s; repeating the request", condition.subject)
        self.ask(client, self.request(job_id, trigger_id), deadline)
        return None

    def _start(self, client: CkptClient, context: Context, request: Call[str], deadline: float, suffix: str) -> str:
        job_id = self.checked_job_id()
        trigger_id = new_id(context, self.operation.value + suffix)
        Journal(context, _RECORD).write(operation=self.operation.value, job_id=job_id, trigger_id=trigger_id)
        self.ask(client, request, deadline)
        self.log.info("Started the %s %s of job %s", self.operation.noun, trigger_id, job_id)
        return trigger_id

    def _attend(self, context: Context, trigger_id: str, deadline: float, *, inherited: bool) -> Any:
        trigger = CkptOperationTrigger(
            ckpt_conn_id=self.ckpt_conn_id,
            deadline=deadline,
            poll_interval=self.poll_interval,
            memo={"inherited": inherited},
            operation=self.operation.value,
            job_id=self.checked_job_id(),
            trigger_id=trigger_id,
        )
        return self.wait_for(context, trigger)

    def execute_complete(self, context: Context, event: Event | None = None) -> Any:
        event = event or {}
        self.publish_links(context, self.checked_job_id())
        status, trigger = Status(event["status"]), event["trigger"]
        if status is Status.DONE:
            return self._succeed(context, event["result"])
        if status in (Status.FAILED, Status.MISSING) and trigger["memo"].get("inherited"):
            self.log.warning("The operation of an earlier try ended badly (%s); starting another", event["message"])
            return self._start_once_more(context, trigger["deadline"])
        if status is Status.FAILED:
            # Its outcome is known and final: the next try is to start another at once.
            Journal(context, _RECORD).forget()
        raise self.failure(context, event)

    def _start_once_more(self, context: Context, deadline: float) -> Any:
        suffix = "/again"
        request = self.request(self.checked_job_id(), new_id(context, self.operation.value + suffix))
        with self.connected() as client:
            trigger_id = self._start(client, context, request, deadline, suffix)
        return self._attend(context, trigger_id, deadline, inherited=False)

    def _succeed(self, context: Context, result: Json) -> Json:
        Journal(context, _RECORD).forget()
        self.log.info("The %s of job %s succeeded: %s", self.operation.noun, self.job_id, result)
        return result

    def after_timeout(self, context: Context, event: Event | None) -> str:
        return (
            f"The {self.operation.noun} cannot be taken back and may still succeed at the job manager; "
            "the next try of this task attaches to it"
        )

    def on_kill(self) -> None:
        """Say what becomes of the operation: the REST API has no way to take one back."""
        self.log.warning(
            "The task was killed; a %s of job %s that was started is not cancelled and runs to its end. "
            "The next try of this task attaches to it.",
            self.operation.noun,
            self.job_id,
        )
