"""Authentication and the loopback rule."""

from __future__ import annotations

import pytest

from ckpt_runtime.configuration.cluster_options import RestAuthentication
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.server import BindingRefused, check_binding
from tests.unit.runtime.rest.conftest import send_to, sender
from tests.unit.runtime.rest.fake_gateway import FakeGateway


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_needs_no_token_when_that_is_asked_for(host: str) -> None:
    check_binding(host, None, RestAuthentication.NONE)
    check_binding(host, "secret", RestAuthentication.NONE)
    with pytest.raises(BindingRefused, match=r"rest\.authentication"):
        check_binding(host, None)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "example.com", "localhost.evil.com", "127.0.0.1.nip.io"]
)
@pytest.mark.parametrize("token", [None, ""])
def test_other_addresses_do(host: str, token: str | None) -> None:
    for authentication in RestAuthentication:
        with pytest.raises(BindingRefused, match="token"):
            check_binding(host, token, authentication)
    check_binding(host, "secret")


@pytest.mark.parametrize(
    "header",
    [None, "", "secret", "Bearer", "Bearer ", "Bearer wrong", "Bearer secret2", "Basic secret", "Bearer sécret"],
)
def test_requests_without_the_token_are_401(header: str | None) -> None:
    send = sender(create_app(FakeGateway(), token="secret"))
    headers = {} if header is None else {b"authorization": header.encode()}
    for path in ("/overview", "/nosuch", "/openapi.json", "/jobs/x"):
        response = send("GET", path, headers=headers)
        assert response.status_code == 401
        assert response.json() == {"errors": ["A valid bearer token is required."]}
        assert response.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_requests_with_a_token_pass_with_any_host_name(scheme: str) -> None:
    send = sender(create_app(FakeGateway(), token="secret"))
    headers = {"authorization": f"{scheme} secret", "host": "driver-7.cluster:8081"}
    assert send("GET", "/v1/overview", headers=headers).status_code == 200


def test_an_empty_token_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="token"):
        create_app(FakeGateway(), token=" ")


@pytest.mark.parametrize("host", ["localhost:8081", "127.0.0.1:1", "[::1]:8081", "localhost"])
def test_server_without_a_token_accepts_loopback_names(host: str) -> None:
    send = send_to(FakeGateway())
    assert send("GET", "/overview", headers={"host": host}).status_code == 200
    assert send("GET", "/overview", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"}, {"host": "evil.example:8081"}, {"host": "[::1"}, {"host": ""}, {"host": "a@b"},
        {"host": "localhost:1", "origin": "http://evil.example"}, {"host": "localhost:1", "origin": "null"},
        {"host": "localhost:1", "origin": "http://localhost:2"},
    ],
)  # fmt: skip
def test_server_without_a_token_refuses_calls_of_other_pages(headers: dict[str, str]) -> None:
    send = send_to(FakeGateway())
    response = send("DELETE", "/cluster", headers=headers)
    assert response.status_code == 403
    assert list(response.json()) == ["errors"]
