"""The JSON response class of the REST layer, and routers whose functions answer with it.

ASCII only (a lone surrogate from a client's text can always be encoded) and strict: a NaN that a handler forgot to
spell as Flink's string ``"NaN"`` is an error of ours, not invalid JSON for the client.
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
    """Makes a router whose functions answer so. ``options`` are those of FastAPI's routers."""
    return APIRouter(default_response_class=FlinkResponse, **options)
