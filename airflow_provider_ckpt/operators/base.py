"""The base class of the operators: deadlines, requests with clear failures, and what a wait's end means."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_provider_ckpt import advice, arguments, defaults
from airflow_provider_ckpt.arguments import Duration, Templated, hide
from airflow_provider_ckpt.conditions.base import Condition, Json, MissingPolicy, Verdict
from airflow_provider_ckpt.conditions.waiting import Backoff, Progress, poll_until_stable
from airflow_provider_ckpt.exceptions import (
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.lineage import ReportsLineage
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.tasks import CkptJobTask, CkptTask
from airflow_provider_ckpt.triggers.wait import with_time_left
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

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

T = TypeVar("T")


class CkptOperator(ReportsLineage, CkptTask, BaseOperator):
    """Base of the operators; not for use in DAGs.

    Durations are a number of seconds, a text such as ``"90 s"`` or ``"5 min"``, or a timedelta.

    :param ckpt_conn_id: the Airflow connection of the job manager. (templated)
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``.
    :param defer_after: how long to wait in the worker first, since most operations take less than a deferral does; 0
        defers at once; default ``[ckpt] defer_after``. (templated)
    :param wait_timeout: how long one try waits; default ``[ckpt] wait_timeout``, or as the operator documents.
        A shorter ``execution_timeout`` of the task applies too, also while it is deferred. (templated)
    :param poll_interval: between two polls; default ``[ckpt] poll_interval``. (templated)
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used; nothing was sent
    :raises CkptConnectionInvalid: a field of the connection cannot be used
    :raises CkptRequestRejected: the token was refused, the job manager refused the request, or has no such call
    :raises CkptUnavailable: the job manager was away, or could not serve, for longer than ``[ckpt]
        request_patience``
    :raises CkptNotFound: the job manager has answered several times that it does not know the job
    :raises CkptOperationFailed: the requested operation failed
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

        :raises CkptArgumentInvalid: for any argument of the wait; each ``execute`` begins with this.
        """
        self.pause()
        self.seconds_here()
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
        """Give a client, whose errors become exceptions that tell Airflow whether a retry makes sense."""
        try:
            with super().connected(deadline) as client:
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
        """Look once at a condition with the client's patience; look again where something seems to be missing."""
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

    def __init__(self, *, job: Templated[str], if_not_found: Templated[str] = "fail", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job = job
        self.if_not_found = if_not_found

    @property
    def requester(self) -> str:
        """The requester's name, for the savepoint catalogue and for clients that have to wait for an upgrade."""
        return f"airflow: {self.dag_id}/{self.task_id}"

    def change(self, client: CkptClient, attempt: Callable[[], Awaitable[T]], *, repeats: bool = True) -> T:
        """Change the job; repeat while another change of it is in progress, because that passes, like an absence."""

        def report(error: CkptClientError) -> None:
            self.log.info("Job %s takes no change at the moment, trying again: %s", self.found_job, error)

        patience = Deadline.after(client.calls.patience_s)
        changing = persistent(
            attempt,
            patience,
            passing=lambda error: repeats and isinstance(error, Conflict),
            backoff=Backoff(self.pause(), patience),
            on_away=report,
        )
        return client.run(changing)
