"""The HTTP part that both clients share: URLs, TLS, turning calls into requests and answers into values.

Nothing is retried or waited for here.

A client that follows the leader is given a :class:`LeaderSource` in place of an address. It asks again after every
failure and as soon as the last answer has expired. Therefore it neither stays with a driver that has lost its
leadership, nor sends a token to a process that later took a dead driver's port. Lookups block, and run in threads of
their own.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from ckpt_runtime.client.errors import CkptClientError, NotServed, UnexpectedAnswer, Unreachable, error_for
from ckpt_runtime.client.requests import Call

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 30.0
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_MAX_ECHOED_CHARS = 300
_TOKEN = re.compile(r"[!-~]+( +[!-~]+)*")


class InvalidUrl(CkptClientError, ValueError):
    """The given address of the REST API is invalid."""


class InvalidToken(CkptClientError, ValueError):
    """The bearer token is invalid. The message does not show it, since it may be close to the real one."""


def check_token(token: str | None, name: str = "token") -> None:
    """Raises :class:`InvalidToken` for a text that cannot be sent in a header; ``name`` is the name of the field."""
    if token is not None and not _TOKEN.fullmatch(token):
        allowed = (
            "a token is not empty, consists of ASCII characters without line breaks, and has no blanks at its ends"
        )
        raise InvalidToken(f"{name}: {allowed}")


def normalise_url(url: str) -> str:
    """Turn ``host:port`` and full URLs into a URL without a trailing slash. Raises :class:`InvalidUrl`."""
    text = url.strip()
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        valid = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
        clean = not (parts.query or parts.fragment)
    except ValueError:
        valid = clean = False
    if "@" in text.partition("://")[2].partition("/")[0]:
        raise InvalidUrl(
            "url: it must be like http://host:port, without a user or password; the token is given separately"
        )
    if not valid or not clean:
        raise InvalidUrl(f"url: {url!r} is not acceptable, it must be like http://host:port")
    return text.rstrip("/")


@lru_cache(maxsize=8)
def _tls_context(verify: bool | str) -> ssl.SSLContext:
    """The TLS context of a setting; cached, because loading certificates takes tens of milliseconds."""
    if verify is True:
        return ssl.create_default_context()
    if verify is False:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    return ssl.create_default_context(cafile=verify)


def check_certificates(verify: bool | str) -> None:
    """Raises OSError for an unusable certificate file, even if it is not yet known whether the file is needed."""
    if isinstance(verify, str):
        _tls_context(verify)


def client_options(
    url: str, token: str | None, verify: bool | str | ssl.SSLContext, timeout_s: float
) -> dict[str, Any]:
    """Arguments of ``httpx.Client`` and ``httpx.AsyncClient``. Proxies are not used for loopback addresses."""
    parts = urlsplit(url)
    headers = {"Accept": "application/json", "User-Agent": "ckpt-client"}
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    if parts.scheme == "http":
        verify = _tls_context(False)  # never used, but httpx would load the certificates for it
    elif not isinstance(verify, ssl.SSLContext):
        verify = _tls_context(verify)
    return {
        "base_url": url,
        "headers": headers,
        "verify": verify,
        "timeout": timeout_s,
        "trust_env": parts.hostname not in _LOOPBACK,
        # A redirect may lead to another host, and turns a POST into a GET.
        "follow_redirects": False,
    }


def request_arguments(call: Call[Any]) -> dict[str, Any]:
    """Arguments of ``httpx``'s ``request``."""
    arguments: dict[str, Any] = {"method": call.method, "url": call.path, "headers": dict(call.headers)}
    if call.query:
        arguments["params"] = dict(call.query)
    if call.upload is not None:
        arguments["files"] = {"jarfile": (*call.upload, "application/octet-stream")}
    elif call.body is not None:
        # ASCII, so that any text can be sent and the server can validate it
        arguments["content"] = json.dumps(call.body).encode("ascii")
        arguments["headers"]["Content-Type"] = "application/json"
    return arguments


