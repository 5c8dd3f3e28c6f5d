"""Storage that never answers costs a checkpoint or a request, never the driver, another job or other paths."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster import job_host, storage_effects
from ckpt_runtime.jobmaster.job_host import LoopHost, SnapshotDeletions
from ckpt_runtime.storage.driver_pools import DriverPools
from ckpt_runtime.storage.metadata import read_metadata
from tests.support.late_calls import deadline_passes
from tests.unit.runtime.jobmaster.shell_bench import JOB, TIMEOUT_S, Bench

LIMIT = "1 h"
"""No call takes so long: only the deadlines of calls that hang pass, at once."""


class Hang:
    """Takes the place of a storage call; its first ``calls`` calls pass their deadline and hang until released."""

    def __init__(self, real: Callable[..., Any], calls: int) -> None:
        self._real = real
        self._left = calls
        self.release = threading.Event()
        self.late = 0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        hangs, self._left = self._left > 0, self._left - 1
        if hangs:
            deadline_passes()
            self.release.wait(TIMEOUT_S)
        try:
            return self._real(*arguments, **options)
        finally:
            self.late += hangs


@pytest.fixture
def hangs() -> Iterator[list[Hang]]:
    made: list[Hang] = []
    yield made
    for hang in made:
        hang.release.set()


@pytest.fixture(autouse=True)
def hasty_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 1)
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1)


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch, hangs: list[Hang]) -> Callable[..., Hang]:
    def install(owner: Any, name: str, calls: int = 1) -> Hang:
        hang = Hang(getattr(owner, name), calls)
        monkeypatch.setattr(owner, name, hang)
        hangs.append(hang)
        return hang

    return install


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Bench, DriverPools]]:
    pools = DriverPools.create(Configuration({"jobmanager.storage.timeout": LIMIT}))
    with ThreadPoolExecutor(1) as idle:
        bench = Bench(directory, idle, pools.of_job(JOB), tolerable_failed_checkpoints=100)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield bench, pools
        finally:
            bench.shell.close()
            pools.shutdown()


def failures(bench: Bench) -> list[str]:
    return [answer.message for answer in bench.listener.answers if isinstance(answer, out.RequestFailed)]


async def test_a_directory_that_cannot_be_made_in_time_aborts_the_checkpoint(
    tmp_path: Path, hang: Callable[..., Hang]
) -> None:
    async with opened(tmp_path) as (bench, _):
        hang(bench.storage, "initialize_checkpoint")
        assert await bench.trigger() == (None, None)
        assert "has not come back within 3600 s" in failures(bench)[0]
        checkpoint_id, _ = await bench.checkpoint()
        assert list(bench.pointers.present) == [checkpoint_id]


async def test_a_savepoint_directory_that_was_made_too_late_does_not_stay(
    tmp_path: Path, hang: Callable[..., Hang]
) -> None:
    async with opened(tmp_path) as (bench, _):
        late = hang(storage_effects, "initialize_savepoint")
        target = tmp_path / "savepoints"
        assert await bench.trigger(CheckpointType.SAVEPOINT, str(target)) == (None, None)
        late.release.set()
        while not late.late or list(target.iterdir()):
            await asyncio.sleep(0.001)


async def test_metadata_that_is_written_too_late_is_settled_by_looking(
    tmp_path: Path, hang: Callable[..., Hang]
) -> None:
    async with opened(tmp_path) as (bench, _):
        late = hang(storage_effects, "write_metadata")
        checkpoint_id, options = await bench.trigger()
        bench.acknowledge(checkpoint_id, options.directory)
        while cast(Any, bench.pools.own).hanging == 0:
            await asyncio.sleep(0.001)
        late.release.set()
        await bench.until(lambda: checkpoint_id in bench.listener.completed)
        found = CompletedCheckpoint.from_json(read_metadata(str(bench.directory / f"chk-{checkpoint_id}")).document)
        assert found.id == checkpoint_id


async def test_the_outcome_of_a_hanging_call_is_not_requested_again(tmp_path: Path, hang: Callable[..., Hang]) -> None:
    """Each question would make one more thread hang."""

    async with opened(tmp_path) as (bench, _):
        late = hang(storage_effects, "write_metadata", calls=100)
        asked = hang(storage_effects, "has_metadata", calls=0)
        checkpoint_id, options = await bench.trigger()
        bench.acknowledge(checkpoint_id, options.directory)
        own: Any = bench.pools.own
        while own.hanging == 0:
            await asyncio.sleep(0.001)
        unknown: list[on.CoordinatorEvent] = []
        tell = bench.shell.tell

        def count(event: on.CoordinatorEvent) -> None:
            unknown.extend([event] if isinstance(event, on.MetadataUnknown) else [])
            tell(event)

        bench.shell.storage._tell = count
        while len(unknown) < 5:
            await asyncio.sleep(0.001)
        assert own.hanging == 1
        assert asked._left == 0
        late._left = 0
        late.release.set()
        await bench.until(lambda: checkpoint_id in bench.listener.completed)


async def test_savepoints_to_storage_that_never_answers_do_not_affect_checkpoints(
    tmp_path: Path, hang: Callable[..., Hang]
) -> None:
    async with opened(tmp_path) as (bench, _):
        hang(storage_effects, "initialize_savepoint", calls=1000)
        for _ in range(24):
            assert await bench.trigger(CheckpointType.SAVEPOINT, str(tmp_path / "savepoints")) == (None, None)
        assert "storage calls to local paths have not come back" in failures(bench)[-1]
        for _ in range(3):
            await bench.checkpoint()


def test_a_deletion_that_hangs_is_tried_again(tmp_path: Path, hang: Callable[..., Hang]) -> None:
    deleted: list[str] = []

    def delete() -> None:
        deleted.append("x")

    async def inside() -> None:
        pools = DriverPools.create(Configuration({"jobmanager.storage.timeout": LIMIT}))
        deletions = SnapshotDeletions(LoopHost(cast(Any, None), pools))
        done, attempted = asyncio.Event(), asyncio.Event()
        deletions.submit("delete x", Hang(delete, 1), attempted.set)
        async with asyncio.timeout(TIMEOUT_S):
            await attempted.wait()
            deletions.when_done(done.set)
            await done.wait()
        assert deleted == ["x"]
        deletions.close()
        pools.shutdown()

    asyncio.run(inside())
