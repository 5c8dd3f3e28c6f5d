"""Connections of other programs to a worker's data port: what they cost, and that peers still connect."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from ckpt_runtime.network import transport as data_transport
from ckpt_runtime.network.connections import authenticate
from ckpt_runtime.network.transport import Address, DataTransport

SECRET = "secret"
TIMEOUT_S = 60


@pytest.fixture
def transport() -> Iterator[DataTransport]:
    transport = DataTransport("127.0.0.1", SECRET)
    yield transport
    transport.close()


def gets_in(address: Address) -> None:
    """As a worker does; raises OSError when it is turned away."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as peer:
        authenticate(peer, SECRET, "client", "data")
        peer.settimeout(0.05)
        with pytest.raises(TimeoutError):
            peer.recv(1)


def is_closed(stranger: socket.socket) -> bool:
    """Reads up to the end, if that has come."""
    while select.select([stranger], [], [], 0)[0]:
        try:
            if not stranger.recv(4096):
                return True
        except OSError:
            return True
    return False


def test_unauthenticated_connections_use_no_thread_and_the_oldest_is_closed(transport: DataTransport) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(transport.address))
            for _ in range(data_transport.MAX_HANDSHAKES + 20)
        ]
        for stranger in strangers:
            stranger.send(b"CKPT1")
        gets_in(transport.address)
        assert threading.active_count() == before
        deadline = time.monotonic() + TIMEOUT_S
        while not all(is_closed(stranger) for stranger in strangers[:20]):
            assert time.monotonic() < deadline
        assert not is_closed(strangers[-1])


def test_a_handshake_has_its_time(transport: DataTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_transport, "HANDSHAKE_TIMEOUT_S", 0.05)
    with socket.create_connection(transport.address, timeout=TIMEOUT_S) as stranger:
        stranger.send(b"C")
        while stranger.recv(4096):
            pass


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"CKPT1" + bytes(32) + bytes(32)])
def test_connection_without_a_proof_is_closed(transport: DataTransport, content: bytes) -> None:
    # It may be closed before all of it is sent, or read.
    with suppress(OSError), socket.create_connection(transport.address, timeout=TIMEOUT_S) as stranger:
        stranger.send(content)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass
    gets_in(transport.address)


WITH_FEW_DESCRIPTORS = """
import os, resource, sys
from ckpt_runtime.network.transport import DataTransport
transport = DataTransport("127.0.0.1", "secret")
used = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))
print(transport.address[1], flush=True)
sys.stdin.read()
print(os.times().user + os.times().system, flush=True)
os._exit(0)
"""


def test_a_worker_without_descriptors_accepts_again_when_there_are_some_and_does_not_turn_in_circles() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WITH_FEW_DESCRIPTORS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = ("127.0.0.1", json.loads(process.stdout.readline()))
        with ExitStack() as opened:
            for _ in range(12):
                opened.enter_context(socket.create_connection(address))
            gets_in(address)
        used_s, _ = process.communicate(timeout=TIMEOUT_S)
    assert float(used_s) < 5
