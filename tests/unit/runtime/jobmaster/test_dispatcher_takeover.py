"""A dispatcher that does not lead yet, takes over, and loses its leadership."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.events import RetentionAsked
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster import known_jobs
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import (
    CheckpointKind,
    HoldRequest,
    JobAlreadyExists,
    JobNotFound,
    JobTerminated,
    NotReady,
    OperationKind,
    RunRequest,
)
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord, store_job
from ckpt_runtime.jobmaster.lineages import LineageHeld
from ckpt_runtime.jobmaster.program_store import ProgramStore
from ckpt_runtime.jobmaster.submission import JobIdRetired, JobStillRunning
from ckpt_runtime.scheduler.job_effects import JobEnded
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HaStore, HeldUpgrade, HeldUpgrades
from ckpt_runtime.storage.leader_store import LeaderInfo
from ckpt_runtime.storage.metadata import has_metadata
from tests.unit.runtime.jobmaster.fake_slots import JOB, World

OTHER = "fedcba9876543210" * 2
REQUEST = RunRequest("program", "module:pipeline", ("--x", "1"), 2, {"acme.x": "y"}, job_id=JOB)


class Session:
    """A world, and a dispatcher that waits for its leadership."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.directory = directory
        self.ended = asyncio.Event()
        self.dispatcher = Dispatcher(
            world.slot_pool,
            ProgramStore(directory / "uploads"),
            Configuration(),
            directory,
            world.pool,
            self.ended.set,
            leads=False,
        )

    def store(self, epoch: int) -> HaStore:
        return HaStore(str(self.directory / "ha"), epoch=epoch)

    async def crashed_job(self, **options: str) -> JobMaster:
        """A job of the first driver, with a checkpoint, whose driver is gone."""
        store = self.store(1)
        submission = self.world.submission(**options)
        directory = store.snapshots.url
        submission = replace(
            submission, request=REQUEST, record=DurableRecord(store, JOB), default_checkpoint_directory=directory
        )
        job = JobMaster(submission, self.world.slot_pool, self.world.pool)
        store_job(store, submission.to_stored(job.prepare_storage()), submission.archive)
        self.world.jobs.append(job)
        job.start()
        await self.world.running(job)
        await job.trigger_checkpoint(CheckpointKind.CONFIGURED)
        return job


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Session]:
    async with World.start(directory) as world:
        session = Session(world, directory)
        try:
            yield session
        finally:
            await session.dispatcher.stop()


