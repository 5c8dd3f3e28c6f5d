"""Calls with a deadline: what hangs is left to itself and counted, and never takes the place of what does not hang."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Any
from weakref import WeakSet

import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.storage import driver_pools
from ckpt_runtime.storage.driver_pools import AddressPools, BoundedPool, DriverPools
from ckpt_runtime.storage.errors import AmbiguousWriteError, PoolExhaustedError, StorageTimeoutError
from ckpt_runtime.storage.filesystem import address_of
from tests.support.late_calls import deadline_passes

SHORT_S = 0.05
LONG_S = 60.0


class Hang:
    """Calls that do not return before they are released; their deadline passes as soon as they have begun."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.came_back = threading.Semaphore(0)

    def __call__(self) -> str:
        deadline_passes()
        return self.in_time()

    def in_time(self) -> str:
        """A call that hangs, whose deadline does not pass."""
        self.release.wait(LONG_S)
        self.came_back.release()
        return "late"


@pytest.fixture
def hang() -> Iterator[Hang]:
    hang = Hang()
    yield hang
    hang.release.set()


def pool(threads: int = 1, deadline_s: float = LONG_S, max_hanging: int = 2, **limits: Any) -> BoundedPool:
    return BoundedPool("storage calls", threads, deadline_s=deadline_s, max_hanging=max_hanging, **limits)


