"""From connections to clients, and the *Test* button."""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import certifi
import pytest

from airflow_provider_ckpt.conditions.job import JobStatusCondition
from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.triggers.wait import CkptTrigger
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.leadership import LeaseSignature
from ckpt_runtime.network.tls import rest_context
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.version import VERSION
from tests.support.certificates import Authority, rest_options
from tests.support.patience import patient
from tests.unit.provider.conftest import JOB, JobManager, unanswered
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served

if TYPE_CHECKING:
    from airflow.triggers.base import TriggerEvent

CA_FILE = certifi.where()


def connect(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> CkptHook:
    document = {"conn_type": "ckpt", "host": "jobs.example"} | fields
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))
    return CkptHook()


@pytest.mark.row("air.1")
@pytest.mark.parametrize(
    ("fields", "url", "verify"),
    [
        ({}, "http://jobs.example:8081", False),
        ({"port": 9000, "schema": "HTTPS"}, "https://jobs.example:9000", True),
        ({"host": "https://jobs.example/", "port": 443}, "https://jobs.example:443", True),
        ({"host": "https://gateway.example/ckpt/a/", "port": 443}, "https://gateway.example:443/ckpt/a", True),
        ({"host": "::1"}, "http://[::1]:8081", False),
        ({"schema": "https", "extra": {"verify": False}}, "https://jobs.example:8081", False),
        ({"schema": "https", "extra": {"verify": "false"}}, "https://jobs.example:8081", False),
        ({"schema": "https", "extra": {"verify": "", "ca_file": ""}}, "https://jobs.example:8081", True),
        ({"conn_type": "derived", "login": "x", "extra": {"team": "x"}}, "http://jobs.example:8081", False),
        ({"schema": "https", "extra": {"ca_file": CA_FILE}}, "https://jobs.example:8081", CA_FILE),
    ],
)
def test_a_connection_is_read(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], url: str, verify: bool | str
) -> None:
    endpoint = connect(monkeypatch, **fields).endpoint()
    assert endpoint.base_url == url
    assert endpoint.verify == verify


