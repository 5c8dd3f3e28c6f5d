"""Flink's own dashboard below ``/flink/``, if the session has one: its files, and the API at the paths it expects.

The dashboard uses relative paths, so ``/flink/jobs/overview`` is ``/jobs/overview``; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ckpt_runtime.rest.errors import without_prefix
from ckpt_runtime.web.flink_dashboard import FlinkDashboard

PREFIX = "/flink"
FIRST_PAGES = (PREFIX, f"{PREFIX}/")


class FlinkPrefix:
    """ASGI middleware. ``needs_login`` says whether the caller still has to log in before it can read anything."""

    def __init__(self, app: ASGIApp, dashboard: FlinkDashboard, needs_login: Callable[[Headers], bool]) -> None:
        self._app = app
        self._dashboard = dashboard
        self._needs_login = needs_login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if scope["type"] != "http" or not (path == PREFIX or path.startswith(f"{PREFIX}/")):
            await self._app(scope, receive, send)
            return
        answer = self._file(scope, path)
        if answer is not None:
            await answer(scope, receive, send)
            return
        await self._app({**without_prefix(scope, PREFIX), "ckpt.flink_dashboard": True}, receive, send)

    def _file(self, scope: Scope, path: str) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return None
        if path == PREFIX:
            return RedirectResponse("flink/", status_code=303)
        if path in FIRST_PAGES and self._needs_login(Headers(scope=scope)):
            return RedirectResponse("../web/", status_code=303)
        file = self._dashboard.find(path.removeprefix(f"{PREFIX}/"))
        return None if file is None else Response(file.content, headers=self._dashboard.headers(file))
