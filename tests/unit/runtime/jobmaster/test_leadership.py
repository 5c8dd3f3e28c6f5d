"""Who leads, and when a leader stops to believe it does: real files, in a loop whose time jumps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.jobmaster import leadership
from ckpt_runtime.jobmaster.leadership import ClusterEnded, Leadership, LeaseSignature
from ckpt_runtime.storage.errors import NotLeaderError, StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.leader_store import LeaderInfo, LeaderStore, PublishedLeader, opened
from tests.support.virtual_time import InlineExecutor, JumpingLoop, LoopTime

LEASE_S = 10.0
TIMEOUT_S = 600


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"loop_factory": JumpingLoop}


@pytest.fixture(autouse=True)
def time_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "time", LoopTime)


def stand_still(seconds: float) -> None:
    """The whole process does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, JumpingLoop)
    loop.stand_still(seconds)


class Store(LeaderStore):
    """Can be made to fail."""

    away = False
    takes_s = 0.0

    def renew(self, info: LeaderInfo, sequence: int) -> None:
        if self.away:
            raise StorageError("away", "x")
        stand_still(self.takes_s)
        super().renew(info, sequence)


class Candidate:
    """A driver that may lead."""

    def __init__(self, directory: Path, name: str, lease_s: float = LEASE_S) -> None:
        self.name = name
        self.store = Store(resolve(directory / "ha"))
        self.leadership = Leadership(self.store, lease_s)
        self.leadership._pool = InlineExecutor()  # type: ignore[assignment]
        self.lost = asyncio.Event()

    async def acquire(self) -> None:
        await self.leadership.acquire(f"http://{self.name}", self.name, self.lost.set)

    async def die(self) -> None:
        """As by SIGKILL: no release."""
        assert self.leadership._renewal is not None
        self.leadership._renewal.cancel()


@asynccontextmanager
async def candidates_on(directory: Path, lease_s: float = LEASE_S) -> AsyncIterator[Callable[[str], Candidate]]:
    candidates: list[Candidate] = []

    def candidate(name: str) -> Candidate:
        candidates.append(Candidate(directory, name, lease_s))
        return candidates[-1]

    async with asyncio.timeout(TIMEOUT_S):
        yield candidate
    for known in candidates:
        await known.leadership.release()


