"""Clients that follow the leader: served applications, real documents, and other servers that listen for a token."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_runtime import leader_retrieval
from ckpt_runtime.client import transport
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import CkptClientError, Unauthorized
from ckpt_runtime.client.transport import Leader, LeaderSource, LeaderUnknown, LeaderUnproven
from ckpt_runtime.jobmaster.leadership import LeaseSignature
from ckpt_runtime.leader_retrieval import InvalidLeaderDirectory, LeaderDirectory
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.leader_store import LeaderInfo
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served

TOKEN = "the-token-of-this-session"


@contextmanager
def listening() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a server that is not the driver, and everything that was sent to it."""
    heard: list[bytes] = []
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                heard.append(connection.recv(65_536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}", heard
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(60)


@pytest.fixture(scope="module")
def two() -> Iterator[tuple[str, str]]:
    """Two drivers of one session."""
    app = create_app(FakeGateway(), token=TOKEN)
    with served(app) as first, served(app) as second:
        yield first, second


class Directory:
    """A cluster's directory, with a leader in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path / "default" / "leader.json"
        self.epoch = 0

    def lead(self, url: str, token: str = TOKEN, good_for_s: float = 300) -> LeaderInfo:
        store = HaStore(str(self.path)).leader.signed_by(LeaseSignature(token, "default", good_for_s / 2))
        info = store.claim(url, "app", "1", after=self.epoch)
        self.epoch = info.epoch
        return info

    def source(self, token: str | None = TOKEN) -> LeaderDirectory:
        return LeaderDirectory(str(self.path), token=token)


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path / "ha")


def ask(source: LeaderSource, blocking: bool, token: str | None = TOKEN, retry_timeout_s: float = 0) -> str:
    """One request; the address that answered it."""
    if blocking:
        with CkptClient(source, token=token, retry_timeout_s=retry_timeout_s) as client:
            client.cluster_overview()
            return client.url

    async def run() -> str:
        async with AsyncCkptClient(source, token=token, retry_timeout_s=retry_timeout_s) as client:
            await client.cluster_overview()
            return client.url

    return asyncio.run(run())


@pytest.fixture(params=[True, False], ids=["blocking", "async"])
def blocking(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_client_follows_to_the_next_leader(directory: Directory, two: tuple[str, str]) -> None:
    with listening() as (address, _):
        dead = address
    directory.lead(dead)
    source = directory.source()
    away: list[CkptClientError] = []

    def next_leader(error: CkptClientError) -> None:
        away.append(error)
        if len(away) == 2:
            directory.lead(two[1])

    with CkptClient(source, token=TOKEN, retry_timeout_s=20, on_away=next_leader) as client:
        assert client.cluster_overview().version
        assert client.url == two[1]
    assert all(dead in str(error) for error in away)


async def test_an_asynchronous_client_follows_too(directory: Directory, two: tuple[str, str]) -> None:
    async with AsyncCkptClient(directory.source(), token=TOKEN, retry_timeout_s=20) as client:
        waiting = asyncio.create_task(client.cluster_overview())
        await asyncio.sleep(0)
        directory.lead(two[0])
        await waiting
        assert client.url == two[0]


def forged(url: str) -> Callable[[Directory], None]:
    return lambda directory: directory.file.write_text(
        json.dumps({**json.loads(directory.file.read_text()), "rest": url})
    )


def foreign(url: str) -> Callable[[Directory], None]:
    def change(directory: Directory) -> None:
        directory.lead(url, token="guessed")

    return change


def unsigned(url: str) -> Callable[[Directory], None]:
    plain = {"rest": url, "app_id": "app", "attempt": "1", "epoch": 9}
    return lambda directory: directory.file.write_text(json.dumps(plain))


def of_another_cluster(url: str) -> Callable[[Directory], None]:
    signature = LeaseSignature(TOKEN, "trains", 10)
    document = signature.signed({"rest": url, "app_id": "app", "attempt": "1", "epoch": 9})
    return lambda directory: directory.file.write_text(json.dumps(document))


@pytest.mark.row("air.1")
@pytest.mark.parametrize("attack", [forged, foreign, unsigned, of_another_cluster])
def test_an_address_that_is_not_proven_gets_nothing(
    directory: Directory, attack: Callable[[str], Callable[[Directory], None]], blocking: bool
) -> None:
    with listening() as (address, heard):
        directory.lead("http://127.0.0.1:1")
        attack(address)(directory)
        with pytest.raises(LeaderUnproven, match=r"leader\.json does not prove"):
            ask(directory.source(), blocking, retry_timeout_s=3600)  # what is not proven now is not waited for
    assert heard == []


@pytest.mark.parametrize("damage", [b"", b'{"rest": "http', b"[]", b"{}" * 40_000])
def test_damage_gets_no_request_and_may_pass(directory: Directory, two: tuple[str, str], damage: bytes) -> None:
    directory.lead(two[0])
    sound = directory.file.read_bytes()
    directory.file.write_bytes(damage)
    with pytest.raises((LeaderUnknown, LeaderUnproven)):
        ask(directory.source(), blocking=True)
    directory.file.write_bytes(sound)
    assert ask(directory.source(), blocking=True) == two[0]


def test_missing_leader_is_reported(directory: Directory, blocking: bool) -> None:
    with pytest.raises(LeaderUnknown, match="no leader has published its address there yet"):
        ask(directory.source(), blocking)


def test_old_document_does_not_prove_an_address(directory: Directory, blocking: bool) -> None:
    """An old document that is put back later, when another process has the port."""
    with listening() as (address, heard):
        directory.lead(address, good_for_s=0.2)
        old = directory.file.read_bytes()
        until = json.loads(old)["good_until"]
        while time.time() <= until:
            time.sleep(0.02)
        directory.file.write_bytes(old)
        with pytest.raises(LeaderUnknown, match="no leader has renewed it"):
            ask(directory.source(), blocking)
    assert heard == []


def test_client_does_not_return_to_an_earlier_leader(directory: Directory, two: tuple[str, str]) -> None:
    with listening() as (address, heard):
        directory.lead(address)
        old = directory.file.read_bytes()
        directory.lead(two[0])
        source = directory.source()
        first = asyncio.run(source.find(60))
        directory.file.write_bytes(old)
        with pytest.raises(LeaderUnknown, match="of epoch 1, and one of epoch 2"):
            asyncio.run(source.find(60, other_than=first))
    assert heard == []


def test_an_address_is_believed_no_longer_than_its_document(
    directory: Directory, two: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client stays; the driver is gone, and another process listens on its port: no request failed in between."""
    directory.lead(two[0])
    with CkptClient(directory.source(), token=TOKEN, retry_timeout_s=0) as client:
        client.cluster_overview()
        later = SimpleNamespace(time=lambda: time.time() + 1000, monotonic=lambda: time.monotonic() + 1000)
        monkeypatch.setattr(transport, "time", later)
        monkeypatch.setattr(leader_retrieval, "time", later)
        with pytest.raises(LeaderUnknown, match="no leader has renewed it"):
            client.cluster_overview()


def test_a_refused_token_makes_it_look_again(directory: Directory, two: tuple[str, str]) -> None:
    """Another session has the port of a dead driver; its document is good for some seconds still."""
    with served(create_app(FakeGateway(), token="of another session")) as other:
        directory.lead(other)
        with CkptClient(directory.source(), token=TOKEN) as client:
            with pytest.raises(Unauthorized):
                client.cluster_overview()
            directory.lead(two[1])
            client.cluster_overview()
            assert client.url == two[1]


class Silent(LeaderSource):
    """A directory that does not answer."""

    def __init__(self) -> None:
        super().__init__("nfs://silent")
        self.answer = threading.Event()
        self.asked = 0

    def look_up(self) -> Leader:
        self.asked += 1
        self.answer.wait(60)
        raise LeaderUnknown(self.where, "it came back")


def test_a_directory_that_hangs_blocks_no_loop_and_costs_one_thread() -> None:
    silent = Silent()

    async def run() -> list[Any]:
        async with AsyncCkptClient(silent, timeout_s=0.3, retry_timeout_s=0) as client:
            waits = asyncio.gather(*(client.cluster_overview() for _ in range(20)), return_exceptions=True)
            return await waits  # a loop that is blocked gets "it came back"

    try:
        failures = asyncio.run(run())
        assert all(
            isinstance(failure, LeaderUnknown) and "no answer within 0.3 s" in str(failure) for failure in failures
        )
        with (
            CkptClient(silent, timeout_s=0.1, retry_timeout_s=0) as client,
            pytest.raises(LeaderUnknown, match="no answer"),
        ):
            client.cluster_overview()
        assert silent.asked == 1
    finally:
        silent.answer.set()


def test_places_that_cannot_be_one() -> None:
    for directory, cluster in (("relative", "default"), ("http://x/y", "default"), ("/ha", "../other")):
        with pytest.raises(InvalidLeaderDirectory):
            LeaderDirectory(directory, cluster, token=None)


def test_client_without_a_token_proves_no_address(directory: Directory) -> None:
    with served(create_app(FakeGateway(), token=None)) as open_to_all:
        HaStore(str(directory.path)).leader.claim(open_to_all, "app", "1", after=0)
        assert ask(directory.source(None), blocking=True, token=None) == open_to_all
