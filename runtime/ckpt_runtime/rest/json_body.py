"""Request bodies: size, time and depth limits and a strict JSON parser.

Stricter than the standard library: no NaN, Infinity or overflowing number, no duplicate key, no lone surrogate, no
deep nesting. Every refusal is a 4xx :class:`ApiError`; nothing here can raise anything else for bad input.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from ckpt_runtime.rest.errors import ApiError, BadRequest

MAX_BODY_BYTES = 256 * 1024
MAX_DEPTH = 32
BODY_TIMEOUT_S = 30.0


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
    """The bytes are not acceptable JSON; the message says why, without repeating them."""


def parse_json(raw: bytes) -> Any:
    """Parse strictly, in time proportional to the length. Raises :class:`JsonRefused`."""
    try:
        text = raw.decode("utf-8")
        document = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except JsonRefused:
        raise
    except UnicodeDecodeError as error:
        raise JsonRefused(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise JsonRefused(f"malformed JSON, {_position_of(error)}") from None
    _check_values(document, MAX_DEPTH)
    return document


def _position_of(error: ValueError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at line {error.lineno} column {error.colno}"
    return "a number has too many digits"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonRefused(f"the key {twice[:100]!a} occurs twice")
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise JsonRefused(f"{name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonRefused("a number is too large")
    return value


def _too_deep() -> JsonRefused:
    return JsonRefused(f"nested deeper than {MAX_DEPTH} levels")


def _check_values(document: Any, levels: int) -> None:
    """Refuse lone surrogates, and arrays and objects nested deeper than ``levels``."""
    if isinstance(document, str):
        try:
            document.encode("utf-8")
        except UnicodeEncodeError:
            raise JsonRefused("a string holds a lone surrogate") from None
    elif isinstance(document, dict | list):
        if levels == 0:
            raise _too_deep()
        if isinstance(document, dict):
            for key in document:
                _check_values(key, 0)
        for value in document.values() if isinstance(document, dict) else document:
            _check_values(value, levels - 1)
