"""The REST application on a real server and a free loopback port, in a thread of its own.

Folders whose tests share one import the fixtures in their ``conftest.py``.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fastapi import FastAPI

from ckpt_runtime.rest import server
from ckpt_runtime.rest.app import create_app
from tests.unit.runtime.rest.fake_gateway import FakeGateway


@contextmanager
def served(app: FastAPI, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL, while it is served."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="served")
    thread.start()
    try:
        running, port = asyncio.run_coroutine_threadsafe(server.start(app, "127.0.0.1", 0, tls=tls), loop).result(60)
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        finally:
            asyncio.run_coroutine_threadsafe(server.stop(running), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


@pytest.fixture(scope="session")
def served_app() -> Iterator[tuple[str, FastAPI]]:
    app = create_app(FakeGateway(), token=None)
    with served(app) as url:
        yield url, app


@pytest.fixture
def gateway(served_app: tuple[str, FastAPI]) -> FakeGateway:
    """An in-memory dispatcher that is new for each test."""
    fake = FakeGateway()
    served_app[1].state.dispatcher = fake
    return fake


@pytest.fixture
def url(served_app: tuple[str, FastAPI], gateway: FakeGateway) -> str:
    return served_app[0]
