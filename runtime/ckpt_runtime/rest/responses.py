"""The JSON response class of the REST layer, and routers whose functions answer with it.

Answers are ASCII only (so a lone surrogate from a client's text can always be encoded) and strict: if a handler forgets
to spell a NaN as Flink's string ``"NaN"``, the result is a server error, not invalid JSON for the client.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response


class FlinkResponse(Response):
    """Writes JSON with Flink's content type."""

    media_type = "application/json; charset=UTF-8"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def flink_router(**options: Any) -> APIRouter:
    """Make a router whose functions answer with :class:`FlinkResponse`. ``options`` are those of FastAPI's routers."""
    return APIRouter(default_response_class=FlinkResponse, **options)