def test_results_and_errors_are_the_calls_own() -> None:
    calls = pool(2)
    assert [calls.submit(pow, 2, n).result(LONG_S) for n in range(50)] == [2**n for n in range(50)]
    with pytest.raises(ZeroDivisionError):
        calls.submit(lambda: 1 // 0).result(LONG_S)
    calls.shutdown()


def test_pool_runs_at_most_the_configured_number_of_threads() -> None:
    calls = pool(3)
    meeting = threading.Barrier(3)
    names = {calls.submit(lambda: (meeting.wait(LONG_S), threading.current_thread().name)[1]) for _ in range(30)}
    assert len({name.result(LONG_S) for name in names}) == 3
    calls.shutdown()


def test_a_call_that_hangs_fails_by_its_deadline_and_the_next_is_served(hang: Hang) -> None:
    calls = pool()
    late = calls.submit(hang)
    with pytest.raises(StorageTimeoutError, match=r"storage calls.*60 s.*1 hang"):
        late.result(LONG_S)
    assert calls.submit(lambda: "served").result(LONG_S) == "served"
    assert calls.submit(lambda: "and on").result(LONG_S) == "and on"
    assert calls.hanging == 1


def test_outcome_of_a_hanging_call_counts_as_unknown() -> None:
    assert issubclass(StorageTimeoutError, AmbiguousWriteError)
    assert not issubclass(PoolExhaustedError, AmbiguousWriteError)


def test_beyond_the_limit_nothing_is_begun_until_a_call_comes_back(hang: Hang) -> None:
    calls = pool()
    for _ in range(2):
        with pytest.raises(StorageTimeoutError):
            calls.submit(hang).result(LONG_S)
    begun = threading.Event()
    with pytest.raises(PoolExhaustedError, match=r"2 storage calls have not come back.*at most 2"):
        calls.submit(begun.set).result(LONG_S)
    assert not begun.is_set()
    hang.release.set()
    for _ in range(2):
        assert hang.came_back.acquire(timeout=LONG_S)
    deadline = threading.Event()
    while calls.hanging and not deadline.wait(0.001):
        pass
    assert calls.submit(lambda: "again").result(LONG_S) == "again"


def test_call_that_waits_for_hanging_calls_fails_by_its_deadline(hang: Hang) -> None:
    calls = pool(1, SHORT_S, max_hanging=1)
    first = calls.submit(hang.in_time)
    waiting = calls.submit(hang.in_time)
    for call in (first, waiting):
        with pytest.raises((PoolExhaustedError, StorageTimeoutError)):
            call.result(LONG_S)
    assert calls.hanging <= 2


def test_call_beyond_the_limit_of_hanging_calls_is_refused(hang: Hang) -> None:
    calls = pool(max_hanging=1)
    with pytest.raises(StorageTimeoutError):
        calls.submit(hang).result(LONG_S)
    with pytest.raises(PoolExhaustedError, match="still hang"):
        calls.submit(int).result(LONG_S)


def test_too_many_that_wait_are_refused(hang: Hang) -> None:
    calls = pool(max_waiting=2)
    running = threading.Event()
    first = calls.submit(lambda: (running.set(), hang.in_time())[1])
    assert running.wait(LONG_S)
    waiting = [calls.submit(lambda: "served") for _ in range(2)]
    with pytest.raises(PoolExhaustedError, match="2 storage calls wait already; at most 2"):
        calls.submit(int).result(LONG_S)
    hang.release.set()
    assert [call.result(LONG_S) for call in (first, *waiting)] == ["late", "served", "served"]


def test_call_that_an_idle_thread_is_about_to_take_does_not_count_as_waiting() -> None:
    calls = pool(2, max_waiting=2)
    meeting = threading.Barrier(3)
    for _ in range(2):
        calls.submit(meeting.wait, LONG_S)
    meeting.wait(LONG_S)
    deadline = threading.Event()
    while calls._idle < 2 and not deadline.wait(0.001):
        pass
    with calls._changed:  # they cannot take any meanwhile
        served = [calls.submit(int) for _ in range(4)]
        refused = calls.submit(int)
    with pytest.raises(PoolExhaustedError, match="wait already"):
        refused.result(LONG_S)
    assert [call.result(LONG_S) for call in served] == [0, 0, 0, 0]
    calls.shutdown()


def test_close_cancels_waiting_calls_and_refuses_new_ones(hang: Hang) -> None:
    calls = pool()
    running = threading.Event()
    first, waiting = calls.submit(lambda: (running.set(), hang.in_time())[1]), calls.submit(int)
    assert running.wait(LONG_S)
    calls.shutdown()
    with pytest.raises(CancelledError):
        waiting.result(LONG_S)
    with pytest.raises(PoolExhaustedError, match="ends"):
        calls.submit(int).result(LONG_S)
    hang.release.set()
    assert first.result(LONG_S) == "late"


def test_result_of_a_returned_call_is_not_kept() -> None:
    class Content:
        pass

    calls = pool()
    found = calls.submit(Content).result(LONG_S)
    calls.submit(int).result(LONG_S)
    gone = weakref.ref(found)
    del found
    gc.collect()
    assert gone() is None
    calls.shutdown()


def test_pools_of_the_driver_are_apart(hang: Hang) -> None:
    """What hangs for one job, or for paths that users name, leaves all others alone."""
    pools = DriverPools.create(Configuration({"jobmanager.storage.timeout": "1 h"}))
    job, other = pools.of_job("a" * 32), pools.of_job("b" * 32)
    named = pools.paths("s3://dead/a")
    late = [executor.submit(hang) for executor in (job.own, named) for _ in range(24)]
    for call in late:
        with pytest.raises((StorageTimeoutError, PoolExhaustedError)):
            call.result(LONG_S)
    with pytest.raises(PoolExhaustedError, match="job aaa"):
        job.own.submit(int).result(LONG_S)
    with pytest.raises(PoolExhaustedError, match="storage calls to s3://dead"):
        other.paths("s3://dead/b").submit(int).result(LONG_S)
    alive = [other.paths("s3://other/a"), other.paths("/local")]
    for executor in (*alive, pools.own, pools.planning, job.deletions, other.own, other.deletions):
        assert executor.submit(lambda: "served").result(LONG_S) == "served"
    pools.shutdown()


def test_a_deadline_counts_the_time_in_the_queue(hang: Hang, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    monkeypatch.setattr(driver_pools._DEADLINES, "add", lambda at, pool, call: deadlines.append(at))
    calls = pool(1)
    before = time.monotonic()
    submitted = [calls.submit(hang.in_time) for _ in range(9)]
    after = time.monotonic()
    hang.release.set()
    assert [call.result(LONG_S) for call in submitted] == ["late"] * 9
    assert len(deadlines) == 9
    assert all(before + LONG_S <= deadline <= after + LONG_S for deadline in deadlines)


def test_a_call_that_is_cancelled_while_it_waits_is_never_begun(hang: Hang) -> None:
    calls = pool()
    first, begun = calls.submit(hang.in_time), threading.Event()
    assert calls.submit(begun.set).cancel()
    after = calls.submit(lambda: "served")
    hang.release.set()
    assert [first.result(LONG_S), after.result(LONG_S)] == ["late", "served"]
    assert not begun.is_set()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("s3://bucket/a/b", "s3://bucket"),
        ("S3://bucket", "s3://bucket"),
        ("webhdfs://user:secret@host:9870/a?x=@", "webhdfs://host:9870"),
        ("/a/b", "local paths"),
        ("file:///a", "local paths"),
        ("relative/a:b", "local paths"),
        ("", "local paths"),
    ],
)
def test_the_address_of_a_url_is_its_scheme_and_host_or_bucket(url: str, address: str) -> None:
    assert address_of(url) == address


def test_addresses_beyond_the_limit_share_a_pool_and_idle_addresses_are_forgotten(hang: Hang) -> None:
    paths = AddressPools(LONG_S, WeakSet())
    assert paths("s3://0/a") is paths("s3://0/b")
    calls = [paths(f"s3://{number}/a").submit(hang.in_time) for number in range(16)]
    assert paths("s3://x/a") is paths("s3://y/a")
    hang.release.set()
    assert [call.result(LONG_S) for call in calls] == ["late"] * 16
