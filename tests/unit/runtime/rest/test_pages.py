"""The web pages and the login to them: what is open, what a cookie can do, and what it cannot."""

from __future__ import annotations

import json
import re
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest

from ckpt_runtime.rest import server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.handlers.pages import MAX_TOKEN_CHARS
from ckpt_runtime.rest.server import LIFETIME_S, WebSessions, cookie_name
from ckpt_runtime.web import page_files
from tests.unit.runtime.rest.conftest import JOB, Send, sender
from tests.unit.runtime.rest.fake_gateway import FakeGateway

HOST = "driver-7:8081"
OWN = {"host": HOST, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
BROWSER = {"host": HOST, "accept": "text/html,*/*"}
STATIC = Path(__file__).parents[4] / "runtime" / "ckpt_runtime" / "web" / "static"


@pytest.fixture(scope="module")
def guarded() -> Send:
    gateway = FakeGateway()
    gateway.add_job(JOB)
    return sender(create_app(gateway, token="the-token"))


def logged_in(send: Send, **headers: str) -> SimpleCookie:
    answer = send("POST", "/web/login", json={"token": "the-token"}, headers=OWN | headers)
    assert (answer.status_code, answer.content) == (204, b"")
    assert "the-token" not in answer.headers["set-cookie"]
    return SimpleCookie(answer.headers["set-cookie"])


def cookie_of(send: Send) -> dict[str, str]:
    (morsel,) = logged_in(send).values()
    return {"cookie": f"{morsel.key}={morsel.value}", "host": HOST}


def test_pages_are_served_to_everybody_with_a_strict_policy(guarded: Send) -> None:
    index = guarded("GET", "/web/", headers={"host": HOST})
    assert index.status_code == 200
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    policy = index.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    for name, file in page_files().items():
        answer = guarded("GET", f"/web/{name}", headers={"host": HOST})
        assert (answer.status_code, answer.content) == (200, file.content)
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = guarded("GET", f"/web/{name}", headers={"host": HOST, "if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_pages_have_no_inline_code_and_load_nothing_from_other_hosts() -> None:
    for path in STATIC.iterdir():
        text = path.read_text()
        assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text) == []
        assert re.findall(r"(?:src|href)=\"(?:https?:)?//", text) == []
        assert [url for url in re.findall(r"https?://[^\s\"']+", text) if "w3.org" not in url] == []
    assert (
        re.findall(r"<script(?![^>]* src=)|<style| style=| on[a-z]+=", page_files()["index.html"].content.decode())
        == []
    )


@pytest.mark.parametrize("path", ["/", "/web"])
def test_browsers_are_led_to_the_pages(guarded: Send, path: str) -> None:
    answer = guarded("GET", path, headers=BROWSER)
    assert (answer.status_code, answer.headers["location"]) == (303, "web/")


@pytest.mark.parametrize(
    "path",
    ["/web/nosuch.js", "/web/../jobs", "/web/%2e%2e/jobs", "/web/..%2fjobs", "/web/app.js/x", "/webx", "/v1/web/",
     "/web//app.js", "/overview", f"/jobs/{JOB}/config", "/web/__init__.py"],
)  # fmt: skip
def test_paths_other_than_the_pages_need_a_token(guarded: Send, path: str) -> None:
    assert guarded("GET", path, headers=BROWSER).status_code == 401


def test_methods_other_than_get_need_a_token_on_the_pages(guarded: Send) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert guarded(method, "/web/", headers=BROWSER).status_code == 401
    assert guarded("PUT", "/web/login", headers=OWN).status_code == 401


def test_unknown_files_are_404_without_a_token(send: Send) -> None:
    for path in ("/web/nosuch.js", "/web/__init__.py", "/web/login"):
        assert send("GET", path).json() == {"errors": [f"Not found: {path}"]}
    assert send("GET", "/web/session").json() == {"login": False, "processes": True}
    assert send("POST", "/web/login", json={"token": ""}).status_code == 204


def test_a_login_sets_a_cookie_that_reads(guarded: Send) -> None:
    (morsel,) = logged_in(guarded).values()
    assert morsel.key == "ckpt-session-8081"
    assert morsel["httponly"]
    assert morsel["samesite"].lower() == "strict"
    assert (morsel["path"], morsel["max-age"], morsel["secure"]) == ("/", str(LIFETIME_S), "")
    headers = {"cookie": f"{morsel.key}={morsel.value}", "host": HOST}
    for path in ("/overview", "/v1/jobs/overview", f"/jobs/{JOB}/checkpoints", "/openapi.json"):
        assert guarded("GET", path, headers=headers).status_code == 200
    assert guarded("GET", "/web/session", headers=headers).json() == {"login": True, "processes": True}


@pytest.mark.parametrize(
    "headers", [{"origin": f"https://{HOST}"}, {"origin": f"https://{HOST}", "sec-fetch-site": ""}]
)
def test_over_tls_the_cookie_is_secure(guarded: Send, headers: dict[str, str]) -> None:
    headers = {key: value for key, value in (OWN | headers).items() if value}
    answer = guarded("POST", "/web/login", json={"token": "the-token"}, headers=headers)
    assert "; secure" in answer.headers["set-cookie"].lower()


def test_the_cookie_changes_nothing(guarded: Send) -> None:
    headers = OWN | cookie_of(guarded)
    for method, path in (
        ("PATCH", f"/jobs/{JOB}"),
        ("POST", f"/jobs/{JOB}/savepoints"),
        ("PUT", f"/jobs/{JOB}/config"),
        ("DELETE", "/cluster"),
        ("POST", "/jars/upload"),
    ):
        assert guarded(method, path, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://driver-7:9999"},
        {"origin": "http://["},
        {"origin": "null"},
        {"origin": f"http://{HOST}/page"},
    ],
)
def test_pages_of_other_origins_can_neither_read_nor_log_in_with_the_cookie(
    guarded: Send, headers: dict[str, str]
) -> None:
    cookie = cookie_of(guarded)
    assert guarded("GET", "/overview", headers=cookie | headers).status_code == 401
    sent = {"host": HOST} | headers
    assert guarded("POST", "/web/login", json={"token": "the-token"}, headers=sent).status_code == 403
    assert guarded("POST", "/web/logout", headers=cookie | headers).status_code == 403
    assert guarded("GET", "/overview", headers=cookie).status_code == 200


def test_cookie_is_invalid_after_a_logout(guarded: Send) -> None:
    cookie = cookie_of(guarded)
    answer = guarded("POST", "/web/logout", headers=OWN | cookie)
    assert answer.status_code == 204
    assert "max-age=0" in answer.headers["set-cookie"].lower()
    assert guarded("GET", "/overview", headers=cookie).status_code == 401
    assert guarded("GET", "/overview", headers=cookie_of(guarded)).status_code == 200


@pytest.mark.parametrize("token", ["", "wrong", "the-tokem", "the-token2", "THE-TOKEN", "ſ" * 100])
def test_a_wrong_token_is_401_and_sets_nothing(guarded: Send, token: str) -> None:
    answer = guarded("POST", "/web/login", json={"token": token}, headers=OWN)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert answer.json() == {"errors": ["token: this is not the session's token"]}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"the-token", b'{"token": 5}', b'{"token": null}', b'{"token": "x", "token": "the-token"}',
     json.dumps({"token": "s3cret" * MAX_TOKEN_CHARS}).encode(), b"token=the-token"],
)  # fmt: skip
def test_malformed_logins_are_400_and_repeat_nothing(guarded: Send, content: bytes) -> None:
    answer = guarded("POST", "/web/login", content=content, headers=OWN)
    assert answer.status_code == 400
    assert "s3cret" not in answer.text
    assert "the-token" not in answer.text