async def test_dispatcher_answers_nothing_about_jobs_before_it_leads(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        dispatcher = session.dispatcher
        for call in (
            dispatcher.list_jobs(),
            dispatcher.run_pipeline(REQUEST),
            dispatcher.dispose_savepoint("/x", None),
            dispatcher.operation_status(OperationKind.SAVEPOINT, "ab" * 16, JOB),
            dispatcher.job_details(JOB),
        ):
            with pytest.raises(NotReady, match="is not the leader"):
                await call
        dispatcher.wait_for(LeaderInfo("http://elsewhere:8081", "app-7", "x", 3))
        with pytest.raises(
            NotReady, match=r"is not the leader.*\(http://elsewhere:8081 of application app-7 is the leader\)"
        ):
            await dispatcher.list_jobs()
        await dispatcher.take_over(session.store(1))
        assert await dispatcher.list_jobs() == ()
        with pytest.raises(JobNotFound):
            dispatcher.jobs[JOB]


@pytest.mark.row("571.5")
async def test_next_driver_continues_jobs_and_recognizes_their_requests(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        await job.patch_checkpoint_config(CheckpointOverrides(timeout_ms=77_000))
        job.suspend(fenced=True)
        dispatcher = session.dispatcher
        await dispatcher.take_over(session.store(2))
        while dispatcher.jobs[JOB].status is not JobStatus.RUNNING:
            await asyncio.sleep(0.001)
        assert dispatcher.jobs[JOB].checkpoint_config().settings.timeout_ms == 77_000
        assert await dispatcher.run_pipeline(REQUEST) == JOB
        with pytest.raises(JobAlreadyExists):
            await dispatcher.run_pipeline(replace(REQUEST, arguments=()))
        await dispatcher.cancel_job(JOB)
        while dispatcher.jobs[JOB].status is not JobStatus.CANCELED:
            await asyncio.sleep(0.001)


@pytest.mark.row("air.4")
async def test_a_job_stored_after_its_id_was_retired_is_not_run(tmp_path: Path) -> None:
    """The write of a driver that leads no more came too late for its successor to see."""

    async with opened(tmp_path) as session:
        dispatcher = session.dispatcher
        session.store(1).retired.retire(JOB, 7)
        job = await session.crashed_job()
        job.suspend(fenced=True)
        await dispatcher.take_over(session.store(2))
        assert await dispatcher.list_jobs() == ()
        assert await dispatcher.retired_job_ids() == {JOB: 7}
        assert session.store(2).jobs.list_ids() == []
        with pytest.raises(JobIdRetired):
            await dispatcher.run_pipeline(REQUEST)


async def test_next_driver_knows_the_owner_of_an_upgrade_until_its_time_has_passed(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        dispatcher, day_ms = session.dispatcher, 86_400_000
        (await session.crashed_job()).suspend(fenced=True)
        mine = HeldUpgrade("upgrade-1", JOB, 1, wall_clock_ms() + day_ms, "airflow: nightly/upgrade", "file:///s")
        late = HeldUpgrade("upgrade-2", OTHER, 1, 2)
        session.store(1).upgrades.change(lambda _: HeldUpgrades({JOB: mine, OTHER: late}))
        await dispatcher.take_over(session.store(2))
        assert (await dispatcher.job_details(JOB)).upgrade == mine
        with pytest.raises(LineageHeld, match=r"airflow: nightly/upgrade \(owner upgrade-1\) since 1970"):
            await dispatcher.cancel_job(JOB)
        with pytest.raises(LineageHeld):
            await dispatcher.hold_lineage(JOB, HoldRequest("upgrade-3", day_ms))
        prolonged = await dispatcher.hold_lineage(JOB, HoldRequest("upgrade-1", 2 * day_ms))
        assert (prolonged.since_ms, prolonged.snapshot, prolonged.until_ms > mine.until_ms) == (1, "file:///s", True)
        assert session.store(2).upgrades.read() == HeldUpgrades({JOB: prolonged})
        await dispatcher.release_lineage(JOB, "upgrade-3")
        assert (await dispatcher.job_details(JOB)).upgrade == prolonged, "it is not upgrade-3's to end"
        await dispatcher.release_lineage(JOB, "upgrade-1")
        assert session.store(2).upgrades.read() == HeldUpgrades()
        await dispatcher.cancel_job(JOB)


@pytest.mark.row("air.4")
async def test_the_id_of_an_ended_job_can_be_retired(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        dispatcher = session.dispatcher
        with pytest.raises(NotReady):
            await dispatcher.retire_job_id(JOB)
        await dispatcher.take_over(session.store(2))
        with pytest.raises(JobStillRunning):
            await dispatcher.retire_job_id(JOB)
        await dispatcher.cancel_job(JOB)
        while dispatcher.jobs[JOB].status is not JobStatus.CANCELED:
            await asyncio.sleep(0.001)
        await dispatcher.retire_job_id(JOB)
        with pytest.raises(JobIdRetired):
            await dispatcher.run_pipeline(REQUEST)
        assert session.store(2).retired.read().keys() == {JOB}


async def test_ended_jobs_are_listed_and_what_is_left_of_them_is_cleaned_up(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        plan = job._shell.core.accepted_plan
        result = job.view.result_to_store(replace_end(job), plan, job.checkpoint_config(), job.checkpoint_statistics())
        session.store(1).results.create_dirty(JOB, result)
        job.suspend(fenced=True)
        dispatcher, store = session.dispatcher, session.store(2)
        await dispatcher.take_over(store)
        assert dispatcher.jobs[JOB].status is JobStatus.FINISHED
        (overview,) = await dispatcher.list_jobs()
        assert overview.status is JobStatus.FINISHED
        assert (await dispatcher.job_details(JOB)).overview == overview
        vertex = (await dispatcher.job_details(JOB)).vertices[0].vertex_id
        assert await dispatcher.vertex_metrics(JOB, vertex) == {}
        assert dispatcher.jobs[JOB].result().status is JobStatus.FINISHED
        with pytest.raises(JobTerminated):
            await dispatcher.cancel_job(JOB)
        with pytest.raises(JobTerminated):
            await dispatcher.trigger_checkpoint(JOB, CheckpointKind.FULL, None)
        assert await dispatcher.run_pipeline(REQUEST) == JOB
        await session.world.until(lambda: store.jobs.list_ids() == [] and store.results.list_ids(dirty_only=True) == [])
        assert not (tmp_path / "ha" / "default" / "snapshots" / JOB).exists()


async def test_the_checkpoints_that_a_cancelled_job_retains_stay(tmp_path: Path) -> None:
    """Its driver stores that it has ended, and dies."""

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job._shell.tell(RetentionAsked())
        end = JobEnded(JobStatus.CANCELED, job.overview().start_time_ms + 5)
        plan, kept = job._shell.core.accepted_plan, job.checkpoint_statistics().latest_completed
        result = job.view.result_to_store(end, plan, job.checkpoint_config(), job.checkpoint_statistics())
        session.store(1).results.create_dirty(JOB, result)
        job.suspend(fenced=True)
        dispatcher, store = session.dispatcher, session.store(2)
        await dispatcher.take_over(store)
        await session.world.until(lambda: store.jobs.list_ids() == [] and store.results.list_ids(dirty_only=True) == [])
        assert kept is not None
        assert kept.external_path is not None
        assert (await dispatcher.cancel_job(JOB)) == replace(kept, vertices={})
        assert has_metadata(resolve(kept.external_path))


async def test_retained_checkpoints_of_a_cancelled_job_stay_if_its_driver_dies_during_the_release(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as session:
        retention = {"externalized_checkpoint_retention": "RETAIN_ON_CANCELLATION", "num_retained": "2"}
        job = await session.crashed_job(**{f"execution__checkpointing__{name}": of for name, of in retention.items()})
        for _ in range(2):
            await job.trigger_checkpoint(CheckpointKind.CONFIGURED)
        latest = job.checkpoint_statistics().latest_completed
        assert latest is not None
        assert latest.external_path is not None
        retained = [resolve(latest.external_path).parent.child(f"chk-{number}") for number in (2, 3)]
        end = JobEnded(JobStatus.CANCELED, job.overview().start_time_ms + 5)
        plan = job._shell.core.accepted_plan
        result = job.view.result_to_store(end, plan, job.checkpoint_config(), job.checkpoint_statistics())
        store = session.store(1)
        await session.world.until(lambda: sorted(store.pointers(JOB).list()) == [2, 3])
        store.results.create_dirty(JOB, result)
        store.pointers(JOB).remove(2)
        job.suspend(fenced=True)
        dispatcher, store = session.dispatcher, session.store(2)
        await dispatcher.take_over(store)
        await session.world.until(lambda: store.jobs.list_ids() == [] and store.results.list_ids(dirty_only=True) == [])
        assert [has_metadata(directory) for directory in retained] == [True, True]


def replace_end(job: JobMaster) -> Any:
    """The effect with which a finished job ends."""
    return JobEnded(JobStatus.FINISHED, job.overview().start_time_ms + 5)


@pytest.mark.parametrize("spoilt", ["plan", "overrides"])
async def test_job_that_cannot_be_recovered_is_shown_with_the_reason_and_not_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str
) -> None:
    monkeypatch.setattr(known_jobs, "_PAUSE_S", 0.001)

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        store = session.store(1)
        changes = {
            "plan": {"properties": {}},
            "overrides": {"configuration": {"$internal.job-checkpoint-overrides": '{"futureField": 1}'}},
        }[spoilt]
        store.jobs.update(JOB, lambda present: replace(present, **changes))  # type: ignore[arg-type]
        dispatcher = session.dispatcher
        await dispatcher.take_over(session.store(2))
        (overview,) = await dispatcher.list_jobs()
        assert (overview.job_id, overview.status) == (JOB, JobStatus.RECONCILING)
        with pytest.raises(NotReady, match=f"{JOB} cannot be recovered: .*(program_id|futureField)"):
            await dispatcher.job_details(JOB)
        assert store.jobs.list_ids() == [JOB]
        assert list((tmp_path / "ha" / "default" / "snapshots" / JOB).glob("chk-*"))


async def test_losing_the_leadership_suspends_the_jobs_and_ends_the_session(tmp_path: Path) -> None:
    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        dispatcher = session.dispatcher
        await dispatcher.take_over(session.store(2))
        while dispatcher.jobs[JOB].status is not JobStatus.RUNNING:
            await asyncio.sleep(0.001)
        await dispatcher.lose_leadership()
        assert session.ended.is_set()
        with pytest.raises(NotReady):
            dispatcher.jobs[JOB]
        found = known_jobs.find_jobs(session.store(3), Configuration())
        assert [known.job_id for known in found if known.submission is not None] == [JOB]


async def test_a_leadership_that_is_lost_while_jobs_are_looked_for_starts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, go_on, find_jobs = threading.Event(), threading.Event(), known_jobs.find_jobs

    def find(*arguments: Any) -> Any:
        looking.set()
        go_on.wait()
        return find_jobs(*arguments)

    monkeypatch.setattr(known_jobs, "find_jobs", find)

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        dispatcher = session.dispatcher
        taking_over = asyncio.create_task(dispatcher.take_over(session.store(2)))
        await session.world.until(looking.is_set)
        await dispatcher.lose_leadership()
        go_on.set()
        await taking_over
        with pytest.raises(NotReady):
            await dispatcher.list_jobs()
        assert list(dispatcher.jobs) == []


async def test_results_of_jobs_that_ended_long_ago_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_jobs, "MAX_ENDED_JOBS", 0)

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.cancel()
        store = session.store(1)
        await session.world.until(lambda: store.jobs.list_ids() == [] and not store.results.list_ids(dirty_only=True))
        await session.dispatcher.take_over(session.store(2))
        session.dispatcher.jobs._forget_old_jobs()
        await session.world.until(lambda: store.results.list_ids() == [])
        assert await session.dispatcher.list_jobs() == ()


async def test_job_whose_storage_was_unavailable_continues_when_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_jobs, "_PAUSE_S", 0.001)
    monkeypatch.setattr(known_jobs, "_FIRST_PAUSE_S", 0.01)

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        snapshots = tmp_path / "ha" / "default" / "snapshots" / JOB
        snapshots.rename(tmp_path / "away")
        dispatcher = session.dispatcher
        await dispatcher.take_over(session.store(2))
        with pytest.raises(NotReady, match="cannot be recovered: .*chk-1"):
            dispatcher.jobs[JOB]
        (tmp_path / "away").rename(snapshots)
        while (await dispatcher.list_jobs())[0].status is not JobStatus.RUNNING:
            await asyncio.sleep(0.001)
        statistics = dispatcher.jobs[JOB].checkpoint_statistics()
        assert statistics.counts.restored == 1


async def test_a_job_that_turns_out_to_be_damaged_is_looked_for_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_jobs, "_PAUSE_S", 0.001)
    monkeypatch.setattr(known_jobs, "_FIRST_PAUSE_S", 0.01)

    async with opened(tmp_path) as session:
        job = await session.crashed_job()
        job.suspend(fenced=True)
        (metadata,) = (tmp_path / "ha" / "default" / "snapshots" / JOB).glob("chk-*/_metadata")
        content = metadata.read_bytes()
        metadata.unlink()
        dispatcher = session.dispatcher
        await dispatcher.take_over(session.store(2))
        metadata.write_bytes(content[:-9])
        looking = dispatcher.jobs._orphaned._looking
        assert looking is not None
        await looking
        with pytest.raises(NotReady, match="damaged"):
            dispatcher.jobs[JOB]
