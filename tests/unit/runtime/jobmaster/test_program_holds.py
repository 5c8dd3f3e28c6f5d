"""Holds of uploaded programs: a held one stays, here, in the directory of high availability and for the next driver."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster.gateway_values import InvalidRequest, NotReady, PipelineInUse, PipelineNotFound
from ckpt_runtime.jobmaster.program_store import ProgramHolds, ProgramStore
from ckpt_runtime.storage.ha_store import HaStore

pytestmark = pytest.mark.usefixtures("process_template")

SOURCE = b"def pipeline(spark):\n    pass\n"


class Driver:
    """What one driver has of programs."""

    def __init__(self, directory: Path, number: int) -> None:
        self.programs = ProgramStore(directory / f"uploads-{number}")
        self.running: dict[str, bytes] = {}
        self.holds = ProgramHolds(self.programs, self.running.get)
        self.store = HaStore(str(directory / "ha"), epoch=number).programs
        self.pool = ThreadPoolExecutor(2)

    async def hold(self, program: str, owner: str, now: int = 7) -> None:
        await self.holds.hold(program, owner, now, self.pool, self.pool)

    async def release(self, program: str, owner: str) -> None:
        await self.holds.release(program, owner, self.pool)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Driver, Driver]]:
    first, second = Driver(directory, 1), Driver(directory, 2)
    yield first, second
    first.pool.shutdown()
    second.pool.shutdown()


def archives(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("ha/default/programs/archive-*")]


async def test_a_held_program_is_not_deleted_until_the_last_owner_releases_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        program = driver.programs.add("job.py", SOURCE, 1).id
        for owner in ("one", "two", "one"):
            await driver.hold(program, owner)
        await driver.release(program, "one")
        await driver.release(program, "nobody")
        with pytest.raises(PipelineInUse, match=f"Pipeline {program} is held by two; release it first"):
            driver.holds.check_unheld(program)
        await driver.release(program, "two")
        driver.holds.check_unheld(program)
        with pytest.raises(PipelineNotFound):
            await driver.hold("0" * 32 + "_job.py", "one")


@pytest.mark.row("air.4")
async def test_next_driver_has_the_held_programs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.holds.take_over(first.store)
        kept, released = (first.programs.add("job.py", SOURCE + end, 1) for end in (b"", b"\n"))
        for program in (kept, released):
            await first.hold(program.id, "me", now=5)
        await first.release(released.id, "me")
        await second.holds.take_over(second.store)
        assert second.programs.list() == (kept,)
        assert second.holds.of(kept.id) == {"me": 5}
        with pytest.raises(NotReady, match="belongs to the leader of epoch 2"):
            await first.hold(released.id, "late")
        await second.release(kept.id, "me")
        second.store.adopt()  # deletes what the former leader wrote too late
        assert archives(tmp_path) == []


async def test_deleted_program_is_restored_from_a_job_that_runs_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        program = driver.programs.add("job.py", SOURCE, 1).id
        driver.running[program] = driver.programs.get(program).archive.read_bytes()
        driver.programs.delete(program)
        await driver.hold(program, "me")
        assert driver.programs.get(program).archive.read_bytes() == driver.running[program]
        driver.running["0" * 32 + "_job.py"] = driver.running[program]
        with pytest.raises(InvalidRequest, match="digest"):
            await driver.hold("0" * 32 + "_job.py", "me")


async def test_an_archive_that_cannot_be_read_stops_no_takeover(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.holds.take_over(first.store)
        program = first.programs.add("job.py", SOURCE, 1).id
        await first.hold(program, "me")
        (tmp_path / "ha/default/programs" / archives(tmp_path)[0]).write_bytes(b"damaged")
        await second.holds.take_over(second.store)
        assert second.holds.of(program) == {"me": 7}
        assert second.programs.list() == ()