def test_token_and_timeout_are_read_and_the_token_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = connect(monkeypatch, password="geheim", extra={"timeout": 5}).endpoint()
    assert endpoint.token == "geheim"
    assert endpoint.timeout == 5.0
    assert "geheim" not in repr(endpoint)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"schema": "ftp"}, "scheme"),
        ({"host": ""}, "host"),
        ({"host": "a/b?c"}, "host"),
        ({"host": "a/b:1"}, "host"),
        ({"host": "a..b"}, "host"),
        ({"port": 70000}, "port"),
        ({"port": -1}, "port"),
        ({"login": "geheim"}, "login"),
        ({"password": "geheim\n"}, r"Bearer token \(password\)"),
        ({"password": "schlüssel-geheim"}, r"Bearer token \(password\)"),
        ({"extra": "[1]"}, "extra"),
        ({"extra": "{verify: 'geheim'"}, "extra"),
        ({"extra": {"verfy": False}}, "extra"),
        ({"extra": {"token": "geheim"}}, "extra"),
        ({"host": "user@a"}, "host"),
        ({"host": "a:8081"}, "host"),
        ({"host": "http://[::1]:8081"}, "host"),
        ({"schema": "https", "extra": {"ca_file": "/no/such/ca.pem"}}, "ca_file"),
        ({"extra": {"verify": "perhaps"}}, "verify"),
        ({"extra": {"timeout": "soon"}}, "timeout"),
        ({"extra": {"timeout": 0}}, "timeout"),
        ({"extra": {"timeout": 6000}}, "timeout"),
        ({"extra": {"ha_dir": "/ha"}}, "host"),
        ({"host": "", "extra": {"ha_dir": 7}}, "ha_dir"),
        ({"host": "", "extra": {"ha_dir": "/ha", "ha_cluster_id": 7}}, "ha_cluster_id"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(CkptConnectionInvalid, match=f"connection 'ckpt_default', {name}: ") as refused:
        connect(monkeypatch, **fields).endpoint()
    assert "geheim" not in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize(
    ("uri", "url"),
    [
        ("ckpt://:geheim@jobs.example:9000/https?verify=false&timeout=10", "https://jobs.example:9000"),
        ("ckpt://https%3A%2F%2Fgateway.example%2Fckpt%2Ftotals:443", "https://gateway.example:443/ckpt/totals"),
        ("ckpt://http://jobs.example/", "http://jobs.example:8081"),
    ],
)
def test_a_connection_may_be_a_uri(monkeypatch: pytest.MonkeyPatch, uri: str, url: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", uri)
    endpoint = CkptHook().endpoint()
    assert endpoint.base_url == url
    assert (endpoint.token, endpoint.timeout) == (("geheim", 10.0) if "geheim" in uri else (None, 30.0))


def test_requests_go_below_a_proxys_path(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    connect(monkeypatch, host="127.0.0.1/gateway", port=job_manager.port)
    found, message = CkptHook().test_connection()
    assert (found, job_manager.received) == (False, ["GET /gateway/overview"]), message


def test_a_file_without_certificates_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    hook = connect(monkeypatch, schema="https", extra={"ca_file": str(tmp_path / "ca.pem")})
    with pytest.raises(CkptConnectionInvalid, match="connection 'ckpt_default', ca_file: .*ca.pem"):
        hook.get_conn()
    found, message = hook.test_connection()
    assert not found
    assert "ca_file" in message


@pytest.mark.row("air.1")
def test_connection_test_reports_version_leader_and_slots(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://127.0.0.1:{job_manager.port}"
    expected = f"version {VERSION}, leader {url}, 6 of 8 slots available, 1 jobs running"
    assert CkptHook().test_connection() == (True, expected)
    job_manager.stop()
    found, message = CkptHook().test_connection()
    assert not found
    assert "cannot be reached" in message
    # Airflow tries what is in the form under a name of its own.
    assert "Check host, port and scheme of this connection" in message
    found, message = connect(monkeypatch, schema="ftp").test_connection()
    assert (found, message) == (False, "scheme: 'ftp' is not acceptable, it must be http or https")
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", "ckpt://127.0.0.1:99999")
    found, message = CkptHook().test_connection()
    assert (found, message.partition(";")[2]) == (False, " a port must be a number from 1 to 65535")


def lead(directory: Path, url: str, token: str = "geheim") -> None:
    store = HaStore(str(directory), "trains").leader
    present = store.current()
    signed = store.signed_by(LeaseSignature(token, "trains"))
    signed.claim(url, "app", "1", after=0 if present is None else present.epoch)


def directory_connection(monkeypatch: pytest.MonkeyPatch, directory: Path, **fields: Any) -> CkptHook:
    extra = {"ha_dir": str(directory), "ha_cluster_id": "trains"}
    return connect(monkeypatch, **({"host": "", "password": "geheim", "extra": extra} | fields))


@pytest.mark.row("air.1")
def test_the_leader_is_found_in_the_directory(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hook = directory_connection(monkeypatch, tmp_path)
    assert hook.endpoint().options["high-availability.storageDir"] == str(tmp_path)
    found, message = hook.test_connection()
    assert not found
    assert "no leader has published its address there yet" in message
    assert hook.base_url() == ""
    lead(tmp_path, f"http://127.0.0.1:{job_manager.port}")
    expected = f"version {VERSION}, leader http://127.0.0.1:{job_manager.port}, 6 of 8 slots available, 1 jobs running"
    assert hook.test_connection() == (True, expected)
    assert hook.base_url() == f"http://127.0.0.1:{job_manager.port}"
    lead(tmp_path, "http://127.0.0.1:1", token="of another session")
    found, message = directory_connection(monkeypatch, tmp_path, password="other").test_connection()
    assert not found
    assert "does not prove its leader's address" in message


@pytest.mark.row("air.1")
def test_a_wait_in_the_triggerer_follows_the_leader(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory_connection(monkeypatch, tmp_path)
    lead(tmp_path, "http://127.0.0.1:1")

    async def wait() -> TriggerEvent:
        trigger = CkptTrigger(
            ckpt_conn_id="ckpt_default",
            condition=JobStatusCondition(JOB, ["RUNNING"]),
            deadline=time.time() + 60,
            poll_interval=0.05,
        )
        with unanswered() as failed:
            event = asyncio.ensure_future(anext(trigger.run()))
            await asyncio.to_thread(failed.acquire, timeout=patient(60))
        assert not event.done()
        lead(tmp_path, f"http://127.0.0.1:{job_manager.port}")
        return await event

    assert asyncio.run(wait()).payload["status"] == "done"


def test_hook_loads_more_than_the_client_only_for_a_directory(alone: Callable[[str], str]) -> None:
    said = alone("""
import os, sys
from airflow_provider_ckpt.hooks.ckpt import CkptHook
os.environ["AIRFLOW_CONN_A"] = '{"conn_type": "ckpt", "host": "127.0.0.1"}'
os.environ["AIRFLOW_CONN_B"] = '{"conn_type": "ckpt", "extra": {"ha_dir": "/ha"}}'
CkptHook("a").get_conn().close()
print("ckpt_runtime.storage" in sys.modules, "ckpt_runtime.leader_retrieval" in sys.modules)
CkptHook("b").get_conn().close()
print("ckpt_runtime.storage" in sys.modules, any(name.startswith("ckpt_runtime.jobmaster") for name in sys.modules))
""")
    assert [line for line in said.splitlines() if line.endswith("False")] == ["False False", "True False"]


def test_a_directory_that_cannot_be_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hook = connect(monkeypatch, host="", extra={"ha_dir": "ftp://x/y"})
    with pytest.raises(CkptConnectionInvalid, match="connection 'ckpt_default', ha_dir: 'ftp://x/y'"):
        hook.get_conn()


def test_the_servers_certificate_is_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = rest_context(Configuration(rest_options(authority.issue("server"))))
    with served(create_app(FakeGateway(), token="geheim"), context) as url:
        fields = {"host": "127.0.0.1", "port": int(url.rpartition(":")[2]), "schema": "https", "password": "geheim"}
        found, message = connect(monkeypatch, **fields, extra={"ca_file": str(authority.path)}).test_connection()
        assert found, message
        found, message = connect(monkeypatch, **fields).test_connection()
        assert not found
        assert "CERTIFICATE_VERIFY_FAILED" in message
        assert "Name the authority that has signed it in the field CA bundle of this connection" in message
        assert CkptHook().ckpt_conn_id not in message
        found, message = connect(monkeypatch, **fields | {"schema": "http"}).test_connection()
        assert not found
