"""The audit log of changes requested over REST: the caller, the request, and the state before and after the change.

It stands between the handlers and the gateway, so that no change can bypass it. Each change has two records: ``asked``
before it begins, and one with its outcome. The log never contains a token, a secret option or a pipeline's arguments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.configuration.configuration import Configuration, shown_value
from ckpt_runtime.configuration.errors import InvalidOptionError
from ckpt_runtime.configuration.rest_options import AuditDestination, RestOptions
from ckpt_runtime.failure_report import printable
from ckpt_runtime.jobmaster.configuration_requests import ConfigurationRequest
from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_values import RunRequest

logger = logging.getLogger("ckpt_runtime.audit")
Json = dict[str, Any]
Write = Callable[[Json], None]
Read = Callable[[DispatcherGateway, str], Awaitable[Any]]
_MAX_CHARS = 1_024
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")
_caller: ContextVar[Json] = ContextVar("caller")


async def _configuration(gateway: DispatcherGateway, job_id: str) -> Json:
    found = await gateway.job_config(job_id)
    return {"version": found.version, "configuration": dict(found.configuration)}


async def _checkpoint_settings(gateway: DispatcherGateway, job_id: str) -> Json:
    found = await gateway.checkpoint_config(job_id)
    return {"overrides": list(found.overrides), "settings": _plain(found.settings)}


async def _parallelism(gateway: DispatcherGateway, job_id: str) -> Any:
    return _plain(await gateway.resource_requirements(job_id))


async def _status(gateway: DispatcherGateway, job_id: str) -> str:
    return (await gateway.job_status(job_id)).value


CHANGES: Final[Mapping[str, Read | None]] = {
    "shutdown_cluster": None,
    "store_pipeline": None,
    "delete_pipeline": None,
    "hold_pipeline": None,
    "release_pipeline": None,
    "mark_savepoint": None,
    "run_pipeline": None,
    "retire_job_id": None,
    "hold_lineage": _status,
    "release_lineage": _status,
    "dispose_savepoint": None,
    "change_job_config": _configuration,
    "cancel_job": _status,
    "patch_checkpoint_config": _checkpoint_settings,
    "delete_checkpoint_config_overrides": _checkpoint_settings,
    "update_resource_requirements": _parallelism,
    "trigger_checkpoint": _status,
    "trigger_savepoint": _status,
    "stop_with_savepoint": _status,
}
"""The gateway's methods that make changes, each with a function that reads the state before and after the change.

The function gets the method's first argument, the job.
"""


class Caller:
    """ASGI middleware behind the guard that remembers the caller of each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers, client = Headers(scope=scope), scope.get("client")
            _caller.set(
                {
                    "address": client[0] if client else "",
                    "agent": _text(headers.get("user-agent", "")),
                    "token": "authorization" in headers,
                    "request": f"{scope['method']} {_text(scope['path'])}",
                }
            )
        await self._app(scope, receive, send)


class AuditedGateway:
    """A gateway whose changes are recorded; everything else passes through."""

    def __init__(self, gateway: DispatcherGateway, write: Write) -> None:
        self._gateway = gateway
        self._write = write
        self._thread = ThreadPoolExecutor(1, "audit")

    @classmethod
    def over(cls, gateway: DispatcherGateway, write: Write | None) -> DispatcherGateway:
        """Wrap the gateway; ``write`` is an :func:`audit_log`. Without one, returns the gateway itself."""
        return gateway if write is None else cast(DispatcherGateway, cls(gateway, write))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._gateway, name)
        if name not in CHANGES:
            return method

        async def recorded(*arguments: Any, **options: Any) -> Any:
            if any(isinstance(item, ConfigurationRequest) and item.dry_run for item in arguments):
                return await method(*arguments, **options)
            return await self._recorded(name, lambda: method(*arguments, **options), arguments, options)

        return recorded

    async def _recorded(
        self, name: str, carry_out: Callable[[], Awaitable[Any]], arguments: tuple[Any, ...], options: Json
    ) -> Any:
        read = CHANGES[name]
        record: Json = {"id": uuid.uuid4().hex, "change": name, "by": _caller.get({})}
        record["arguments"] = [_plain(item) for item in (*arguments, *options.values())]
        if read is not None:
            record["before"] = await self._seen(read, arguments[0])
        await self._put(record | {"outcome": "asked"})
        try:
            answer = await carry_out()
        except BaseException as error:
            await asyncio.shield(self._put(record | {"outcome": "refused", "error": _text(str(error))}))
            raise
        if read is not None:
            record["after"] = await self._seen(read, arguments[0])
        await asyncio.shield(self._put(record | {"outcome": "done", "answer": _plain(answer)}))
        return answer

    async def _seen(self, read: Read, job_id: str) -> Any:
        try:
            return await read(self._gateway, job_id)
        except Exception as error:  # the change itself will meet the same error
            return {"unknown": _text(str(error))}

    async def _put(self, record: Json) -> None:
        line = {"timestamp": time.time_ns() // 1_000_000, **record}
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._write, line)
        except OSError as error:
            logger.error("the audit log cannot be written: %s: %s", error, json.dumps(line))


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
            try:
                return _FileLog(Path(file))
            except OSError as error:
                allowed = f"a file that can be written ({error.strerror})"
                raise InvalidOptionError(RestOptions.AUDIT_FILE.key, file, allowed) from error


class _FileLog:
    """A private file with one JSON document per line; created again if it was moved away."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self({"timestamp": time.time_ns() // 1_000_000, "outcome": "the session begins"})

    def __call__(self, record: Json) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, json.dumps(record).encode("ascii") + b"\n")
        finally:
            os.close(descriptor)


def _text(text: str) -> str:
    return printable(_CREDENTIALS.sub("***@", text), _MAX_CHARS)


def _plain(value: Any) -> Any:
    """JSON values of the gateway's arguments and results, without secrets and file contents."""
    match value:
        case None | bool() | int() | float() | str():
            return _text(str(value)) if isinstance(value, str) else value
        case RunRequest():
            shown = {name: getattr(value, name) for name in ("pipeline_id", "entry_point", "job_id", "parallelism")}
            shown |= {"savepoint_path": value.savepoint_path, "claim_mode": value.claim_mode.value}
            shown |= {"like_job": value.like_job, "drill": value.drill, "fork": value.fork}
            shown |= {"upgrade_owner": value.condition.owner}
            return _plain(shown) | {"configuration": _options(value.configuration)}
        case ConfigurationRequest():
            return {"options": _options(value.options), "version": value.version, "partial": value.partial}
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case tuple() | list():
            return [_plain(item) for item in value]
        case CheckpointOverrides():
            return dict(value.request_fields)
        case _:
            return _fields(value)


def _fields(value: Any) -> Any:
    """The fields of a dataclass; of any other value, such as an upload's content, only its type."""
    if not is_dataclass(value):
        return type(value).__name__
    return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}


def _options(options: Mapping[str, str | None]) -> Json:
    return {_text(key): None if value is None else _text(shown_value(key, value)) for key, value in options.items()}
