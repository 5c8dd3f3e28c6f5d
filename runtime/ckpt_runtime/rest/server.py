"""Serves the REST application on an asyncio loop that already runs, and lets only authenticated callers in.

It installs no signal handler and never ends the loop; its caller stops it.

The HTTP/1.1 protocol has limits that uvicorn lacks: a head must arrive in time, and errors are JSON. The number of
connections is bounded. An excess connection gets 503 as soon as it sends data; if there are too many excess connections
as well, it is closed without an answer.

Callers are authenticated by bearer token, by the cookie of a login (reading only), or by loopback alone. With a token,
every request must carry the token or the cookie issued for it; only the code of the web pages is public. Without a
token, which must be configured explicitly, the server binds to loopback addresses only. It then refuses requests that a
web page could make a browser send: those with a foreign ``Host`` (DNS rebinding) or a foreign ``Origin``. A token is
never logged or echoed, and cookies never contain it.

A cookie's value has its expiry and a random id, signed with a key that each driver generates: it is invalid after the
driver's end at the latest. Nothing is stored for a session, so any number of logins takes no memory; only the newest
sessions that were logged out before their expiry are remembered.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from ckpt_runtime.configuration.cluster_options import RestAuthentication, RestOptions
from ckpt_runtime.rest.event_stream import end_streams
from ckpt_runtime.rest.exchange import error_response

LIFETIME_S = 12 * 3600
MAX_ENDED = 10_000
"""How many logged-out, unexpired sessions are remembered; beyond this number the oldest one becomes valid again."""

_VALUE = re.compile(r"([0-9]{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class WebSessions:
    """Issues sessions and verifies them."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._key = secrets.token_bytes(32)
        self._clock = clock
        self._ended: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> str:
        """Make the value of a new cookie."""
        claim = f"{int(self._clock()) + LIFETIME_S}.{secrets.token_hex(16)}"
        return f"{claim}.{self._signature(claim)}"

    def is_valid(self, value: str) -> bool:
        """Whether this driver has issued the cookie and its session has not ended."""
        found = _VALUE.fullmatch(value)
        if found is None:
            return False
        end, session_id, signature = found.groups()
        signed = hmac.compare_digest(signature, self._signature(f"{end}.{session_id}"))
        return signed and self._clock() < int(end) and session_id not in self._ended

    def end(self, value: str) -> None:
        """Invalidate a session; an invalid value is ignored."""
        if self.is_valid(value):
            self._ended[value.split(".")[1]] = None
            if len(self._ended) > MAX_ENDED:
                self._ended.popitem(last=False)

    def _signature(self, claim: str) -> str:
        return hmac.new(self._key, claim.encode("ascii"), hashlib.sha256).hexdigest()


def cookie_name(host: str) -> str:
    """The cookie's name, which contains the port, as browsers send the cookies of a host to all of its ports."""
    try:
        port = urlsplit(f"//{host}").port
    except ValueError:
        port = None
    return f"ckpt-session-{port or 'default'}"


def is_same_origin(headers: Mapping[str, str]) -> bool:
    """Whether a page of this server sent the request, according to the browser's headers; without such headers it is
    true.

    Behind a proxy that changes ``Host``, it is true only for browsers that send ``Sec-Fetch-Site`` (over TLS, all do).
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    # Compared as text, because a header that is not a URL, such as "http://[", cannot be parsed.
    return origin is None or origin.partition("://")[2] == headers.get("host", "")


_LOOPBACK_NAMES = frozenset({"localhost", "ip6-localhost"})


class BindingRefused(ValueError):
    """The REST server would be reachable from other machines without a token."""


def is_loopback(host: str) -> bool:
    """Whether the host is ``localhost`` or a loopback address; other names are not resolved and count as reachable."""
    bare = host.strip("[]").lower()
    if bare in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False


def check_binding(host: str, token: str | None, authentication: RestAuthentication = RestAuthentication.TOKEN) -> None:
    """Raises :class:`BindingRefused` for a server without a token, unless configured so and bound to loopback."""
    if token:
        return
    if authentication is not RestAuthentication.NONE:
        raise BindingRefused(
            "rest.authentication: TOKEN needs a token: set the environment variable CKPT_REST_TOKEN or rest.token-file"
        )
    if not is_loopback(host):
        raise BindingRefused(
            f"rest.bind-address: {host!r} is reachable from other machines, which needs a token; "
            "set one, or bind to 127.0.0.1"
        )


class Guard:
    """ASGI middleware in front of everything else. ``is_public`` selects the requests that need no authentication.

    A cookie set by a login (``sessions``) suffices for reading only, because a page of another site could make a
    browser send the cookie along with a change.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, sessions: WebSessions, is_public: Callable[[str, str, str], bool]
    ) -> None:
        self._app = app
        self._expected = token
        self._sessions = sessions
        self._is_public = is_public

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._expected is None:
            refusal = self._refusal_of_origin(headers, scope.get("scheme", "http"))
        else:
            refusal = self._of_token(scope, headers)
        await (refusal or self._app)(scope, receive, send)

    def _of_token(self, scope: Scope, headers: Headers) -> Response | None:
        if has_token(self._expected or "", headers):
            return None
        method = scope["method"]
        if self._is_public(method, scope["path"], headers.get("accept", "")):
            return None
        if method in ("GET", "HEAD") and has_session(self._sessions, headers):
            return None
        return error_response(401, ["A valid bearer token is required."], {"WWW-Authenticate": 'Bearer realm="ckpt"'})

    def _refusal_of_origin(self, headers: Headers, scheme: str) -> Response | None:
        host = headers.get("host", "")
        if not is_loopback(_host_name(f"//{host}")):
            return error_response(403, ["Without a token this server answers to loopback host names only."])
        origin = headers.get("origin")
        if origin is not None and origin != f"{scheme}://{host}":
            return error_response(403, ["Requests from other origins are not accepted."])
        return None


def _host_name(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def has_token(expected: str, headers: Headers) -> bool:
    """Whether a request carries the token, which is compared in constant time."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    offered = given.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
    return hmac.compare_digest(offered, expected.encode())


def has_session(sessions: WebSessions, headers: Headers) -> bool:
    """Whether the request comes from a logged-in browser, on behalf of a page of this server."""
    cookies = cookie_parser(headers.get("cookie", ""))
    return sessions.is_valid(cookies.get(cookie_name(headers.get("host", "")), "")) and is_same_origin(headers)


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
            # A client that still has to send its request would lose an earlier answer.
            message = f"the server already has {self._max_connections} connections; try again"
            self._answer_and_close(503, b"Service Unavailable", message, [(b"retry-after", b"1")])
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
        """True keeps the connection open for the pending answer: a client that has closed its sending side may still
        read.

        An endless stream is the exception: there, end of input means that the client has disconnected.
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
    the binding first (:func:`ckpt_runtime.rest.server.check_binding`).
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
