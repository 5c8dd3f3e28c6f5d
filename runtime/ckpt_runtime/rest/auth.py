"""Authentication of callers: by bearer token, by the cookie of a login (reading only), or by loopback alone.

With a token, every request must carry the token or the cookie issued for it; only the code of the web pages is public.
Without a token, which must be configured explicitly, the server binds to loopback addresses only. It then refuses
requests that a web page could make a browser send: those with a foreign ``Host`` (DNS rebinding) or a foreign
``Origin``. A token is never logged or echoed, and cookies never contain it.

A cookie's value has its expiry and a random id, signed with a key that each driver generates: it is invalid after the
driver's end at the latest. Nothing is stored for a session, so any number of logins takes no memory; only the newest
sessions that were logged out before their expiry are remembered.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.configuration.cluster_options import RestAuthentication
from ckpt_runtime.rest.responses import error_response

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
    """Whether the browser's headers say that a page of this server sent the request; without such headers it is true.

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
