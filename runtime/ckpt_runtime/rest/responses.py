"""Routes and answers: functions get the dispatcher and return values of the contract; errors have one shape.

JSON is ASCII only (so a lone surrogate from a client's text can always be encoded) and strict: if a handler forgets to
spell a NaN as Flink's string ``"NaN"``, the result is a server error, not invalid JSON for the client. Every error is
``{"errors": [...]}``: our own :class:`ApiError`, the dispatcher's named errors, and the framework's routing and
parameter errors. An answer never contains a stack trace or the request body.

Flink's client reads a failed operation's ``serialized-throwable`` as a Java object stream that holds an
``org.apache.flink.util.SerializedThrowable``. That stream (Java Object Serialization protocol 5) is built from
texts here, just enough for Flink's command line to print a failure. Nothing in the project reads such streams.
"""

from __future__ import annotations

import json
import struct
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.jobmaster import gateway_errors
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
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


async def _dispatcher_of(request: Request) -> Dispatcher:
    """The application's dispatcher. A coroutine, because FastAPI runs a plain function in a thread per request."""
    dispatcher: Dispatcher = request.app.state.dispatcher
    return dispatcher


TheDispatcher = Annotated[Dispatcher, Depends(_dispatcher_of)]

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


_PREFIX = "/v1"


class VersionPrefix:
    """Strips ``/v1`` and outer slashes from the path, as Flink does.

    Paths of the web pages, below ``pages``, keep their trailing slash, because their links are relative.
    """

    def __init__(self, app: ASGIApp, pages: str) -> None:
        self._app = app
        self._pages = f"{pages}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # A path joined from ``http://host:8081/`` and ``/jobs`` starts with two slashes.
            trimmed = f"/{scope['path'].strip('/')}"
            if trimmed != scope["path"] and not f"{trimmed}/".startswith(self._pages):
                raw: bytes | None = scope.get("raw_path")
                scope = moved(scope, trimmed)
                if raw is not None:
                    scope["raw_path"] = b"/" + raw.strip(b"/")
            if scope["path"].startswith(f"{_PREFIX}/"):
                scope = without_prefix(scope, _PREFIX)
        await self._app(scope, receive, send)


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


_STREAM_HEADER = struct.pack(">HH", 0xACED, 5)
_TC_NULL, _TC_OBJECT, _TC_CLASSDESC = b"\x70", b"\x73", b"\x72"
_TC_STRING, _TC_LONGSTRING, _TC_END_BLOCK = b"\x74", b"\x7c", b"\x78"
_TC_REFERENCE = b"\x71"
_FIRST_HANDLE = 0x7E0000
_SERIALIZABLE, _SERIALIZABLE_WITH_WRITE_METHOD = 2, 3
_MAX_CHARS = 64 * 1024

_THROWABLE = ("java.lang.Throwable", -3042686055658047285, _SERIALIZABLE_WITH_WRITE_METHOD)
_EXCEPTION = ("java.lang.Exception", -3387516993124229948, _SERIALIZABLE)
_SERIALIZED_THROWABLE = ("org.apache.flink.util.SerializedThrowable", 7284183123441947635, _SERIALIZABLE)


def serialized_throwable(exception: str, message: str, stack_trace: str) -> str:
    """The stream in Base64. ``exception`` is shown as the error's class, ``stack_trace`` as its full text."""
    return b64encode(_stream(exception, message, stack_trace)).decode("ascii")


def _stream(exception: str, message: str, stack_trace: str) -> bytes:
    handles: dict[str, int] = {}
    out = [_STREAM_HEADER, _TC_OBJECT]
    out.append(
        _class_description(
            _SERIALIZED_THROWABLE,
            [
                ("originalErrorClassName", "Ljava/lang/String;"),
                ("fullStringifiedStackTrace", "Ljava/lang/String;"),
                ("serializedException", "[B"),
            ],
            handles,
        )
    )
    out.append(_class_description(_EXCEPTION, [], handles))
    out.append(
        _class_description(
            _THROWABLE,
            [
                ("cause", "Ljava/lang/Throwable;"),
                ("detailMessage", "Ljava/lang/String;"),
                ("stackTrace", "[Ljava/lang/StackTraceElement;"),
                ("suppressedExceptions", "Ljava/util/List;"),
            ],
            handles,
        )
    )
    out.append(_TC_NULL)  # Throwable's superclass is not serializable
    out += [_TC_NULL, _string(message), _TC_NULL, _TC_NULL, _TC_END_BLOCK]
    out += [_string(exception), _string(stack_trace), _TC_NULL]
    return b"".join(out)


def _class_description(identity: tuple[str, int, int], fields: list[tuple[str, str]], handles: dict[str, int]) -> bytes:
    """Write a class description without the superclass, which follows; repeated type names are references."""
    name, uid, flags = identity
    out = [_TC_CLASSDESC, _utf(name), struct.pack(">qBH", uid, flags, len(fields))]
    _assign(name, handles)
    for field, type_name in fields:
        out.append(type_name[:1].encode("ascii") + _utf(field))
        if type_name in handles:
            out.append(_TC_REFERENCE + struct.pack(">I", handles[type_name]))
        else:
            out.append(_TC_STRING + _utf(type_name))
            _assign(type_name, handles)
    out.append(_TC_END_BLOCK)
    return b"".join(out)


def _assign(name: str, handles: dict[str, int]) -> None:
    handles[name] = _FIRST_HANDLE + len(handles)


def _utf(text: str) -> bytes:
    encoded = _modified_utf8(text)
    return struct.pack(">H", len(encoded)) + encoded


def _string(text: str) -> bytes:
    encoded = _modified_utf8(text[:_MAX_CHARS])
    if len(encoded) <= 0xFFFF:
        return _TC_STRING + struct.pack(">H", len(encoded)) + encoded
    return _TC_LONGSTRING + struct.pack(">Q", len(encoded)) + encoded


def _modified_utf8(text: str) -> bytes:
    """Encode in Java's modified UTF-8: each UTF-16 code unit separately, and NUL as two bytes."""
    units = text.encode("utf-16-be", "surrogatepass")
    out = bytearray()
    for (unit,) in struct.iter_unpack(">H", units):
        if 1 <= unit <= 0x7F:
            out.append(unit)
        elif unit <= 0x7FF:
            out += bytes((0xC0 | unit >> 6, 0x80 | unit & 0x3F))
        else:
            out += bytes((0xE0 | unit >> 12, 0x80 | unit >> 6 & 0x3F, 0x80 | unit & 0x3F))
    return bytes(out)
