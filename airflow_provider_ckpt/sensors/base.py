"""The base class of the sensors: a condition polled in the triggerer, or poked in a worker."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_provider_ckpt import advice, arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Condition, Json, Progress, Status, is_waited_out, poll_until_stable
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobFailed,
    CkptRequestRejected,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook, Endpoint
from airflow_provider_ckpt.links import JOB_LINKS
from airflow_provider_ckpt.retry import CkptRetryPolicy
from airflow_provider_ckpt.tasks import CONFIRMING_SECONDS, CkptJobTask
from airflow_provider_ckpt.triggers.wait import has_changed
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.waiting import DEFAULT_RETRY_TIMEOUT_S

if TYPE_CHECKING:
    from airflow.sdk import Context
    from airflow.sdk.bases.operatorlink import BaseOperatorLink


class CkptSensor(CkptJobTask, BaseSensorOperator):
    """Base of the sensors; not for use in DAGs. A sensor only watches: the job keeps running after any result.

    :param job: the job: its id, its name where no other living job has it, or a task's result that has an id.
        (templated)
    :param if_not_found: ``fail``, or ``skip`` this sensor, when there is no such job. (templated)
    :param ckpt_conn_id: the Airflow connection of the job manager. (templated)
    :param deferrable: wait in the triggerer; default ``[ckpt] deferrable``, else the variable
        ``AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE``, else true; and not with a ``mode``.
    :param mode: ``poke`` or ``reschedule``: how a sensor waits that is not deferrable. Both together are refused.
    :param defer_after: how long to wait in the worker first, in seconds, as a text such as ``"5 s"`` or a timedelta; 0
        defers at once; default ``[ckpt] defer_after``. (templated)
    :param poke_interval: seconds between two polls; default ``[ckpt] poll_interval``.
    :param timeout: how long to wait, as for every sensor. A shorter ``execution_timeout`` applies too, also while the
        sensor is deferred; the sensor may then be retried.
    :raises CkptArgumentInvalid: an argument, or what its template rendered to, cannot be used; nothing was sent
    :raises CkptConnectionInvalid: a field of the connection cannot be used
    :raises CkptRequestRejected: the token was refused, the job manager refused the request, or has no such call
    :raises CkptUnavailable: the job manager did not answer, or could not serve the request, for longer than ``[ckpt]
        request_retry_timeout``
    :raises CkptNotFound: the job manager has answered several times that it does not know the job
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
        interval = arguments.configured_seconds("poll_interval") if poke_interval is None else poke_interval
        super().__init__(poke_interval=interval, mode=mode or "poke", **kwargs)
        if self.retry_policy is None:
            self.retry_policy = CkptRetryPolicy()
        arguments.pause("poke_interval", self.poke_interval)
        if deferrable is not None:
            arguments.flag("deferrable", deferrable)
        if deferrable and mode is not None:
            raise CkptArgumentInvalid("mode", mode, "a deferrable sensor has no mode; set deferrable=False to use it")
        self.job = job
        self.if_not_found = if_not_found
        self.ckpt_conn_id = ckpt_conn_id
        self.deferrable = mode is None and arguments.deferrable() if deferrable is None else deferrable
        self.defer_after = defer_after
        self.link_addresses: dict[str, str] = {}
        self._condition: Condition | None = None
        self._progress: Progress | None = None
        self._trouble = ""
        self._begun_with: Endpoint | None = None

    @abstractmethod
    def condition(self, context: Context, deadline: float | None) -> Condition:
        """Make the condition from the rendered arguments; look at the job first if the condition needs it.

        :raises CkptClientError: when that look fails. Without a deadline the poll is short, and is repeated later.
        """

    def succeeded(self, context: Context) -> None:
        """Continue once the condition holds."""

    def pause(self) -> float:
        """Seconds between two polls."""
        return self.poke_interval

    def retry_timeout(self, deadline: float | None) -> float:
        """Seconds for which a request is repeated: a poke, which has no deadline, has to be short."""
        return DEFAULT_RETRY_TIMEOUT_S if deadline is None else super().retry_timeout(deadline)

    def execute(self, context: Context) -> Any:
        if not self.deferrable:
            return self._poked(context)
        try:
            deadline = time.time() + min(self.timeout, self.attempt_limit())
            self.find_job(context, deadline)
            condition = self.condition(context, deadline)
        except CkptClientError as error:
            kind = CkptUnavailable if is_waited_out(error) else CkptRequestRejected
            raise kind(advice.on_error(error, self.ckpt_conn_id)) from error
        return self.wait_for(context, condition, deadline)

    def ended_here(self, context: Context, event: Json) -> Any:
        """Continue through Airflow's own entry point, which turns failures into skips if that is configured."""
        return self.resume_execution("execute_complete", {"event": event}, context)

    def _poked(self, context: Context) -> Any:
        """Poke as Airflow's own sensors do; a timeout names the condition, and the last obstacle."""
        try:
            return super().execute(context)
        except AirflowSensorTimeout as error:
            known = self._condition
            text = str(error) if known is None else f"{known.subject}: not reached ({known.standing}). {error}"
            trouble = f" Last trouble: {self._trouble}" if self._trouble else ""
            raise AirflowSensorTimeout(text + trouble) from error

    def poke(self, context: Context) -> bool | PokeReturnValue:
        """Look once; a temporarily absent job manager does not fail the sensor."""
        if self._progress is None:
            self._progress = Progress(self.log, f"job {self.job}")
        self._begun_with = self._begun_with or self.hook.endpoint()
        # A job that seems unknown is looked up again at once, because the next poke may run in another process.
        pause = min(self.poke_interval, CONFIRMING_SECONDS)
        try:
            if self._condition is None:
                self.find_job(context, None)
                self._condition = self.condition(context, None)
                self._progress = Progress(self.log, self._condition.subject)
            with self.hook.get_conn(endpoint=self._begun_with) as client:
                verdict = client.run(poll_until_stable(self._condition, client.calls, self._progress, pause))
        except CkptClientError as error:
            begun_with, self._begun_with = self._begun_with, self.hook.endpoint()
            renewed = advice.is_refused_token(error) and has_changed(self.hook, begun_with, self._begun_with)
            if not renewed and not is_waited_out(error):
                raise CkptRequestRejected(advice.on_error(error, self.ckpt_conn_id)) from error
            self._progress.away(error)
            self._trouble = advice.on_error(error, self.ckpt_conn_id)
            return False
        self._trouble = ""
        if verdict is None:
            return False
        event = {"status": verdict.status, "message": verdict.message, "result": verdict.result, "trace": verdict.trace}
        return PokeReturnValue(is_done=True, xcom_value=self._result(context, event))

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        """Continue after the wait."""
        event = event or {}
        self.publish_job(context, self.found_job)
        result = self._result(context, event)
        self.log.info("Reached: %s", result)
        return result

    def _result(self, context: Context, event: Json) -> Json:
        """Return the result of a wait that succeeded; raise the exception for any other."""
        if Status(event["status"]) is not Status.DONE:
            raise self.failure(context, event, CkptJobFailed)
        self.succeeded(context)
        self.forget_job(context)
        result: Json = event["result"]
        return result

    def timeout_error(self, context: Context, event: Json) -> Exception:
        """Airflow retries a sensor after its ``execution_timeout``, but never after its ``timeout``."""
        kind = CkptWaitTimeout if self.attempt_limit() < self.timeout else AirflowSensorTimeout
        return kind(advice.on_verdict(event, self.ckpt_conn_id))
