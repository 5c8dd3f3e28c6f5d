"""The pages inside Airflow: their files, and a way through to the job manager that a connection names.

Airflow mounts it without any protection. Each request therefore checks in Airflow whether its user may read the
connection: a user who sees the pages sees all data that the connection's token gives access to, but never the token. It
only reads: GET, and only the paths that the pages request.
"""

from __future__ import annotations

from functools import cache

from airflow.api_fastapi.core_api.security import requires_access_connection
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from airflow_provider_ckpt.plugins.upstream import UpstreamRefused, asked_of, is_allowed
from airflow_provider_ckpt.plugins.views import add_views
from ckpt_runtime.web.files import INDEX, page_files

_MAY_READ = Depends(requires_access_connection("GET"))
_ROOT = "/{connection_id}"
_STYLE = "style.css"
_THEME = "theme.js"


@cache
def application() -> FastAPI:
    """The application of this process."""
    app = FastAPI(title="ckpt", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_api_route(f"/{_STYLE}", _style, methods=["GET"])
    app.add_api_route(f"/{_THEME}", _theme, methods=["GET"])
    add_views(app)
    app.add_api_route(f"{_ROOT}/web/", _page, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/web/session", _session, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/web/{{name}}", _page, methods=["GET"], dependencies=[_MAY_READ])
    app.add_api_route(f"{_ROOT}/{{path:path}}", _through, methods=["GET"], dependencies=[_MAY_READ])
    return app


async def _page(request: Request, name: str = INDEX) -> Response:
    file = page_files().get(name)
    if file is None:
        return _refusal(404, "There is no such page.")
    headers = file.headers(may_be_framed=True)
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers)


async def _session() -> dict[str, bool]:
    """The login is Airflow's own."""
    return {"login": False}


def _file(name: str) -> Response:
    file = page_files()[name]
    return Response(file.content, headers=file.headers(may_be_framed=True))


async def _style() -> Response:
    return _file(_STYLE)


async def _theme() -> Response:
    return _file(_THEME)


async def _through(request: Request, connection_id: str, path: str) -> Response:
    """The answer of the job manager to the same path."""
    if not is_allowed(path):
        return _refusal(404, "The pages do not request this path.")
    try:
        answer = await asked_of(connection_id, path, dict(request.query_params))
    except UpstreamRefused as refused:
        return _refusal(refused.status, str(refused))
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
    return Response(answer.content, answer.status, headers, media_type="application/json")


def _refusal(status: int, message: str) -> Response:
    return JSONResponse({"errors": [message]}, status_code=status)
