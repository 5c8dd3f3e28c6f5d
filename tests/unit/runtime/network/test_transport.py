"""Two transports over real loopback sockets: order, flow control, lost and unknown peers, errors of I/O threads."""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.network import transport as data_transport
from ckpt_runtime.network.connections import authenticate, receive_exactly
from ckpt_runtime.network.elements import EndOfPartition, SenderCredit, Watermark
from ckpt_runtime.network.framing import HEADER_BYTES, FrameKind, channel_id, encode_header
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.network.remote_subpartition import RemoteSubpartition
from ckpt_runtime.network.transport import Address, DataTransport

SECRET = "secret"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.001)


@pytest.fixture
def transports() -> Iterator[tuple[DataTransport, DataTransport]]:
    sender, receiver = DataTransport("127.0.0.1", SECRET), DataTransport("127.0.0.1", SECRET)
    yield sender, receiver
    sender.close()
    receiver.close()


def batch(start: int, rows: int = 100) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(range(start, start + rows), pa.int64()), "s": [str(i) for i in range(rows)]})


def new_channel(window: int = 4) -> tuple[InputGate, InputChannel]:
    gate = InputGate(lambda: None)
    return gate, gate.add_channel(0, window)


def take(gate: InputGate) -> object:
    wait_until(lambda: gate.has_arrivals, "an element")
    arrived = gate.poll()
    assert arrived is not None
    channel, element = arrived
    if isinstance(element, EncodedRows):
        channel.buffer_consumed()
        return pa.ipc.read_record_batch(element.message, element.schema)
    return element


def test_worker_listens_at_the_first_free_port_of_its_range_and_names_a_full_range() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"no port from {port} to {port} is free on 127\.0\.0\.1: set taskmanager\.data"
        ):
            DataTransport("127.0.0.1", SECRET, (port, port))
    transport = DataTransport("127.0.0.1", SECRET, (port, port))
    try:
        assert transport.address == ("127.0.0.1", port)
    finally:
        transport.close()


def test_producer_that_holds_rows_is_woken_when_its_receiver_has_processed_everything(
    transports: tuple[DataTransport, DataTransport],
) -> None:
    sender, receiver = transports
    gate, channel = new_channel(window=8)
    wire = channel_id(1, 0)
    receiver.register(wire, channel)
    woken = threading.Event()
    sending = sender.connect(receiver.address, wire, 8, woken.set)
    for start in range(3):
        sending.send_batch(batch(start))
    assert not sending.is_drained
    take(gate)
    take(gate)
    sending.held = True
    woken.clear()
    assert not sending.is_drained
    take(gate)
    assert woken.wait(60)
    assert sending.is_drained


def test_rows_and_control_elements_arrive_in_order(transports: tuple[DataTransport, DataTransport]) -> None:
    sender, receiver = transports
    gate, channel = new_channel(window=2)
    wire = channel_id(1, 0)
    receiver.register(wire, channel)
    out = sender.connect(receiver.address, wire, 4, lambda: None)
    for round_ in range(50):
        out.send_batch(batch(round_ * 100))
        out.send_control(Watermark(round_))
    out.send_control(EndOfPartition())
    for round_ in range(50):
        assert take(gate) == batch(round_ * 100)
        assert take(gate) == Watermark(round_)
    assert take(gate) == EndOfPartition()


def test_a_sender_has_no_room_until_the_receiver_gives_credit(transports: tuple[DataTransport, DataTransport]) -> None:
    sender, receiver = transports
    gate, channel = new_channel(window=2)
    wire = channel_id(1, 0)
    receiver.register(wire, channel)
    woken = threading.Event()
    out = sender.connect(receiver.address, wire, 3, woken.set)
    for sent in range(5):
        wait_until(lambda: out.has_room, "room for a buffer")
        out.send_batch(batch(sent * 100))
    wait_until(lambda: len(channel.queue) == 2 and not out.has_room, "a full window and a full queue")
    woken.clear()
    for index in range(5):
        assert take(gate) == batch(index * 100)
    assert woken.wait(60)
    assert out.has_room


def test_a_receiver_may_register_after_the_sender_connected(transports: tuple[DataTransport, DataTransport]) -> None:
    sender, receiver = transports
    wire = channel_id(7, 3)
    out = sender.connect(receiver.address, wire, 4, lambda: None)
    out.send_batch(batch(0))
    gate, channel = new_channel()
    receiver.register(wire, channel)
    assert take(gate) == batch(0)


def test_channels_of_a_released_deployment_are_deaf(transports: tuple[DataTransport, DataTransport]) -> None:
    sender, receiver = transports
    old_gate, old = new_channel()
    receiver.register(channel_id(1, 0), old)
    stale = sender.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
    stale.send_batch(batch(0))
    assert take(old_gate) == batch(0)
    receiver.release(1)
    stale.send_batch(batch(100))
    gate, channel = new_channel()
    receiver.register(channel_id(2, 0), channel)
    sender.connect(receiver.address, channel_id(2, 0), 4, lambda: None).send_batch(batch(200))
    assert take(gate) == batch(200)
    assert not old_gate.has_arrivals


