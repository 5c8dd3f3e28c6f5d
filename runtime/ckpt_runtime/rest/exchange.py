"""What all requests and answers share: bodies that are read and checked, routes, answers, errors of one shape.

JSON is read more strictly than by the standard library: no NaN, Infinity or overflowing number, no duplicate key, no
lone surrogate, no deep nesting. An upload is one multipart part called ``jarfile``, a ``.py`` or a ``.zip``; the
client's file name is only displayed and never used as a path. Every refusal is a 4xx :class:`ApiError`.

Handlers get the dispatcher and return values of the contract. An answer's JSON is ASCII only (so a lone surrogate from
a client's text can always be encoded) and strict: if a handler forgets to spell a NaN as Flink's string ``"NaN"``, the
result is a server error, not invalid JSON for the client. Every error is ``{"errors": [...]}``: our own
:class:`ApiError`, the dispatcher's named errors, and the framework's routing and parameter errors. An answer never
contains a stack trace or the request body.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.jobmaster import gateway_values
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import ConfigurationRefused, OptionsNotAllowed, StoredPipeline


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

_GATEWAY_STATUS: tuple[tuple[type[gateway_values.GatewayError], int], ...] = (
    (gateway_values.NotFound, 404),
    (gateway_values.Conflict, 409),
    (gateway_values.InvalidRequest, 400),
    (gateway_values.RequirementsRefused, 400),
    (ConfigurationRefused, 400),
    (OptionsNotAllowed, 403),
    (gateway_values.SubmissionFailed, 400),
    (gateway_values.NotReady, 503),
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
    app.add_exception_handler(gateway_values.GatewayError, _on_gateway_error)
    app.add_exception_handler(RequestValidationError, _on_parameter_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error.status, error.errors)


async def _on_gateway_error(_request: Request, error: Exception) -> Response:
    status = next((status for kind, status in _GATEWAY_STATUS if isinstance(error, kind)), 500)
    headers = {"Retry-After": "1"} if status == 503 else None
    # An unknown job is reported in Flink's own words, which tools recognise.
    is_job = isinstance(error, gateway_values.JobNotFound)
    text = f"org.apache.flink.runtime.rest.NotFoundException: {error}" if is_job else str(error)
    return error_response(status, [text], headers)


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


MAX_BODY_BYTES = 256 * 1024
MAX_DEPTH = 32
BODY_TIMEOUT_S = 30.0
_MAX_DIGITS = 400
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


async def limited_stream(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body's chunks. Raises 413 as soon as ``limit`` bytes are exceeded, 408 if the client stalls."""
    chunks = _limited(request, limit)
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise ApiError(408, f"No part of the request body arrived for {BODY_TIMEOUT_S:g} s.") from None
        if chunk is None:
            return
        yield chunk


