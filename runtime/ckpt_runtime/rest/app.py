"""The REST application: Flink's paths over a :class:`Dispatcher`, each with and without ``/v1``.

It only assembles the parts; it starts no server and keeps no state of jobs.
"""

from __future__ import annotations

from fastapi import FastAPI

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.rest.audit import AuditLog, Write
from ckpt_runtime.rest.event_stream import EventStreams
from ckpt_runtime.rest.exchange import DEFAULT_MAX_UPLOAD_BYTES, VersionPrefix, install_error_handlers
from ckpt_runtime.rest.handlers import checkpoints, cluster, configuration, jobs, pages
from ckpt_runtime.rest.openapi import install_openapi
from ckpt_runtime.rest.server import Guard, WebSessions

_DESCRIPTION = (
    "Jobs, checkpoints and savepoints in the shapes of Flink's REST API, plus FLIP-530 and FLIP-571. "
    "Every path also answers under /v1. Errors are always an object with the one field `errors`."
)


def create_app(
    dispatcher: Dispatcher,
    *,
    token: str | None,
    max_upload_bytes: int = DEFAULT_MAX_UPLOAD_BYTES,
    audit: Write | None = None,
) -> FastAPI:
    """Make the application. ``token`` None means no authentication and loopback callers only (see ``rest.server``).

    ``audit`` writes the records of the audit log, if there is one.
    """
    if token is not None and not token.strip():
        raise ValueError("token must not be empty; None means no token")
    app = FastAPI(title="ckpt", description=_DESCRIPTION, docs_url=None, redoc_url=None, redirect_slashes=False)
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
    app.add_middleware(VersionPrefix, pages=pages.PREFIX)
    # The guard is added last, because the middleware added last runs first.
    app.add_middleware(Guard, token=token, sessions=app.state.web_sessions, is_public=pages.is_public)
    return app
