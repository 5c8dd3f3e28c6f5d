"""Job ids: one job for each, and none for a retired one, at any time of the request and with any leader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import JobAlreadyExists, NotReady, RunRequest
from ckpt_runtime.jobmaster.submission import JobIdRetired, JobStillRunning, Submissions
from ckpt_runtime.storage.ha_store import KEPT_MS, HaStore

JOB, OTHER = "ab" * 16, "cd" * 16
REQUEST = RunRequest("program", job_id=JOB)


class Driver:
    """What one driver knows of ids, and what it has started."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self.submissions = Submissions()
        self.store = HaStore(str(directory / "ha"), epoch=epoch).retired
        self.pool = ThreadPoolExecutor(2)
        self.planned: list[str] = []
        self.started: list[str] = []
        self.may_submit = asyncio.Event()
        self.may_submit.set()

    async def run(self, request: RunRequest = REQUEST) -> None:
        await self.submissions.once(request.job_id or "", request, self._submit)

    async def _submit(self, job_id: str, request: RunRequest) -> None:
        self.planned.append(job_id)
        await self.may_submit.wait()
        if request.arguments == ("refused",):
            raise NotReady("no")
        self.started.append(job_id)

    async def retire(self, job_id: str = JOB, now_ms: int = 7) -> None:
        await self.submissions.retire(job_id, self.started.__contains__, now_ms, self.pool)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Driver, Driver]]:
    first, second = Driver(directory, 1), Driver(directory, 2)
    yield first, second
    first.pool.shutdown()
    second.pool.shutdown()


@pytest.mark.row("air.4")
async def test_a_request_after_its_id_was_retired_starts_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        await driver.retire()
        await driver.retire()
        with pytest.raises(JobIdRetired, match=f"The job id {JOB} is retired"):
            await driver.run()
        await driver.run(replace(REQUEST, job_id=OTHER))
        assert driver.started == [OTHER]
        assert driver.submissions.retired() == {JOB: 7}


@pytest.mark.row("air.4")
async def test_next_driver_knows_the_retired_ids(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.submissions.take_over(first.store)
        await first.retire()
        await second.submissions.take_over(second.store)
        with pytest.raises(JobIdRetired):
            await second.run()
        with pytest.raises(NotReady, match="belongs to the leader of epoch 2"):
            await first.retire(OTHER)
        assert second.submissions.retired() == {JOB: 7}


async def test_the_id_of_a_living_job_is_not_retired(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        await driver.run()
        with pytest.raises(JobStillRunning, match="has not ended"):
            await driver.retire()
        await driver.run()
        driver.started.clear()  # it has ended
        await driver.retire()
        with pytest.raises(JobIdRetired):
            await driver.run()


@pytest.mark.parametrize("refused", [False, True])
async def test_retirement_of_an_id_waits_for_a_submission_in_progress(tmp_path: Path, refused: bool) -> None:
    async with opened(tmp_path) as (driver, _):
        driver.may_submit.clear()
        request = replace(REQUEST, arguments=("refused",)) if refused else REQUEST
        running = [asyncio.create_task(driver.run(request)) for _ in range(2)]
        retiring = asyncio.create_task(driver.retire())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not retiring.done()
        with pytest.raises(JobAlreadyExists):
            await driver.run(replace(REQUEST, parallelism=7))
        driver.may_submit.set()
        found = await asyncio.gather(retiring, *running, return_exceptions=True)
        if refused:
            assert [type(each) for each in found] == [type(None), NotReady, NotReady]
            with pytest.raises(JobIdRetired):
                await driver.run()
        else:
            assert [type(each) for each in found] == [JobStillRunning, type(None), type(None)]
            assert driver.started == [JOB]


async def test_a_caller_that_stops_waiting_does_not_end_the_submission_for_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        driver.may_submit.clear()
        first, second, third = (asyncio.create_task(driver.run()) for _ in range(3))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        driver.may_submit.set()
        await asyncio.gather(first, third)
        assert driver.started == [JOB]


async def test_request_that_is_sent_again_after_a_lost_connection_joins_its_submission(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        driver.may_submit.clear()
        first = asyncio.create_task(driver.run())
        await asyncio.sleep(0)
        first.cancel()  # as a server does when its client has disconnected
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(driver.run())
        await asyncio.sleep(0)
        driver.may_submit.set()
        await again
        assert driver.planned == driver.started == [JOB]


async def test_retirement_of_an_id_waits_for_a_submission_that_starts_at_the_same_time(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):

        async def run_again() -> None:
            with pytest.raises(NotReady):
                await driver.run(replace(REQUEST, arguments=("refused",)))
            driver.may_submit.clear()
            await driver.run()

        driver.may_submit.clear()
        running = asyncio.create_task(run_again())
        await asyncio.sleep(0)
        retiring = asyncio.create_task(driver.retire())
        await asyncio.sleep(0)
        driver.may_submit.set()
        for _ in range(5):
            await asyncio.sleep(0)
        driver.may_submit.set()
        await running
        with pytest.raises(JobStillRunning):
            await retiring
        assert driver.submissions.retired() == {}


async def test_ids_are_forgotten_after_a_month(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.submissions.take_over(first.store)
        await first.retire(now_ms=0)
        await first.retire(OTHER, now_ms=KEPT_MS)
        await second.submissions.take_over(second.store)
        assert second.submissions.retired() == {OTHER: KEPT_MS}


async def test_a_retirement_that_cannot_be_stored_is_not_reported_as_done(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        await driver.submissions.take_over(driver.store)
        (tmp_path / "ha/default/retired").rename(tmp_path / "away")
        (tmp_path / "ha/default/retired").write_text("no directory")
        with pytest.raises(NotReady, match="could not be stored"):
            await driver.retire()
        (tmp_path / "ha/default/retired").unlink()
        (tmp_path / "away").rename(tmp_path / "ha/default/retired")
        await driver.retire()
        assert driver.store.read() == {JOB: 7}
