"""The two clients over the one table of requests: :class:`CkptClient` blocks, :class:`AsyncCkptClient` is awaited.

Every method that talks to the server is made, for both, from the function of the same name in
:mod:`ckpt_runtime.client.requests` or :mod:`ckpt_runtime.client.waiting`, with its parameters and result. Both clients
are safe to share: the blocking one between threads, the asynchronous one between tasks of one loop.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx

from ckpt_runtime.client import requests, waiting
from ckpt_runtime.client.errors import (
    CkptApiError,
    CkptClientError,
    NotServed,
    Unauthorized,
    UnexpectedAnswer,
    is_passing,
)
from ckpt_runtime.client.event_stream import EventFeed, StreamedEvent
from ckpt_runtime.client.leader import Leader, LeaderSource
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.transport import (
    DEFAULT_TIMEOUT_S,
    check_certificates,
    check_token,
    client_options,
    normalise_url,
    read_answer,
    request_arguments,
    unreachable,
)
from ckpt_runtime.client.waiting import DEFAULT_PATIENCE_S, Pause, Steps

P = ParamSpec("P")
T = TypeVar("T")
Http = TypeVar("Http")
Transport = TypeVar("Transport")


class _Method(Generic[P, T]):
    """A method of both clients, made from the function that builds its call or steps."""

    def __init__(self, build: Callable[P, Call[T] | Steps[T]]) -> None:
        self._build = build

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T] | Steps[T]]: ...

    @overload
    def __get__(self, client: CkptClient, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncCkptClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: CkptClient | AsyncCkptClient | None, owner: type) -> Callable[P, Any]:
        if client is None:
            return self._build

        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            built = self._build(*args, **kwargs)
            return client.execute(built) if isinstance(built, Call) else client.run(built)

        return method


class _Methods:
    """The requests that both clients offer."""

    cluster_overview = _Method(requests.cluster_overview)
    dashboard_config = _Method(requests.dashboard_config)
    cluster_configuration = _Method(requests.cluster_configuration)
    shutdown_cluster = _Method(requests.shutdown_cluster)
    upload_pipeline = _Method(requests.upload_pipeline)
    list_pipelines = _Method(requests.list_pipelines)
    delete_pipeline = _Method(requests.delete_pipeline)
    hold_pipeline = _Method(requests.hold_pipeline)
    release_pipeline = _Method(requests.release_pipeline)
    run_drill = _Method(requests.run_drill)
    plan_pipeline = _Method(requests.plan_pipeline)
    run_pipeline = _Method(requests.run_pipeline)
    hold_lineage = _Method(requests.hold_lineage)
    release_lineage = _Method(requests.release_lineage)
    retire_job_id = _Method(requests.retire_job_id)
    retired_job_ids = _Method(requests.retired_job_ids)
    slot_agents = _Method(requests.slot_agents)
    thread_dump = _Method(requests.thread_dump)
    recent_log = _Method(requests.recent_log)
    list_jobs = _Method(requests.list_jobs)
    job_details = _Method(requests.job_details)
    job_status = _Method(requests.job_status)
    job_health = _Method(requests.job_health)
    job_plan = _Method(requests.job_plan)
    job_config = _Method(requests.job_config)
    replace_job_config = _Method(requests.replace_job_config)
    patch_job_config = _Method(requests.patch_job_config)
    job_metrics = _Method(requests.job_metrics)
    job_exceptions = _Method(requests.job_exceptions)
    execution_result = _Method(requests.execution_result)
    cancel_job = _Method(requests.cancel_job)
    cancel_and_retain = _Method(requests.cancel_and_retain)
    vertex_details = _Method(requests.vertex_details)
    subtask_times = _Method(requests.subtask_times)
    vertex_backpressure = _Method(requests.vertex_backpressure)
    vertex_metrics = _Method(requests.vertex_metrics)
    checkpoint_statistics = _Method(requests.checkpoint_statistics)
    checkpoint_details = _Method(requests.checkpoint_details)
    checkpoint_subtasks = _Method(requests.checkpoint_subtasks)
    checkpoint_config = _Method(requests.checkpoint_config)
    patch_checkpoint_config = _Method(requests.patch_checkpoint_config)
    reset_checkpoint_config = _Method(requests.reset_checkpoint_config)
    resource_requirements = _Method(requests.resource_requirements)
    parallelism_bounds = _Method(requests.parallelism_bounds)
    update_resource_requirements = _Method(requests.update_resource_requirements)
    trigger_checkpoint = _Method(requests.trigger_checkpoint)
    trigger_savepoint = _Method(requests.trigger_savepoint)
    stop_with_savepoint = _Method(requests.stop_with_savepoint)
    dispose_savepoint = _Method(requests.dispose_savepoint)
    list_savepoints = _Method(requests.list_savepoints)
    latest_savepoint = _Method(requests.latest_savepoint)
    mark_savepoint = _Method(requests.mark_savepoint)
    operation_status = _Method(requests.operation_status)
    wait_for_operation = _Method(waiting.wait_for_operation)
    wait_for_state = _Method(waiting.wait_for_state)
    wait_for_config = _Method(waiting.wait_for_config)
    rescale = _Method(waiting.rescale)


class _Client(_Methods, Generic[Http, Transport]):
    """The common part of both clients: where they send requests, and how long they repeat them.

    A client that follows a leader keeps HTTP connections for each address that has led, until the client is closed.
    """

    def __init__(
        self,
        address: str | LeaderSource,
        *,
        token: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        patience_s: float = DEFAULT_PATIENCE_S,
        transport: Transport | None = None,
        on_away: Callable[[CkptClientError], None] | None = None,
    ) -> None:
        check_token(token)
        self.patience_s = patience_s
        self._on_away = on_away
        self._options = (token, verify, timeout_s)
        self._transport = transport
        self._timeout_s = timeout_s
        self._connected: dict[str, Http] = {}
        self._leader: Leader | None = None
        self._failed: Leader | None = None
        self._source = None if isinstance(address, str) else address
        self._url = address if isinstance(address, str) else ""
        if isinstance(address, str):
            self._url = normalise_url(address)
            self._http_at(self._url)
        elif not isinstance(verify, ssl.SSLContext):
            check_certificates(verify)

    @property
    def url(self) -> str:
        """Where requests go: the given address, or that of the last leader found (empty before the first)."""
        return self._url

    def _connect(self, **options: Any) -> Http:
        raise NotImplementedError

    def _http_at(self, url: str) -> Http:
        found = self._connected.get(url)
        if found is None:
            token, verify, timeout_s = self._options
            made = self._connect(**client_options(url, token, verify, timeout_s), transport=self._transport)
            found = self._connected.setdefault(url, made)
        return found

    def _led_by(self, leader: Leader) -> Http:
        self._leader, self._url = leader, leader.url
        return self._http_at(leader.url)

    def _after(self, error: CkptClientError) -> CkptClientError:
        """Return the error, after marking the leader as doubtful if the leader may have caused it."""
        if self._leader is not None and (not isinstance(error, CkptApiError) or is_passing(error) or _foreign(error)):
            self._failed = self._leader
        return error

    @contextmanager
    def _asking(self, url: str) -> Iterator[None]:
        """Turn a failure of one request into the client's own error, and doubt the leader if it may have caused it."""
        try:
            yield
        except httpx.TransportError as error:
            raise self._after(unreachable(url, error)) from error
        except CkptApiError as error:
            self._after(error)
            raise

    def _patient(self, call: Call[T], patience_s: float | None) -> Steps[T]:
        return waiting.retry(call, self.patience_s if patience_s is None else patience_s, self._on_away)


