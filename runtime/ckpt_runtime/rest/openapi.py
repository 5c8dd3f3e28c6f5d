"""The OpenAPI document: the framework's, plus bodies that handlers read themselves, plus answers and their examples.

The schemas of answers are those of the contract's structs. ``examples.json`` holds real answers by path and situation;
``make docs`` writes it.
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from importlib.resources import files
from typing import Any, get_args

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec import NODEFAULT, Struct, structs
from pydantic import BaseModel

from ckpt_runtime.rest.exchange import ContractRoute

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["errors"],
    "properties": {"errors": {"type": "array", "items": {"type": "string"}}},
}
_JOB = "fa461ac280c9aa36bde4a060aa97618c"
EVENT_STREAM = "text/event-stream"
_EVENTS = {"description": "Events with `id`, `event` and `data`; `data` is a JSON object in one line."}
"""The schema has no type, because some tools validate the whole text against it, and others each event."""
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


def _plain(schema: Any, *, nullable: bool = False) -> Any:
    """Remove titles and defaults, and from bodies null, which counts as absent or is refused."""
    if isinstance(schema, list | tuple):
        return [_plain(item, nullable=nullable) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema and not nullable:
        return _plain(next(item for item in schema["anyOf"] if item != {"type": "null"}))
    return {key: _plain(value, nullable=nullable) for key, value in schema.items() if key not in ("title", "default")}


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
    answers, components = _answer_schemas(app)
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            operation["responses"].pop("422", None)
            key = f"{method.upper()} {path}"
            answer = next(answer for status, answer in operation["responses"].items() if status.startswith("2"))
            (media_type,) = answer["content"]
            sent = _EVENTS if media_type == EVENT_STREAM else answers.get(key, {"type": "string"})
            answer["content"] = {media_type: {"schema": sent, "examples": _named(examples[key])}}
    schema["components"] = {"schemas": components}
    if authenticated:
        schema["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"bearer": []}]
    return schema


def _answer_schemas(app: FastAPI) -> tuple[dict[str, Any], dict[str, Any]]:
    """The schema of each route's answer, such as ``"GET /jobs"``, and the components that these refer to."""
    routes = [route for route in app.routes if isinstance(route, ContractRoute) and route.answer is not None]
    kinds = {f"{method} {route.path}": _members(route.answer) for route in routes for method in route.methods}
    flat = [kind for members in kinds.values() for kind in members]
    schemas, components = msgspec.json.schema_components(flat, ref_template="#/components/schemas/{name}")
    found = iter(_plain(schemas, nullable=True))
    answers = {key: [next(found) for _ in members] for key, members in kinds.items()}
    for struct in _subclasses(Struct):
        if struct.__module__.startswith("ckpt_runtime.contract.") and struct.__name__ in components:
            # What the server always sends is required, although readers accept answers without it.
            may_omit = any(kind.__struct_config__.omit_defaults for kind in (struct, *_subclasses(struct)))
            required = [
                item.encode_name for item in structs.fields(struct) if not may_omit or item.default is NODEFAULT
            ]
            tag = struct.__struct_config__.tag_field
            components[struct.__name__]["required"] = [*([] if tag is None else [tag]), *required]
    return {key: one[0] if len(one) == 1 else {"anyOf": one} for key, one in answers.items()}, _plain(
        components, nullable=True
    )


def _members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of a union, which msgspec would not describe."""
    return get_args(kind) if isinstance(kind, types.UnionType) else (kind,)


def _subclasses(kind: type[Struct]) -> Iterator[type[Struct]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


_SERVERS: list[dict[str, str | Any]] = [{"url": "/v1"}, {"url": "/"}]
