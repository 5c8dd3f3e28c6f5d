"""The control endpoint of the driver: authenticated peers are accepted; everything else is refused without harm."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from ckpt_runtime.jobmaster import control_endpoint
from ckpt_runtime.jobmaster.control_endpoint import AnyPeer, ControlEndpoint
from ckpt_runtime.network.agent_messages import (
    AgentHeartbeat,
    AgentMessage,
    Ping,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    Registration,
    WorkerExited,
)
from ckpt_runtime.network.connections import MAX_MESSAGE_BYTES, ControlConnection, encode, framed
from ckpt_runtime.network.control_messages import WorkerHeartbeat, WorkerMessage
from ckpt_runtime.network.framing import PREFACE_BYTES, PROOF_BYTES, AuthenticationError, Handshake

AGENT = RegisterAgent("0-0", "h", (), ProcessIdentity("", 1, 0))
WORKER = RegisterWorker("0-0", "w", ("h", 1), ProcessIdentity("", 1, 0), "")
TIMEOUT_S = 60


class RunningEndpoint:
    """An endpoint with its visitors; notes messages and ends. ``arrived`` is set for each."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[AnyPeer] = asyncio.Queue()
        self.messages: list[Any] = []
        self.lost: list[tuple[str, bool]] = []
        self.arrived = asyncio.Event()
        self.error: Exception | None = None
        self.endpoint = ControlEndpoint("127.0.0.1", "secret", self)
        self.port = 0
        self._visitors: list[asyncio.StreamWriter] = []

    def peer_registered(self, peer: AnyPeer) -> None:
        self.peers.put_nowait(peer)

    def peer_message(self, peer: AnyPeer, message: AgentMessage | WorkerMessage) -> None:
        self.messages.append(message)
        self.arrived.set()
        if self.error is not None:
            raise self.error

    def peer_lost(self, peer: AnyPeer, reason: str, *, explained: bool) -> None:
        self.lost.append((reason, explained))
        self.arrived.set()

    async def next(self) -> None:
        await asyncio.wait_for(self.arrived.wait(), TIMEOUT_S)
        self.arrived.clear()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self._visitors.append(writer)
        return reader, writer

    async def stop(self) -> None:
        for writer in self._visitors:
            writer.close()
        await self.endpoint.stop()

    async def enter(self, secret: str = "secret") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Through the handshake."""
        reader, writer = await self.connect()
        handshake = Handshake(secret, "client", ControlConnection.PURPOSE)
        writer.write(handshake.preface())
        preface = await reader.readexactly(PREFACE_BYTES)
        writer.write(handshake.proof(preface))
        handshake.verify(preface, await reader.readexactly(PROOF_BYTES))
        return reader, writer

    async def guest(
        self, registration: Registration = AGENT
    ) -> tuple[AnyPeer, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.enter()
        writer.write(framed(registration))
        return await asyncio.wait_for(self.peers.get(), TIMEOUT_S), reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other side hangs up."""
    try:
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    except ConnectionError:
        return b""


@asynccontextmanager
async def opened() -> AsyncIterator[RunningEndpoint]:
    running = RunningEndpoint()
    running.port = await running.endpoint.start()
    try:
        yield running
    finally:
        await running.stop()


async def test_the_end_of_a_connection_is_reported_once() -> None:
    async with opened() as running:
        peer, _, writer = await running.guest()
        writer.close()
        await running.next()
        assert len(running.lost) == 1
        assert peer.closed
        peer.send(Ping())


async def test_a_peer_closed_on_this_side_is_not_reported() -> None:
    async with opened() as running:
        peer, reader, _ = await running.guest()
        peer.close()
        peer.close()
        peer.send(Ping())
        assert await rest_of(reader) == b""
        await running.endpoint.stop()
        assert running.lost == []


async def test_a_wrong_secret_is_refused_by_both_sides() -> None:
    async with opened() as running:
        with pytest.raises((AuthenticationError, asyncio.IncompleteReadError)):
            await running.enter("guess")
        reader, writer = await running.connect()
        writer.write(Handshake("guess", "client", ControlConnection.PURPOSE).preface() + b"x" * PROOF_BYTES)
        answer = await rest_of(reader)
        assert len(answer) <= PREFACE_BYTES + PROOF_BYTES
        assert running.peers.empty()


