"""Flink's dashboard below ``/flink/``: what is read of a distribution, and what is served of it to whom."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

import pytest

from ckpt_runtime.configuration.errors import InvalidOptionError
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.web import flink_dashboard
from ckpt_runtime.web.flink_dashboard import FlinkDashboard
from tests.unit.runtime.rest.conftest import JOB, Send, sender
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.test_pages import BROWSER, HOST, cookie_of

INDEX = (
    b"""<html><link href="a.css" media="print" onload="this.media='all'">"""
    b"""<script>boot()</script><script src="m.js"></script>"""
)
FILES = {"index.html": INDEX, "m.js": b"main()", "assets/f.ttf": b"font", "jobs": b"a file as a path of the API"}


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("flink")
    (home / "lib").mkdir()
    with zipfile.ZipFile(home / "lib" / "flink-dist-2.3.0.jar", "w") as jar:
        for name, content in FILES.items():
            jar.writestr(f"web/{name}", content)
        jar.writestr("org/apache/Secret.class", b"not of the dashboard")
    return home


@pytest.fixture(scope="module")
def served(distribution: Path) -> Send:
    gateway = FakeGateway()
    gateway.add_job(JOB)
    dashboard = FlinkDashboard.of(str(distribution))
    return sender(create_app(gateway, token="the-token", flink_dashboard=dashboard))


def test_a_distribution_its_jar_and_a_folder_are_read(distribution: Path, tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to("/etc/passwd")
    for place in (distribution, distribution / "lib", distribution / "lib" / "flink-dist-2.3.0.jar", tmp_path):
        found = FlinkDashboard.of(str(place))
        assert {name: file.content for name in FILES if (file := found.find(name))} == FILES
        for other in ("link", "../org/apache/Secret.class", "org/apache/Secret.class", "/etc/passwd", "assets"):
            assert found.find(other) is None


def test_what_has_no_dashboard_is_refused(tmp_path: Path, distribution: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jar").write_bytes(b"no archive")
    for place in (tmp_path, tmp_path / "a.jar", tmp_path / "nosuch"):
        with pytest.raises(InvalidOptionError, match=r"web\.flink-dashboard.*a Flink distribution"):
            FlinkDashboard.of(str(place))
    for limit, value in (("MAX_FILES", 3), ("MAX_BYTES", 10)):
        with monkeypatch.context() as patch, pytest.raises(InvalidOptionError):
            patch.setattr(flink_dashboard, limit, value)
            FlinkDashboard.of(str(distribution))


def test_files_and_the_api_lie_beside_one_another(served: Send) -> None:
    cookie = cookie_of(served)
    answer = served("GET", "/flink/", headers=cookie)
    assert (answer.status_code, answer.content) == (200, INDEX)
    policy = answer.headers["content-security-policy"]
    for inline in (b"this.media='all'", b"boot()"):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'" in policy
    assert "script-src 'self' 'unsafe-hashes' 'sha256" in policy
    assert served("GET", "/flink/m.js", headers=cookie).headers["content-type"].startswith("text/javascript")
    assert served("GET", "/flink/assets/f.ttf", headers=cookie).content == b"font"
    assert served("GET", f"/flink/jobs/{JOB}/status", headers=cookie).json() == {"status": "RUNNING"}
    assert served("GET", "/flink/nosuch", headers=cookie).json() == {"errors": ["Not found: /flink/nosuch"]}
    assert not served("GET", "/flink/config", headers=cookie).json()["features"]["web-submit"]
    assert served("GET", "/config", headers=cookie).json()["features"]["web-submit"]
    assert served("GET", "/web/session", headers=cookie).json() == {"login": True, "flink": True}


def test_who_is_not_logged_in_is_led_to_the_login(served: Send) -> None:
    for path, location in (("/flink", "flink/"), ("/flink/", "../web/")):
        answer = served("GET", path, headers=BROWSER)
        assert (answer.status_code, answer.headers["location"]) == (303, location)
    for path in ("/flink/m.js", "/flink/overview", "/flink/nosuch", "/flink//", "/flinkx"):
        assert served("GET", path, headers=BROWSER).status_code == 401


def test_the_cookie_changes_nothing_there_either(served: Send) -> None:
    headers = cookie_of(served) | {"origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
    for method, path in (("PATCH", f"/flink/jobs/{JOB}"), ("POST", "/flink/jars/upload"), ("POST", "/flink/")):
        assert served(method, path, headers=headers).status_code == 401


def test_without_one_there_is_nothing(send: Send) -> None:
    assert send("GET", "/flink/").status_code == 404
    assert send("GET", "/flink/overview").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        *("jobmanager/environment", "jobmanager/stdout", "jobmanager/profiler"),
        *("taskmanagers/x/stdout", "taskmanagers/x/profiler"),
    ],
)
def test_what_only_the_dashboard_asks_for_is_answered_there_alone(served: Send, path: str) -> None:
    cookie = cookie_of(served)
    assert served("GET", f"/flink/{path}", headers=cookie).status_code == 200
    assert served("GET", f"/{path}", headers=cookie).json() == {"errors": [f"Not found: /{path}"]}
    assert served("GET", "/flink/taskmanagers/nosuch", headers=cookie).status_code == 404


def test_metrics_of_a_jvm_are_zero_for_the_dashboard_alone(served: Send) -> None:
    cookie, query = cookie_of(served), "jobmanager/metrics?get=taskSlotsTotal,Status.JVM.Memory.Heap.Max"
    slots = {"id": "taskSlotsTotal", "value": "8"}
    heap = {"id": "Status.JVM.Memory.Heap.Max", "value": "0"}
    assert served("GET", f"/flink/{query}", headers=cookie).json() == [slots, heap]
    assert served("GET", f"/{query}", headers=cookie).json() == [slots]
