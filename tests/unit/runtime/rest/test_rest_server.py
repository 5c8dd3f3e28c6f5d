"""Serving on a loop that already runs."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from ckpt_runtime.rest import server
from ckpt_runtime.rest.app import create_app
from tests.unit.runtime.rest.fake_gateway import FakeGateway


async def raw(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await writer.drain()
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return answer


def test_start_on_a_free_port_serve_and_stop() -> None:
    async def run() -> None:
        before = signal.getsignal(signal.SIGINT)
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert (await client.get("/v1/overview")).status_code == 200
        assert signal.getsignal(signal.SIGINT) == before
        await server.stop(running)
        await server.stop(running)
        with pytest.raises(OSError, match=r"(?i)connect"):
            await raw(port, b"GET / HTTP/1.1\r\n\r\n")

    asyncio.run(run())


def test_a_taken_port_is_an_os_error() -> None:
    async def run() -> None:
        running, port = await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", 0)
        with pytest.raises(OSError, match="in use"):
            await server.start(create_app(FakeGateway(), token=None), "127.0.0.1", port)
        await server.stop(running)

    asyncio.run(run())


@pytest.mark.parametrize(
    "line",
    [
        b"GET /jobs/\xff\xfe HTTP/1.1",
        b"GET /jobs/%ff%fe HTTP/1.1",
        b"GET /%00 HTTP/1.1",
        b"nonsense",
        b"GET //jobs HTTP/1.1",
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
