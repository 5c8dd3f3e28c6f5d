"""Serving the REST application on an asyncio loop that already runs.

It installs no signal handler and never ends the loop; its caller stops it.

The HTTP/1.1 protocol has limits that uvicorn lacks: a head must arrive in time, and errors are JSON. The number of
connections is bounded. An excess connection gets 503 as soon as it sends data; if there are too many excess connections
as well, it is closed without an answer.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckpt_runtime.configuration.cluster_options import RestOptions
from ckpt_runtime.rest.event_stream import end_streams

HEAD_TIMEOUT_S = 30.0
"""Maximum time from the first byte of a connection or request to the end of the request's head."""

REFUSED_TIMEOUT_S = 5.0
"""The same limit for an excess connection."""

UNREAD_TIMEOUT_S = 60.0
"""How long a client may leave written data unread, once its write buffer is full."""

LINGER_S = 1.0
"""How long a client may keep sending a body after its answer; closing at once could lose the answer."""

MAX_REFUSED = 64
"""Maximum number of connections that wait for a 503; further ones are closed without an answer."""

_ENDLESS = "/events"
_CLOSED = (h11.ERROR, h11.CLOSED, h11.MUST_CLOSE)


class BoundedHttpProtocol(H11Protocol):
    """The protocol class for ``uvicorn.Config(http=...)``."""

    def __init__(self, *arguments: Any, max_connections: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._max_connections = max_connections
        self.is_refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._lingers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        refused = sum(isinstance(known, BoundedHttpProtocol) and known.is_refused for known in self.connections)
        self.is_refused = len(self.connections) - refused > self._max_connections
        if self.is_refused and refused >= MAX_REFUSED:
            transport.abort()
        else:
            self._watch_head()

    def data_received(self, data: bytes) -> None:
        if self._lingers or self.transport.is_closing() or self.conn.our_state in _CLOSED:
            return
        if self.is_refused:
            self._refuse()
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Close the connection after an answer that was sent before the end of the body, as the rest is not read."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._lingers = True
            self._unset_keepalive_if_required()
            self.loop.call_later(LINGER_S, self.transport.abort)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def eof_received(self) -> bool:  # type: ignore[override]
        """True keeps the connection open for the pending answer: a client that sends no more may still read.

        An endless stream is the exception: there, end of input means that the client has gone.
        """
        if self.cycle is not None and self.cycle.scope["path"].endswith(_ENDLESS):
            return False
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body or self.scheme == "https":
            return False
        self.cycle.keep_alive = False
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_unread_timer()

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._stop_unread_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        """Start or stop the timer for the head; the client's state is idle until a whole head has arrived."""
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._head_timer is None:
            timeout = REFUSED_TIMEOUT_S if self.is_refused else HEAD_TIMEOUT_S
            self._head_timer = self.loop.call_later(timeout, self._head_is_late)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not an HTTP request, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            # The request's handler still waits for the rest of the body; it must not answer as well.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        self._answer_and_close(400, b"Bad Request", msg, [])

    def _refuse(self) -> None:
        """Answer 503 to a request that has begun: a client that still has to send it would lose an earlier answer."""
        message = f"the server already has {self._max_connections} connections; try again"
        self._answer_and_close(503, b"Service Unavailable", message, [(b"retry-after", b"1")])

    def _answer_and_close(self, status: int, reason: bytes, message: str, headers: list[tuple[bytes, bytes]]) -> None:
        body = json.dumps({"errors": [message]}).encode("ascii")
        common = [
            (b"content-type", b"application/json; charset=UTF-8"),
            (b"content-length", str(len(body)).encode("ascii")),
            (b"connection", b"close"),
        ]
        head = self.conn.send(h11.Response(status_code=status, headers=common + headers, reason=reason))
        self.transport.write((head or b"") + body)
        self.transport.close()


_GRACE_S = 5
_LATE_S = 0.05


class EmbeddedServer(uvicorn.Server):
    """A uvicorn server without signal handling, for an event loop that belongs to the host process."""

    serving: asyncio.Task[None]

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the host process owns them."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every connection, including those accepted during the shutdown, which would be served forever."""
        known = set(self.server_state.connections)
        late = asyncio.create_task(self._end_late_ones(known), name="late-connections")
        try:
            await super().shutdown(sockets)
        finally:
            late.cancel()
            for connection in self.server_state.connections:
                cast(BoundedHttpProtocol, connection).transport.abort()

    async def _end_late_ones(self, known: set[Any]) -> None:
        while True:
            await asyncio.sleep(_LATE_S)
            for connection in self.server_state.connections - known:
                connection.shutdown()
                known.add(connection)


async def start(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    max_connections: int = RestOptions.MAX_CONNECTIONS.default,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> tuple[EmbeddedServer, int]:
    """Bind, serve, and return the server and its port once it accepts connections.

    ``port`` 0 takes a free one. ``max_connections`` are served at a time. ``tls`` for HTTPS.
    ``options`` go to ``uvicorn.Config``. Raises :class:`OSError` when the address cannot be bound. Callers check
    the binding first (:func:`ckpt_runtime.rest.auth.check_binding`).
    """
    listening = _bind(host, port)
    config = uvicorn.Config(
        app,
        http=cast(type[BoundedHttpProtocol], partial(BoundedHttpProtocol, max_connections=max_connections)),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
        **options,
    )
    config.load()
    # After load(), which makes TLS contexts only from files.
    config.ssl = tls
    server = EmbeddedServer(config)
    server.serving = asyncio.create_task(server.serve([listening]), name="rest-server")
    while not server.started:
        if server.serving.done():
            listening.close()
            await server.serving
            raise RuntimeError("the REST server ended before it had started")
        # uvicorn does not notify its caller when it has started.
        await asyncio.sleep(0.005)
    return server, int(listening.getsockname()[1])


async def stop(server: EmbeddedServer) -> None:
    """End the event streams, let other requests finish (at most 5 s), then close. May be called twice."""
    end_streams(cast(ASGIApp, server.config.app))
    server.should_exit = True
    await server.serving


def _bind(host: str, port: int) -> socket.socket:
    bare = host.strip("[]")
    family, kind, protocol, _, address = socket.getaddrinfo(
        bare, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        # For a session restarted at once, while connections of the previous one are still closing on the port.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(256)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening
