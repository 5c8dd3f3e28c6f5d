"""Routes whose functions answer with values of the contract, and the JSON that they become.

Answers are ASCII only (so a lone surrogate from a client's text can always be encoded) and strict: if a handler forgets
to spell a NaN as Flink's string ``"NaN"``, the result is a server error, not invalid JSON for the client.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, get_type_hints

from fastapi import APIRouter
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.responses import Response


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
