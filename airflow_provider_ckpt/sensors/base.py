"""What the sensors share: a condition polled in the triggerer, or poked in a worker."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from airflow.sdk import BaseSensorOperator, PokeReturnValue, XComArg
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_provider_ckpt import advice, arguments, defaults
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Condition, Status, Verdict
from airflow_provider_ckpt.conditions.progress import Progress
from airflow_provider_ckpt.conditions.waiting import is_waited_out, poll_until_stable
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobFailed,
    CkptNotFound,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.hooks.connection import Endpoint
from airflow_provider_ckpt.job_tasks import CkptJobTask
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.tasks import FIRST_LOOKS_SECONDS, backstop, seconds_here, tell_trace, wait_here
from airflow_provider_ckpt.triggers.base import CkptTrigger, event_payload, goes_on
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.waiting import DEFAULT_PATIENCE_S

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink

CONFIRMING_SECONDS = 1.0
"""Between two looks for a job that seems to be unknown, at most."""


class CkptSensor(CkptJobTask, BaseSensorOperator):
    """Base of the sensors; not for use in DAGs. A sensor only watches: the job keeps running, whatever the result.

    :param job: the job: its id, its name where no other living job has it, or a task's result that has an id.
        (templated)
    :param if_not_found: ``fail``, or ``skip`` this sensor, when there is no such job. (templated)
    :param ckpt_conn_id: the Airflow connection of the job manager. (templated)
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``, and not with a ``mode``.
    :param mode: ``poke`` or ``reschedule``: how a sensor waits that is not deferrable. Both together are refused.
    :param defer_after: how long to wait in the worker first, in seconds, as a text such as ``"5 s"`` or a timedelta; 0
        defers at once; default ``[ckpt] defer_after``. (templated)
    :param poke_interval: seconds between two polls; default ``[ckpt] poll_interval``.
    :param timeout: how long to wait, as for every sensor. A shorter ``execution_timeout`` applies too, also while the
        sensor is deferred; the sensor may then be retried.
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used; nothing was sent
    :raises CkptConnectionInvalid: a field of the connection cannot be used
    :raises CkptRequestRejected: the token was refused, the job manager refused the request, or has no such call
    :raises CkptUnavailable: the job manager was away, or could not serve, for longer than ``[ckpt]
        request_patience``
    :raises CkptNotFound: the job manager has said several times that it does not know the job
    :raises CkptJobNotFound: no job of this name lives; the message lists those that do
    :raises CkptJobAmbiguous: several living jobs have the name; the message lists them
    """

    template_fields: Collection[str] = ("ckpt_conn_id", "job", "if_not_found", "defer_after")
    operator_extra_links: Collection[BaseOperatorLink] = JOB_LINKS
    ui_color = "#e3f0ec"

    def __init__(
        self,
        *,
        job: Templated[str],
        if_not_found: Templated[str] = "fail",
        ckpt_conn_id: str = CkptHook.default_conn_name,
        deferrable: bool | None = None,
        mode: str | None = None,
        defer_after: Templated[Duration] | None = None,
        poke_interval: float | timedelta | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("multiple_outputs", True)
        interval = defaults.poll_interval() if poke_interval is None else poke_interval
        super().__init__(poke_interval=interval, mode=mode or "poke", **kwargs)
        arguments.pause("poke_interval", self.poke_interval)
        if deferrable is not None:
            arguments.flag("deferrable", deferrable)
        if deferrable and mode is not None:
            raise CkptArgumentInvalid("mode", mode, "a deferrable sensor has none; give deferrable=False with it")
        self.job = job
        self.if_not_found = if_not_found
        self.ckpt_conn_id = ckpt_conn_id
        self.deferrable = mode is None and defaults.deferrable() if deferrable is None else deferrable
        self.defer_after = defer_after
        self.link_addresses: dict[str, str] = {}
        self._condition: Condition | None = None
        self._progress: Progress | None = None
        self._trouble = ""
        self._begun_with: Endpoint | None = None

    @property
    def job_id(self) -> XComArg:
        """The id of the job that this task has found, for arguments of other tasks."""
        return XComArg(self, "job_id")

    @abstractmethod
    def trigger(self, context: Context, deadline: float | None) -> CkptTrigger:
        """Make the trigger from the rendered arguments; look at the job first if the trigger needs it.

        :raises CkptClientError: when that look fails. Without a deadline the look is short, and is repeated later.
        """

    def succeeded(self, context: Context) -> None:
        """Continue once the condition holds."""

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return self._poked(context)
        try:
            deadline = time.time() + min(self.timeout, self.longest_try())
            self._find(context, deadline)
            trigger = self.trigger(context, deadline)
        except CkptClientError as error:
            kind = CkptUnavailable if is_waited_out(error) else CkptRequestRejected
            raise kind(advice.on_error(error, self.ckpt_conn_id)) from error
        verdict = self._wait_here(trigger)
        if verdict is not None:
            # Through Airflow's own entry point, which turns failures into skips if that is configured.
            return self.resume_execution("execute_complete", {"event": event_payload(verdict, trigger)}, context)
        return self.defer(trigger=trigger, method_name="execute_complete", timeout=backstop(trigger.deadline))

    def _poked(self, context: Context) -> Any:
        """Poke as Airflow's own sensors do; a timeout says what was waited for, and what prevented it last."""
        try:
            return super().execute(context)
        except AirflowSensorTimeout as error:
            known = self._condition
            text = str(error) if known is None else f"{known.subject}: not reached ({known.standing}). {error}"
            trouble = f" Last trouble: {self._trouble}" if self._trouble else ""
            raise AirflowSensorTimeout(text + trouble) from error

    def _wait_here(self, trigger: CkptTrigger) -> Verdict | None:
        seconds = seconds_here(self.defer_after)
        if seconds <= 0:
            return None
        interval = min(self.poke_interval, FIRST_LOOKS_SECONDS)
        return wait_here(self.hook.get_conn, trigger, seconds, interval, self.log)

    def poke(self, context: Context) -> bool | PokeReturnValue:
        """Look once; a temporarily absent job manager does not fail the sensor."""
        if self._progress is None:
            self._progress = Progress(self.log, f"job {self.job}")
        self._begun_with = self._begun_with or self.hook.endpoint()
        try:
            if self._condition is None:
                self._find(context, None)
                self._condition = self.trigger(context, None).condition()
                self._progress = Progress(self.log, self._condition.subject)
            with self.hook.get_conn(endpoint=self._begun_with) as client:
                # A job that seems unknown is looked up again at once, because the next poke may run in another process.
                pause = min(self.poke_interval, CONFIRMING_SECONDS)
                verdict = client.run(poll_until_stable(self._condition, self._progress, pause))
        except CkptClientError as error:
            begun_with, self._begun_with = self._begun_with, self.hook.endpoint()
            renewed = advice.is_refused_token(error) and goes_on(self.hook, begun_with, self._begun_with)
            if not renewed and not is_waited_out(error):
                raise CkptRequestRejected(advice.on_error(error, self.ckpt_conn_id)) from error
            self._progress.away(error)
            self._trouble = advice.on_error(error, self.ckpt_conn_id)
            return False
        self._trouble = ""
        if verdict is None:
            return False
        if verdict.status is not Status.DONE:
            tell_trace(self.log, {"trace": verdict.trace})
            self._fail({"status": verdict.status, "message": verdict.message, "result": verdict.result})
        self.succeeded(context)
        self.forget_job(context)
        return PokeReturnValue(is_done=True, xcom_value=verdict.result)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> Any:
        """Continue after the trigger's event."""
        event = event or {}
        self.publish_job(context, self.found_job)
        status = Status(event["status"])
        if status is not Status.DONE:
            tell_trace(self.log, event)
            self._fail(event)
        self.succeeded(context)
        self.forget_job(context)
        self.log.info("Reached: %s", event["result"])
        return event["result"]

    def _fail(self, event: dict[str, Any]) -> NoReturn:
        status, message = Status(event["status"]), str(event["message"])
        if status is Status.TIMEOUT:
            # Airflow retries a sensor after its execution_timeout, but never after its timeout.
            kind = CkptWaitTimeout if self.longest_try() < self.timeout else AirflowSensorTimeout
            raise kind(advice.on_verdict(event, self.ckpt_conn_id))
        if status is Status.MISSING:
            raise CkptNotFound(advice.on_missing(message, self.ckpt_conn_id))
        if status is Status.REFUSED:
            raise CkptRequestRejected(advice.on_verdict(event, self.ckpt_conn_id))
        raise CkptJobFailed(message)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue as every sensor does; the job stays the one that was waited for."""
        self.go_on_with(context, next_kwargs)
        return super().resume_execution(next_method, next_kwargs, context)

    def _find(self, context: Context, deadline: float | None) -> None:
        """Find the job, with a patience that ends before the deadline; without a deadline this is one short look."""
        away = Progress(self.log, "the session to answer").away
        patience = DEFAULT_PATIENCE_S if deadline is None else self.request_patience(deadline)
        pause = min(self.poke_interval, CONFIRMING_SECONDS)
        self.find_job(context, lambda: self.hook.get_conn(patience=patience, on_away=away), pause, self.log)