class CkptClient(_Client[httpx.Client, httpx.BaseTransport]):
    """The client whose methods block.

    ``address`` is ``host:port`` or a URL, or a source of the current leader (``ckpt_runtime.leader_retrieval``). With a
    source, requests follow the leader, and the token is sent only to proven addresses. ``verify`` is True, False, a CA
    file or an ``ssl.SSLContext``. ``timeout_s`` bounds each single request; while the server is away, the request is
    repeated for ``patience_s`` (0: never), and ``on_away`` is called each time. ``transport`` replaces the network.
    """

    renew_token: Callable[[], str | None] | None = None
    """Called for another token when the server refuses the present one; returns None if there is none."""

    def _connect(self, **options: Any) -> httpx.Client:
        return httpx.Client(**options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        for http in self._connected.values():
            http.close()

    def execute(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        return self.run(self._patient(call, patience_s))

    def stream_events(self, feed: EventFeed) -> Iterator[StreamedEvent]:
        """Follow one connection, from where the feed stands to its end. Raises the errors of ``client.errors``."""
        http, url = self._where()
        with self._asking(url), http.stream(**feed.request(self._timeout_s)) as response:
            if not feed.is_stream(response):
                response.read()
                raise feed.refused(response)
            for line in response.iter_lines():
                yield from feed.take(line)

    def follow_events(
        self, jobs: Collection[str] | None = None, *, last_event_id: str | None = None, patience_s: float = 60.0
    ) -> Iterator[StreamedEvent]:
        """Follow the events of these jobs, or of all jobs, over one connection after the other.

        Raises :class:`NotServed` if the server has no such streams, and the error that prevents a connection for
        ``patience_s``.
        """
        feed = EventFeed(jobs, last_event_id)
        while True:
            lost: CkptClientError | None = None
            try:
                yield from self.stream_events(feed)
            except CkptClientError as error:
                lost = error
            time.sleep(feed.pause_after(lost, time.monotonic(), patience_s))

    def run(self, steps: Steps[T], *, patience_s: float = 0.0) -> T:
        """Carry out the steps and return their result; repeats calls for ``patience_s`` while the server is away."""
        try:
            step = next(steps)
            while True:
                try:
                    answer = self._carry_out(step, patience_s)
                except CkptClientError as error:
                    # The steps decide whether the error is passing.
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as end:
            result: T = end.value
            return result

    def _carry_out(self, step: Call[Any] | Pause, patience_s: float) -> Any:
        if isinstance(step, Pause):
            return time.sleep(step.seconds)
        if patience_s > 0:
            return self.execute(step, patience_s=patience_s)
        try:
            return self._send(step)
        except Unauthorized as error:
            if error.status != 401 or not self._renewed():
                raise
        return self._send(step)

    def _send(self, call: Call[Any]) -> Any:
        http, url = self._where()
        with self._asking(url):
            response = http.request(**request_arguments(call))
            return read_answer(call, response)

    def _renewed(self) -> bool:
        """Whether there is another token; if so, all further requests use it."""
        refused, verify, timeout_s = self._options
        token = None if self.renew_token is None else self.renew_token()
        if token is None or token == refused:
            return False
        check_token(token)
        self._options = (token, verify, timeout_s)
        for http in self._connected.values():
            http.headers["Authorization"] = f"Bearer {token}"
        return True

    def _where(self) -> tuple[httpx.Client, str]:
        if self._source is not None:
            leader = self._source.find(self._timeout_s, other_than=self._failed)
            return self._led_by(leader), leader.url
        return self._http_at(self._url), self._url


async def run_steps(steps: Steps[T], carry_out: Callable[[Call[Any] | Pause], Awaitable[Any]]) -> T:
    """Await the steps one by one with ``carry_out`` and return their result."""
    try:
        step = next(steps)
        while True:
            try:
                answer = await carry_out(step)
            except CkptClientError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


class AsyncCkptClient(_Client[httpx.AsyncClient, httpx.AsyncBaseTransport]):
    """The client whose methods are awaited; methods and parameters are those of :class:`CkptClient`."""

    def _connect(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(**options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for http in self._connected.values():
            await http.aclose()

    async def execute(self, call: Call[T], *, patience_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``."""
        return await self.run(self._patient(call, patience_s))

    async def stream_events(self, feed: EventFeed) -> AsyncIterator[StreamedEvent]:
        """Follow one connection, from where the feed stands to its end. Raises the errors of ``client.errors``."""
        http, url = await self._where()
        with self._asking(url):
            async with http.stream(**feed.request(self._timeout_s)) as response:
                if not feed.is_stream(response):
                    await response.aread()
                    raise feed.refused(response)
                async for line in response.aiter_lines():
                    for event in feed.take(line):
                        yield event

    async def follow_events(
        self, jobs: Collection[str] | None = None, *, last_event_id: str | None = None, patience_s: float = 60.0
    ) -> AsyncIterator[StreamedEvent]:
        """See :meth:`CkptClient.follow_events`."""
        feed = EventFeed(jobs, last_event_id)
        while True:
            lost: CkptClientError | None = None
            try:
                async for event in self.stream_events(feed):
                    yield event
            except CkptClientError as error:
                lost = error
            await asyncio.sleep(feed.pause_after(lost, time.monotonic(), patience_s))

    async def run(self, steps: Steps[T], *, patience_s: float = 0.0) -> T:
        """Carry out the steps and return their result; repeats calls for ``patience_s`` while the server is away."""
        return await run_steps(steps, lambda step: self._carry_out(step, patience_s))

    async def _carry_out(self, step: Call[Any] | Pause, patience_s: float) -> Any:
        if isinstance(step, Pause):
            return await asyncio.sleep(step.seconds)
        if patience_s > 0:
            return await self.execute(step, patience_s=patience_s)
        http, url = await self._where()
        with self._asking(url):
            response = await http.request(**request_arguments(step))
            return read_answer(step, response)

    async def _where(self) -> tuple[httpx.AsyncClient, str]:
        if self._source is not None:
            leader = await self._source.afind(self._timeout_s, other_than=self._failed)
            return self._led_by(leader), leader.url
        return self._http_at(self._url), self._url


def _foreign(error: CkptApiError) -> bool:
    """Whether another server may listen at the address by now."""
    return isinstance(error, (Unauthorized, NotServed, UnexpectedAnswer))
