"""A REST application over an in-memory dispatcher, called in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.rest.app import create_app
from tests.unit.runtime.rest.fake_gateway import FakeGateway

JOB = "fa461ac280c9aa36bde4a060aa97618c"
Send = Callable[..., httpx.Response]


@pytest.fixture
def gateway() -> FakeGateway:
    fake = FakeGateway()
    fake.add_job(JOB)
    return fake


@pytest.fixture
def send(gateway: FakeGateway) -> Send:
    """``send(method, path, **httpx arguments)`` against the application, without a network."""
    return send_to(gateway)


@cache
def open_app() -> FastAPI:
    app = create_app(cast(Dispatcher, FakeGateway()), token=None, max_upload_bytes=100_000)
    app.state.event_streams.end()  # each stream ends with what there is
    return app


def send_to(gateway: FakeGateway) -> Send:
    """Over the one application without a token; building it takes longer than most tests."""
    open_app().state.dispatcher = gateway
    return sender(open_app())


def sender(app: FastAPI) -> Send:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)

    def request(method: str, path: str, **arguments: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **arguments)

        return asyncio.run(run())

    return request
