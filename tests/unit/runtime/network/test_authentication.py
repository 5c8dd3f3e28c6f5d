from __future__ import annotations

import pytest

from ckpt_runtime.network.framing import AuthenticationError, Handshake, new_secret


def both(client_secret: str = "s", server_secret: str = "s") -> tuple[Handshake, Handshake]:
    return Handshake(client_secret, "client", "control"), Handshake(server_secret, "server", "control")


def test_two_sides_with_one_secret_accept_each_other() -> None:
    client, server = both()
    client.verify(server.preface(), server.proof(client.preface()))
    server.verify(client.preface(), client.proof(server.preface()))


def test_another_secret_is_refused_by_both() -> None:
    client, server = both(client_secret="other")
    with pytest.raises(AuthenticationError):
        client.verify(server.preface(), server.proof(client.preface()))
    with pytest.raises(AuthenticationError):
        server.verify(client.preface(), client.proof(server.preface()))


def test_a_proof_cannot_be_reflected() -> None:
    client, server = both()
    with pytest.raises(AuthenticationError):
        server.verify(client.preface(), server.proof(client.preface()))


def test_a_proof_cannot_be_replayed_in_another_connection() -> None:
    client, server = both()
    recorded = client.proof(server.preface())
    later = Handshake("s", "server", "control")
    with pytest.raises(AuthenticationError):
        later.verify(client.preface(), recorded)


def test_a_proof_is_for_one_protocol() -> None:
    client, _ = both()
    data_server = Handshake("s", "server", "data")
    with pytest.raises(AuthenticationError):
        data_server.verify(client.preface(), client.proof(data_server.preface()))


@pytest.mark.parametrize("preface", [b"", b"HTTP/" + b"x" * 32, b"CKPT1" + b"x" * 31])
def test_a_foreign_preface_is_refused(preface: bytes) -> None:
    _, server = both()
    with pytest.raises(AuthenticationError, match="does not speak"):
        server.proof(preface)


def test_secrets_are_long_and_differ() -> None:
    assert len(new_secret()) == 64
    assert new_secret() != new_secret()
