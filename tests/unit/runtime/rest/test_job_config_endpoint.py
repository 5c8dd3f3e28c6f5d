"""GET, PUT and PATCH of a job's configuration (FLIP-530): their shapes, and what is refused with which status."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from tests.unit.runtime.rest.conftest import JOB, Send
from tests.unit.runtime.rest.fake_gateway import FakeGateway

PATH = f"/jobs/{JOB}/config"
INTERVAL, TIMEOUT = "execution.checkpointing.interval", "execution.checkpointing.timeout"


@pytest.fixture(autouse=True)
def everything_may_change(gateway: FakeGateway) -> None:
    gateway.allow_list = ("*",)


def put(send: Send, version: Any = 1, query: str = "?changes=true", **options: Any) -> Any:
    return send("PUT", PATH + query, json={"configuration": given(options), "version": version})


def given(options: dict[str, Any]) -> dict[str, Any]:
    return {{"interval": INTERVAL, "timeout": TIMEOUT}.get(key, key): value for key, value in options.items()}


def errors(answer: Any, status: int) -> str:
    assert answer.status_code == status, answer.text
    (line,) = answer.json()["errors"]
    return str(line)


@pytest.mark.row("530.1")
def test_configuration_has_its_version_and_its_author(send: Send) -> None:
    answer = put(send, interval="5 s")
    assert answer.status_code == 200
    assert answer.json() == {
        "version": 2,
        "restart": False,
        "dry-run": False,
        "changes": {INTERVAL: {"before": None, "after": "5 s", "change": "live", "hidden-by-override": None}},
    }
    shown = send("GET", f"/v1{PATH}")
    assert shown.headers["etag"] == '"2"'
    document = shown.json()
    assert (document["configuration"], document["version"], document["running-version"]) == ({INTERVAL: "5 s"}, 2, 2)
    (change,) = document["changes"]
    assert (change["version"], change["options"]) == (2, [INTERVAL])
    assert change["by"]


@pytest.mark.row("530.1")
def test_put_answers_an_empty_object_unless_the_changes_are_asked_for(send: Send) -> None:
    assert put(send, query="", interval="5 s").json() == {}
    assert put(send, query="?changes=false", interval="5 s").json() == {}
    assert put(send, 2, query="?dry-run=true", interval="6 s").json()["dry-run"]
    assert send("GET", PATH).json()["version"] == 2
    assert "changes" in errors(put(send, query="?changes=maybe", interval="6 s"), 400)


@pytest.mark.row("530.2")
class TestStatuses:
    @pytest.mark.parametrize(
        "body",
        [b"", b"{}", b"[]", b"{", b'{"version": 1}', b'{"configuration": {}}', b'{"configuration": [], "version": 1}',
         b'{"configuration": {}, "version": 0}', b'{"configuration": {}, "version": 1.0}',
         b'{"configuration": {}, "version": "1"}', b'{"configuration": {}, "vesion": 1}',
         b'{"configuration": {"a": null}, "version": 1}', b'{"configuration": {"a": []}, "version": 1}',
         b'{"configuration": {}, "version": 1, "more": 1}'],
    )  # fmt: skip
    def test_400_malformed(self, send: Send, body: bytes) -> None:
        assert send("PUT", PATH, content=body).status_code == 400
        assert send("GET", PATH).json()["version"] == 1

    def test_invalid_value_gets_400_with_option_value_and_allowed_values(self, send: Send) -> None:
        message = errors(put(send, interval="often", timeout="5 ms", unknown="is mine"), 400)
        first, second = message.splitlines()
        assert first.startswith(f"{INTERVAL}: 'often' is not acceptable; allowed: ")
        assert second.startswith(f"{TIMEOUT}: '5 ms' is not acceptable; allowed: ")
        assert "at least 10" in second

    def test_change_of_an_unchangeable_option_gets_400_with_the_reason(self, send: Send) -> None:
        message = errors(put(send, **{"pipeline.name": "other", "state.backend.type": "rocksdb"}), 400)
        name, backend = message.splitlines()
        assert name.startswith("pipeline.name: 'other' is not acceptable")
        assert "canonical savepoint" in backend

    @pytest.mark.row("530.3")
    def test_403_names_all_that_are_not_on_the_allow_list(self, send: Send, gateway: FakeGateway) -> None:
        gateway.allow_list = (INTERVAL,)
        options = {TIMEOUT: "1 min", "my.key": "x", INTERVAL: "5 s"}
        message = errors(put(send, **options), 403)
        assert message.startswith(f"{TIMEOUT}, my.key: ")
        assert send("GET", PATH).json()["configuration"] == {}
        assert put(send, interval="5 s").status_code == 200

    @pytest.mark.row("530.3")
    def test_403_on_an_empty_allow_list(self, send: Send, gateway: FakeGateway) -> None:
        gateway.allow_list = ()
        assert "allows to change are none" in errors(put(send, interval="5 s"), 403)

    def test_409_another_version(self, send: Send) -> None:
        assert put(send, interval="5 s").status_code == 200
        assert "has version 2" in errors(put(send, interval="6 s"), 409)
        assert "has version 2" in errors(put(send, 3, interval="6 s"), 409)

    def test_500_otherwise(self, send: Send, gateway: FakeGateway) -> None:
        gateway.unexpected = RuntimeError("a mistake")
        assert put(send, interval="5 s").status_code == 500


@pytest.mark.row("530.4")
@pytest.mark.row("530.10")
def test_equal_value_in_another_spelling_changes_nothing_at_any_version(send: Send) -> None:
    assert put(send, interval="10s", timeout="60 s").json()["version"] == 2
    for version in (1, 2, 77):
        answer = put(send, version, interval="10000 ms", timeout="1 min").json()
        assert (answer["version"], answer["changes"], answer["restart"]) == (2, {}, False)
    assert send("GET", PATH).json()["configuration"][INTERVAL] == "10s"
    default = put(send, 2, interval="10s", timeout="60 s", **{"pipeline.max-parallelism": "-1"}).json()
    assert default["version"] == 2
    default = put(send, 2, interval="10s", timeout="60 s", **{"execution.checkpointing.min-pause": "0"}).json()
    assert default["version"] == 3


@pytest.mark.row("530.10")
def test_dry_run_reports_needed_restart_and_changes_nothing(send: Send, gateway: FakeGateway) -> None:
    gateway.jobs[JOB].overrides = CheckpointOverrides(timeout_ms=77)
    options = {TIMEOUT: "1 min", "execution.buffer-timeout.interval": "5 ms"}
    answer = put(send, query="?dry-run=true", **options).json()
    assert (answer["version"], answer["restart"], answer["dry-run"]) == (2, True, True)
    assert {key: (change["change"], change["hidden-by-override"]) for key, change in answer["changes"].items()} == {
        TIMEOUT: ("live", "checkpointTimeout"),
        "execution.buffer-timeout.interval": ("restart", None),
    }
    assert send("GET", PATH).json()["version"] == 1
    assert put(send, query="?dry-run=perhaps", interval="5 s").status_code == 400


@pytest.mark.row("530.10")
def test_values_that_come_back_as_they_are_shown_are_kept(send: Send, gateway: FakeGateway) -> None:
    secret = {"my.password": "hush", "my.url": "http://me:hush@host/"}
    assert put(send, **secret).json()["changes"]["my.password"]["after"] == "******"
    shown = send("GET", PATH).json()["configuration"]
    assert "hush" not in str(shown)
    assert put(send, 2, interval="5 s", **shown).json()["version"] == 3
    assert gateway.jobs[JOB].own.given.to_dict() == {INTERVAL: "5 s", **secret}
    assert "other.password" in errors(put(send, 3, **shown, **{"other.password": "******"}), 400)


@pytest.mark.row("530.8")
class TestPatch:
    def patch(self, send: Send, headers: dict[str, str] | None = None, **options: Any) -> Any:
        return send("PATCH", PATH, json={"configuration": given(options)}, headers=headers or {})

    def test_patch_changes_given_options_only_and_null_removes_one(self, send: Send) -> None:
        put(send, interval="5 s", timeout="1 min")
        answer = self.patch(send, timeout=None, **{"my.number": 3}).json()
        assert (answer["version"], answer["restart"]) == (3, True)
        assert answer["changes"][TIMEOUT]["after"] is None
        assert send("GET", PATH).json()["configuration"] == {INTERVAL: "5 s", "my.number": "3"}

    @pytest.mark.parametrize(("header", "status"), [("1", 200), ('"1"', 200), ("*", 200), ('"2"', 409), ("x", 400)])
    def test_patch_with_the_version_that_it_is_based_on_is_accepted(self, send: Send, header: str, status: int) -> None:
        assert self.patch(send, {"If-Match": header}, interval="5 s").status_code == status

    def test_removal_of_an_unset_option_changes_nothing(self, send: Send) -> None:
        assert self.patch(send, timeout=None).json()["version"] == 1

    @pytest.mark.parametrize("body", [{}, {"configuration": None}, {"configuration": {"a": []}}, {"version": 1}])
    def test_malformed(self, send: Send, body: Any) -> None:
        assert send("PATCH", PATH, json=body).status_code == 400
