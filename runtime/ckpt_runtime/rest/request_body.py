"""Reading request bodies: size, time and depth limits, a strict JSON parser, and uploaded pipelines.

JSON is read more strictly than by the standard library: no NaN, Infinity or overflowing number, no duplicate key, no
lone surrogate, no deep nesting. An upload is one multipart part called ``jarfile``, a ``.py`` or a ``.zip``; the
client's file name is only displayed and never used as a path. Every refusal is a 4xx :class:`ApiError`.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.rest.responses import ApiError, BadRequest, echo

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
    """The bytes are not acceptable JSON; the message says why and where, and repeats no more than a key."""


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
    """Numbers of so many digits would take long to convert."""
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
        await _check_content(part, name)
        return await dispatcher.store_pipeline(name, _chunks(part))
    finally:
        await form.close()


async def _check_content(part: UploadFile, name: str) -> None:
    first = await part.read(len(_ZIP_MAGIC))
    await part.seek(0)
    if not first:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is empty")
    if name.lower().endswith(".zip") and first != _ZIP_MAGIC:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is not a zip archive")


async def _chunks(part: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await part.read(_CHUNK_BYTES):
        yield chunk
