"""The base classes of the operators: deadlines, requests with clear failures, and the meaning of a wait's end.

The life of an asynchronous operation as a task, in :class:`CkptOperationOperator`: recorded, started once, found again
by a later try.

1. The trigger id is written to the journal before the request, and the request is idempotent on it: there is no moment
   at which a crash loses or doubles an operation.
2. A later try requests the state of the operation: in progress - attach; succeeded - return its result; failed or
   unknown - start another.
3. It is started once the job can take it: the task waits for a job that is restarting or that a new driver recovers.
4. An operation that fails is started once more within the same deadline if the failure was not its own: it was found
   again and belonged to an earlier try; the job manager has forgotten it, as a new driver does; or the job has
   restarted in the meantime.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferralTimeout

from airflow_provider_ckpt import advice, arguments
from airflow_provider_ckpt.arguments import Duration, Templated, hide
from airflow_provider_ckpt.conditions.base import (
    Backoff,
    Condition,
    Json,
    MissingPolicy,
    Progress,
    Status,
    Verdict,
    poll_until_stable,
)
from airflow_provider_ckpt.conditions.job import Operation, OperationCondition, ReadyForSnapshotCondition
from airflow_provider_ckpt.exceptions import (
    CkptConflict,
    CkptJobFailed,
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.lineage import LineageReport, ReportsLineage, Written
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.retry import CkptRetryPolicy
from airflow_provider_ckpt.tasks import CkptJobTask, CkptTask, Journal, new_id
from airflow_provider_ckpt.triggers.wait import with_time_left
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCalls, CkptClient
from ckpt_runtime.client.errors import (
    BadRequest,
    CkptClientError,
    Conflict,
    NotFound,
    NotServed,
    Unauthorized,
    is_passing,
)
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import Deadline, persistent
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink


T = TypeVar("T")


class CkptOperator(ReportsLineage, CkptTask, BaseOperator):
    """Base of the operators; not for use in DAGs.

    Durations are a number of seconds, a text such as ``"90 s"`` or ``"5 min"``, or a timedelta.

    :param ckpt_conn_id: the Airflow connection of the job manager. (templated)
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``, else the variable
        ``AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE``, else true.
    :param defer_after: how long to wait in the worker first, since most operations take less than a deferral does; 0
        defers at once; default ``[ckpt] defer_after``. (templated)
    :param wait_timeout: how long one try waits; default ``[ckpt] wait_timeout``, or as the operator documents.
        A shorter ``execution_timeout`` of the task applies too, also while it is deferred. (templated)
    :param poll_interval: between two polls; default ``[ckpt] poll_interval``. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used; nothing was sent
    :raises CkptConnectionInvalid: a field of the connection cannot be used
    :raises CkptRequestRejected: the token was refused, the job manager refused the request, or has no such call
    :raises CkptUnavailable: the job manager did not answer, or could not serve the request, for longer than ``[ckpt]
        request_retry_timeout``
    :raises CkptNotFound: the job manager has answered several times that it does not know the job
    :raises CkptOperationFailed: the requested operation failed
    :raises CkptConflict: the present state of the job forbids the request; the default ``retry_policy``,
        :class:`~airflow_provider_ckpt.retry.CkptRetryPolicy`, makes no retry
    :raises CkptWaitTimeout: ``wait_timeout`` has passed; the message says whether the remote operation continues
    """

    template_fields: Collection[str] = ("ckpt_conn_id", "defer_after", "wait_timeout", "poll_interval")
    ui_color = "#e3f0ec"

    def __init__(
        self,
        *,
        ckpt_conn_id: str = CkptHook.default_conn_name,
        deferrable: bool | None = None,
        defer_after: Templated[Duration] | None = None,
        wait_timeout: Templated[Duration] | None = None,
        poll_interval: Templated[Duration] | None = None,
        **kwargs: Any,
    ) -> None:
        # Each field of a result is an XCom of its own, which templates and XComArgs of other tasks can name.
        kwargs.setdefault("multiple_outputs", True)
        super().__init__(**kwargs)
        if self.retry_policy is None:
            self.retry_policy = CkptRetryPolicy()
        self.ckpt_conn_id = ckpt_conn_id
        self.deferrable = arguments.deferrable() if deferrable is None else arguments.flag("deferrable", deferrable)
        self.defer_after = defer_after
        self.wait_timeout = wait_timeout
        self.poll_interval = poll_interval
        self.link_addresses: dict[str, str] = {}

    def render_template(self, *args: Any, **kwargs: Any) -> Any:
        """Render part by part, as every operator does; Airflow stores and shows the result before ``execute``."""
        rendered = super().render_template(*args, **kwargs)
        hide(rendered)
        return rendered

    # -- requests ----------------------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When this try gives up, in seconds since the epoch; ``None``: never.

        :raises CkptArgumentInvalid: for any argument of the wait; each ``execute`` begins with this.
        """
        self.pause()
        self.seconds_before_deferral()
        given = arguments.optional_seconds("wait_timeout", self.wait_timeout)
        limit = self.default_wait_timeout() if given is None else given
        limit = min(math.inf if limit is None else limit, self.attempt_limit())
        return None if math.isinf(limit) else time.time() + limit

    def pause(self) -> float:
        """Seconds between two polls."""
        given = arguments.optional_seconds("poll_interval", self.poll_interval)
        return (
            arguments.configured_seconds("poll_interval") if given is None else arguments.pause("poll_interval", given)
        )

    def default_wait_timeout(self) -> float | None:
        """Return the seconds that a try waits when the DAG author gives none; ``None``: without a limit."""
        return arguments.configured_seconds("wait_timeout")

    @contextmanager
    def connected(self, deadline: float | None = None) -> Iterator[CkptClient]:
        """Give a client, whose errors become exceptions that decide whether Airflow retries."""
        try:
            with super().connected(deadline) as client:
                yield client
        except CkptClientError as error:
            text = advice.on_error(error, self.ckpt_conn_id)
            if isinstance(error, (Unauthorized, BadRequest, NotServed)):
                raise CkptRequestRejected(text) from error
            if isinstance(error, NotFound):
                raise CkptNotFound(text) from error
            if isinstance(error, Conflict):
                raise CkptConflict(text) from error
            raise (CkptUnavailable if is_passing(error) else CkptOperationFailed)(text) from error

    def ask(self, client: CkptClient, call: Call[T]) -> T:
        """Perform an idempotent request. "Not found" counts only after several such answers in a row.

        :raises CkptClientError: what the client raises once its retry timeout is over.
        """
        return client.run(self.asked(client.calls, call))

    async def asked(self, client: AsyncCalls, call: Call[T]) -> T:
        """As :meth:`ask`, within a coroutine."""
        for _ in range(MissingPolicy.LIMIT - 1):
            try:
                return await client.execute(call)
            except NotFound as error:
                self.log.info("%s; looking again", error)
                await asyncio.sleep(self.pause())
        return await client.execute(call)

    def look(self, client: CkptClient, condition: Condition) -> Verdict | None:
        """Poll a condition once within the client's retry timeout; poll again where something seems to be missing."""
        progress = Progress(self.log, condition.subject)
        return client.run(poll_until_stable(condition, client.calls, progress, self.pause()))

    # -- ends of waits -----------------------------------------------------------------------------------------

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue after a deferral; turns Airflow's deferral timeout into this operator's own timeout."""
        event = (next_kwargs or {}).get("event")
        if event is not None:
            next_kwargs = {**(next_kwargs or {}), "event": with_time_left(event)}
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout as error:
            raise CkptWaitTimeout(
                "Airflow's deferral timeout passed before the trigger reported, perhaps because no triggerer runs. "
                + self.after_timeout(context, None)
            ) from error

    def after_timeout(self, context: Context, event: Json | None) -> str:
        """Clean up once the deadline has passed, and return what becomes of the rest as a sentence."""
        return ""

    def timeout_error(self, context: Context, event: Json) -> Exception:
        """Return the exception for a deadline that has passed, after the cleanup."""
        message = advice.on_verdict(event, self.ckpt_conn_id)
        return CkptWaitTimeout(f"{message}. {self.after_timeout(context, event)}".rstrip(". "))


class CkptJobOperator(CkptJobTask, CkptOperator):
    """Base of the operators that act on one existing job; not for use in DAGs.

    :param job: the job: its id, its name where no other living job has it, or a task's result that has an id.
        (templated)
    :param if_not_found: ``fail``, or ``skip`` this task, when there is no such job. (templated)
    :raises CkptJobNotFound: no job of this name lives; the message lists those that do
    :raises CkptJobAmbiguous: several living jobs have the name; the message lists them
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "job", "if_not_found")
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS
    failed_wait: ClassVar[type[Exception]] = CkptOperationFailed
    """Raised if what the operator waits for can no longer come."""

    def __init__(self, *, job: Templated[str], if_not_found: Templated[str] = "fail", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.if_not_found = if_not_found

    @property
    def requester(self) -> str:
        """The name of the requester, for the savepoint catalogue and for clients that have to wait for an upgrade."""
        return f"airflow: {self.dag_id}/{self.task_id}"

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        event = event or {}
        self.publish_job(context, self.found_job)
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event, self.failed_wait)
        return self.reached(context, event)

    def reached(self, context: Context, event: Json) -> Any:
        """Return the result of a wait that has succeeded."""
        raise NotImplementedError

    async def asked_change(self, client: AsyncCalls, job_id: str, call: Call[T]) -> T:
        """Ask for a change of the job's configuration.

        :raises CkptJobFailed: the job has ended.
        """
        try:
            return await self.asked(client, call)
        except Conflict as error:
            job = await self.asked(client, requests.job_details(job_id))
            if job.state in TERMINAL_STATES:
                raise CkptJobFailed(f"job {job_id} is {job.state}, so its configuration cannot be changed") from error
            raise

    def change(self, client: CkptClient, attempt: Callable[[], Awaitable[T]], *, repeats: bool = True) -> T:
        """Change the job; repeat while another change of it is in progress, because that passes, like an absence."""

        def report(error: CkptClientError) -> None:
            self.log.info("Job %s cannot be changed at the moment, trying again: %s", self.found_job, error)

        retry_timeout = Deadline.after(client.calls.retry_timeout_s)
        changing = persistent(
            attempt,
            retry_timeout,
            passing=lambda error: repeats and isinstance(error, Conflict),
            backoff=Backoff(self.pause(), retry_timeout),
            on_away=report,
        )
        return client.run(changing)