async def _limited(request: Request, limit: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    # The length of the text is checked first: int() refuses thousands of digits, and is slow for somewhat fewer.
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
    received = 0
    try:
        async for chunk in request.stream():
            received += len(chunk)
            if received > limit:
                raise ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
            yield chunk
    except ClientDisconnect:
        raise BadRequest("The client closed the connection before the end of the request body.") from None


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return b"".join([chunk async for chunk in _limited(request, MAX_BODY_BYTES)])
    except TimeoutError:
        raise ApiError(408, f"The request body did not arrive within {BODY_TIMEOUT_S:g} s.") from None


async def read_object(request: Request, *, expected: str, empty_is_object: bool = True) -> dict[str, Any]:
    """Read the body as a JSON object. ``expected`` names the format in messages.

    An empty body counts as ``{}``, as in Flink, unless ``empty_is_object`` is false.
    """
    raw = await _body(request)
    if not raw.strip():
        if empty_is_object:
            return {}
        raise BadRequest(f"Request did not match expected format {expected}: the body is empty.")
    try:
        document = parse_json(raw)
    except JsonRefused as error:
        raise BadRequest(f"Request did not match expected format {expected}: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest(f"Request did not match expected format {expected}: the body must be a JSON object.")
    return document


async def whole_request(request: Request) -> None:
    """Wait until the ignored body of a request that makes a change has arrived completely.

    Otherwise a request that is broken after its head would be refused by the HTTP layer and still be carried out.
    """
    await _body(request)


class JsonRefused(ValueError):
    """The bytes are not acceptable JSON; the message names the reason and the position, and repeats at most a key."""


@dataclass(frozen=True, slots=True)
class _BadNumber:
    """Stands for a number that is refused once its place in the document is known."""

    problem: str


def parse_json(raw: bytes) -> Any:
    """Parse strictly, in time proportional to the length. Raises :class:`JsonRefused`."""
    text = ""
    try:
        text = raw.decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=lambda name: _BadNumber(f"{name} is not a JSON number"),
            parse_float=_finite_float,
            parse_int=_integer,
        )
    except JsonRefused:
        raise
    except UnicodeDecodeError as error:
        raise JsonRefused(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _too_deep(_deepest_field(text)) from None
    except json.JSONDecodeError as error:
        raise JsonRefused(f"malformed JSON, {error.msg} at line {error.lineno} column {error.colno}") from None
    _check_values(document, ())
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonRefused(f"the key {twice[:100]!a} occurs twice")
    return document


def _finite_float(text: str) -> float | _BadNumber:
    value = float(text)
    return value if math.isfinite(value) else _BadNumber("a number is too large")


def _integer(text: str) -> int | _BadNumber:
    """Converts the digits of an integer; refuses very long ones, which would take long to convert."""
    return int(text) if len(text) <= _MAX_DIGITS else _BadNumber("a number has too many digits")


def _too_deep(path: tuple[str, ...]) -> JsonRefused:
    return _refused(path, f"nested deeper than {MAX_DEPTH} levels")


def _refused(path: tuple[str, ...], problem: str) -> JsonRefused:
    place = ".".join(path)
    return JsonRefused(f"{problem}, in the field {place[:100]!a}" if place else problem)


def _deepest_field(text: str) -> tuple[str, ...]:
    """The field in which a document becomes too deep; its text is well-formed up to there."""
    depth, field = 0, ""
    for token in _TOKEN.finditer(text):
        match token[0][0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case _ if depth == 1:
                field = token[0][1:-1]
        if depth > MAX_DEPTH:
            break
    return (field,) if field else ()


def _check_values(document: Any, path: tuple[str, ...]) -> None:
    """Refuse bad numbers, lone surrogates, and arrays and objects that are nested too deep."""
    if isinstance(document, str):
        try:
            document.encode("utf-8")
        except UnicodeEncodeError:
            raise _refused(path, "a string holds a lone surrogate") from None
    elif isinstance(document, _BadNumber):
        raise _refused(path, document.problem)
    elif isinstance(document, dict | list):
        if len(path) == MAX_DEPTH:
            raise _too_deep(path)
        if isinstance(document, dict):
            for key, value in document.items():
                _check_values(key, (*path, key))
                _check_values(value, (*path, key))
        else:
            for number, value in enumerate(document):
                _check_values(value, (*path, str(number)))


PART_NAME = "jarfile"
DEFAULT_MAX_UPLOAD_BYTES = 100 * 1024 * 1024
_FRAMING_BYTES = 16 * 1024
_CHUNK_BYTES = 256 * 1024
_MAX_NAME_CHARS = 200
_ZIP_MAGIC = b"PK\x03\x04"


def display_name(raw: str | None) -> str:
    """The last segment of the client's file name. Raises 400 unless it ends in ``.py`` or ``.zip``."""
    name = re.split(r"[/\\]", raw or "")[-1]
    printable = name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS and not name.startswith(".")
    if not printable or not name.lower().endswith((".py", ".zip")):
        raise BadRequest(f"{PART_NAME}: the file name {echo(raw)} is not acceptable, it must end in .py or .zip")
    return name


async def receive_pipeline(request: Request, dispatcher: Dispatcher, max_bytes: int) -> StoredPipeline:
    """Parse the form, check the part and hand its bytes to the dispatcher."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadRequest(f"The upload must be multipart/form-data with one file in the part {PART_NAME!r}.")
    body = limited_stream(request, max_bytes + _FRAMING_BYTES)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=4)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"Malformed multipart upload: {error.message}") from None
    except (KeyError, UnicodeDecodeError, LookupError, ValueError):
        raise BadRequest("Malformed multipart upload.") from None
    try:
        part = form.get(PART_NAME)
        if not isinstance(part, UploadFile):
            raise BadRequest(f"The upload has no file in the part {PART_NAME!r}.")
        name = display_name(part.filename)
        first = await part.read(len(_ZIP_MAGIC))
        await part.seek(0)
        if not first:
            raise BadRequest(f"{PART_NAME}: {echo(name)} is empty")
        if name.lower().endswith(".zip") and first != _ZIP_MAGIC:
            raise BadRequest(f"{PART_NAME}: {echo(name)} is not a zip archive")
        return await dispatcher.store_pipeline(name, _chunks(part))
    finally:
        await form.close()


async def _chunks(part: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await part.read(_CHUNK_BYTES):
        yield chunk
