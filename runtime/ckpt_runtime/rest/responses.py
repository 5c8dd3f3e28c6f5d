"""The JSON response class of the REST layer.

ASCII only (a lone surrogate from a client's text can always be encoded) and strict: a NaN that a handler forgot to
spell as Flink's string ``"NaN"`` is an error of ours, not invalid JSON for the client.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class FlinkResponse(Response):
    """Writes JSON with Flink's content type."""

    media_type = "application/json; charset=UTF-8"

    def render(self, content: Any) -> bytes:
        return json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
