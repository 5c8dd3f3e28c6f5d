"""Serving the REST application on an asyncio loop that already runs.

It installs no signal handler and never ends the loop; its caller stops it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp

from ckpt_runtime.configuration.rest_options import RestOptions
from ckpt_runtime.rest.event_stream import end_streams
from ckpt_runtime.rest.http_protocol import BoundedHttpProtocol

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
