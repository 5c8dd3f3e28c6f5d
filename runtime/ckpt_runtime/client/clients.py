"""The client: :class:`AsyncCkptClient` is awaited; :class:`CkptClient` is the same client for callers that block.

Every method that talks to the server is made from the function of the same name in
:mod:`ckpt_runtime.client.requests` or :mod:`ckpt_runtime.client.waiting`, with its parameters and result. Both clients
are safe to share: the blocking one between threads, the asynchronous one between tasks of one loop.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypedDict, TypeVar, Unpack, overload

import httpx

from ckpt_runtime.client import requests, waiting
from ckpt_runtime.client.errors import (
    CkptApiError,
    CkptClientError,
    NotFound,
    NotServed,
    Unauthorized,
    UnexpectedAnswer,
    is_outcome_unknown,
    is_passing,
)
from ckpt_runtime.client.event_stream import EventFeed, StreamedEvent
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.transport import (
    DEFAULT_TIMEOUT_S,
    Leader,
    LeaderSource,
    check_certificates,
    check_token,
    client_options,
    normalise_url,
    read_answer,
    request_arguments,
    unreachable,
)
from ckpt_runtime.client.waiting import DEFAULT_RETRY_TIMEOUT_S, Deadline, persistent

P = ParamSpec("P")
T = TypeVar("T")


class _Method(Generic[P, T]):
    """A method of both clients, made from the function that builds its call."""

    def __init__(self, build: Callable[P, Call[T]]) -> None:
        self._build = build

    @overload
    def __get__(self, client: None, owner: type) -> Callable[P, Call[T]]: ...

    @overload
    def __get__(self, client: CkptClient, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncCalls, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: CkptClient | AsyncCalls | None, owner: type) -> Callable[P, Any]:
        if client is None:
            return self._build
        return lambda *args, **kwargs: client.execute(self._build(*args, **kwargs))


class _Wait(Generic[P, T]):
    """A method of both clients, made from a coroutine function that takes the asynchronous client."""

    def __init__(self, wait: Callable[Concatenate[AsyncCalls, P], Coroutine[Any, Any, T]]) -> None:
        self._wait = wait

    @overload
    def __get__(self, client: CkptClient, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncCalls, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: CkptClient | AsyncCalls, owner: type) -> Callable[P, Any]:
        if isinstance(client, CkptClient):
            return lambda *args, **kwargs: client.run(self._wait(client.calls, *args, **kwargs))
        return lambda *args, **kwargs: self._wait(client, *args, **kwargs)


class _Methods:
    """The calls that both clients offer."""

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
    job_progress = _Method(requests.job_progress)
    execution_result = _Method(requests.execution_result)
    cancel_job = _Method(requests.cancel_job)
    cancel_and_retain = _Method(requests.cancel_and_retain)
    vertex_details = _Method(requests.vertex_details)
    subtask_times = _Method(requests.subtask_times)
    vertex_backpressure = _Method(requests.vertex_backpressure)
    vertex_metrics = _Method(requests.vertex_metrics)
    subtask_metric_names = _Method(requests.subtask_metric_names)
    subtask_metric_sums = _Method(requests.subtask_metric_sums)
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
    wait_for_operation = _Wait(waiting.wait_for_operation)
    wait_for_state = _Wait(waiting.wait_for_state)
    wait_for_config = _Wait(waiting.wait_for_config)
    rescale = _Wait(waiting.rescale)


class AsyncCalls(_Methods, ABC):
    """The calls of the REST API as methods that are awaited; a subclass says how one call is carried out."""

    @abstractmethod
    async def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``.

        ``retry_timeout_s``: how long the call is repeated while the server is away, instead of the client's value.
        """


class ClientOptions(TypedDict, total=False):
    """The options of both clients, see :class:`AsyncCkptClient`."""

    token: str | None
    verify: bool | str | ssl.SSLContext
    timeout_s: float
    retry_timeout_s: float
    transport: httpx.AsyncBaseTransport | None
    on_away: Callable[[CkptClientError], None] | None


