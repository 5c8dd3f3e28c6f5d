"""The web pages, and logging in to them with the session's token.

The pages themselves are public, because they contain only code. Their data comes from the API, which requires the token
or the cookie set by a login (``rest.server``).
"""

from __future__ import annotations

import hmac
from urllib.parse import urlsplit

from fastapi import Request
from starlette.responses import RedirectResponse, Response

from ckpt_runtime.rest.exchange import (
    ApiError,
    BadRequest,
    flink_router,
    not_found,
    original_path,
    read_object,
    whole_request,
)
from ckpt_runtime.rest.server import LIFETIME_S, WebSessions, cookie_name, is_same_origin
from ckpt_runtime.web import INDEX, page_files

router = flink_router(include_in_schema=False)
routers = (router,)

PREFIX = "/web"
LOGIN = f"{PREFIX}/login"
LOGOUT = f"{PREFIX}/logout"
SESSION = f"{PREFIX}/session"
MAX_TOKEN_CHARS = 4_096


def is_public(method: str, path: str, accept: str) -> bool:
    """Whether a request needs neither token nor cookie: it only loads code, or logs in or out."""
    if method == "POST":
        return path in (LOGIN, LOGOUT)
    if method not in ("GET", "HEAD"):
        return False
    if path == "/":
        return "text/html" in accept
    return path in (PREFIX, f"{PREFIX}/", SESSION) or path.removeprefix(f"{PREFIX}/") in page_files()


@router.get("/")
async def root(request: Request) -> Response:
    """Redirects browsers to the pages; programs get 404, as from Flink's API."""
    if "text/html" not in request.headers.get("accept", ""):
        return not_found(original_path(request))
    return RedirectResponse("web/", status_code=303)


@router.get(PREFIX)
async def without_slash() -> Response:
    """Redirects to the path with a slash, which the pages' relative addresses need."""
    return RedirectResponse("web/", status_code=303)


@router.get(SESSION)
async def session(request: Request) -> dict[str, bool]:
    """Tells a page whether the browser is logged in, and that this server, unlike others, shows its processes."""
    return {"login": _sessions(request).is_valid(_cookie(request)), "processes": True}


@router.get(f"{PREFIX}/")
@router.get(f"{PREFIX}/{{name}}")
async def page(request: Request, name: str = INDEX) -> Response:
    """One file of the web pages."""
    file = page_files().get(name)
    if file is None:
        return not_found(original_path(request))
    headers = file.headers()
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers)


@router.post(LOGIN)
async def login(request: Request) -> Response:
    """Checks ``{"token": ...}``, and sets a cookie with which the browser can read, but change nothing."""
    _from_own_page(request)
    given = (await read_object(request, expected='{"token": "..."}', empty_is_object=False)).get("token")
    if not isinstance(given, str) or len(given) > MAX_TOKEN_CHARS:
        raise BadRequest(f"token: it must be a text of at most {MAX_TOKEN_CHARS} characters")  # the token is not echoed
    expected: str | None = request.app.state.token
    if expected is None:
        return Response(status_code=204)
    if not hmac.compare_digest(given.strip().encode(), expected.encode()):
        raise ApiError(401, "token: this is not the session's token")
    return _with_cookie(request, _sessions(request).begin(), LIFETIME_S)


@router.post(LOGOUT)
async def logout(request: Request) -> Response:
    """Ends the browser's session on the server, and deletes its cookie."""
    _from_own_page(request)
    await whole_request(request)
    _sessions(request).end(_cookie(request))
    return _with_cookie(request, "", 0)


def _sessions(request: Request) -> WebSessions:
    sessions: WebSessions = request.app.state.web_sessions
    return sessions


def _cookie(request: Request) -> str:
    return request.cookies.get(cookie_name(request.headers.get("host", "")), "")


def _from_own_page(request: Request) -> None:
    if not is_same_origin(request.headers):
        raise ApiError(403, "Requests from other origins are not accepted.")


def _with_cookie(request: Request, value: str, lifetime_s: int) -> Response:
    """Set the cookie; the browser's ``Origin`` shows whether it uses TLS, which a proxy may terminate."""
    secure = "https" in (request.url.scheme, urlsplit(request.headers.get("origin", "")).scheme)
    answer = Response(status_code=204, headers={"Cache-Control": "no-store"})
    answer.set_cookie(
        cookie_name(request.headers.get("host", "")),
        value,
        max_age=lifetime_s,
        path="/",
        secure=secure,
        httponly=True,
        samesite="strict",
    )
    return answer