async def test_first_driver_leads_at_once_and_clients_find_it(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first = candidate("a")
        with pytest.raises(NotLeaderError):
            first.leadership.fence()
        await first.acquire()
        first.leadership.fence()
        assert first.leadership.epoch == 1
        present = first.store.current()
        assert present is not None
        assert present.rest == "http://a"


async def test_a_second_waits_as_long_as_the_first_renews(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first, second = candidate("a"), candidate("b")
        await first.acquire()
        waiting = asyncio.create_task(second.acquire())
        await asyncio.sleep(5 * LEASE_S)
        assert not waiting.done()
        first.leadership.fence()
        assert not first.lost.is_set()
        waiting.cancel()


async def test_a_waiting_driver_ends_when_the_whole_cluster_is_shut_down(tmp_path: Path) -> None:
    """A driver that comes later leads as before."""

    async with candidates_on(tmp_path) as candidate:
        first, second, third = candidate("a"), candidate("b"), candidate("c")
        await first.acquire()
        reported = asyncio.Event()
        waiting = asyncio.create_task(
            second.leadership.acquire("http://b", "b", second.lost.set, lambda _: reported.set())
        )
        await reported.wait()
        await first.leadership.release(ended=True)
        with pytest.raises(ClusterEnded):
            await waiting
        await third.acquire()
        assert third.leadership.epoch == 2


async def test_a_waiting_driver_shows_the_leader_and_its_address(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first, second = candidate("a"), candidate("b")
        await first.acquire()
        reported: asyncio.Queue[LeaderInfo] = asyncio.Queue()
        waiting = asyncio.create_task(second.leadership.acquire("http://b", "b", second.lost.set, reported.put_nowait))
        leader = await reported.get()
        assert (leader.rest, leader.app_id) == ("http://a", "a")
        await first.leadership.release()
        await waiting
        assert reported.empty(), "it is reported once"


@pytest.mark.row("571.5")
async def test_a_dead_leader_is_followed_when_its_lease_has_run_out(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first, second = candidate("a"), candidate("b")
        await first.acquire()
        await first.die()
        begun = LoopTime.monotonic()
        await second.acquire()
        assert LEASE_S * 2 / 3 <= LoopTime.monotonic() - begun <= LEASE_S * 3 / 2
        assert second.leadership.epoch == 2
        second.leadership.fence()
        with pytest.raises(StorageError):
            first.leadership.fence()


async def test_leader_that_ended_in_order_is_replaced_at_once(tmp_path: Path) -> None:
    """Whose lease would last for longer than a test may."""

    async with candidates_on(tmp_path, 10 * TIMEOUT_S) as candidate:
        first, second = candidate("a"), candidate("b")
        await first.acquire()
        await first.leadership.release()
        with pytest.raises(NotLeaderError):
            first.leadership.fence()
        await second.acquire()


async def test_a_leader_that_cannot_renew_stops_before_another_one_starts(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first, second = candidate("a"), candidate("b")
        await first.acquire()
        first.store.away = True
        waiting = asyncio.create_task(second.acquire())
        await first.lost.wait()
        assert not waiting.done()
        with pytest.raises(NotLeaderError):
            first.leadership.fence()
        await waiting


async def test_leader_is_notified_when_its_epoch_is_over(tmp_path: Path) -> None:
    async with candidates_on(tmp_path) as candidate:
        first = candidate("a")
        await first.acquire()
        LeaderStore(resolve(tmp_path / "ha")).claim("http://b", "b", "1", after=1)
        with pytest.raises(NotLeaderError, match="b"):
            first.leadership.fence()
        await first.lost.wait()


@pytest.mark.parametrize("takes_s", [0.0, LEASE_S / 3], ids=["fast storage", "slow storage"])
async def test_a_driver_that_was_frozen_for_long_continues_if_no_other_driver_took_over(
    tmp_path: Path, takes_s: float
) -> None:
    """Storage has the whole time of a lease to answer then, as the machine is a busy one."""

    async with candidates_on(tmp_path) as candidate:
        first = candidate("a")
        await first.acquire()
        first.store.takes_s = takes_s
        stand_still(LEASE_S)
        with pytest.raises(StorageError, match="run out"):
            first.leadership.fence()
        while True:
            await asyncio.sleep(0.01)
            try:
                first.leadership.fence()
                break
            except NotLeaderError:
                raise
            except StorageError:
                continue
        assert not first.lost.is_set()


async def test_a_directory_that_cannot_be_used_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "ha").write_text("in the way")

    async with candidates_on(tmp_path) as candidate:
        with pytest.raises(StorageError, match="ha"):
            await candidate("a").acquire()


async def test_a_signed_address_is_renewed_as_long_as_its_leader_lives(tmp_path: Path) -> None:
    """It is corrected after another process has changed it."""
    file = tmp_path / "ha" / "leader.json"

    def published() -> PublishedLeader:
        return opened(file.read_bytes(), "token", "flights", LoopTime.time())

    async with candidates_on(tmp_path) as candidate:
        leader = candidate("a")
        leader.leadership._store = LeaderStore(resolve(tmp_path / "ha")).signed_by(
            LeaseSignature("token", "flights", LEASE_S)
        )
        await leader.acquire()
        first = published()
        assert first.rest == "http://a"
        while (published().good_until or 0) <= (first.good_until or 0):
            await asyncio.sleep(0.02)
        sound = file.read_bytes()
        file.write_bytes(sound.replace(b"http://a", b"http://b"))
        while b"http://b" in file.read_bytes():
            await asyncio.sleep(0.02)
        assert published().epoch == 1