def test_floods_of_logins_are_bounded_in_size_and_leave_nothing(guarded: Send) -> None:
    assert guarded("POST", "/web/login", content=b" " * 300_000, headers=OWN).status_code == 413
    app = create_app(FakeGateway(), token="the-token")
    send = sender(app)
    before = dict(vars(app.state.web_sessions))
    for _ in range(50):
        assert send("POST", "/web/login", json={"token": "wrong"}, headers=OWN).status_code == 401
        logged_in(send)
    assert vars(app.state.web_sessions) == before


def test_a_session_ends_with_its_time_and_with_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000.0]
    sessions = WebSessions(lambda: now[0])
    value = sessions.begin()
    assert sessions.is_valid(value)
    assert not WebSessions(lambda: now[0]).is_valid(value)
    end, session_id, signature = value.split(".")
    for forged in (
        "", "..", value[:-1], value + "0", f"{int(end) + 1}.{session_id}.{signature}", f"{end}.{'0' * 32}.{signature}",
        f"{end}.{session_id}.{'0' * 64}", value.upper(), value.replace(".", "٠"),
    ):  # fmt: skip
        assert not sessions.is_valid(forged)
    now[0] += LIFETIME_S
    assert not sessions.is_valid(value)
    monkeypatch.setattr(server, "MAX_ENDED", 2)
    ended = [sessions.begin() for _ in range(3)]
    for session in (*ended, "forged"):
        sessions.end(session)
    assert [sessions.is_valid(session) for session in ended] == [True, False, False]


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("a:8081", "8081"),
        ("[::1]:9", "9"),
        ("a", "default"),
        ("", "default"),
        ("a:x", "default"),
        ("a:99999", "default"),
    ],
)
def test_two_sessions_of_one_host_have_cookies_of_their_own(host: str, name: str) -> None:
    assert cookie_name(host) == f"ckpt-session-{name}"


def test_server_without_a_token_serves_no_pages_to_other_hosts() -> None:
    send = sender(create_app(FakeGateway(), token=None))
    assert send("GET", "/web/", headers={"host": "evil.example"}).status_code == 403
    answer: httpx.Response = send("GET", "/web/", headers={"host": "localhost:1"})
    assert answer.status_code == 200