MAX_ROUNDS = 3
"""Maximum number of times one attempt starts the operation."""
RECORD = "ckpt_operation"
_NOTHING = Verdict(Status.MISSING, "no earlier try has started an operation")


class CkptOperationOperator(CkptJobOperator):
    """Base of the operators that start an operation of a job and wait for its end; not for use in DAGs.

    With ``if_not_found="skip"``, a job that was found and has since ended counts as not found, unless it has failed.

    :raises CkptJobFailed: the job has ended, and can no longer take such an operation
    """

    operation: ClassVar[Operation]

    @abstractmethod
    def request(self, job_id: str, trigger_id: str) -> Call[str]:
        """Make the request that starts the operation, with the arguments checked."""

    def finished_earlier(self, client: CkptClient, job_id: str) -> Json | None:
        """Return the result, if known, of an operation that must have succeeded although its record has expired."""
        return None

    def still_holds(self, client: CkptClient, job_id: str) -> bool:
        """Tell whether the result of an earlier try's operation is what this try is to return."""
        return True

    def keep(self, context: Context, record: Json, result: Json) -> None:
        """Decide which records the journal keeps after a success: none, so that a cleared task starts another
        operation."""
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
            return self._wait_for_operation(context, record["trigger_id"], deadline, {"inherited": True})
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
            self.log.warning("The %s of an earlier try did not succeed (%s)", condition.subject, verdict.message)
        return verdict

    # -- starting ----------------------------------------------------------------------------------------------

    def _begin(self, context: Context, deadline: float | None, memo: Json) -> Any:
        """Start the operation once the job can take it. ``memo``: its ``round``, and a ``trigger_id`` that is to be
        used again."""
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
            except Conflict:  # perhaps it has ended since that poll
                result = self.finished_earlier(client, job_id)
                if result is None:
                    raise
                return self._succeed(context, result)
        self.log.info("Started the %s %s of job %s", self.operation.noun, trigger_id, job_id)
        memo = {"round": memo["round"], "running_since_ms": facts["running_since_ms"]}
        return self._wait_for_operation(context, trigger_id, deadline, memo)

    def _wait_for_operation(self, context: Context, trigger_id: str, deadline: float | None, memo: Json) -> Any:
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
            return self._on_operation_failed(context, event)
        raise self.failure(context, event)

    def _on_operation_failed(self, context: Context, event: Json) -> Any:
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
        self.log.warning("The %s did not succeed (%s); starting another", self.operation.noun, event["message"])
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
        self.lineage_report = LineageReport(writes=[] if path is None else [Written(path)], job_id=self.found_job)
        self.log.info("The %s of job %s succeeded: %s", self.operation.noun, self.found_job, result)
        return result

    def after_timeout(self, context: Context, event: Json | None) -> str:
        if event is not None and "trigger_id" not in event.get("trigger", {}).get("condition", {}):
            return f"No {self.operation.noun} was started"
        return (
            f"The {self.operation.noun} cannot be cancelled and may still succeed in the job manager; the next try of "
            "this task attaches to it"
        )

    def on_kill(self) -> None:
        """Log what becomes of the operation: the REST API cannot cancel one."""
        self.log.warning(
            "The task was killed; a %s of job %s that was started is not cancelled and runs to its end. "
            "The next try of this task attaches to it.",
            self.operation.noun,
            self.found_job,
        )
