"""Two transports over real loopback sockets: order, flow control, late registration, lost peers, wrong secrets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from ckpt_runtime.network.connections import receive_exactly
from ckpt_runtime.network.elements import EndOfPartition, Watermark
from ckpt_runtime.network.framing import channel_id
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.network.transport import DataTransport

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
    stranger = DataTransport("127.0.0.1", "another secret")
    with pytest.raises(ConnectionError):
        stranger.connect(receiver.address, channel_id(1, 0), 4, lambda: None)
    stranger.close()


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