def read_answer(call: Call[T], response: httpx.Response) -> T:
    """Parse the answer. Raises a :class:`CkptApiError` for an error status or a foreign document."""
    if response.status_code >= 300:
        lines = _error_lines(response)
        # The errors of servers that lack a path. Flink looks for a file of its dashboard first.
        unknown = [f"Not found: {call.path}"], [f"Unable to load requested file {call.path}."]
        if response.status_code == 404 and lines in unknown:
            lacking = "" if call.feature is None else f": it lacks {call.feature}"
            raise NotServed(404, [f"this server does not serve {call.method} {call.path}{lacking}"])
        raise error_for(response.status_code, lines)
    try:
        if response.headers.get("content-type", "").startswith("text/plain"):
            return call.parse(response.text)
        document = json.loads(response.content) if response.content else {}
        return call.parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnexpectedAnswer(
            response.status_code,
            [f"{call.method} {call.path}: the response has an unexpected form ({type(error).__name__}: {error})"],
        ) from error


def _error_lines(response: httpx.Response) -> list[str]:
    try:
        document = json.loads(response.content)
    except ValueError:
        document = None
    lines = document.get("errors") if isinstance(document, Mapping) else None
    if isinstance(lines, list) and lines:
        return [str(line) for line in lines]
    text = response.text.strip()[:_MAX_ECHOED_CHARS]
    return [f"HTTP status {response.status_code}" + (f": {text}" if text else "")]


def unreachable(url: str, error: httpx.TransportError) -> Unreachable:
    """Return the client's own exception for one of ``httpx``'s."""
    unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
    return Unreachable(url, str(error) or type(error).__name__, sent=not unsent)


class LeaderUnknown(Unreachable):
    """There is no leader, or none can be determined; there may be one later. Nothing was sent."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(where, reason, sent=False)


class LeaderUnproven(CkptClientError):
    """The alleged address of the leader lacks a valid proof. No token was sent there."""


@dataclass(frozen=True, slots=True)
class Leader:
    """A proven address of the leader. ``good_until`` is on this process's monotonic clock."""

    url: str
    epoch: int
    good_until: float


class LeaderSource(ABC):
    """Finds a cluster's leader. Safe to share between threads, clients and event loops."""

    def __init__(self, where: str) -> None:
        """``where`` names the place in errors."""
        self.where = where
        self._lock = threading.Lock()
        self._lookup: Future[Leader] | None = None
        self._latest: Leader | None = None

    @abstractmethod
    def look_up(self) -> Leader:
        """Look up the leader; blocks. Raises :class:`LeaderUnknown`, :class:`LeaderUnproven`."""

    async def find(self, timeout_s: float, *, other_than: Leader | None = None) -> Leader:
        """Return the leader; looks it up unless an answer other than ``other_than`` is still good."""
        latest = self._latest
        if latest is not None and latest is not other_than and time.monotonic() < latest.good_until:
            return latest
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(self._shared_lookup())
        except TimeoutError:
            raise LeaderUnknown(self.where, f"no answer within {timeout_s:g} s") from None

    def _shared_lookup(self) -> Future[Leader]:
        """The lookup in progress, shared by all waiting callers: a lookup that hangs costs one thread."""
        with self._lock:
            if self._lookup is None or self._lookup.done():
                self._lookup = Future()
                self._lookup.set_running_or_notify_cancel()  # a caller that gives up cannot cancel it for the others
                # A daemon thread: a lookup that hangs does not keep the process from ending.
                threading.Thread(target=self._answer, args=(self._lookup,), name="leader-lookup", daemon=True).start()
            return self._lookup

    def _answer(self, lookup: Future[Leader]) -> None:
        try:
            found = self.look_up()
            latest = self._latest
            if latest is not None and found.epoch < latest.epoch:
                raise LeaderUnknown(
                    self.where, f"its leader is of epoch {found.epoch}, and one of epoch {latest.epoch} was seen before"
                )
            self._latest = found
            lookup.set_result(found)
        except BaseException as error:
            lookup.set_exception(error)
