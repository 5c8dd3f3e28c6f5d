"""Answers: routes whose functions return values of the contract, their JSON, and errors in one shape.

JSON is ASCII only (so a lone surrogate from a client's text can always be encoded) and strict: if a handler forgets to
spell a NaN as Flink's string ``"NaN"``, the result is a server error, not invalid JSON for the client. Every error is
``{"errors": [...]}``: our own :class:`ApiError`, the dispatcher's named errors, and the framework's routing and
parameter errors. An answer never contains a stack trace or the request body.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from ckpt_runtime.jobmaster import gateway_errors
from ckpt_runtime.jobmaster.gateway_errors import ConfigurationRefused, OptionsNotAllowed


def now_ms() -> int:
    """The wall-clock time in milliseconds since the epoch, for durations that are shown; no decision depends on it."""
    return time.time_ns() // 1_000_000


class FlinkResponse(Response):
    """Writes values of the contract as JSON with Flink's content type."""

    media_type = "application/json; charset=UTF-8"

    def render(self, content: Any) -> bytes:
        document = to_builtins(content)
        return json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


class ContractRoute(APIRoute):
    """``answer`` is the type of the contract that the function returns; None for functions that return a response."""

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Any]], **options: Any) -> None:
        self.answer = get_type_hints(endpoint)["return"]
        if isinstance(self.answer, type) and issubclass(self.answer, Response):
            self.answer = None
            super().__init__(path, endpoint, **options)
            return
        options["response_model"] = None
        super().__init__(path, _encoded(endpoint, options.get("status_code") or 200), **options)


def _encoded(endpoint: Callable[..., Awaitable[Any]], status: int) -> Callable[..., Awaitable[Response]]:
    @wraps(endpoint)
    async def answer(**arguments: Any) -> Response:
        value = await endpoint(**arguments)
        # FastAPI passes the argument ``response`` to functions that set headers.
        headers = arguments["response"].headers if "response" in arguments else None
        return FlinkResponse(value, status_code=status, headers=headers)

    return answer


def flink_router(**options: Any) -> APIRouter:
    """Make a router whose functions answer with values of the contract. ``options`` are those of FastAPI's routers."""
    return APIRouter(default_response_class=FlinkResponse, route_class=ContractRoute, **options)


MAX_ECHOED_CHARS = 200
"""Maximum number of characters of a refused value that an error message repeats."""

_GATEWAY_STATUS: tuple[tuple[type[gateway_errors.GatewayError], int], ...] = (
    (gateway_errors.NotFound, 404),
    (gateway_errors.Conflict, 409),
    (gateway_errors.InvalidRequest, 400),
    (gateway_errors.RequirementsRefused, 400),
    (ConfigurationRefused, 400),
    (OptionsNotAllowed, 403),
    (gateway_errors.SubmissionFailed, 400),
    (gateway_errors.NotReady, 503),
)


class ApiError(Exception):
    """An error that becomes an answer with this status and these lines; nothing has changed on the server."""

    def __init__(self, status: int, *errors: str) -> None:
        super().__init__("; ".join(errors))
        self.status = status
        self.errors: Sequence[str] = errors


class BadRequest(ApiError):
    """A 400: the request is malformed or names an unacceptable value."""

    def __init__(self, *errors: str) -> None:
        super().__init__(400, *errors)


def echo(value: object) -> str:
    """The ``repr`` of a client's value, shortened for a message."""
    text = repr(value)
    return text if len(text) <= MAX_ECHOED_CHARS else f"{text[:MAX_ECHOED_CHARS]}... ({len(text)} characters)"


def error_response(status: int, errors: Sequence[str], headers: dict[str, str] | None = None) -> Response:
    """Make an answer in the common error shape."""
    return FlinkResponse({"errors": list(errors)}, status_code=status, headers=headers)


def not_found(path: str) -> Response:
    """Flink's answer to an unknown path or method."""
    return error_response(404, [f"Not found: {path[:MAX_ECHOED_CHARS]}"])


def original_path(request: Request) -> str:
    """The path as the client wrote it, including the version prefix."""
    path: str = request.scope.get("ckpt.original_path") or request.url.path
    return path


def without_prefix(scope: Scope, prefix: str) -> dict[str, Any]:
    """The request's scope without this prefix of its path."""
    raw: bytes | None = scope.get("raw_path")
    rest = moved(scope, scope["path"].removeprefix(prefix))
    return rest if raw is None else {**rest, "raw_path": raw.removeprefix(prefix.encode())}


def moved(scope: Scope, path: str) -> dict[str, Any]:
    """The request's scope with another path; the original path is remembered."""
    return {**scope, "path": path, "ckpt.original_path": scope.get("ckpt.original_path", scope["path"])}


def install_error_handlers(app: FastAPI) -> None:
    """Give all errors of ``app`` the common shape; an unknown path or method is 404, never 405 (as in Flink)."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(gateway_errors.GatewayError, _on_gateway_error)
    app.add_exception_handler(RequestValidationError, _on_parameter_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error.status, error.errors)


async def _on_gateway_error(_request: Request, error: Exception) -> Response:
    status = next((status for kind, status in _GATEWAY_STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if status == 503 else None
    return error_response(status, [_text_of(error)], headers)


def _text_of(error: Exception) -> str:
    """The text of an error; an unknown job is reported in Flink's own words, which tools recognise."""
    is_job = isinstance(error, gateway_errors.JobNotFound)
    return f"org.apache.flink.runtime.rest.NotFoundException: {error}" if is_job else str(error)


async def _on_parameter_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(400, [_parameter_message(problem) for problem in error.errors()])


def _parameter_message(problem: dict[str, Any]) -> str:
    where, name = (*problem["loc"], "", "")[:2]
    return (
        f"Bad request, could not parse parameters: Cannot resolve {where} parameter ({name}) from value "
        f"{echo(problem.get('input'))}: {problem['msg']}"
    )


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code in (404, 405):
        return not_found(original_path(request))
    return error_response(error.status_code, [str(error.detail)])


async def _on_unexpected(_request: Request, error: Exception) -> Response:
    """The server logs the traceback; the client gets only the kind of error."""
    return error_response(500, ["Internal server error.", type(error).__name__])
