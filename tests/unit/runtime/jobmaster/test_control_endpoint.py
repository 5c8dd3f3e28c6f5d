"""The driver's door: who knows the secret is let in, everything else is turned away without harm."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest

from ckpt_runtime.jobmaster import control_endpoint
from ckpt_runtime.jobmaster.control_endpoint import ControlEndpoint, Message, Peer
from ckpt_runtime.network.authentication import PREFACE_BYTES, PROOF_BYTES, AuthenticationError, Handshake
from ckpt_runtime.network.connections import MAX_MESSAGE_BYTES, ControlConnection, encode_message

HELLO = {"type": "hello", "role": "agent", "slot": "0-0"}
TIMEOUT_S = 10


class Listener:
    """Notes messages and the end; ``arrived`` is set for each."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.lost: list[str] = []
        self.arrived = asyncio.Event()
        self.error: Exception | None = None

    def peer_message(self, peer: Peer, message: Message) -> None:
        self.messages.append(message)
        self.arrived.set()
        if self.error is not None:
            raise self.error

    def peer_lost(self, peer: Peer, reason: str) -> None:
        self.lost.append(reason)
        self.arrived.set()

    async def next(self) -> None:
        await asyncio.wait_for(self.arrived.wait(), TIMEOUT_S)
        self.arrived.clear()


class Door:
    """An endpoint with its visitors."""

    def __init__(self) -> None:
        self.peers: asyncio.Queue[Peer] = asyncio.Queue()
        self.listener = Listener()
        self.endpoint = ControlEndpoint("127.0.0.1", "secret", self.welcome)
        self.port = 0
        self._visitors: list[asyncio.StreamWriter] = []

    def welcome(self, peer: Peer) -> None:
        peer.listener = self.listener
        self.peers.put_nowait(peer)

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

    async def guest(self) -> tuple[Peer, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.enter()
        writer.write(encode_message(HELLO))
        return await asyncio.wait_for(self.peers.get(), TIMEOUT_S), reader, writer


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the other side hangs up."""
    try:
        return await asyncio.wait_for(reader.read(), TIMEOUT_S)
    except ConnectionError:
        return b""


def run(test: Callable[[Door], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        door = Door()
        door.port = await door.endpoint.start()
        try:
            await test(door)
        finally:
            await door.stop()

    asyncio.run(inside())


def test_a_guest_is_welcomed_with_its_hello_and_talks_both_ways() -> None:
    async def test(door: Door) -> None:
        peer, reader, writer = await door.guest()
        assert (peer.hello, peer.role) == (HELLO, "agent")
        before = peer.last_heard
        writer.write(encode_message({"type": "heartbeat", "n": 1}) + encode_message({"type": "x"}))
        while len(door.listener.messages) < 2:
            await door.listener.next()
        assert door.listener.messages == [{"type": "heartbeat", "n": 1}, {"type": "x"}]
        assert peer.last_heard >= before
        peer.send({"type": "ping"})
        assert await reader.readexactly(4 + len(orjson.dumps({"type": "ping"}))) == encode_message({"type": "ping"})

    run(test)


def test_the_end_of_a_connection_is_reported_once() -> None:
    async def test(door: Door) -> None:
        peer, _, writer = await door.guest()
        writer.close()
        await door.listener.next()
        assert len(door.listener.lost) == 1
        assert peer.closed
        peer.send({"type": "ping"})

    run(test)


def test_a_peer_closed_on_this_side_is_not_reported() -> None:
    async def test(door: Door) -> None:
        peer, reader, _ = await door.guest()
        peer.close()
        peer.close()
        peer.send({"type": "ping"})
        assert await rest_of(reader) == b""
        await door.endpoint.stop()
        assert door.listener.lost == []

    run(test)


def test_a_wrong_secret_is_refused_by_both_sides() -> None:
    async def test(door: Door) -> None:
        with pytest.raises((AuthenticationError, asyncio.IncompleteReadError)):
            await door.enter("guess")
        reader, writer = await door.connect()
        writer.write(Handshake("guess", "client", ControlConnection.PURPOSE).preface() + b"x" * PROOF_BYTES)
        answer = await rest_of(reader)
        assert len(answer) <= PREFACE_BYTES + PROOF_BYTES
        assert door.peers.empty()

    run(test)


@pytest.mark.parametrize(
    "content", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 4, b"\0" * 500, b"CKPT1" + b"\xff" * 400]
)
def test_garbage_is_refused_and_others_still_enter(content: bytes) -> None:
    async def test(door: Door) -> None:
        reader, writer = await door.connect()
        writer.write(content)
        writer.write_eof()
        await rest_of(reader)
        peer, _, _ = await door.guest()
        assert peer.hello == HELLO

    run(test)


@pytest.mark.parametrize("hello", [b"{not json", b"\xff\xff", b""])
def test_a_hello_that_is_no_json_is_refused(hello: bytes) -> None:
    async def test(door: Door) -> None:
        reader, writer = await door.enter()
        writer.write(struct.pack("<I", len(hello)) + hello)
        assert await rest_of(reader) == b""
        assert door.peers.empty()

    run(test)


def test_an_announced_giant_ends_the_connection_without_being_read() -> None:
    async def test(door: Door) -> None:
        _, reader, writer = await door.guest()
        writer.write(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        await door.listener.next()
        assert f"{MAX_MESSAGE_BYTES + 1} bytes" in door.listener.lost[0]
        assert await rest_of(reader) == b""

    run(test)


@pytest.mark.parametrize("broken", ["message", "handler"])
def test_a_message_that_breaks_costs_only_its_own_connection(broken: str) -> None:
    async def test(door: Door) -> None:
        _, reader, writer = await door.guest()
        if broken == "handler":
            door.listener.error = KeyError("type")
            writer.write(encode_message({}))
        else:
            writer.write(struct.pack("<I", 3) + b"{{{")
        while not door.listener.lost:
            await door.listener.next()
        assert await rest_of(reader) == b""
        door.listener.error = None
        assert (await door.guest())[0].hello == HELLO

    run(test)


def test_stopping_hangs_up_on_everybody() -> None:
    async def test(door: Door) -> None:
        _, reader, _ = await door.guest()
        half_way, _ = await door.connect()
        await door.endpoint.stop()
        assert await rest_of(reader) == b""
        await rest_of(half_way)
        with pytest.raises(OSError):
            await door.connect()

    run(test)


def test_of_too_many_strangers_the_oldest_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_endpoint, "MAX_HANDSHAKES", 3)

    async def test(door: Door) -> None:
        peer, _, _ = await door.guest()
        readers = [(await door.connect())[0] for _ in range(5)]
        await door.guest()
        for reader in readers[:2]:
            await rest_of(reader)
        assert not readers[-1].at_eof()
        assert not peer.closed, "a peer that has proved itself is no stranger"

    run(test)
