"""What must not stop a worker's I/O thread or leave a producer asleep."""

from __future__ import annotations

import socket
import threading
from collections import deque
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.network.connections import authenticate, receive_exactly
from ckpt_runtime.network.elements import EndOfPartition, SenderCredit
from ckpt_runtime.network.framing import HEADER_BYTES, FrameKind, channel_id, encode_header
from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.network.transport import DataTransport

SECRET = "secret"
WIRE = channel_id(1, 0)


class Unconnected:
    """A connection that takes notice of nothing."""

    error = None

    def ready(self, subpartition: RemoteSubpartition) -> None:
        return


class Interrupted(SenderCredit):
    """Lets the producer run in the middle of the I/O thread's work."""

    __slots__ = ("producer",)

    def spend(self) -> None:
        super().spend()
        producer, self.producer = self.producer, lambda: None
        producer()


def test_a_producer_that_fills_the_channel_while_it_is_drained_is_woken() -> None:
    batch = pa.record_batch({"n": [1]})
    woken: list[bool] = []
    subpartition = RemoteSubpartition(WIRE, 2, lambda: woken.append(True))
    connection: Any = Unconnected()
    subpartition.attach(connection)
    credit = subpartition._credit = Interrupted()
    asleep: list[bool] = []

    def produce() -> None:
        subpartition.send_batch(batch)
        asleep.append(not subpartition.has_room)

    credit.producer = produce
    subpartition.send_batch(batch)
    subpartition.grant(1)
    subpartition.drain_into(deque())
    assert asleep == [True]
    assert subpartition.has_room
    assert woken


def test_a_channel_that_always_had_room_causes_no_wakeup() -> None:
    woken: list[bool] = []
    subpartition = RemoteSubpartition(WIRE, 3, lambda: woken.append(True))
    connection: Any = Unconnected()
    subpartition.attach(connection)
    subpartition.send_batch(pa.record_batch({"n": [1]}))
    subpartition.grant(3)
    subpartition.drain_into(deque())
    assert woken == []


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.CONTROL, b"no element"),
        (FrameKind.CONTROL, b'{"t":"unknown"}'),
        (FrameKind.SCHEMA, b"no schema"),
        (FrameKind.DATA, b"rows without a schema"),
        (None, b"\xff" * HEADER_BYTES),
    ],
)
def test_a_peer_that_sends_nonsense_loses_its_connection_and_others_keep_theirs(
    kind: FrameKind | None, body: bytes
) -> None:
    arrived = threading.Event()
    transport = DataTransport("127.0.0.1", SECRET)
    gate = InputGate(arrived.set)
    channel = gate.add_channel(0, 4)
    transport.register(WIRE, channel)
    try:
        with socket.create_connection(transport.address) as peer:
            authenticate(peer, SECRET, "client", "data")
            peer.sendall(encode_header(WIRE, 0, FrameKind.OPEN))
            receive_exactly(peer, HEADER_BYTES + 4)
            peer.sendall(body if kind is None else encode_header(WIRE, len(body), kind) + body)
            assert arrived.wait(60)
            element = gate.poll()
            assert element is not None
            assert isinstance(element[1], ConnectionError)
            assert peer.recv(1) == b""
        assert_still_works(transport)
    finally:
        transport.close()


def assert_still_works(receiver: DataTransport) -> None:
    arrived = threading.Event()
    gate = InputGate(arrived.set)
    wire = channel_id(2, 0)
    receiver.register(wire, gate.add_channel(0, 4))
    sender = DataTransport("127.0.0.1", SECRET)
    try:
        sender.connect(receiver.address, wire, 4, lambda: None).send_control(EndOfPartition())
        assert arrived.wait(60)
        element = gate.poll()
        assert element is not None
        assert element[1] == EndOfPartition()
    finally:
        sender.close()
