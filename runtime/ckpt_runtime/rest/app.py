"""The REST application: Flink's paths over a :class:`DispatcherGateway`, each with and without ``/v1``.

It only puts the pieces together; it starts no server and keeps no state of jobs.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.rest.audit import Caller
from ckpt_runtime.rest.auth import Guard
from ckpt_runtime.rest.errors import install_error_handlers
from ckpt_runtime.rest.event_stream import EventStreams
from ckpt_runtime.rest.handlers import (
    checkpoint_config,
    checkpoints,
    cluster,
    dashboard,
    events,
    health,
    job_config,
    jobs,
    pipelines,
    rescaling,
    savepoints,
    vertices,
)
from ckpt_runtime.rest.openapi import install_openapi
from ckpt_runtime.rest.responses import FlinkResponse
from ckpt_runtime.rest.uploads import DEFAULT_MAX_UPLOAD_BYTES

_PREFIX = "/v1"
_DESCRIPTION = (
    "Jobs, checkpoints and savepoints in the shapes of Flink's REST API, plus FLIP-530 and FLIP-571. "
    "Every path also answers under /v1. Errors are always an object with the one field `errors`."
)


class VersionPrefix:
    """Takes ``/v1`` off the path, remembering what the client wrote."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] == "http" and path.startswith(f"{_PREFIX}/"):
            scope = {**scope, "path": path.removeprefix(_PREFIX), "ckpt.original_path": path}
            raw: bytes | None = scope.get("raw_path")
            if raw is not None:
                scope["raw_path"] = raw.removeprefix(_PREFIX.encode())
        await self._app(scope, receive, send)


def create_app(
    gateway: DispatcherGateway, *, token: str | None, max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES
) -> FastAPI:
    """Makes the application. ``token`` None means no authentication and loopback callers only (see ``rest.auth``)."""
    if token is not None and not token.strip():
        raise ValueError("token must not be empty; None means no token")
    app = FastAPI(
        title="ckpt",
        description=_DESCRIPTION,
        default_response_class=FlinkResponse,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    app.state.event_streams = EventStreams()
    app.state.max_upload_bytes = max_upload_bytes
    # checkpoint_config comes before checkpoints, whose ":triggerid" would match "configuration"
    of_jobs = (jobs, job_config, events, rescaling, vertices, checkpoint_config, checkpoints, savepoints)
    for room in (cluster, dashboard, health, pipelines, *of_jobs):
        app.include_router(room.router)
    install_error_handlers(app)
    install_openapi(app, authenticated=token is not None)
    app.add_middleware(VersionPrefix)
    app.add_middleware(Caller)
    app.add_middleware(Guard, token=token)
    return app
