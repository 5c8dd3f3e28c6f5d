"""From connections to clients, and the *Test* button."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import certifi
import pytest

from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from tests.unit.provider.conftest import JobManager

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
        ({"host": "::1"}, "http://[::1]:8081", False),
        ({"schema": "https", "extra": {"verify": False}}, "https://jobs.example:8081", False),
        ({"schema": "https", "extra": {"verify": "false"}}, "https://jobs.example:8081", False),
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
        ({"host": "a/b"}, "host"),
        ({"host": "user@a"}, "host"),
        ({"host": "a:8081"}, "host"),
        ({"host": "http://[::1]:8081"}, "host"),
        ({"schema": "https", "extra": {"ca_file": "/no/such/ca.pem"}}, "ca_file"),
        ({"extra": {"verify": "perhaps"}}, "verify"),
        ({"extra": {"timeout": "soon"}}, "timeout"),
        ({"extra": {"timeout": 0}}, "timeout"),
        ({"extra": {"timeout": 6000}}, "timeout"),
    ],
)
def test_a_field_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], name: str
) -> None:
    with pytest.raises(CkptConnectionInvalid, match=f"connection 'ckpt_default', {name}: "):
        connect(monkeypatch, **fields).endpoint()


def test_a_file_without_certificates_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    hook = connect(monkeypatch, schema="https", extra={"ca_file": str(tmp_path / "ca.pem")})
    with pytest.raises(CkptConnectionInvalid, match="connection 'ckpt_default', ca_file: .*ca.pem"):
        hook.get_conn()
    found, message = hook.test_connection()
    assert not found
    assert "ca_file" in message


@pytest.mark.row("air.1")
def test_the_test_button_tells_what_it_found(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CkptHook().test_connection() == (True, "version 2.3.0, 6 of 8 slots available, 1 jobs running")
    job_manager.stop()
    found, message = CkptHook().test_connection()
    assert not found
    assert "cannot be reached" in message
    found, message = connect(monkeypatch, schema="ftp").test_connection()
    assert not found
    assert "scheme" in message


def test_the_asynchronous_client_is_the_same(job_manager: JobManager) -> None:
    async def ask() -> int:
        async with await CkptHook().aget_conn() as client:
            return (await client.cluster_overview()).slots_total

    assert asyncio.run(ask()) == 8
