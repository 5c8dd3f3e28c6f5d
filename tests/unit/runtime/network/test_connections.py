"""The blocking end of a control connection, over real sockets: authentication, limits, broken peers, wrong secrets."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from ckpt_runtime.network import connections
from ckpt_runtime.network.agent_messages import FROM_AGENT, TO_AGENT, Ping, SpawnWorker, WorkerExited
from ckpt_runtime.network.connections import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    ControlConnection,
    MalformedMessageError,
    authenticate,
    framed,
    message_length,
    receive_exactly,
)
from ckpt_runtime.network.framing import AuthenticationError, Handshake, new_secret


@pytest.fixture
def pair() -> Iterator[tuple[ControlConnection, socket.socket]]:
    near, far = socket.socketpair()
    connection = ControlConnection(near)
    yield connection, far
    connection.close()
    far.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def in_background(action: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_messages_arrive_whole_however_they_are_cut(pair: tuple[ControlConnection, socket.socket]) -> None:
    connection, far = pair
    content = framed(Ping()) + framed(SpawnWorker("ä" * 1_000))

    def send_in_pieces() -> None:
        for start in range(0, len(content), 7):
            far.sendall(content[start : start + 7])

    thread = in_background(send_in_pieces)
    assert connection.receive(TO_AGENT) == Ping()
    assert connection.receive(TO_AGENT) == SpawnWorker("ä" * 1_000)
    thread.join()


def test_many_threads_may_send(pair: tuple[ControlConnection, socket.socket]) -> None:
    connection, far = pair
    receiver = ControlConnection(far.dup())
    threads = [
        in_background(lambda n=n: [connection.send(WorkerExited("x" * 5_000, n)) for _ in range(20)])  # type: ignore[misc]
        for n in range(4)
    ]
    received = [receiver.receive(FROM_AGENT) for _ in range(80)]
    for thread in threads:
        thread.join()
    receiver.close()
    assert sorted(message.code for message in received if isinstance(message, WorkerExited)) == sorted(
        list(range(4)) * 20
    )


@pytest.mark.parametrize("sent", [b"", b"\x05", framed(Ping())[:-1]])
def test_a_peer_that_hangs_up_is_a_connection_error(pair: tuple[ControlConnection, socket.socket], sent: bytes) -> None:
    connection, far = pair
    far.sendall(sent)
    far.close()
    with pytest.raises(ConnectionError, match="closed"):
        connection.receive(TO_AGENT)


def test_closing_wakes_a_receiver(pair: tuple[ControlConnection, socket.socket]) -> None:
    connection, _ = pair
    ended: list[BaseException] = []

    def receive() -> None:
        try:
            connection.receive(TO_AGENT)
        except OSError as error:
            ended.append(error)

    thread = in_background(receive)
    connection.close()
    thread.join(60)
    assert len(ended) == 1
    connection.close()


class TestLimits:
    def test_an_announced_giant_is_refused_before_it_is_read(
        self, pair: tuple[ControlConnection, socket.socket]
    ) -> None:
        connection, far = pair
        far.sendall(struct.pack("<I", 0xFFFFFFFF))
        with pytest.raises(MalformedMessageError, match="of 4294967295 bytes was announced"):
            connection.receive(TO_AGENT)

    def test_length_up_to_the_limit_is_allowed_and_more_is_neither_read_nor_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert message_length(struct.pack("<I", MAX_MESSAGE_BYTES)) == MAX_MESSAGE_BYTES
        with pytest.raises(MalformedMessageError):
            message_length(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        monkeypatch.setattr(connections, "MAX_MESSAGE_BYTES", len(framed(SpawnWorker("x" * 12))) - LENGTH_BYTES)
        assert framed(SpawnWorker("x" * 12))
        with pytest.raises(ValueError, match="bytes exceeds the limit of"):
            framed(SpawnWorker("x" * 13))


class TestDial:
    def serve(self, listener: socket.socket, secret: str, greeting: bytes | None = None) -> threading.Thread:
        def accept() -> None:
            accepted, _ = listener.accept()
            with accepted:
                if greeting is not None:
                    accepted.sendall(greeting)
                    return
                try:
                    authenticate(accepted, secret, "server", ControlConnection.PURPOSE)
                    accepted.sendall(framed(Ping()))
                    receive_exactly(accepted, 1)
                except ConnectionError:
                    return

        return in_background(accept)

    def test_both_sides_know_the_secret(self, listener: socket.socket) -> None:
        thread = self.serve(listener, "s")
        connection = ControlConnection.dial(listener.getsockname(), "s")
        assert connection.receive(TO_AGENT) == Ping()
        assert connection.local_host == "127.0.0.1"
        connection.close()
        thread.join()

    def test_a_server_that_does_not_know_it_is_refused(self, listener: socket.socket) -> None:
        thread = self.serve(listener, "other")
        with pytest.raises(ConnectionError):
            ControlConnection.dial(listener.getsockname(), "s")
        thread.join()

    def test_a_server_of_another_kind_is_refused(self, listener: socket.socket) -> None:
        thread = self.serve(listener, "", greeting=b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        with pytest.raises((AuthenticationError, ConnectionError)):
            ControlConnection.dial(listener.getsockname(), "s")
        thread.join()

    def test_a_missing_peer_is_an_os_error(self, listener: socket.socket) -> None:
        address = listener.getsockname()
        listener.close()
        with pytest.raises(OSError):
            ControlConnection.dial(address, "s")


def both(client_secret: str = "s", server_secret: str = "s") -> tuple[Handshake, Handshake]:
    return Handshake(client_secret, "client", "control"), Handshake(server_secret, "server", "control")


def test_two_sides_with_one_secret_accept_each_other() -> None:
    client, server = both()
    client.verify(server.preface(), server.proof(client.preface()))
    server.verify(client.preface(), client.proof(server.preface()))


def test_proofs_of_another_secret_side_connection_or_protocol_are_refused() -> None:
    client, server = both()
    other_client, other_server = both(client_secret="other")
    data_server = Handshake("s", "server", "data")
    recorded = client.proof(server.preface())
    for verifier, preface, proof in (
        (other_client, other_server.preface(), other_server.proof(other_client.preface())),
        (other_server, other_client.preface(), other_client.proof(other_server.preface())),
        (server, client.preface(), server.proof(client.preface())),  # reflected
        (Handshake("s", "server", "control"), client.preface(), recorded),  # replayed in a later connection
        (data_server, client.preface(), client.proof(data_server.preface())),
    ):
        with pytest.raises(AuthenticationError):
            verifier.verify(preface, proof)


@pytest.mark.parametrize("preface", [b"", b"HTTP/" + b"x" * 32, b"CKPT1" + b"x" * 31])
def test_a_foreign_preface_is_refused(preface: bytes) -> None:
    _, server = both()
    with pytest.raises(AuthenticationError, match="does not speak"):
        server.proof(preface)


def test_secrets_are_long_and_differ() -> None:
    assert len(new_secret()) == 64
    assert new_secret() != new_secret()
