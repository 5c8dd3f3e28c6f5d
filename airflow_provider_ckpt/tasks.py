"""What operators and sensors have in common: the connection, links to the job, and how a wait begins in the worker."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING

from airflow.sdk.exceptions import AirflowTaskTimeout

from airflow_provider_ckpt import arguments, defaults
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.conditions.base import Json, Status, Verdict
from airflow_provider_ckpt.conditions.progress import Log
from airflow_provider_ckpt.conditions.waiting import Wait
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.links import JOB_LINKS, pages_path
from airflow_provider_ckpt.triggers.base import CkptTrigger, goes_on
from ckpt_runtime.client.clients import CkptClient

if TYPE_CHECKING:
    from airflow.sdk import Context

FIRST_LOOKS_SECONDS = 0.5
"""Between two polls in a worker that is about to defer, at most."""
_SOONER_SECONDS = 5.0
"""A try ends at most this long before Airflow's ``execution_timeout``."""
_BACKSTOP_SECONDS = 120.0
"""The trigger keeps the deadline; Airflow's deferral timeout comes this much later, for a triggerer that is down."""


class CkptTask:
    """Base of operators and sensors, beside Airflow's own."""

    ckpt_conn_id: str
    execution_timeout: timedelta | None
    link_addresses: dict[str, str]

    @property
    def hook(self) -> CkptHook:
        """The hook of the connection."""
        return CkptHook(self.ckpt_conn_id)

    def request_patience(self, deadline: float | None) -> float:
        """Seconds for which a request is repeated while the job manager is away."""
        patience = defaults.request_patience()
        return patience if deadline is None else max(0.0, min(patience, deadline - time.time()))

    def longest_try(self) -> float:
        """Seconds after which ``execution_timeout`` ends a try, also while it is deferred, where Airflow does not look.

        A little sooner than Airflow does it in a worker: what ends there can say what becomes of the remote side.
        """
        if self.execution_timeout is None:
            return math.inf
        seconds = self.execution_timeout.total_seconds()
        return max(0.0, seconds - min(_SOONER_SECONDS, seconds / 10))

    def publish_job(self, context: Context, job_id: str) -> None:
        """Store the id and the links' addresses now: links work while the task is still deferred, and a task that
        cleans up finds the job though this one fails."""
        address = self.hook.endpoint().browser_address
        pages = pages_path(self.ckpt_conn_id) if address is None else f"{address}/web/"
        addresses = {link.xcom_key: link.address(pages, job_id) for link in JOB_LINKS}
        if addresses != self.link_addresses:
            self.link_addresses.update(addresses)
            for key, value in {"job_id": job_id, **addresses}.items():
                context["ti"].xcom_push(key=key, value=value)


def is_over_time() -> bool:
    """Whether Airflow calls ``on_kill`` because ``execution_timeout`` has passed, and not because of a person."""
    return isinstance(sys.exception(), AirflowTaskTimeout)


def backstop(deadline: float | None) -> timedelta | None:
    """Airflow's own timeout of a deferral whose trigger keeps ``deadline``."""
    return None if deadline is None else timedelta(seconds=max(deadline - time.time(), 0.0) + _BACKSTOP_SECONDS)


def seconds_here(defer_after: Templated[Duration] | None) -> float:
    """Seconds that a task waits in its worker before it defers, ``defer_after`` being the author's argument."""
    given = arguments.optional_seconds("defer_after", defer_after)
    return defaults.defer_after() if given is None else given


def wait_here(
    connect: Callable[[], AbstractContextManager[CkptClient]],
    trigger: CkptTrigger,
    seconds: float,
    interval: float,
    log: Log,
) -> Verdict | None:
    """Wait in this process for the trigger's condition; ``None`` when the wait is to continue elsewhere."""
    until = time.time() + seconds
    last = trigger.deadline is not None and trigger.deadline <= until
    hook, condition = CkptHook(trigger.ckpt_conn_id), trigger.condition()
    while True:
        begun_with = hook.endpoint()
        with connect() as client:
            verdict = Wait(condition, trigger.deadline if last else until, interval, log).in_a_worker(client)
        if not verdict.refuses_token or not goes_on(hook, begun_with, hook.endpoint()):
            return None if verdict.status is Status.TIMEOUT and not last else verdict


def tell_trace(log: Log, event: Json) -> None:
    """The remote side's account of a failure, in the log of the task that fails for it."""
    if event.get("trace"):
        log.info("What the job manager tells of the failure:\n%s", event["trace"])
