"""The common parts of operators and sensors: the connection, the job that they are about, waiting for a condition, the
journal.

The first try looks up a job that is given by its name, and the result is recorded: a retry, and the part of the task
after a deferral, use the same job although another job may have the name by then. A cleared success looks again.

The journal is a task's record of its requests, written before they are sent, so that its next try finds them again.
"""

from __future__ import annotations

import math
import sys
import time
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, cast

from airflow.sdk import XComArg
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout
from airflow.sdk.execution_time.context import NEVER_EXPIRE

from airflow_provider_ckpt import advice, arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Condition, Json, Progress, Status, Verdict, Wait
from airflow_provider_ckpt.exceptions import CkptJobNotFound, CkptNotFound, CkptOperationFailed, CkptRequestRejected
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.jobs import resolve
from airflow_provider_ckpt.links import JOB_LINKS, pages_path
from airflow_provider_ckpt.triggers.wait import CkptTrigger, event_payload, has_changed
from ckpt_runtime.client.clients import CkptClient

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context


_FIRST_LOOKS_SECONDS = 0.5
"""Between two polls in a worker that is about to defer, at most."""
CONFIRMING_SECONDS = 1.0
"""Between two polls for a job that seems to be unknown, at most."""
_SOONER_SECONDS = 5.0
"""A try ends at most this long before Airflow's ``execution_timeout``."""
_BACKSTOP_SECONDS = 120.0
"""The trigger keeps the deadline; Airflow's deferral timeout comes this much later, for a triggerer that is down."""
IF_NOT_FOUND = ("FAIL", "SKIP")
_RECORD = "ckpt_found_job"


