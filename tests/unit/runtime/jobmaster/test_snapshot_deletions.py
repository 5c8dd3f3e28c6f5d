"""Deletions that fail are tried again until they are done; a fenced driver deletes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.jobmaster import job_host
from ckpt_runtime.jobmaster.job_host import LoopHost, Pool, SnapshotDeletions
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.errors import (
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)

TIMEOUT_S = 60


class Storage:
    """Deletes by noting the name; ``errors`` are raised one after the other first."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.attempts = 0
        self.deleted: list[str] = []

    def delete(self, name: str = "x") -> Callable[[], None]:
        def call() -> None:
            self.attempts += 1
            if self.errors:
                raise self.errors.pop(0)
            self.deleted.append(name)

        return call


def away() -> StorageError:
    return StorageError("no answer", "x")


@asynccontextmanager
async def opened(fence: Callable[[], None] | None = None) -> AsyncIterator[SnapshotDeletions]:
    with ThreadPoolExecutor(1) as pool:
        host = LoopHost(cast(Any, None), DriverPools(own=pool, deletions=pool, paths=lambda _: pool, planning=pool))
        deletions = SnapshotDeletions(host) if fence is None else SnapshotDeletions(host, fence)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield deletions
        finally:
            deletions.close()


async def done(deletions: SnapshotDeletions) -> None:
    event = asyncio.Event()
    deletions.when_done(event.set)
    await event.wait()


async def attempted(deletions: SnapshotDeletions, delete: Callable[[], None], what: str = "delete x") -> None:
    """Up to the first attempt's end."""
    event = asyncio.Event()
    deletions.submit(what, delete, event.set)
    await event.wait()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No retry by the clock within a test."""
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1_000_000)
    monkeypatch.setattr(job_host, "MAX_DELETION_PAUSE_MS", 1_000_000)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1)


@pytest.mark.usefixtures("hasty")
async def test_a_deletion_that_failed_is_tried_again_by_the_clock() -> None:
    storage = Storage(away(), away(), away())

    async with opened() as deletions:
        deletions.submit("delete x", storage.delete())
        await done(deletions)
        assert (storage.attempts, storage.deleted) == (4, ["x"])
        assert deletions.unfinished == ()


@pytest.mark.usefixtures("patient")
async def test_first_attempt_of_a_deletion_is_reported_once_with_any_outcome() -> None:
    storage = Storage(away())

    async with opened() as deletions:
        answers: list[int] = []
        deletions.submit("delete x", storage.delete(), lambda: answers.append(1))
        await attempted(deletions, storage.delete("y"))
        assert answers == [1]
        assert deletions.unfinished == ("delete x",)
        deletions.retry()
        await done(deletions)
        assert answers == [1]
        assert storage.deleted == ["y", "x"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("error", "finished"),
    [
        (NotFoundError("gone", "x"), True),
        (InvalidLocationError("not there", "x"), True),
        (CorruptFileError("damaged", "x"), True),
        (RuntimeError("a bug"), True),
        (away(), False),
        (PermissionError("read-only"), False),
    ],
)
async def test_deletion_that_cannot_succeed_is_not_repeated(error: Exception, finished: bool) -> None:
    storage = Storage(error)

    async with opened() as deletions:
        await attempted(deletions, storage.delete())
        assert (deletions.unfinished == ()) is finished
        deletions.retry()
        await done(deletions)
        assert storage.attempts == (1 if finished else 2)


async def test_a_driver_that_lost_its_lease_deletes_nothing() -> None:
    storage = Storage()

    def closed() -> None:
        raise NotLeaderError("another driver leads", "x")

    async with opened(closed) as deletions:
        await attempted(deletions, storage.delete())
        assert storage.attempts == 0
        await done(deletions)


@pytest.mark.usefixtures("patient")
async def test_the_end_comes_after_everything_that_waits() -> None:
    storage = Storage(away())

    async with opened() as deletions:
        await attempted(deletions, storage.delete("first"))
        deletions.when_done(lambda: deletions.submit("last", storage.delete("last")))
        assert storage.deleted == []
        deletions.retry()
        while storage.deleted != ["first", "last"]:
            await asyncio.sleep(0)


@pytest.mark.usefixtures("patient")
async def test_deletions_stop_after_closing(caplog: pytest.LogCaptureFixture) -> None:
    storage = Storage(away())

    async with opened() as deletions:
        await attempted(deletions, storage.delete())
        deletions.close()
        deletions.retry()
        deletions.submit("delete y", storage.delete("y"))
        assert storage.attempts == 1
    assert "could not delete x before the end" in caplog.text


@pytest.mark.usefixtures("patient")
async def test_completions_are_not_reported_after_closing() -> None:
    """What follows would delete the job's directory."""
    reported: list[str] = []

    async with opened() as deletions:
        await attempted(deletions, Storage(away()).delete())
        deletions.when_done(lambda: reported.append("waited"))
        deletions.close()
        deletions.when_done(lambda: reported.append("at once"))
    assert reported == []


