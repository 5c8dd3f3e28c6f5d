"""HTTPS of the REST server, and who does not get in: by another authority, by name, in plain text."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.cli.main import main
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import Unreachable
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.tls import rest_context
from ckpt_runtime.rest.app import create_app
from tests.support.certificates import Authority, rest_options
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("other-authority"))


@pytest.fixture(scope="module")
def url(authority: Authority) -> Iterator[str]:
    context = rest_context(Configuration(rest_options(authority.issue("server"))))
    assert context is not None
    with served(create_app(FakeGateway(), token="token"), context) as address:
        yield address


def test_both_clients_verify_the_certificate_and_connect(url: str, authority: Authority) -> None:
    assert url.startswith("https://")
    with CkptClient(url, token="token", verify=str(authority.path)) as client:
        assert client.cluster_overview().slots_total == 8

    async def ask() -> int:
        async with AsyncCkptClient(url, token="token", verify=str(authority.path)) as client:
            return (await client.cluster_overview()).slots_total

    assert asyncio.run(ask()) == 8


@pytest.mark.parametrize("trusted", ["other", "system"])
def test_a_server_of_an_unknown_authority_gets_no_token(url: str, other_authority: Authority, trusted: str) -> None:
    verify = str(other_authority.path) if trusted == "other" else True
    with (
        CkptClient(url, token="token", verify=verify, retry_timeout_s=0) as client,
        pytest.raises(Unreachable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.cluster_overview()


def test_a_server_under_another_name_gets_no_token(authority: Authority, url: str) -> None:
    context = ssl.create_default_context(cafile=str(authority.path))
    with (
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as plain,
        pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'jobs.example'"),
    ):
        context.wrap_socket(plain, server_hostname="jobs.example")


def test_request_without_tls_is_refused(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http"), headers={"Authorization": "Bearer token"}, trust_env=False, timeout=60)
    with CkptClient(url.replace("https", "http"), retry_timeout_s=0) as client, pytest.raises(Unreachable):
        client.cluster_overview()


def test_tls_towards_a_server_without_is_named() -> None:
    with (
        served(create_app(FakeGateway(), token="token")) as plain,
        CkptClient(plain.replace("http", "https"), token="token", verify=False, retry_timeout_s=0) as client,
        pytest.raises(Unreachable, match="SSL"),
    ):
        client.cluster_overview()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
def test_rest_server_needs_tls_1_2(url: str) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain)


def test_the_command_line(
    url: str, authority: Authority, other_authority: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CKPT_REST_TOKEN", "token")
    monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / "none"))
    assert main(["--url", url, "--ca-file", str(authority.path), "list"]) == ExitCode.OK
    assert main(["--url", url, "--ca-file", str(other_authority.path), "list"]) == ExitCode.UNREACHABLE
    assert main(["--url", url, "--insecure", "list"]) == ExitCode.OK
    monkeypatch.setenv("CKPT_CA_FILE", str(authority.path))
    assert main(["--url", url, "list"]) == ExitCode.OK


def test_server_without_a_token_accepts_pages_of_its_own_origin(authority: Authority) -> None:
    context = rest_context(Configuration(rest_options(authority.issue("open"))))
    with served(create_app(FakeGateway(), token=None), context) as open_to_all:
        verify = ssl.create_default_context(cafile=str(authority.path))
        for origin, status in ((open_to_all, 200), (open_to_all.replace("https", "http"), 403)):
            answer = httpx.get(
                f"{open_to_all}/overview", headers={"Origin": origin}, verify=verify, trust_env=False, timeout=60
            )
            assert answer.status_code == status