class CkptTask:
    """Base of operators and sensors, in addition to Airflow's own."""

    ckpt_conn_id: str
    deferrable: bool
    defer_after: Templated[Duration] | None
    execution_timeout: timedelta | None
    link_addresses: dict[str, str]
    log: Any
    defer: Any

    @property
    def hook(self) -> CkptHook:
        """The hook of the connection."""
        return CkptHook(self.ckpt_conn_id)

    @abstractmethod
    def pause(self) -> float:
        """Seconds between two polls."""

    def retry_timeout(self, deadline: float | None) -> float:
        """Seconds for which a request is repeated while the job manager does not answer."""
        retry_timeout = arguments.configured_seconds("request_retry_timeout")
        return retry_timeout if deadline is None else max(0.0, min(retry_timeout, deadline - time.time()))

    @contextmanager
    def connected(self, deadline: float | None = None) -> Iterator[CkptClient]:
        """Give a client that waits for an absent job manager, limited by :meth:`retry_timeout`."""
        away = Progress(self.log, "the session to answer").away
        with self.hook.get_conn(retry_timeout=self.retry_timeout(deadline), on_away=away) as client:
            yield client

    def attempt_limit(self) -> float:
        """Seconds after which ``execution_timeout`` ends a try, also while it is deferred, where Airflow does not look.

        A little sooner than Airflow does it in a worker: so the task can still report what becomes of the remote side.
        """
        if self.execution_timeout is None:
            return math.inf
        seconds = self.execution_timeout.total_seconds()
        return max(0.0, seconds - min(_SOONER_SECONDS, seconds / 10))

    def publish_job(self, context: Context, job_id: str) -> None:
        """Store the id and the links' addresses now: links work while the task is still deferred, and a task that
        cleans up finds the job even if this one fails."""
        address = self.hook.endpoint().browser_address
        pages = pages_path(self.ckpt_conn_id) if address is None else f"{address}/web/"
        addresses = {link.xcom_key: link.address(pages, job_id) for link in JOB_LINKS}
        if addresses != self.link_addresses:
            self.link_addresses.update(addresses)
            stored = {"job_id": job_id, "ckpt_conn_id": self.ckpt_conn_id, **addresses}
            for key, value in stored.items():
                context["ti"].xcom_push(key=key, value=value)

    # -- waiting -----------------------------------------------------------------------------------------------

    def seconds_before_deferral(self) -> float:
        """Seconds that the task waits in its worker before it defers."""
        given = arguments.optional_seconds("defer_after", self.defer_after)
        return arguments.configured_seconds("defer_after") if given is None else given

    def wait_for(self, context: Context, condition: Condition, deadline: float | None, memo: Json | None = None) -> Any:
        """Wait for the condition, here for a while and then deferred; ends in ``execute_complete``.

        ``memo`` is JSON that the event returns, under ``trigger`` with the condition and the deadline.
        """
        trigger = CkptTrigger(
            ckpt_conn_id=self.ckpt_conn_id,
            condition=condition,
            deadline=deadline,
            poll_interval=self.pause(),
            memo=memo,
        )
        seconds, interval = math.inf, self.pause()
        if self.deferrable:
            seconds, interval = self.seconds_before_deferral(), min(interval, _FIRST_LOOKS_SECONDS)
        verdict = self._wait_here(trigger, seconds, interval) if seconds > 0 else None
        if verdict is not None:
            return self.ended_here(context, event_payload(verdict, trigger))
        # The trigger ends at the deadline by itself; Airflow's timeout is for one that never reports.
        left = None if deadline is None else timedelta(seconds=max(deadline - time.time(), 0.0) + _BACKSTOP_SECONDS)
        return self.defer(trigger=trigger, method_name="execute_complete", timeout=left)

    def _wait_here(self, trigger: CkptTrigger, seconds: float, interval: float) -> Verdict | None:
        """Wait in this process; ``None`` when the wait is to continue in the triggerer."""
        until = time.time() + seconds
        last = trigger.deadline is not None and trigger.deadline <= until
        hook = self.hook
        while True:
            begun_with = hook.endpoint()
            with hook.get_conn() as client:
                wait = Wait(trigger.condition, trigger.deadline if last else until, interval, self.log)
                verdict = client.run(wait.until_verdict(client.calls))
            if not verdict.refuses_token or not has_changed(hook, begun_with, hook.endpoint()):
                return None if verdict.status is Status.TIMEOUT and not last else verdict

    def ended_here(self, context: Context, event: Json) -> Any:
        """Continue after a wait that ended in this process."""
        return self.execute_complete(context, event)

    def execute_complete(self, context: Context, event: Json | None = None) -> Any:
        """Continue after a wait. The event holds the verdict and the trigger's arguments."""
        raise NotImplementedError

    @abstractmethod
    def timeout_error(self, context: Context, event: Json) -> Exception:
        """Return the exception for a deadline that has passed."""

    def failure(self, context: Context, event: Json, failed: type[Exception] = CkptOperationFailed) -> Exception:
        """Return the exception for a wait that did not succeed, after the job manager's trace is logged."""
        self.log_trace(event)
        status, message = Status(event["status"]), str(event["message"])
        if status is Status.TIMEOUT:
            return self.timeout_error(context, event)
        if status is Status.MISSING:
            return CkptNotFound(advice.on_missing(message, self.ckpt_conn_id))
        if status is Status.REFUSED:
            return CkptRequestRejected(advice.on_verdict(event, self.ckpt_conn_id))
        return failed(message)

    def log_trace(self, event: Json) -> None:
        """Log the remote side's account of a failure."""
        if event.get("trace"):
            self.log.info("The job manager's report of the failure:\n%s", event["trace"])


