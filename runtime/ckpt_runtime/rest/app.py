"""The REST application: Flink's paths over a :class:`Dispatcher`, each with and without ``/v1``.

It only assembles the parts; it starts no server and keeps no state of jobs.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.rest.audit import AuditLog, Write
from ckpt_runtime.rest.auth import Guard, WebSessions
from ckpt_runtime.rest.event_stream import EventStreams
from ckpt_runtime.rest.handlers import checkpoints, cluster, configuration, jobs, pages
from ckpt_runtime.rest.openapi import install_openapi
from ckpt_runtime.rest.request_body import DEFAULT_MAX_UPLOAD_BYTES
from ckpt_runtime.rest.responses import install_error_handlers, moved, without_prefix

_PREFIX = "/v1"
_DESCRIPTION = (
    "Jobs, checkpoints and savepoints in the shapes of Flink's REST API, plus FLIP-530 and FLIP-571. "
    "Every path also answers under /v1. Errors are always an object with the one field `errors`."
)


class VersionPrefix:
    """Strips ``/v1`` and outer slashes from the path, as Flink does."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = _without_outer_slashes(scope)
            if scope["path"].startswith(f"{_PREFIX}/"):
                scope = without_prefix(scope, _PREFIX)
        await self._app(scope, receive, send)


def _without_outer_slashes(scope: Scope) -> Scope:
    """Strip outer slashes except the first: a path joined from ``http://host:8081/`` and ``/jobs`` starts with two.

    Paths of the web pages keep their trailing slash, because their links are relative.
    """
    path: str = scope["path"]
    trimmed = f"/{path.strip('/')}"
    if trimmed == path or f"{trimmed}/".startswith(f"{pages.PREFIX}/"):
        return scope
    raw: bytes | None = scope.get("raw_path")
    rest = moved(scope, trimmed)
    return rest if raw is None else {**rest, "raw_path": b"/" + raw.strip(b"/")}


def create_app(
    dispatcher: Dispatcher,
    *,
    token: str | None,
    max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
    audit: Write | None = None,
) -> FastAPI:
    """Make the application. ``token`` None means no authentication and loopback callers only (see ``rest.auth``).

    ``audit`` writes the records of the audit log, if there is one.
    """
    if token is not None and not token.strip():
        raise ValueError("token must not be empty; None means no token")
    app = FastAPI(
        title="ckpt",
        description=_DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.dispatcher = dispatcher
    app.state.event_streams = EventStreams()
    app.state.max_upload_bytes = max_upload_bytes
    app.state.token = token
    app.state.web_sessions = WebSessions()
    # The routes are added as they are: include_router() would analyse each function again, for a tenth of a second.
    # Configuration comes before checkpoints, whose ":triggerid" would match "configuration".
    for room in (cluster, jobs, configuration, checkpoints, pages):
        for router in room.routers:
            app.router.routes.extend(router.routes)
    install_error_handlers(app)
    install_openapi(app, authenticated=token is not None)
    if audit is not None:
        app.add_middleware(AuditLog, write=audit)
    app.add_middleware(VersionPrefix)
    # The guard is added last, because the middleware added last runs first.
    app.add_middleware(Guard, token=token, sessions=app.state.web_sessions, is_public=pages.is_public)
    return app
