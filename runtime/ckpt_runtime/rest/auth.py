"""Authentication of callers: by bearer token, by the cookie of a login (reading only), or by loopback alone.

With a token, every request must carry the token or the cookie issued for it; only the code of the web pages is public.
Without a token, which must be configured explicitly, the server binds to loopback addresses only. It then refuses
requests that a web page could make a browser send: those with a foreign ``Host`` (DNS rebinding) or a foreign
``Origin``. A token is never logged or echoed.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.configuration.rest_options import RestAuthentication
from ckpt_runtime.rest.errors import error_response
from ckpt_runtime.rest.web_sessions import WebSessions, cookie_name, is_same_origin

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
    """ASGI middleware in front of everything else. ``is_public`` says which requests need no authentication.

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
            refusal = self._of_strangers(headers, scope.get("scheme", "http"))
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

    def _of_strangers(self, headers: Headers, scheme: str) -> Response | None:
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
