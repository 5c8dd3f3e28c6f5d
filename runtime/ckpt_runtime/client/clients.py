"""The two clients over the one table of requests: :class:`CkptClient` blocks, :class:`AsyncCkptClient` is awaited.

Every method that talks to the server is made from the function of the same name in
:mod:`ckpt_runtime.client.requests`, with its parameters and result. Both clients are safe to share: the blocking one
between threads, the asynchronous one between tasks of one loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Collection, Coroutine, Generator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
from tenacity import AsyncRetrying, Retrying

from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.models import OperationStatus
from ckpt_runtime.client.requests import Call, OperationKind
from ckpt_runtime.client.transport import (
    DEFAULT_TIMEOUT_S,
    client_options,
    normalise_url,
    read_answer,
    request_arguments,
    unreachable,
)
from ckpt_runtime.client.waiting import (
    DEFAULT_PATIENCE_S,
    Attempts,
    PollSchedule,
    arrived,
    retry_options,
    settled,
)

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

DEFAULT_POLL_INTERVAL_S = 1.0


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
    bounds each single request; for ``patience_s`` it is repeated while the server is away (0: never repeated).
    ``transport`` replaces the network.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        patience_s: float = DEFAULT_PATIENCE_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = normalise_url(url)
        self._http = httpx.Client(**client_options(self.url, token, verify, timeout_s), transport=transport)
        self.patience_s = patience_s

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def execute(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        attempts = Attempts(call)
        retrying = Retrying(**retry_options(self.patience_s if patience_s is None else patience_s))
        answer: T = retrying(lambda: self.run(attempts.next()))
        return answer

    def run(self, steps: Generator[Call[Any], Any, T], *, patience_s: float = 0.0) -> T:
        """Carry out calls as a generator yields them, each for ``patience_s`` while the server is away.

        Returns the generator's result.
        """
        try:
            call = next(steps)
            while True:
                try:
                    answer = self.execute(call, patience_s=patience_s) if patience_s > 0 else self._send(call)
                except CkptClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

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
        call = requests.operation_status(kind, trigger_id, job_id)
        return self._wait(call, settled, schedule)

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
        return self._wait(requests.job_status(job_id), lambda state: arrived(job_id, state, states), schedule)

    def _wait(self, call: Call[A], judge: Callable[[A], T | None], schedule: PollSchedule) -> T:
        while True:
            found = judge(self.execute(call, patience_s=schedule.patience_s))
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
        patience_s: float = DEFAULT_PATIENCE_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = normalise_url(url)
        self._http = httpx.AsyncClient(**client_options(self.url, token, verify, timeout_s), transport=transport)
        self.patience_s = patience_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def execute(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        attempts = Attempts(call)
        retrying = AsyncRetrying(**retry_options(self.patience_s if patience_s is None else patience_s))

        async def attempt() -> T:
            return await self.run(attempts.next())

        answer: T = await retrying(attempt)
        return answer

    async def run(self, steps: Generator[Call[Any], Any, T]) -> T:
        """Carry out calls, each once, as a generator yields them; returns its result."""
        try:
            call = next(steps)
            while True:
                try:
                    answer = await self._send(call)
                except CkptClientError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

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
        call = requests.operation_status(kind, trigger_id, job_id)
        return await self._wait(call, settled, schedule)

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
        return await self._wait(requests.job_status(job_id), lambda state: arrived(job_id, state, states), schedule)

    async def _wait(self, call: Call[A], judge: Callable[[A], T | None], schedule: PollSchedule) -> T:
        while True:
            found = judge(await self.execute(call, patience_s=schedule.patience_s))
            if found is not None:
                return found
            await asyncio.sleep(schedule.next_delay())
