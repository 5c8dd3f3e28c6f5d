"""What all operators share: the connection, waiting in the triggerer or here, deadlines, links, and clear failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_provider_ckpt import advice, arguments, defaults
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Condition, MissingPolicy, Status, Verdict
from airflow_provider_ckpt.conditions.progress import Progress
from airflow_provider_ckpt.conditions.waiting import Backoff, poll_until_stable
from airflow_provider_ckpt.exceptions import (
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.job_tasks import CkptJobTask
from airflow_provider_ckpt.lineage import TellsLineage
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.secret_values import hide
from airflow_provider_ckpt.tasks import (
    FIRST_LOOKS_SECONDS,
    CkptTask,
    backstop,
    seconds_here,
    tell_trace,
    wait_here,
)
from airflow_provider_ckpt.triggers.base import CkptTrigger, event_payload, with_time_left
from ckpt_runtime.client.clients import CkptClient
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
from ckpt_runtime.client.waiting import Deadline, Pause, Steps, persistent

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

Event = dict[str, Any]

T = TypeVar("T")


class CkptOperator(TellsLineage, CkptTask, BaseOperator):
    """Base of the operators; not for use in DAGs.

    Durations are a number of seconds, a text such as ``"90 s"`` or ``"5 min"``, or a timedelta.

    :param ckpt_conn_id: the Airflow connection of the job manager. (templated)
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``.
    :param defer_after: how long to wait in the worker first, since most operations take less than a deferral does; 0
        defers at once; default ``[ckpt] defer_after``. (templated)
    :param wait_timeout: how long one try waits; default ``[ckpt] wait_timeout``, unless an operator says otherwise.
        A shorter ``execution_timeout`` of the task applies too, also while it is deferred. (templated)
    :param poll_interval: between two polls; default ``[ckpt] poll_interval``. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used; nothing was sent
    :raises CkptConnectionInvalid: a field of the connection cannot be used
    :raises CkptRequestRejected: the token was refused, the job manager refused the request, or has no such call
    :raises CkptUnavailable: the job manager was away, or could not serve, for longer than ``[ckpt]
        request_patience``
    :raises CkptNotFound: the job manager has said several times that it does not know the job
    :raises CkptOperationFailed: what was asked for came to nothing
    :raises CkptWaitTimeout: ``wait_timeout`` has passed; the message says what became of the remote operation
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
        self.ckpt_conn_id = ckpt_conn_id
        self.deferrable = defaults.deferrable() if deferrable is None else arguments.flag("deferrable", deferrable)
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

        :raises CkptArgumentInvalid: for any argument that says how to wait; each ``execute`` begins with this.
        """
        self.pause()
        seconds_here(self.defer_after)
        given = arguments.optional_seconds("wait_timeout", self.wait_timeout)
        limit = self.default_wait_timeout() if given is None else given
        limit = min(math.inf if limit is None else limit, self.longest_try())
        return None if math.isinf(limit) else time.time() + limit

    def pause(self) -> float:
        """Seconds between two polls."""
        given = arguments.optional_seconds("poll_interval", self.poll_interval)
        return defaults.poll_interval() if given is None else arguments.pause("poll_interval", given)

    def default_wait_timeout(self) -> float | None:
        """Return the seconds that a try waits when the DAG author gives none; ``None``: without a limit."""
        return defaults.wait_timeout()

    @contextmanager
    def connected(self, deadline: float | None = None) -> Iterator[CkptClient]:
        """Give a client that waits for an absent job manager, limited by ``[ckpt] request_patience`` and ``deadline``.

        Its errors become exceptions that tell Airflow whether a retry makes sense.
        """
        away = Progress(self.log, "the session to answer").away
        try:
            with self.hook.get_conn(patience=self.request_patience(deadline), on_away=away) as client:
                yield client
        except CkptClientError as error:
            text = advice.on_error(error, self.ckpt_conn_id)
            if isinstance(error, (Unauthorized, BadRequest, NotServed)):
                raise CkptRequestRejected(text) from error
            if isinstance(error, NotFound):
                raise CkptNotFound(text) from error
            raise (CkptUnavailable if is_passing(error) else CkptOperationFailed)(text) from error

    def ask(self, client: CkptClient, call: Call[T]) -> T:
        """Perform an idempotent request. "Not found" counts only when it comes several times in a row.

        :raises CkptClientError: what the client raises once its patience is over.
        """
        return client.run(self.asked(call), patience_s=client.patience_s)

    def asked(self, call: Call[T]) -> Steps[T]:
        """Give the steps of :meth:`ask`."""
        for _ in range(MissingPolicy.LIMIT - 1):
            try:
                answer: T = yield call
            except NotFound as error:
                self.log.info("%s; looking again", error)
                yield Pause(self.pause())
            else:
                return answer
        answer = yield call
        return answer

    def look(self, client: CkptClient, condition: Condition) -> Verdict | None:
        """Look once at a condition with the client's patience; look again where something seems to be missing."""
        steps = poll_until_stable(condition, Progress(self.log, condition.subject), self.pause())
        return client.run(steps, patience_s=client.patience_s)

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait_for(self, context: Context, trigger: CkptTrigger) -> Any:
        """Wait for the trigger's condition, here for a while and then deferred; ends in ``execute_complete``."""
        seconds, interval = math.inf, self.pause()
        if self.deferrable:
            seconds, interval = seconds_here(self.defer_after), min(interval, FIRST_LOOKS_SECONDS)
        if seconds > 0:
            verdict = wait_here(self.connected, trigger, seconds, interval, self.log)
            if verdict is not None:
                return self.execute_complete(context, event_payload(verdict, trigger))
        # The trigger ends at the deadline by itself; Airflow's timeout is for one that never reports.
        return self.defer(trigger=trigger, method_name="execute_complete", timeout=backstop(trigger.deadline))

    def execute_complete(self, context: Context, event: Event | None = None) -> Any:
        """Continue after a wait. The event holds the verdict and the trigger's arguments."""
        raise NotImplementedError

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

    def after_timeout(self, context: Context, event: Event | None) -> str:
        """Clean up once the deadline has passed, and say what becomes of the rest."""
        return ""

    def failure(self, context: Context, event: Event, failed: type[Exception] = CkptOperationFailed) -> Exception:
        """Return the exception for an unsuccessful event, after its trace is logged and the remaining cleanup is
        done."""
        tell_trace(self.log, event)
        status, message = Status(event["status"]), str(event["message"])
        if status is Status.TIMEOUT:
            message = advice.on_verdict(event, self.ckpt_conn_id)
            return CkptWaitTimeout(f"{message}. {self.after_timeout(context, event)}".rstrip(". "))
        if status is Status.MISSING:
            return CkptNotFound(advice.on_missing(message, self.ckpt_conn_id))
        if status is Status.REFUSED:
            return CkptRequestRejected(advice.on_verdict(event, self.ckpt_conn_id))
        return failed(message)


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

    def __init__(self, *, job: Templated[str], if_not_found: Templated[str] = "fail", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.if_not_found = if_not_found

    @property
    def requester(self) -> str:
        """The requester's name, for the savepoint catalogue and for clients that have to wait for an upgrade."""
        return f"airflow: {self.dag_id}/{self.task_id}"

    @property
    def job_id(self) -> XComArg:
        """The id of the job that this task has found, for arguments of other tasks."""
        return XComArg(self, "job_id")

    def find(self, context: Context, deadline: float | None) -> str:
        """Return the id of the job, see :meth:`find_job`; errors as of :meth:`connected`."""
        return self.find_job(context, lambda: self.connected(deadline), self.pause(), self.log)

    def change(self, client: CkptClient, attempt: Callable[[], Steps[T]], *, repeats: bool = True) -> T:
        """Change the job; repeat while another change of it is in progress, because that passes, like an absence."""
        patience = Deadline.after(client.patience_s)
        steps = persistent(
            attempt,
            patience,
            passing=lambda error: repeats and isinstance(error, Conflict),
            backoff=Backoff(self.pause(), patience),
            on_away=self._tell_conflict,
        )
        return client.run(steps, patience_s=client.patience_s)

    def _tell_conflict(self, error: CkptClientError) -> None:
        self.log.info("Job %s takes no change at the moment, trying again: %s", self.found_job, error)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue as every operator does; the job stays the one that was waited for."""
        self.go_on_with(context, next_kwargs)
        return super().resume_execution(next_method, next_kwargs, context)