class _Timers:
    """A host with a clock of its own, whose pool answers at once; ``pauses`` are what was asked for."""

    def __init__(self) -> None:
        self.pauses: list[float] = []
        self.now_ms = 0
        self._timers: dict[object, tuple[float, Callable[[], None]]] = {}

    def now(self) -> Instant:
        return Instant(self.now_ms, self.now_ms)

    def in_pool(self, pool: Pool | str, call: Callable[[], Any], answer: Callable[[Callable[[], Any]], None]) -> None:
        found = call()
        answer(lambda: found)

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> SimpleNamespace:
        self.pauses.append(delay_ms)
        timer = object()
        self._timers[timer] = (self.now_ms + delay_ms, call)
        return SimpleNamespace(cancel=lambda: self._timers.pop(timer))

    def fire(self) -> None:
        """The one timer that there is, when it is due."""
        ((due_ms, call),) = self._timers.values()
        self._timers.clear()
        self.now_ms = int(due_ms)
        call()


def test_the_newest_failure_sets_the_pause() -> None:
    """One that has failed for hours does not keep a fresh one waiting as long."""
    host = _Timers()
    deletions = SnapshotDeletions(cast(Any, host))
    old, new = Storage(*(away() for _ in range(30))), Storage(away(), away())
    deletions.submit("delete old", old.delete())
    for _ in range(9):
        host.fire()
    assert host.pauses[:3] == [500.0, 1000.0, 2000.0]
    assert host.pauses[-1] == job_host.MAX_DELETION_PAUSE_MS
    host.now_ms += 10_000
    fresh_ms = host.now_ms
    deletions.submit("delete new", new.delete("new"))
    host.fire()
    assert host.now_ms == fresh_ms + 500
    assert host.pauses[-1] == 1000.0
    host.fire()
    assert new.deleted == ["new"]
    assert host.pauses[-1] == job_host.MAX_DELETION_PAUSE_MS


def test_a_retry_that_is_due_earlier_is_not_put_off_by_a_fresh_failure() -> None:
    host = _Timers()
    deletions = SnapshotDeletions(cast(Any, host))
    storage = Storage(*(away() for _ in range(10)))
    deletions.submit("delete old", storage.delete())
    for _ in range(9):
        host.fire()
    due_ms = host.now_ms + 30_000
    host.now_ms = due_ms - 100
    storage.errors.append(away())
    deletions.submit("delete new", storage.delete("new"))
    host.fire()
    assert host.now_ms == due_ms
    assert sorted(storage.deleted) == ["new", "x"]
    assert deletions.unfinished == ()


@pytest.mark.usefixtures("patient")
async def test_the_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(job_host, "MAX_WAITING", 2)
    storage = Storage(*(away() for _ in range(3)))

    async with opened() as deletions:
        for name in "abc":
            await attempted(deletions, storage.delete(), f"delete {name}")
        assert deletions.unfinished == ("delete b", "delete c")
    assert "cannot delete a: too many deletions" in caplog.text
