"""The audit log of changes requested over REST: one record per request, with the caller, the request and the answer.

The middleware runs after the guard, so that calls without the token leave no record. Secret options and credentials
in URLs are masked; arguments of pipelines and uploaded files are left out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ckpt_runtime.configuration.cluster_options import AuditDestination, RestOptions
from ckpt_runtime.configuration.configuration import Configuration, shown_value
from ckpt_runtime.configuration.option import InvalidOptionError
from ckpt_runtime.failure_report import printable

logger = logging.getLogger("ckpt_runtime.audit")
Write = Callable[[dict[str, Any]], None]
_MAX_CHARS = 1_024
_MAX_BYTES = 256 * 1_024
"""Longer bodies and answers are not recorded. No JSON body that the API accepts is longer."""
_UNRECORDED = frozenset({"programArgs", "programArgsList"})


class AuditLog:
    """ASGI middleware. A request that only reads, plans or is a dry run leaves no record."""

    def __init__(self, app: ASGIApp, write: Write) -> None:
        self._app = app
        self._write = write
        self._thread = ThreadPoolExecutor(1, "audit")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _changes_something(scope):
            await self._app(scope, receive, send)
            return
        body, answer, status = bytearray(), bytearray(), 500

        async def received() -> Message:
            message = await receive()
            _keep(body, message)
            return message

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            _keep(answer, message)
            await send(message)

        try:
            await self._app(scope, received, sent)
        finally:
            record = {**_request(scope), "body": _document(body), "status": status, "answer": _document(answer)}
            await asyncio.shield(self._put(record))

    async def _put(self, record: dict[str, Any]) -> None:
        line = {"timestamp": time.time_ns() // 1_000_000, **record}
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, line)
        except OSError as error:
            logger.error("the audit log cannot be written: %s: %s", error, json.dumps(line))


def _changes_something(scope: Scope) -> bool:
    if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
        return False
    path: str = scope["path"]
    if path.startswith("/web/") or (path.startswith("/jars/") and path.endswith("/plan")):
        return False
    return QueryParams(scope["query_string"]).get("dry-run") != "true"


def _request(scope: Scope) -> dict[str, Any]:
    headers, client = Headers(scope=scope), scope.get("client")
    path, query = scope.get("ckpt.original_path", scope["path"]), scope["query_string"].decode("latin-1")
    return {
        "by": {
            "address": client[0] if client else "",
            "agent": _text(headers.get("user-agent", "")),
            "requester": _text(headers.get("ckpt-requester", "")),
            "token": "authorization" in headers,
        },
        "request": _text(f"{scope['method']} {path}{'?' if query else ''}{query}"),
    }


def _keep(content: bytearray, message: Message) -> None:
    """Collect at most one byte more than the limit; the extra byte shows :func:`_document` that the content is too
    long."""
    chunk = message.get("body", b"")
    content += chunk[: _MAX_BYTES + 1 - len(content)]


def _document(content: bytearray) -> Any:
    """The JSON document as it may be recorded, None for any other content."""
    if len(content) > _MAX_BYTES:
        return None
    try:
        return _shown("", json.loads(content))
    except (ValueError, RecursionError):
        return None


def _shown(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {_text(name): _shown(name, item) for name, item in value.items() if name not in _UNRECORDED}
    if isinstance(value, list):
        return [_shown(key, item) for item in value]
    if isinstance(value, str):
        return _text(shown_value(key, value))
    return value


def _text(text: str) -> str:
    return printable(shown_value("", text), _MAX_CHARS)


def audit_log(configuration: Configuration) -> Write | None:
    """The function that writes records; None without an audit log. Raises ConfigurationError if it cannot be opened."""
    file = configuration.get(RestOptions.AUDIT_FILE)
    match configuration.get(RestOptions.AUDIT_DESTINATION):
        case AuditDestination.NONE:
            return None
        case AuditDestination.LOG:
            return lambda record: logger.info("%s", json.dumps(record))
        case AuditDestination.FILE:
            if file is None or not Path(file).is_absolute():
                raise InvalidOptionError(RestOptions.AUDIT_FILE.key, file, "the absolute path of a file, for FILE")
            write = _file_writer(Path(file))
            try:
                write({"timestamp": time.time_ns() // 1_000_000, "request": "the session begins"})
            except OSError as error:
                allowed = f"a file that can be written ({error.strerror})"
                raise InvalidOptionError(RestOptions.AUDIT_FILE.key, file, allowed) from error
            return write


def _file_writer(path: Path) -> Write:
    """Append lines to a private file, which is opened for each line, so that it may be moved away at any time."""

    def write(record: dict[str, Any]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, json.dumps(record).encode("ascii") + b"\n")
        finally:
            os.close(descriptor)

    return write
