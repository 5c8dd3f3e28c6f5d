"""The OpenAPI document: the framework's, plus bodies that handlers read themselves, plus examples and their schemas.

``examples.json`` holds real answers by path and situation; ``make docs`` writes it.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from ckpt_runtime.rest.response_schemas import schema_of

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["errors"],
    "properties": {"errors": {"type": "array", "items": {"type": "string"}}},
}
_JOB = "fa461ac280c9aa36bde4a060aa97618c"
EVENT_STREAM = "text/event-stream"
_EVENTS = {"description": "Events with `id`, `event` and `data`; `data` is a JSON object in one line."}
"""The schema has no type, because some tools validate the whole text against it, and some each event."""
_ERRORS = {
    308: (
        "The mode `stop` is gone; there is no `Location`.",
        f"The termination mode 'stop' has been removed; use /jobs/{_JOB}/stop.",
    ),
    400: (
        "The request is malformed or a value is not acceptable; nothing has changed.",
        "checkpointInterval: 0 is not acceptable, it must be an integer from 10 to 315360000000",
    ),
    401: ("No valid bearer token.", "A valid bearer token is required."),
    403: (
        "No token is set, and the caller is a web page or used a name that is not loopback.",
        "Requests from other origins are not accepted.",
    ),
    404: ("What the path names does not exist.", f"Job {_JOB} not found"),
    408: ("The body came too slowly.", "No part of the request body arrived for 30 s."),
    409: (
        "The present state of the job forbids it; nothing has changed.",
        f"Job {_JOB} has already reached the terminal state FINISHED",
    ),
    413: ("The body is too large.", "The request body is larger than the limit of 1048576 bytes."),
    503: ("This driver cannot serve now; try again.", "the session is shutting down"),
}
"""What each status means, and an example of its message."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Make the ``responses`` argument of a route: error statuses with their common shape."""
    return {status: _error(status) for status in (401, 403, *statuses, 503)}


def _error(status: int) -> dict[str, Any]:
    meaning, example = _ERRORS[status]
    answer = {"schema": ERROR_SCHEMA, "example": {"errors": [example]}}
    return {"description": meaning, "content": {"application/json": answer}}


def json_body(model: type[BaseModel], examples: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Make the ``openapi_extra`` of a route whose body is a ``model``; ``examples`` are bodies by their titles."""
    schema = _plain(model.model_json_schema())
    required = "required" in schema or "minProperties" in schema
    content = {"schema": schema, "examples": _named(examples)}
    return {"requestBody": {"required": required, "content": {"application/json": content}}}


def _plain(schema: Any) -> Any:
    """Remove titles, defaults and null, which counts as absent or is refused."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema:
        return _plain(next(item for item in schema["anyOf"] if item != {"type": "null"}))
    return {key: _plain(value) for key, value in schema.items() if key not in ("title", "default")}


def _named(examples: dict[str, Any]) -> dict[str, Any]:
    return {name: {"value": value} for name, value in examples.items()}


def install_openapi(app: FastAPI, *, authenticated: bool) -> None:
    """Serve a document without the framework's 422 (bad parameters are 400 here), with both path prefixes."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, authenticated=authenticated)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, *, authenticated: bool) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, servers=_SERVERS
    )
    examples = json.loads(files("ckpt_runtime.rest").joinpath("examples.json").read_text("utf-8"))
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            _describe_answer(operation, examples[f"{method.upper()} {path}"])
    for unused in ("HTTPValidationError", "ValidationError"):
        schema.get("components", {}).get("schemas", {}).pop(unused, None)
    if authenticated:
        schema.setdefault("components", {})["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
    return schema


def _describe_answer(operation: dict[str, Any], examples: dict[str, Any]) -> None:
    answer = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
    if EVENT_STREAM in answer["content"]:
        answer["content"] = {EVENT_STREAM: {"schema": _EVENTS, "examples": _named(examples)}}
        return
    if "text/plain" in answer["content"]:
        answer["content"] = {"text/plain": {"schema": {"type": "string"}, "examples": _named(examples)}}
        return
    answer["content"] = {"application/json": {"schema": schema_of(examples.values()), "examples": _named(examples)}}


_SERVERS: list[dict[str, str | Any]] = [{"url": "/v1"}, {"url": "/"}]