def test_a_lost_peer_fails_both_ends() -> None:
    sender, receiver = DataTransport("127.0.0.1", SECRET), DataTransport("127.0.0.1", SECRET)
    gate, channel = new_channel()
    receiver.register(channel_id(1, 0), channel)
    out = sender.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
    out.send_batch(batch(0))
    take(gate)
    sender.close()
    assert isinstance(take(gate), ConnectionError)
    receiver.close()
    other = DataTransport("127.0.0.1", SECRET)
    third = DataTransport("127.0.0.1", SECRET)
    out = other.connect(third.address, channel_id(1, 0), 4, lambda: None)
    third.close()
    wait_until(lambda: out.error is not None, "the sender to notice")
    other.close()


def test_a_peer_without_the_secret_is_refused(transports: tuple[DataTransport, DataTransport]) -> None:
    _, receiver = transports
    peer = DataTransport("127.0.0.1", "another secret")
    with pytest.raises(ConnectionError):
        peer.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
    peer.close()


def test_garbage_is_refused_before_any_frame_is_read(transports: tuple[DataTransport, DataTransport]) -> None:
    _, receiver = transports
    with socket.create_connection(receiver.address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100)
        connection.settimeout(60)
        with pytest.raises(ConnectionError):
            receive_exactly(connection, 1 << 20)


def test_a_receivers_request_for_smaller_buffers_reaches_the_sender(
    transports: tuple[DataTransport, DataTransport],
) -> None:
    """Also one from before the channel was bound; data on its way is not disturbed."""
    sender, receiver = transports
    gate, channel = new_channel(window=2)
    wire = channel_id(1, 0)
    channel.buffer_size.announce(4_096)
    receiver.register(wire, channel)
    out = sender.connect(receiver.address, wire, 4, lambda: None)
    heard: list[int] = []
    out.buffer_size.listen(heard.append)
    wait_until(lambda: heard == [4_096], "the size")
    for round_ in range(20):
        out.send_batch(batch(round_ * 100))
        channel.buffer_size.announce(1_000 + round_)
        assert take(gate) == batch(round_ * 100)
    wait_until(lambda: len(heard) == 21, "all sizes")
    assert heard == [4_096, *range(1_000, 1_020)]


def test_a_request_for_a_released_channel_is_dropped(transports: tuple[DataTransport, DataTransport]) -> None:
    sender, receiver = transports
    channels = [new_channel()[1], new_channel()[1]]
    outs = []
    for deployment, channel in enumerate(channels, start=1):
        wire = channel_id(deployment, 0)
        receiver.register(wire, channel)
        outs.append(sender.connect(receiver.address, wire, 4, lambda: None))
        outs[-1].send_control(Watermark(deployment))
    wait_until(lambda: all(channel.queue for channel in channels), "both channels to be open")
    sender.release(1)
    for channel in channels:
        channel.buffer_size.announce(2_048)
    wait_until(lambda: outs[1].buffer_size.latest == 2_048, "the size of the channel that lives")
    assert outs[0].buffer_size.latest is None


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


def is_closed(peer: socket.socket) -> bool:
    """Reads up to the end, if that has come."""
    while select.select([peer], [], [], 0)[0]:
        try:
            if not peer.recv(4096):
                return True
        except OSError:
            return True
    return False


def test_unauthenticated_connections_use_no_thread_and_the_oldest_is_closed(transport: DataTransport) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        peers = [
            opened.enter_context(socket.create_connection(transport.address))
            for _ in range(data_transport.MAX_HANDSHAKES + 20)
        ]
        for peer in peers:
            peer.send(b"CKPT1")
        gets_in(transport.address)
        assert threading.active_count() == before
        deadline = time.monotonic() + TIMEOUT_S
        while not all(is_closed(peer) for peer in peers[:20]):
            assert time.monotonic() < deadline
        assert not is_closed(peers[-1])


def test_a_handshake_has_its_time(transport: DataTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_transport, "HANDSHAKE_TIMEOUT_S", 0.05)
    with socket.create_connection(transport.address, timeout=TIMEOUT_S) as peer:
        peer.send(b"C")
        while peer.recv(4096):
            pass


@pytest.mark.parametrize("content", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, b"CKPT1" + bytes(32) + bytes(32)])
def test_connection_without_a_proof_is_closed(transport: DataTransport, content: bytes) -> None:
    # It may be closed before all of it is sent, or read.
    with suppress(OSError), socket.create_connection(transport.address, timeout=TIMEOUT_S) as peer:
        peer.send(content)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
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