class AsyncCkptClient(AsyncCalls):
    """The client whose methods are awaited.

    ``address`` is ``host:port`` or a URL, or a source of the current leader (``ckpt_runtime.leader_retrieval``). With a
    source, requests follow the leader, and the token is sent only to proven addresses; connections to each address that
    has led are kept until the client is closed. ``verify`` is True, False, a CA file or an ``ssl.SSLContext``.
    ``timeout_s`` bounds each single request. While the server does not answer, a request is repeated for
    ``retry_timeout_s`` (0: never), and ``on_away`` is called each time. ``transport`` replaces the network.
    """

    renew_token: Callable[[], str | None] | None = None
    """Called in a thread when the server refuses the current token; returns another token or None."""

    def __init__(
        self,
        address: str | LeaderSource,
        *,
        token: str | None = None,
        verify: bool | str | ssl.SSLContext = True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_timeout_s: float = DEFAULT_RETRY_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
        on_away: Callable[[CkptClientError], None] | None = None,
    ) -> None:
        check_token(token)
        self.retry_timeout_s = retry_timeout_s
        self._on_away = on_away
        self._token, self._verify, self._timeout_s = token, verify, timeout_s
        self._transport = transport
        self._connected: dict[str, httpx.AsyncClient] = {}
        self._leader: Leader | None = None
        self._failed: Leader | None = None
        self._source = None if isinstance(address, str) else address
        self.url = ""
        """Where requests go: the given address, or that of the last leader found (empty before the first)."""
        if isinstance(address, str):
            self.url = normalise_url(address)
            self._http_at(self.url)
        elif not isinstance(verify, ssl.SSLContext):
            check_certificates(verify)

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

    async def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`. Raises the errors of ``client.errors``.

        While the server is away, the call is repeated for ``retry_timeout_s``: at least two attempts, or one with 0.
        """
        retry_timeout_s = self.retry_timeout_s if retry_timeout_s is None else retry_timeout_s
        lost = False
        """Whether an attempt may have succeeded although its answer was lost; its outcome is looked up if possible."""

        async def attempt() -> T:
            nonlocal lost
            if lost and call.lookup is not None:
                try:
                    return await self._send(call.lookup)
                except NotFound:
                    pass  # the request never arrived, or is still on its way
            try:
                return await self._send(call)
            except CkptClientError as error:
                lost = lost or is_outcome_unknown(error)
                if not lost or call.lookup is None or is_passing(error):
                    raise
                try:
                    return await self._send(call.lookup)  # refused, perhaps because an earlier attempt arrived
                except NotFound:
                    raise error from None

        attempts = 2 if retry_timeout_s > 0 else 1
        return await persistent(attempt, Deadline.after(retry_timeout_s), attempts=attempts, on_away=self._on_away)

    async def stream_events(self, feed: EventFeed) -> AsyncIterator[StreamedEvent]:
        """Yield the events of one connection, from the feed's position on. Raises the errors of ``client.errors``."""
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
        self, jobs: Collection[str] | None = None, *, last_event_id: str | None = None, retry_timeout_s: float = 60.0
    ) -> AsyncIterator[StreamedEvent]:
        """Follow the events of these jobs, or of all jobs, over one connection after the other.

        Raises :class:`NotServed` if the server has no such streams, and the error that prevents a connection for
        ``retry_timeout_s``.
        """
        feed = EventFeed(jobs, last_event_id)
        while True:
            lost: CkptClientError | None = None
            try:
                async for event in self.stream_events(feed):
                    yield event
            except CkptClientError as error:
                lost = error
            await asyncio.sleep(feed.pause_after(lost, time.monotonic(), retry_timeout_s))

    async def _send(self, call: Call[T]) -> T:
        """Send one attempt, and a second one with another token if the server refuses the first."""
        try:
            return await self._send_once(call)
        except Unauthorized as error:
            if error.status != 401 or not await self._has_renewed():
                raise
        return await self._send_once(call)

    async def _send_once(self, call: Call[T]) -> T:
        http, url = await self._where()
        with self._asking(url):
            return read_answer(call, await http.request(**request_arguments(call)))

    async def _has_renewed(self) -> bool:
        """Whether there is another token; if so, all further requests use it."""
        token = None if self.renew_token is None else await asyncio.to_thread(self.renew_token)
        if token is None or token == self._token:
            return False
        check_token(token)
        self._token = token
        for http in self._connected.values():
            http.headers["Authorization"] = f"Bearer {token}"
        return True

    async def _where(self) -> tuple[httpx.AsyncClient, str]:
        if self._source is not None:
            self._leader = await self._source.find(self._timeout_s, other_than=self._failed)
            self.url = self._leader.url
        return self._http_at(self.url), self.url

    def _http_at(self, url: str) -> httpx.AsyncClient:
        if url not in self._connected:
            options = client_options(url, self._token, self._verify, self._timeout_s)
            self._connected[url] = httpx.AsyncClient(**options, transport=self._transport)
        return self._connected[url]

    @contextmanager
    def _asking(self, url: str) -> Iterator[None]:
        """Turn a request's failure into the client's own error. If the leader may have changed, look it up again."""
        try:
            yield
        except httpx.TransportError as error:
            self._failed = self._leader
            raise unreachable(url, error) from error
        except CkptApiError as error:
            # These errors may mean that another server listens at the address by now.
            if is_passing(error) or isinstance(error, Unauthorized | NotServed | UnexpectedAnswer):
                self._failed = self._leader
            raise


class CkptClient(_Methods):
    """The client whose methods block: it runs the coroutines of an :class:`AsyncCkptClient`, and takes its options.

    Works in any thread, also where an event loop runs, and in signal handlers: the coroutines run in the event loop of
    one thread that all blocking clients of the process share.
    """

    def __init__(self, address: str | LeaderSource, **options: Unpack[ClientOptions]) -> None:
        self.calls = AsyncCkptClient(address, **options)
        """The asynchronous client, for coroutines that :meth:`run` carries out."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self.run(self.calls.close())

    @property
    def url(self) -> str:
        """Where requests go: the given address, or that of the last leader found (empty before the first)."""
        return self.calls.url

    def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T:
        """Send one call of :mod:`ckpt_runtime.client.requests`; see :meth:`AsyncCkptClient.execute`."""
        return self.run(self.calls.execute(call, retry_timeout_s=retry_timeout_s))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Block until a coroutine that uses :attr:`calls` has ended. An exception from a signal handler cancels it."""
        if threading.current_thread().name == _LOOP_THREAD:
            work.close()
            raise RuntimeError("a blocking client was called from a coroutine that a blocking client runs")
        future = asyncio.run_coroutine_threadsafe(work, _shared_loop())
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stream_events(self, feed: EventFeed) -> Iterator[StreamedEvent]:
        """See :meth:`AsyncCkptClient.stream_events`."""
        return self._iterate(self.calls.stream_events(feed))

    def follow_events(
        self, jobs: Collection[str] | None = None, *, last_event_id: str | None = None, retry_timeout_s: float = 60.0
    ) -> Iterator[StreamedEvent]:
        """See :meth:`AsyncCkptClient.follow_events`."""
        return self._iterate(
            self.calls.follow_events(jobs, last_event_id=last_event_id, retry_timeout_s=retry_timeout_s)
        )

    def _iterate(self, events: AsyncIterator[T]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(events, None)

        try:
            while (event := self.run(following())) is not None:
                yield event
        finally:
            self.run(events.aclose())  # type: ignore[attr-defined]


_LOOP_THREAD = "ckpt-client"
_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _shared_loop() -> asyncio.AbstractEventLoop:
    """The event loop of the blocking clients of this process, in a daemon thread that starts with the first request."""
    global _loop
    with _loop_lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name=_LOOP_THREAD, daemon=True).start()
        return _loop


def _after_fork() -> None:
    """Reset the loop in a child process, which inherits its memory but not its thread."""
    global _loop, _loop_lock
    _loop, _loop_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
