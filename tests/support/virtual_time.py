"""Time that passes at once: an event loop that jumps to what is due next, and a server on it that can be away.

For waits whose only partner is an application in the same loop: nothing there takes time, and a task that waits for a
minute waits for nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

import httpx
from starlette.types import ASGIApp, Message

T = TypeVar("T")
P = ParamSpec("P")

_LATE = 1e-6
"""A timer is never early, not even by what adding seconds loses."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock stands still while there is something to do, and jumps to the next timer when there is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def stand_still(self, seconds: float) -> None:
        """Time passes in which nothing of the loop runs."""
        self._now += seconds

    def _run_once(self) -> None:
        loop: Any = self
        if not loop._ready and loop._scheduled:
            self._now = max(self._now, loop._scheduled[0]._when + _LATE)
        super()._run_once()  # type: ignore[misc]


class LoopTime:
    """Takes the place of the module ``time``: its clocks are that of the running loop."""

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()

    time = monotonic


class InlineExecutor(Executor):
    """Calls run at once, in the thread of the loop: none is under way when time jumps."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run it in a loop whose time jumps."""
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work)


class _Stream(httpx.AsyncByteStream):
    """The body of an answer as it comes, until its end or that of the connection."""

    def __init__(self, server: InLoopServer) -> None:
        self._server = server
        self.messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            message = await self.messages.get()
            if message is None:
                raise httpx.ReadError("the connection is broken")
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return

    async def aclose(self) -> None:
        self._server.streams.discard(self)
        if self.task is not None:
            self.task.cancel()


class InLoopServer(httpx.AsyncBaseTransport):
    """An application behind no socket. While it is ``away``, connections are refused and open ones break."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application
        self._away = False
        self.streams: set[_Stream] = set()
        self.requests: list[tuple[float, str]] = []
        """Each with the time at which it came, or was refused."""

    @property
    def away(self) -> bool:
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        for stream in tuple(self.streams) if away else ():
            stream.messages.put_nowait(None)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append((asyncio.get_running_loop().time(), f"{request.method} {path}"))
        if self._away:
            raise httpx.ConnectError("no server listens")
        body, stream = await request.aread(), _Stream(self)
        sent = False

        async def receive() -> Message:
            nonlocal sent
            if sent:
                await asyncio.Event().wait()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": request.url.scheme,
            "path": path,
            "raw_path": request.url.raw_path,
            "root_path": "",
            "query_string": request.url.query,
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 1),
            "server": (request.url.host, request.url.port or 80),
        }
        self.streams.add(stream)
        stream.task = asyncio.create_task(self._answer(scope, receive, stream))
        begun = await stream.messages.get()
        if begun is None:
            raise httpx.ReadError("the connection is broken")
        return httpx.Response(begun["status"], headers=begun["headers"], stream=stream)

    async def _answer(self, scope: Any, receive: Any, stream: _Stream) -> None:
        async def send(message: Message) -> None:
            stream.messages.put_nowait(message)

        await self._application(scope, receive, send)