class CkptJobTask(CkptTask):
    """Base of tasks of one job. ``finds_ended``: if no living job has the name, the one that ended last is meant."""

    finds_ended: ClassVar[bool] = False
    job: Templated[str]
    if_not_found: Templated[str]
    _found: str | None = None

    @property
    def job_id(self) -> XComArg:
        """The id of the job that this task has found, for arguments of other tasks."""
        return XComArg(cast("BaseOperator", self), "job_id")

    @property
    def found_job(self) -> str:
        """The id of the job; before it is found, the argument."""
        return self._found or arguments.job(self.job)

    @property
    def skips(self) -> bool:
        """Whether the task is to be skipped when there is no such job.

        :raises CkptArgumentInvalid: for anything that is neither ``fail`` nor ``skip``.
        """
        return arguments.choice("if_not_found", self.if_not_found, IF_NOT_FOUND) == "SKIP"

    def find_job(self, context: Context, deadline: float | None) -> str:
        """Return the id of the job that every step of this task means, and to which its links lead from now on.

        :raises CkptArgumentInvalid: when the argument cannot name a job.
        :raises CkptJobNotFound: when there is none, and the task is not to be skipped for it.
        :raises CkptJobAmbiguous: when several have the name.
        """
        if self.skips and self.job in (None, "", "None"):
            raise AirflowSkipException(f"job: {self.job!r}, no earlier task has found a job")
        given, journal = arguments.job(self.job), Journal(context, _RECORD)
        record = journal.read()
        if record.get("job") == given:
            self._found = str(record["job_id"])
        elif arguments.is_job_id(given) and not self.skips:
            self._found = given
        else:
            try:
                with self.connected(deadline) as client:
                    pause = min(self.pause(), CONFIRMING_SECONDS)
                    line = client.run(resolve(client.calls, given, ended=self.finds_ended, pause=pause))
            except CkptJobNotFound as error:
                if self.skips:
                    raise AirflowSkipException(str(error)) from error
                raise
            self._found = line.job_id
            self.log.info("Job %r is %s, which is %s", given, line.job_id, line.state)
            journal.write(job=given, job_id=self._found)
        self.publish_job(context, self._found)
        return self._found

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """Continue after a deferral; the task keeps waiting for the same job."""
        condition = (((next_kwargs or {}).get("event") or {}).get("trigger") or {}).get("condition") or {}
        self._found = condition.get("job_id") or Journal(context, _RECORD).read().get("job_id") or self._found
        return super().resume_execution(next_method, next_kwargs, context)  # type: ignore[misc]

    def forget_job(self, context: Context) -> None:
        """After a success: a cleared task looks for the job again."""
        Journal(context, _RECORD).forget()


def is_over_time() -> bool:
    """Whether Airflow calls ``on_kill`` because ``execution_timeout`` has passed, and not because of a person."""
    return isinstance(sys.exception(), AirflowTaskTimeout)


_NAMESPACE = uuid.UUID("6f1d2c0e-7f0b-5a58-9d5e-0c3a6b1f9a44")


class Journal:
    """One JSON record of one task instance.

    :param context: the task's context.
    :param key: the record's name in the store.
    """

    def __init__(self, context: Context | Mapping[str, Any], key: str) -> None:
        self._store: Any = context.get("task_state_store")
        self._key = key

    @property
    def remembers(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def read(self) -> dict[str, Any]:
        """Read the record, or an empty one."""
        found = None if self._store is None else self._store.get(self._key)
        return dict(found) if isinstance(found, dict) else {}

    def write(self, **fields: Any) -> dict[str, Any]:
        """Replace the record; it never expires. Returns it."""
        if self._store is not None:
            self._store.set(self._key, fields, retention=NEVER_EXPIRE)
        return fields

    def forget(self) -> None:
        """Delete the record, so that a cleared task starts from the beginning."""
        if self._store is not None:
            self._store.delete(self._key)


def new_id(context: Context | Mapping[str, Any], purpose: str) -> str:
    """Make an id for a request of this try: 32 hex digits, equal for all requests of this try with the same purpose."""
    return uuid.uuid5(_NAMESPACE, f"{context['ti'].id}/{purpose}").hex


def series_of(context: Context | Mapping[str, Any]) -> str:
    """Return a text that all tries of this task instance have in common, and no other instance or mapped index."""
    instance = context["ti"]
    parts = (instance.dag_id, instance.run_id, instance.task_id, getattr(instance, "map_index", -1))
    return "/".join(str(part) for part in parts)


def numbered_id(series: str, number: int) -> str:
    """Make the id of the ``number``-th job of a series: 32 hex digits."""
    return uuid.uuid5(_NAMESPACE, f"{series}/job/{number}").hex
