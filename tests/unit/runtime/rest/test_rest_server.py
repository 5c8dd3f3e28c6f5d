"""Serving on a loop that already runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest

from ckpt_runtime.rest import exchange, server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.runtime.rest.conftest import JOB
from tests.unit.runtime.rest.fake_gateway import FakeGateway


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


async def test_a_connection_that_is_made_while_the_server_ends_is_ended_too() -> None:
    """It is no longer among those that are asked to close; its requests are not answered for ever."""

    running, _ = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
    stopping = asyncio.create_task(server.stop(running))
    while running.servers[0].is_serving():
        await asyncio.sleep(0)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def accepted() -> asyncio.Protocol:
        factory: Any = running.config.http_protocol_class
        made: asyncio.Protocol = factory(config=running.config, server_state=running.server_state, app_state={})
        return made

    await asyncio.get_running_loop().connect_accepted_socket(accepted, theirs)
    reader, writer = await asyncio.open_connection(sock=ours)
    await stopping
    assert running.server_state.connections == set()
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET /v1/overview HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()


async def test_a_taken_port_is_an_os_error() -> None:
    running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
    with pytest.raises(OSError, match="in use"):
        await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", port)
    await server.stop(running)


@pytest.mark.parametrize(
    "line",
    [
        b"GET /jobs/\xff\xfe HTTP/1.1",
        b"GET /jobs/%ff%fe HTTP/1.1",
        b"GET /%00 HTTP/1.1",
        b"nonsense",
        b"GET /jobs//x HTTP/1.1",
    ],
)
def test_bytes_that_are_no_clean_request_are_4xx(line: bytes) -> None:
    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        try:
            return await raw(port, line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        finally:
            await server.stop(running)

    status = asyncio.run(run()).split(b" ", 2)[1]
    assert status.startswith(b"4")


@pytest.mark.parametrize("start", [b"", b"GET /jobs HT", b"GET /overview HTTP/1.1\r\nHost: localhost\r\nX: "])
def test_a_head_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.05)

    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        try:
            return await raw(port, start)
        finally:
            await server.stop(running)

    assert asyncio.run(run()) == b""


def test_client_that_has_closed_its_sending_side_still_gets_its_answer() -> None:
    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /overview HTTP/1.1\r\nHost: localhost\r\n\r\n")
        writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
            await server.stop(running)

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")


def test_bytes_that_are_not_http_get_errors_in_the_common_shape() -> None:
    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        try:
            return await raw(port, b"\x16\x03\x01 nonsense\r\n\r\n")
        finally:
            await server.stop(running)

    head, body = asyncio.run(run()).split(b"\r\n\r\n")
    assert b"application/json" in head
    assert json.loads(body) == {"errors": ["Invalid HTTP request received."]}


@pytest.mark.parametrize(("method", "path"), [("POST", "/savepoint-disposal"), ("DELETE", "/cluster"), ("PATCH", "")])
@pytest.mark.parametrize("trickles", [False, True])
def test_a_body_that_does_not_come_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, trickles: bool
) -> None:
    """Whether it stalls or comes byte by byte; and nothing has happened."""
    monkeypatch.setattr(exchange, "BODY_TIMEOUT_S", 0.1)
    gateway = FakeGateway()
    gateway.add_job(JOB)
    head = f"{method} {path or f'/jobs/{JOB}'} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"

    async def trickle(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b" ")
            await asyncio.sleep(0.01)

    async def run() -> bytes:
        running, port = await server.start(create_app(gateway, token=None), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + b"Content-Length: 100000\r\n\r\n{")
        sending = asyncio.create_task(trickle(writer)) if trickles else None
        try:
            return await asyncio.wait_for(reader.readline(), 60)
        finally:
            if sending is not None:
                sending.cancel()
            writer.close()
            await server.stop(running)

    assert asyncio.run(run()).startswith(b"HTTP/1.1 408 ")
    assert not gateway.shut_down
    assert gateway.jobs[JOB].status is JobStatus.RUNNING
    assert not gateway.operations


REQUEST = b"GET /overview HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"x", b"x" * 9])
def test_an_answer_before_the_end_of_the_body_is_the_connections_last(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Whatever the client still sends, and however slowly."""
    monkeypatch.setattr(server, "LINGER_S", 0.05)

    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token="right"), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /jobs/x/savepoints HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            writer.write(sent)
            await asyncio.wait_for(reader.read(), 60)
            deadline = asyncio.get_running_loop().time() + 60
            while running.server_state.connections:
                assert asyncio.get_running_loop().time() < deadline, "the connection stays"
                await asyncio.sleep(0.005)
            return head
        finally:
            writer.close()
            await server.stop(running)

    assert asyncio.run(run()).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_sends_its_body_after_the_answer_reads_the_answer() -> None:
    async def run() -> bytes:
        running, port = await server.start(create_app(FakeGateway(), token="right"), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /jobs/x/savepoints HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        try:
            for _ in range(10):
                writer.write(b"x" * 100_000)
                await writer.drain()
            return await asyncio.wait_for(reader.read(), 60)
        finally:
            writer.close()
            await server.stop(running)

    assert b"A valid bearer token is required" in asyncio.run(run())


async def test_a_connection_too_many_gets_503_until_another_one_ends() -> None:
    running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0, max_connections=2)
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
    try:
        for reader, writer in held:
            writer.write(REQUEST)
            assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 200 ")
        for _ in range(3):
            head, body = (await raw(port, REQUEST)).split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1" in head.lower()
            assert json.loads(body) == {"errors": ["the server already has 2 connections; try again"]}
        held[0][1].close()
        answer = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        while not (await raw(port, answer)).startswith(b"HTTP/1.1 200 "):
            await asyncio.sleep(0.01)
    finally:
        held[1][1].close()
        await server.stop(running)


def test_connections_that_were_refused_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that says nothing is closed soon; further ones get no answer."""
    monkeypatch.setattr(server, "MAX_REFUSED", 1)
    monkeypatch.setattr(server, "REFUSED_TIMEOUT_S", 0.3)

    async def run() -> None:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0, max_connections=1)
        writers = []
        try:
            _, first = await asyncio.open_connection("127.0.0.1", port)
            refused, second = await asyncio.open_connection("127.0.0.1", port)
            dropped, third = await asyncio.open_connection("127.0.0.1", port)
            writers += [first, second, third]
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(dropped.read(), 60) == b""
            assert await asyncio.wait_for(refused.read(), 60) == b""
            assert len(running.server_state.connections) == 1
        finally:
            for writer in writers:
                writer.close()
            await server.stop(running)

    asyncio.run(run())
