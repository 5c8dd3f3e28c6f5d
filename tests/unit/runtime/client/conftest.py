"""A served REST application over an in-memory dispatcher that is new for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI

from ckpt_runtime.rest.app import create_app
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served


@pytest.fixture(scope="session")
def client_server() -> Iterator[tuple[str, FastAPI]]:
    app = create_app(FakeGateway(), token=None)
    with served(app) as url:
        yield url, app


@pytest.fixture
def gateway(client_server: tuple[str, FastAPI]) -> FakeGateway:
    fake = FakeGateway()
    client_server[1].state.dispatcher = fake
    return fake


@pytest.fixture
def url(client_server: tuple[str, FastAPI], gateway: FakeGateway) -> str:
    return client_server[0]
