"""Streams over a real server and a gateway in memory: keep-alive, slow readers, the end, who may listen."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from ckpt_runtime.jobmaster.event_log import EventLog, EventType
from ckpt_runtime.rest import event_stream, server
from ckpt_runtime.rest.app import create_app
from tests.unit.runtime.rest.fake_gateway import FakeGateway

TIMEOUT_S = 60.0
STATUS = EventType.JOB_STATUS
FAR_MORE = 400
"""Events of 100 kB: more than sockets and buffers hold on both sides."""


class Served:
    """The application on a loop that the test steps through: everything of the server happens there."""

    def __init__(self, capacity: int = 8, token: str | None = None) -> None:
        self.gateway = FakeGateway()
        self.log = self.gateway.events = EventLog("5e551017a2b3c4d5", capacity)
        self.app: FastAPI = create_app(self.gateway, token=token)
        self.loop = asyncio.new_event_loop()
        self.server, self.port = self.loop.run_until_complete(server.start(self.app, "127.0.0.1", 0))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, TIMEOUT_S))

    def publish(self, number: int, text: str = "") -> None:
        self.log.publish(STATUS, None, {"number": number, "text": text})

    def close(self) -> None:
        self.run(server.stop(self.server))
        self.loop.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def start(**options: Any) -> Served:
        started.append(Served(**options))
        return started[-1]

    yield start
    for found in started:
        found.close()


async def connect(served: Served, path: str = "/events", *headers: str) -> tuple[asyncio.StreamReader, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, limit=1 << 24)
    lines = [f"GET {path} HTTP/1.1", "Host: localhost", *headers]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())
    return reader, writer


def test_silence_is_filled_with_signs_of_life(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.05)
    served = serve()

    async def listen() -> None:
        reader, writer = await connect(served)
        await reader.readuntil(b"event: start\n")
        served.publish(1)
        await reader.readuntil(b"id: 5e551017a2b3c4d5-1\nevent: job-status\n")
        await reader.readuntil(b": keep-alive\nid: 5e551017a2b3c4d5-1\n\n")
        writer.close()

    served.run(listen())


def test_a_client_that_closes_is_forgotten_before_anything_is_written(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 10 * TIMEOUT_S)
    served = serve()

    async def listen() -> None:
        reader, writer = await connect(served)
        await reader.readuntil(b"event: start\n")
        assert served.log.listeners == 1
        writer.close()
        await writer.wait_closed()
        while served.log.listeners or served.server.server_state.connections:
            await asyncio.sleep(0.01)

    served.run(listen())


def test_slow_reader_gets_reset_and_is_disconnected_and_delays_no_other_stream(serve: Callable[..., Served]) -> None:
    served = serve(capacity=16)
    text = "x" * 100_000

    async def listen() -> bytes:
        reader, writer = await connect(served)
        await reader.readuntil(b"event: start\n")
        writer.transport.pause_reading()
        for number in range(1, FAR_MORE + 1):
            served.publish(number, text)
            await asyncio.sleep(0)  # the server writes as much as it can
        writer.transport.resume_reading()
        rest = await reader.readuntil(b"event: reset\n")
        rest += await reader.readuntil(b"\r\n0\r\n\r\n")  # the end of the answer
        writer.close()
        return rest

    rest = served.run(listen())
    assert rest.count(b"event: reset") == 1
    newest = rest.rpartition(b"id: ")[2].partition(b"\n")[0]
    assert newest == f"5e551017a2b3c4d5-{served.log.newest}".encode()
    assert served.log.listeners == 0


def test_a_reader_that_reads_nothing_at_all_is_cut_off(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "UNREAD_TIMEOUT_S", 0.1)
    served = serve(capacity=1_000)
    with socket.create_connection(("127.0.0.1", served.port)) as deaf:
        deaf.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")

        async def publish() -> None:
            while not served.log.listeners:
                await asyncio.sleep(0.01)
            for number in range(300):
                served.publish(number, "x" * 100_000)
            while served.log.listeners or served.server.server_state.connections:
                await asyncio.sleep(0.01)

        served.run(publish())


def test_a_stream_ends_with_the_server(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_GRACE_S", 10 * TIMEOUT_S)
    served = serve()

    async def listen() -> bytes:
        reader, writer = await connect(served)
        await reader.readuntil(b"event: start\n")
        await server.stop(served.server)
        rest = await reader.read()
        writer.close()
        return rest

    rest = served.run(listen())
    assert b'event: end\ndata: {"reason":"the session ends"}' in rest
    assert rest.endswith(b"\r\n0\r\n\r\n")


@pytest.mark.parametrize("path", ["/events", "/v1/events", f"/jobs/{'0' * 32}/events"])
def test_stream_without_the_token_is_refused(serve: Callable[..., Served], path: str) -> None:
    served = serve(token="open sesame")

    async def ask() -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.get(f"http://127.0.0.1:{served.port}{path}")).status_code

    assert served.run(ask()) == 401
    assert served.log.listeners == 0


def test_a_driver_that_does_not_lead_has_no_stream(serve: Callable[..., Served]) -> None:
    served = serve()
    served.gateway.ready = False

    async def ask() -> int:
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.get(f"http://127.0.0.1:{served.port}/events")).status_code

    assert served.run(ask()) == 503