@pytest.mark.parametrize(
    "content", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\0" * 500, b"CKPT1" + b"\xff" * 400]
)
async def test_garbage_is_refused_and_others_still_enter(content: bytes) -> None:
    async with opened() as running:
        reader, writer = await running.connect()
        writer.write(content)
        writer.write_eof()
        await rest_of(reader)
        peer, _, _ = await running.guest()
        assert peer.registration == AGENT


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (b"{not MessagePack", "are not a message"),
        (b"\xff\xff", "are not a message"),
        (b"", "are not a message"),
        (b"\x91" * 100_000, "are not a message"),
        (encode(WorkerHeartbeat(1)), "may not send message 'WorkerHeartbeat' here"),
        (encode(WorkerExited("w", 1)), "may not send message 'WorkerExited' here"),
        (encode(Ping()), "may not send message 'Ping' here"),
        (b"\x82\xa4type\xadRegisterAgent\xa4slot\x01", "RegisterAgent .* malformed: Expected `str`, got `int`"),
        (b"\x81\xa4type\xaeRegisterWorker", "RegisterWorker .* malformed: Object missing required field"),
    ],
)
async def test_peer_that_does_not_register_first_is_refused_by_name(
    body: bytes, reported: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened() as running:
        reader, writer = await running.enter()
        writer.write(struct.pack("<I", len(body)) + body)
        assert await rest_of(reader) == b""
        assert running.peers.empty()
        assert re.search(f"refused a control connection .*{reported}", caplog.text)


@pytest.mark.parametrize(
    ("registration", "body", "reported"),
    [
        (AGENT, encode(AGENT), "a slot agent may not send message 'RegisterAgent' here"),
        (AGENT, encode(WorkerHeartbeat(1)), "a slot agent may not send message 'WorkerHeartbeat' here"),
        (AGENT, b"\x83\xa4type\xacWorkerExited\xa6worker\xa1w\xa4code\xa1x", "WorkerExited of a slot agent is"),
        (AGENT, b"\xc1", "a slot agent sent bytes that are not a message"),
        (WORKER, encode(AGENT), "a worker may not send message 'RegisterAgent' here"),
        (WORKER, encode(Ping()), "a worker may not send message 'Ping' here"),
        (WORKER, b"\x81\xa4type\xa1\xff", "a worker sent bytes that are not a message"),
        (WORKER, b"\x82\xa4type\xafWorkerHeartbeat\xaadeployment\xc0", "WorkerHeartbeat of a worker is malformed"),
        (WORKER, b"", "a worker sent bytes that are not a message"),
    ],
)
async def test_a_message_that_breaks_the_protocol_is_the_reason_for_the_end_of_its_sender(
    registration: Registration, body: bytes, reported: str
) -> None:
    async with opened() as running:
        _, reader, writer = await running.guest(registration)
        _, _, neighbour = await running.guest()
        writer.write(struct.pack("<I", len(body)) + body + framed(AgentHeartbeat()))
        await running.next()
        ((reason, explained),) = running.lost
        assert reported in reason
        assert explained
        assert await rest_of(reader) == b""
        assert running.messages == []
        neighbour.write(framed(AgentHeartbeat()))
        await running.next()
        assert running.messages == [AgentHeartbeat()]


async def test_messages_of_a_closed_peer_are_dropped() -> None:
    async with opened() as running:
        peer, reader, writer = await running.guest()
        writer.write(framed(AgentHeartbeat()) * 3)
        peer.close()
        assert await rest_of(reader) == b""
        await running.endpoint.stop()
        assert (running.messages, running.lost) == ([], [])


async def test_an_announced_giant_ends_the_connection_without_being_read() -> None:
    async with opened() as running:
        _, reader, writer = await running.guest()
        writer.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        await running.next()
        assert f"{MAX_MESSAGE_BYTES + 1} bytes" in running.lost[0][0]
        assert running.lost[0][1]
        assert await rest_of(reader) == b""


async def test_a_message_that_breaks_its_handler_costs_only_its_own_connection() -> None:
    async with opened() as running:
        _, reader, writer = await running.guest()
        running.error = KeyError("type")
        writer.write(framed(AgentHeartbeat()))
        while not running.lost:
            await running.next()
        assert running.lost == [("handling its message failed: KeyError: 'type'", True)]
        assert await rest_of(reader) == b""
        running.error = None
        assert (await running.guest())[0].registration == AGENT


async def test_stopping_hangs_up_on_everybody() -> None:
    async with opened() as running:
        _, reader, _ = await running.guest()
        half_way, _ = await running.connect()
        await running.endpoint.stop()
        assert await rest_of(reader) == b""
        await rest_of(half_way)
        with pytest.raises(OSError):
            await running.connect()


async def test_oldest_of_too_many_unauthenticated_connections_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_endpoint, "MAX_HANDSHAKES", 3)

    async with opened() as running:
        peer, _, _ = await running.guest()
        readers = [(await running.connect())[0] for _ in range(5)]
        await running.guest()
        for reader in readers[:2]:
            await rest_of(reader)
        assert not readers[-1].at_eof()
        assert not peer.closed, "an authenticated connection stays open"


async def test_a_fixed_port_is_used_and_one_that_is_taken_is_named_with_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"jobmanager\.rpc\.port: {port} cannot be used at 127\.0\.0\.1"):
            await ControlEndpoint("127.0.0.1", "secret", RunningEndpoint(), port).start()
    endpoint = ControlEndpoint("127.0.0.1", "secret", RunningEndpoint(), port)
    try:
        assert await endpoint.start() == port
    finally:
        await endpoint.stop()
