"""The two clients over the one table of requests: :class:`CkptClient` blocks, :class:`AsyncCkptClient` is awaited.

Every method that talks to the server is made from the function of the same name in
:mod:`ckpt_runtime.client.requests`, with its parameters and result. Both clients are safe to share: the blocking one
between threads, the asynchronous one between tasks of one loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, Retrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.client.models import OperationStatus
from ckpt_runtime.client.requests import Call, OperationKind
from ckpt_runtime.client.transport import (
    DEFAULT_TIMEOUT_S,
    client_options,
    is_retriable,
    normalise_url,
    read_answer,
    request_arguments,
    unreachable,
)
from ckpt_runtime.client.waiting import PollSchedule, arrived, settled

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_ATTEMPTS = 4
DEFAULT_POLL_INTERVAL_S = 1.0


def _retry_options(attempts: int) -> dict[str, Any]:
    return {
        "stop": stop_after_attempt(attempts),
        "wait": wait_random_exponential(multiplier=0.1, max=2.0),
        "retry": retry_if_exception(is_retriable),
        "retry_error_callback": _last_error,
    }


def _last_error(state: RetryCallState) -> Any:
    """The last attempt's own exception instead of tenacity's."""
    assert state.outcome is not None
    return state.outcome.result()


def _blocking(build: Callable[P, Call[T]]) -> Callable[Concatenate[CkptClient, P], T]:
    @wraps(build)
    def method(self: CkptClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.execute(build(*args, **kwargs))

    return method


def _awaitable(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncCkptClient, P], Coroutine[Any, Any, T]]:
    @wraps(build)
    async def method(self: AsyncCkptClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.execute(build(*args, **kwargs))

    return method


class CkptClient:
    """Blocking client.

    ``url`` is ``host:port`` or a URL. ``verify`` is True, False, a CA file or an ``ssl.SSLContext``. ``timeout_s``
    bounds each single request; ``attempts`` how often a repeatable one is sent. ``transport`` replaces the network.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = DEFAULT_ATTEMPTS,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = normalise_url(url)
        self._http = httpx.Client(**client_options(self.url, token, verify, timeout_s), transport=transport)
        self._attempts = attempts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def execute(self, call: Call[T]) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        attempts = self._attempts if call.repeatable else 1
        answer: T = Retrying(**_retry_options(attempts))(self._send, call)
        return answer

    def _send(self, call: Call[T]) -> T:
        try:
            response = self._http.request(**request_arguments(call))
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        return read_answer(call, response)

    cluster_overview = _blocking(requests.cluster_overview)
    dashboard_config = _blocking(requests.dashboard_config)
    cluster_configuration = _blocking(requests.cluster_configuration)
    shutdown_cluster = _blocking(requests.shutdown_cluster)
    upload_pipeline = _blocking(requests.upload_pipeline)
    list_pipelines = _blocking(requests.list_pipelines)
    delete_pipeline = _blocking(requests.delete_pipeline)
    run_pipeline = _blocking(requests.run_pipeline)
    list_jobs = _blocking(requests.list_jobs)
    job_details = _blocking(requests.job_details)
    job_status = _blocking(requests.job_status)
    job_plan = _blocking(requests.job_plan)
    job_config = _blocking(requests.job_config)
    job_metrics = _blocking(requests.job_metrics)
    job_exceptions = _blocking(requests.job_exceptions)
    execution_result = _blocking(requests.execution_result)
    cancel_job = _blocking(requests.cancel_job)
    vertex_details = _blocking(requests.vertex_details)
    vertex_backpressure = _blocking(requests.vertex_backpressure)
    vertex_metrics = _blocking(requests.vertex_metrics)
    checkpoint_statistics = _blocking(requests.checkpoint_statistics)
    checkpoint_details = _blocking(requests.checkpoint_details)
    checkpoint_subtasks = _blocking(requests.checkpoint_subtasks)
    checkpoint_config = _blocking(requests.checkpoint_config)
    patch_checkpoint_config = _blocking(requests.patch_checkpoint_config)
    reset_checkpoint_config = _blocking(requests.reset_checkpoint_config)
    trigger_checkpoint = _blocking(requests.trigger_checkpoint)
    trigger_savepoint = _blocking(requests.trigger_savepoint)
    stop_with_savepoint = _blocking(requests.stop_with_savepoint)
    dispose_savepoint = _blocking(requests.dispose_savepoint)
    operation_status = _blocking(requests.operation_status)

    def wait_for_operation(
        self,
        kind: OperationKind,
        trigger_id: str,
        job_id: str | None = None,
        *,
        timeout_s: float | None,
        poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    ) -> OperationStatus:
        """Poll until the operation is done. Raises :class:`OperationFailed`, :class:`WaitTimeout`."""
        schedule = PollSchedule(f"The {kind} operation {trigger_id}", timeout_s, poll_interval_s)
        return self._wait(lambda: settled(self.operation_status(kind, trigger_id, job_id)), schedule)

    def wait_for_state(
        self,
        job_id: str,
        states: Collection[str],
        *,
        timeout_s: float | None,
        poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    ) -> str:
        """Poll until the job is in one of ``states``. Raises :class:`JobEnded`, :class:`WaitTimeout`."""
        schedule = PollSchedule(f"Job {job_id} being {' or '.join(sorted(states))}", timeout_s, poll_interval_s)
        return self._wait(lambda: arrived(job_id, self.job_status(job_id), states), schedule)

    def _wait(self, ask: Callable[[], T | None], schedule: PollSchedule) -> T:
        while True:
            try:
                found = ask()
                schedule.reached()
            except Unreachable as error:
                schedule.not_reached(error)
                found = None
            if found is not None:
                return found
            time.sleep(schedule.next_delay())


