"""The life of an asynchronous operation as a task: recorded, started once, found again by a later try.

1. The trigger id is written to the journal before the request, and the request is idempotent on it: there is no moment
   at which a crash loses or doubles an operation.
2. A later try asks about the operation: in progress - attach; succeeded - return its result; failed or unknown - start
   another.
3. It is started once the job can take it: the task waits for a job that is restarting or that a new driver recovers.
4. An operation that fails is started once more within the same deadline if the failure was not its own: it was found
   again and belonged to an earlier try; the job manager has forgotten it, as a new driver does; or the job has
   restarted meanwhile.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ckpt.conditions.base import Json, Status, Verdict
from airflow_provider_ckpt.conditions.job import ReadyForSnapshotCondition
from airflow_provider_ckpt.conditions.operation import Operation, OperationCondition
from airflow_provider_ckpt.exceptions import CkptJobFailed
from airflow_provider_ckpt.journal import Journal, new_id
from airflow_provider_ckpt.lineage import Written
from airflow_provider_ckpt.operators.base import CkptJobOperator
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import Conflict
from ckpt_runtime.client.models import TERMINAL_STATES
from ckpt_runtime.client.requests import Call

if TYPE_CHECKING:
    from airflow.sdk import Context

MAX_ROUNDS = 3
"""Maximum number of times one attempt starts the operation."""
RECORD = "ckpt_operation"
_NOTHING = Verdict(Status.MISSING, "no earlier try has started an operation")


class CkptOperationOperator(CkptJobOperator):
    """Base of the operators that start an operation of a job and wait for its end; not for use in DAGs.

    With ``if_not_found="skip"``, a job that was found and has ended since counts as not found, unless it has
    failed.

    :raises CkptJobFailed: the job has ended, and can no longer take such an operation
    """

    operation: ClassVar[Operation]

    @abstractmethod
    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        """Make the request that starts the operation, with the arguments checked."""

    def finished_earlier(self, client: CkptClient, job_id: str) -> Json | None:
        """Return the result of an operation that must have succeeded though its record is gone, if it is known."""
        return None

    def still_holds(self, client: CkptClient, job_id: str) -> bool:
        """Tell whether the result of an earlier try's operation is what this try is to return."""
        return True

    def keep(self, context: Context, record: Json, result: Json) -> None:
        """Decide what the journal keeps after a success: nothing, so that a cleared task starts another operation."""
        Journal(context, RECORD).forget()
        self.forget_job(context)

    def execute(self, context: Context) -> Any:
        # Bad arguments are reported before anything is sent.
        self.request("0" * 32, new_id(context, self.operation.value))
        deadline = self.deadline()
        job_id = self.find_job(context, deadline)
        record = Journal(context, RECORD).read()
        known = record.get("job_id") == job_id and record.get("operation") == self.operation.value
        with self.connected(deadline) as client:
            verdict = self._look_up(client, record) if known else _NOTHING
        if verdict is None:
            return self._attend(context, record["trigger_id"], deadline, {"inherited": True})
        if verdict.status is Status.DONE:
            return self._succeed(context, verdict.result)
        # Unknown: the request never arrived, or is still on its way. Reusing the id makes both requests one operation.
        same = record["trigger_id"] if known and verdict.status is Status.MISSING else None
        return self._begin(context, deadline, {"round": 0, "trigger_id": same})

    def _look_up(self, client: CkptClient, record: Json) -> Verdict | None:
        """Return what became of the operation of an earlier try; ``None`` while it runs."""
        job_id, trigger_id = record["job_id"], record["trigger_id"]
        if record.get("result") is not None and self.still_holds(client, job_id):
            self.log.info("An earlier try of this task has succeeded: %s", record["result"])
            return Verdict(Status.DONE, result=record["result"])
        condition = OperationCondition(job_id, self.operation, trigger_id)
        verdict = self.look(client, condition)
        if verdict is None:
            self.log.info("Attaching to the %s, which an earlier try started", condition.subject)
        elif verdict.status is Status.DONE:
            if not self.still_holds(client, job_id):
                return Verdict(Status.FAILED, "superseded")
            self.log.info("The %s, which an earlier try started, has succeeded", condition.subject)
        else:
            self.log.warning("The %s of an earlier try came to nothing (%s)", condition.subject, verdict.message)
        return verdict

    # -- starting ----------------------------------------------------------------------------------------------

    def _begin(self, context: Context, deadline: float | None, memo: Json) -> Any:
        """Start the operation as soon as the job can take it; not while the job is restarting or being stopped.

        ``memo``: the ``round``, and the ``trigger_id`` if it is not to be a new one.
        """
        condition = ReadyForSnapshotCondition(self.found_job)
        with self.connected(deadline) as client:
            verdict = self.look(client, condition)
        if verdict is None:
            return self.wait_for(context, condition, deadline, memo)
        if verdict.status is not Status.DONE:
            raise self.failure(context, {"status": verdict.status, "message": verdict.message, "trace": verdict.trace})
        self.publish_job(context, self.found_job)
        return self._start(context, verdict, deadline, memo)

    def _start(self, context: Context, ready: Verdict, deadline: float | None, memo: Json) -> Any:
        """The job is ready, or has ended."""
        job_id, facts = self.found_job, ready.result
        with self.connected(deadline) as client:
            if facts["status"] in TERMINAL_STATES:
                result = self.finished_earlier(client, job_id)
                if result is None:
                    self.log_trace({"trace": ready.trace})
                    noun = self.operation.noun
                    text = f"job {job_id} is {facts['status']}{ready.message}; it can no longer take a {noun}"
                    if self.skips and facts["status"] != "FAILED":
                        raise AirflowSkipException(text)
                    raise CkptJobFailed(text)
                return self._succeed(context, result)
            trigger_id = memo["trigger_id"] or new_id(context, f"{self.operation.value}/{memo['round']}")
            Journal(context, RECORD).write(operation=self.operation.value, job_id=job_id, trigger_id=trigger_id)
            try:
                self.ask(client, self.request(job_id, trigger_id))
            except Conflict:  # perhaps it has ended since that look
                result = self.finished_earlier(client, job_id)
                if result is None:
                    raise
                return self._succeed(context, result)
        self.log.info("Started the %s %s of job %s", self.operation.noun, trigger_id, job_id)
        memo = {"round": memo["round"], "running_since_ms": facts["running_since_ms"]}
        return self._attend(context, trigger_id, deadline, memo)

    def _attend(self, context: Context, trigger_id: str, deadline: float | None, memo: Json) -> Any:
        condition = OperationCondition(self.found_job, self.operation, trigger_id)
        return self.wait_for(context, condition, deadline, memo)

    # -- ends --------------------------------------------------------------------------------------------------

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        self.publish_job(context, self.found_job)
        status, started = Status(event["status"]), "trigger_id" in event["trigger"]["condition"]
        if status is Status.DONE and started:
            return self._succeed(context, event["result"])
        if status is Status.DONE:
            ready = Verdict(status, str(event["message"]), event["result"], str(event["trace"]))
            return self._start(context, ready, event["trigger"]["deadline"], event["trigger"]["memo"])
        if started and status in (Status.FAILED, Status.MISSING):
            return self._came_to_nothing(context, event)
        raise self.failure(context, event)

    def _came_to_nothing(self, context: Context, event: Json) -> Any:
        """Raise the failure, or start another operation if this one was not the task's own or the job has restarted."""
        memo, deadline = event["trigger"]["memo"], event["trigger"]["deadline"]
        round_ = memo.get("round", 0) + 1
        with self.connected(deadline) as client:
            result = self.finished_earlier(client, self.found_job)
            again = result is None and round_ < MAX_ROUNDS and self._is_to_repeat(client, event)
        if result is not None:
            return self._succeed(context, result)
        # The outcome of this operation is known and final, so the next one gets a new id.
        Journal(context, RECORD).forget()
        if not again or (deadline is not None and time.time() >= deadline):
            raise self.failure(context, event)
        self.log.warning("The %s came to nothing (%s); starting another", self.operation.noun, event["message"])
        return self._begin(context, deadline, {"round": round_, "trigger_id": None})

    def _is_to_repeat(self, client: CkptClient, event: Json) -> bool:
        """True if an earlier try started it, the job manager forgot it, or a restart of the job ended it."""
        memo = event["trigger"]["memo"]
        if memo.get("inherited") or Status(event["status"]) is Status.MISSING:
            return True
        now = self.look(client, ReadyForSnapshotCondition(self.found_job))
        if now is None:
            return True
        restarted = now.result.get("running_since_ms") != memo["running_since_ms"]
        return restarted and now.result.get("status") not in TERMINAL_STATES

    def _succeed(self, context: Context, result: Json) -> Json:
        self.keep(context, Journal(context, RECORD).read(), result)
        path = result.get("savepoint_path")
        self.report_lineage(writes=[] if path is None else [Written(path)], job_id=self.found_job)
        self.log.info("The %s of job %s succeeded: %s", self.operation.noun, self.found_job, result)
        return result

    def after_timeout(self, context: Context, event: Json | None) -> str:
        if event is not None and "trigger_id" not in event.get("trigger", {}).get("condition", {}):
            return f"No {self.operation.noun} was started"
        return (
            f"The {self.operation.noun} cannot be taken back and may still succeed at the job manager; "
            "the next try of this task attaches to it"
        )

    def on_kill(self) -> None:
        """Log what becomes of the operation: the REST API cannot cancel one."""
        self.log.warning(
            "The task was killed; a %s of job %s that was started is not cancelled and runs to its end. "
            "The next try of this task attaches to it.",
            self.operation.noun,
            self.found_job,
        )
