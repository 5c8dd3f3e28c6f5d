"""Pieces for the OpenAPI document that handlers with hand-parsed bodies add to their routes."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["errors"],
    "properties": {"errors": {"type": "array", "items": {"type": "string"}}},
}
HEX_ID_SCHEMA: dict[str, Any] = {"type": "string", "pattern": "^[0-9a-fA-F]{32}$"}

_MEANINGS = {
    400: "The request is malformed or a value is not acceptable; nothing has changed.",
    401: "No valid bearer token.",
    404: "What the path names does not exist.",
    409: "The present state of the job forbids it; nothing has changed.",
    413: "The body is too large.",
    503: "This driver cannot serve now; try again.",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The ``responses`` argument of a route: error statuses with their one shape."""
    content = {"application/json": {"schema": ERROR_SCHEMA}}
    return {status: {"description": _MEANINGS[status], "content": content} for status in (401, *statuses, 503)}


def json_body(properties: dict[str, Any], *, required: bool = False, closed: bool = False) -> dict[str, Any]:
    """The ``openapi_extra`` of a route that takes a JSON object; ``closed`` ones refuse unknown fields."""
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if closed:
        schema |= {"additionalProperties": False, "minProperties": 1}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI, *, authenticated: bool) -> None:
    """Serve a document without the framework's 422 (bad parameters are 400 here), with both path prefixes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes, servers=_SERVERS
            )
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            if authenticated:
                schema.setdefault("components", {})["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"}
                }
                schema["security"] = [{"bearer": []}]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


_SERVERS: list[dict[str, str | Any]] = [{"url": "/v1"}, {"url": "/"}]
