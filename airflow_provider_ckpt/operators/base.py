"""What all operators share: the connection, waiting in the triggerer or here, deadlines, links, and honest failures."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_provider_ckpt import arguments, defaults
from airflow_provider_ckpt.conditions.base import Status
from airflow_provider_ckpt.conditions.driver import Pacing, T, insist, is_passing, wait
from airflow_provider_ckpt.exceptions import (
    CkptOperationFailed,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.triggers.base import CkptTrigger, event_payload
from ckpt_runtime.client import BadRequest, CkptClient, CkptClientError, Unauthorized
from ckpt_runtime.client.requests import Call

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

Event = dict[str, Any]

REQUEST_PATIENCE_SECONDS = 60.0
"""How long a worker repeats one request to a job manager that is away, within the task's deadline."""
FIRST_LOOKS_SECONDS = 0.5
"""Between two polls in a worker that is about to defer, at most."""
_BACKSTOP_SECONDS = 120.0
"""The trigger keeps the deadline; Airflow's deferral timeout comes so much later, for a triggerer that is down."""


class CkptOperator(BaseOperator):
    """Base of the operators; not for use in DAGs.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``.
    :param defer_after: seconds to wait in the worker first, since most operations take less than a deferral does; 0
        defers at once; default ``[ckpt] defer_after``.
    :param wait_timeout: how long one try waits, seconds or a timedelta; default ``[ckpt] wait_timeout``.
    :param poll_interval: seconds between two polls; default ``[ckpt] poll_interval``.
    """

    template_fields: Collection[str] = ("ckpt_conn_id",)
    ui_color = "#e3f0ec"

    def __init__(
        self,
        *,
        ckpt_conn_id: str = CkptHook.default_conn_name,
        deferrable: bool | None = None,
        defer_after: float | None = None,
        wait_timeout: float | timedelta | None = None,
        poll_interval: float | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("multiple_outputs", True)
        super().__init__(**kwargs)
        self.ckpt_conn_id = ckpt_conn_id
        self.deferrable = defaults.deferrable() if deferrable is None else deferrable
        self.defer_after = defaults.defer_after() if defer_after is None else defer_after
        self.wait_timeout = defaults.wait_timeout() if wait_timeout is None else wait_timeout
        self.poll_interval = defaults.poll_interval() if poll_interval is None else poll_interval
        self.link_addresses: dict[str, str] = {}

    # -- requests ----------------------------------------------------------------------------------------------

    @property
    def hook(self) -> CkptHook:
        """The hook of the connection."""
        return CkptHook(self.ckpt_conn_id)

    def deadline(self) -> float:
        """When this try gives up, in seconds since the epoch."""
        return time.time() + arguments.seconds("wait_timeout", self.wait_timeout)

    @contextmanager
    def connected(self) -> Iterator[CkptClient]:
        """A client; its errors become exceptions that tell Airflow whether a retry makes sense."""
        try:
            with self.hook.get_conn() as client:
                yield client
        except (BadRequest, Unauthorized) as error:
            raise CkptRequestRejected(str(error)) from error
        except CkptClientError as error:
            if is_passing(error):
                raise CkptUnavailable(str(error)) from error
            raise CkptOperationFailed(str(error)) from error

    def ask(self, client: CkptClient, call: Call[T], deadline: float) -> T:
        """Perform an idempotent request, waiting out a job manager that is away for a while."""
        return insist(client, call, min(deadline, time.time() + REQUEST_PATIENCE_SECONDS), Pacing(self.poll_interval))

    # -- waiting -----------------------------------------------------------------------------------------------

    def wait_for(self, context: Context, trigger: CkptTrigger) -> Any:
        """Wait for the trigger's condition, here for a while and then deferred; ends in ``execute_complete``."""
        patience = self.defer_after if self.deferrable else math.inf
        interval = min(self.poll_interval, FIRST_LOOKS_SECONDS) if self.deferrable else self.poll_interval
        until = min(time.time() + patience, trigger.deadline)
        if patience > 0:
            with self.connected() as client:
                verdict = wait(trigger.condition(), client, until, Pacing(interval))
            if verdict.status is not Status.TIMEOUT or until == trigger.deadline:
                return self.execute_complete(context, event_payload(verdict, trigger))
        backstop = timedelta(seconds=max(trigger.deadline - time.time(), 0.0) + _BACKSTOP_SECONDS)
        return self.defer(trigger=trigger, method_name="execute_complete", timeout=backstop)

    def execute_complete(self, context: Context, event: Event | None = None) -> Any:
        """Go on after a wait. The event holds the verdict and the trigger's arguments."""
        raise NotImplementedError

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Airflow's entry after a deferral; turns its deferral timeout into this operator's own end."""
        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except TaskDeferralTimeout as error:
            raise CkptWaitTimeout(
                "Airflow's deferral timeout passed before the trigger reported, perhaps because no triggerer runs. "
                + self.after_timeout(context, None)
            ) from error

    def after_timeout(self, context: Context, event: Event | None) -> str:
        """Called when the deadline passed: clean up what is to be cleaned up, and say what becomes of the rest."""
        return ""

    def failure(self, context: Context, event: Event, failed: type[Exception] = CkptOperationFailed) -> Exception:
        """What to raise for an event that is not a success, once its consequences are dealt with."""
        status, message = Status(event["status"]), str(event["message"])
        if status is Status.TIMEOUT:
            return CkptWaitTimeout(f"{message}. {self.after_timeout(context, event)}".rstrip(". "))
        return CkptRequestRejected(message) if status is Status.REFUSED else failed(message)

    # -- links -------------------------------------------------------------------------------------------------

    def publish_links(self, context: Context, job_id: str, links: Sequence[Any] = JOB_LINKS) -> None:
        """Store the links' addresses now, so that they work while the task is still deferred."""
        base_url = self.hook.endpoint().base_url
        for link in links:
            self.link_addresses[link.xcom_key] = link.address(base_url, job_id)
            context["ti"].xcom_push(key=link.xcom_key, value=self.link_addresses[link.xcom_key])


class CkptJobOperator(CkptOperator):
    """Base of the operators that act on one existing job; not for use in DAGs.

    :param job_id: the job, 32 hex digits. (templated)
    """

    template_fields: Collection[str] = (*CkptOperator.template_fields, "job_id")
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS

    def __init__(self, *, job_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.job_id = job_id

    def checked_job_id(self) -> str:
        """The job id after rendering.

        :raises CkptArgumentInvalid: when it is not one.
        """
        return arguments.hex_id("job_id", self.job_id)