class AsyncCkptClient:
    """Asynchronous client; the same methods, awaited. Parameters as of :class:`CkptClient`."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        attempts: int = DEFAULT_ATTEMPTS,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = normalise_url(url)
        self._http = httpx.AsyncClient(**client_options(self.url, token, verify, timeout_s), transport=transport)
        self._attempts = attempts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def execute(self, call: Call[T]) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        attempts = self._attempts if call.repeatable else 1
        answer: T = await AsyncRetrying(**_retry_options(attempts))(self._send, call)
        return answer

    async def _send(self, call: Call[T]) -> T:
        try:
            response = await self._http.request(**request_arguments(call))
        except httpx.TransportError as error:
            raise unreachable(self.url, error) from error
        return read_answer(call, response)

    cluster_overview = _awaitable(requests.cluster_overview)
    dashboard_config = _awaitable(requests.dashboard_config)
    cluster_configuration = _awaitable(requests.cluster_configuration)
    shutdown_cluster = _awaitable(requests.shutdown_cluster)
    upload_pipeline = _awaitable(requests.upload_pipeline)
    list_pipelines = _awaitable(requests.list_pipelines)
    delete_pipeline = _awaitable(requests.delete_pipeline)
    run_pipeline = _awaitable(requests.run_pipeline)
    list_jobs = _awaitable(requests.list_jobs)
    job_details = _awaitable(requests.job_details)
    job_status = _awaitable(requests.job_status)
    job_plan = _awaitable(requests.job_plan)
    job_config = _awaitable(requests.job_config)
    job_metrics = _awaitable(requests.job_metrics)
    job_exceptions = _awaitable(requests.job_exceptions)
    execution_result = _awaitable(requests.execution_result)
    cancel_job = _awaitable(requests.cancel_job)
    vertex_details = _awaitable(requests.vertex_details)
    vertex_backpressure = _awaitable(requests.vertex_backpressure)
    vertex_metrics = _awaitable(requests.vertex_metrics)
    checkpoint_statistics = _awaitable(requests.checkpoint_statistics)
    checkpoint_details = _awaitable(requests.checkpoint_details)
    checkpoint_subtasks = _awaitable(requests.checkpoint_subtasks)
    checkpoint_config = _awaitable(requests.checkpoint_config)
    patch_checkpoint_config = _awaitable(requests.patch_checkpoint_config)
    reset_checkpoint_config = _awaitable(requests.reset_checkpoint_config)
    trigger_checkpoint = _awaitable(requests.trigger_checkpoint)
    trigger_savepoint = _awaitable(requests.trigger_savepoint)
    stop_with_savepoint = _awaitable(requests.stop_with_savepoint)
    dispose_savepoint = _awaitable(requests.dispose_savepoint)
    operation_status = _awaitable(requests.operation_status)

    async def wait_for_operation(
        self,
        kind: OperationKind,
        trigger_id: str,
        job_id: str | None = None,
        *,
        timeout_s: float | None,
        poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    ) -> OperationStatus:
        """Poll until the operation is done. Raises :class:`OperationFailed`, :class:`WaitTimeout`."""
        schedule = PollSchedule(f"The {kind} operation {trigger_id}", timeout_s, poll_interval_s)

        async def ask() -> OperationStatus | None:
            return settled(await self.operation_status(kind, trigger_id, job_id))

        return await self._wait(ask, schedule)

    async def wait_for_state(
        self,
        job_id: str,
        states: Collection[str],
        *,
        timeout_s: float | None,
        poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    ) -> str:
        """Poll until the job is in one of ``states``. Raises :class:`JobEnded`, :class:`WaitTimeout`."""
        schedule = PollSchedule(f"Job {job_id} being {' or '.join(sorted(states))}", timeout_s, poll_interval_s)

        async def ask() -> str | None:
            return arrived(job_id, await self.job_status(job_id), states)

        return await self._wait(ask, schedule)

    async def _wait(self, ask: Callable[[], Awaitable[T | None]], schedule: PollSchedule) -> T:
        while True:
            try:
                found = await ask()
                schedule.reached()
            except Unreachable as error:
                schedule.not_reached(error)
                found = None
            if found is not None:
                return found
            await asyncio.sleep(schedule.next_delay())
