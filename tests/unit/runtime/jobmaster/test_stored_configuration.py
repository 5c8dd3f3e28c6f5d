"""What changed configurations and patches leave in the high-availability directory, and what is read of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides, OverridesChange
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.jobmaster import job_record
from ckpt_runtime.jobmaster.gateway_values import (
    InvalidRequest,
    JobTerminated,
    NotReady,
    UpdateInProgress,
)
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.job_settings import submitted_settings
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotLeaderError, StorageError
from ckpt_runtime.storage.ha_store import HaStore
from tests.unit.runtime.jobmaster.drivers import (
    UnsurePlan,
    crash,
    driver,
    make_hasty,
    stored_job,
    submission_found_by,
    taken_over,
)
from tests.unit.runtime.jobmaster.fake_slots import JOB, World

PATCH = CheckpointOverrides(timeout_ms=77_000)
TIMEOUT, DIRECTORY = "execution.checkpointing.timeout", "execution.checkpointing.dir"
NOTE = ChangeNote(2, 7, "alice", (TIMEOUT,))


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    make_hasty(monkeypatch)


async def change(job: JobMaster, *, restarts: bool = False, **options: str | None) -> None:
    """Of options by their last words."""
    base = job.accepted_plan
    own = base.own
    wanted = {{"timeout": TIMEOUT}.get(name, f"my.{name}"): value for name, value in options.items()}
    given = own.given.with_values(wanted)
    configuration = Configuration.merge(job.defaults, given)
    note = replace(NOTE, version=own.version + 1)
    settings = submitted_settings(configuration)
    graph = replace(base.graph, configuration=configuration.to_dict())
    plan = replace(base, graph=graph, configuration=configuration, settings=settings, own=own.changed(given, note))
    await job.change_configuration(plan, base, None, restarts=restarts)


@pytest.mark.row("530.5")
@pytest.mark.row("530.9")
async def test_a_new_driver_continues_with_configuration_graph_version_and_overrides(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        job = world.submit_durably(driver(tmp_path), my__mark="a")
        await world.running(job)
        await job.patch_checkpoint_config(CheckpointOverrides(interval_ms=77_000))
        await change(job, timeout="50 s", mark="b")
        await change(job, timeout=None, restarts=True)
        await crash(job)
        stored = driver(tmp_path).jobs.get(JOB)
        assert stored.version == 3
        assert JOB_CHECKPOINT_OVERRIDES in stored.configuration
        assert TIMEOUT not in str((stored.configuration, stored.graph, stored.properties))
        job = await taken_over(world, driver(tmp_path, 2))
        found = job.config_info()
        assert (found.version, found.running_version, [note.version for note in found.changes]) == (3, 3, [2, 3])
        assert found.configuration["my.mark"] == "b"
        assert job.graph.configuration["my.mark"] == "b"
        assert (job.checkpoint_config().settings.timeout_ms, job.checkpoint_config().settings.interval_ms) == (
            600_000, 77_000,
        )  # fmt: skip
        settings = (await job.patch_checkpoint_config(None)).settings
        assert settings.interval_ms is None


@pytest.mark.row("530.5")
async def test_configuration_that_was_not_stored_is_not_in_force(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        store = driver(tmp_path)
        job = world.submit_durably(store, record=UnsurePlan(store, JOB))
        await world.running(job)
        with pytest.raises(NotReady, match="unknown whether the change is stored"):
            await change(job, timeout="50 s", restarts=True)
        await world.until(lambda: job._shell.core._change.plan is None)
        assert job.config_info().version == 1
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        assert job.metrics()["numRestarts"] == "0"


def as_stored_before(store: Any, **configuration: str) -> None:
    """What an earlier version had: the cluster's options mixed with the job's, no version, no notes."""

    def earlier(job: Any) -> Any:
        mixed = {"of.cluster": "c", **job.configuration}
        properties = {key: value for key, value in job.properties.items() if key != "defaults"}
        return replace(job, properties={**properties, "cluster_configuration": mixed})

    store.jobs.update(JOB, earlier)


@pytest.mark.row("530.9")
async def test_a_job_of_an_earlier_version_has_version_1_and_what_is_removed_stays_so(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        job = world.submit_durably(driver(tmp_path), execution__checkpointing__timeout="50 s")
        await world.running(job)
        await crash(job)
        as_stored_before(driver(tmp_path))
        job = await taken_over(world, driver(tmp_path, 2))
        assert (job.config_info().version, job.config_info().changes) == (1, ())
        assert job.configuration["of.cluster"] == "c"
        assert job.checkpoint_config().settings.timeout_ms == 50_000
        await change(job, timeout=None)
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        await crash(job)
        job = await taken_over(world, driver(tmp_path, 3))
        assert job.checkpoint_config().settings.timeout_ms == 600_000
        assert job.configuration["of.cluster"] == "c"
        assert job.config_info().version == 2


@pytest.mark.row("530.9")
async def test_clusters_value_applies_after_the_jobs_option_is_removed(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        store = driver(tmp_path)
        job = world.submit_durably(store, execution__checkpointing__timeout="50 s")
        await world.running(job)
        await crash(job)

        def says(job: Any) -> Any:
            return replace(job, properties={**job.properties, "defaults": {TIMEOUT: "40 s"}})

        store.jobs.update(JOB, says)
        job = await taken_over(world, driver(tmp_path, 2))
        assert job.checkpoint_config().settings.timeout_ms == 50_000
        await change(job, timeout=None)
        await crash(job)
        submission = submission_found_by(driver(tmp_path, 3))
        assert submission.configuration[TIMEOUT] == "40 s"
        assert TIMEOUT not in submission.own.given


class Record(DurableRecord):
    """Changes of overrides that fail: ``errors`` are raised in turn, after the change was stored where ``happens``."""

    def __init__(self, store: HaStore, *errors: Exception, happens: bool = False) -> None:
        super().__init__(store, JOB)
        self.errors = list(errors)
        self.happens = happens
        self.gate = threading.Event()
        self.gate.set()

    def change_overrides(self, change: OverridesChange) -> str | None:
        self.gate.wait()
        if not self.errors:
            return super().change_overrides(change)
        if self.happens:
            super().change_overrides(change)
        raise self.errors.pop(0)

    def settle_overrides(self) -> str | None:
        self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)
        return super().settle_overrides()


class TestPatch:
    @asynccontextmanager
    async def with_errors(
        self, directory: Path, *errors: Exception, happens: bool = False
    ) -> AsyncIterator[tuple[JobMaster, HaStore, Record, World]]:
        record = Record(driver(directory), *errors, happens=happens)
        async with stored_job(directory, record=record, execution__checkpointing__timeout="1 min") as (
            world,
            job,
            store,
        ):
            yield job, store, record, world

    @pytest.mark.row("571.6")
    async def test_a_crash_before_the_write_is_an_error_and_leaves_no_trace(self, tmp_path: Path) -> None:
        async with self.with_errors(tmp_path, StorageError("no space", "x")) as (job, store, _, _):
            with pytest.raises(NotReady, match="nothing has changed: no space"):
                await job.patch_checkpoint_config(PATCH)
            assert job.checkpoint_config().settings.timeout_ms == 60_000
            assert store.jobs.get(JOB).checkpoint_overrides is None
            assert (await job.patch_checkpoint_config(PATCH)).settings.timeout_ms == 77_000

    @pytest.mark.row("571.6")
    async def test_next_driver_applies_a_patch_after_a_crash_between_write_and_apply(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(job_record, "UNKNOWN_PAUSE_MS", 1_000_000)

        async with self.with_errors(tmp_path, RuntimeError("crash"), happens=True) as (job, store, record, world):
            patching = asyncio.ensure_future(job.patch_checkpoint_config(PATCH))
            await world.until(lambda: not record.errors)
            await world.until(lambda: store.jobs.get(JOB).checkpoint_overrides is not None)
            assert job.checkpoint_config().settings.timeout_ms == 60_000
            await crash(job)
            patching.cancel()
            recovered = await taken_over(world, driver(tmp_path, 2))
            assert recovered.checkpoint_config().settings.timeout_ms == 77_000

    @pytest.mark.row("571.6")
    @pytest.mark.parametrize("happens", [True, False])
    async def test_an_unknown_outcome_is_settled(self, tmp_path: Path, happens: bool) -> None:
        unknown = [AmbiguousWriteError("timeout", "x"), StorageError("away", "x"), AmbiguousWriteError("timeout", "x")]
        async with self.with_errors(tmp_path, *unknown, happens=happens) as (job, store, _, _):
            assert (await job.patch_checkpoint_config(PATCH)).settings.timeout_ms == 77_000
            assert store.jobs.get(JOB).checkpoint_overrides == '{"checkpointTimeout": 77000}'

    @pytest.mark.row("571.6")
    @pytest.mark.parametrize("happens", [True, False])
    async def test_patch_of_unknown_outcome_is_reported_as_unknown_and_applied_if_stored(
        self, tmp_path: Path, happens: bool
    ) -> None:
        unknown = [AmbiguousWriteError("timeout", "x")] * 1000
        async with self.with_errors(tmp_path, *unknown, happens=happens) as (job, _, record, world):
            with pytest.raises(NotReady, match="unknown whether the change is stored"):
                await job.patch_checkpoint_config(PATCH)
            with pytest.raises(UpdateInProgress):
                await job.patch_checkpoint_config(PATCH)
            record.errors.clear()
            if happens:
                await world.until(lambda: job.checkpoint_config().settings.timeout_ms == 77_000)
            later = CheckpointOverrides(min_pause_ms=5)
            while job.checkpoint_config().settings.min_pause_ms != 5:
                try:
                    await job.patch_checkpoint_config(later)
                except UpdateInProgress:
                    await asyncio.sleep(0.001)
            assert job.checkpoint_config().settings.timeout_ms == (77_000 if happens else 60_000)

    async def test_patch_of_unknown_outcome_is_abandoned_with_the_job(self, tmp_path: Path) -> None:
        async with self.with_errors(tmp_path, *[AmbiguousWriteError("timeout", "x")] * 1000) as (
            job,
            store,
            record,
            world,
        ):
            with pytest.raises(NotReady, match="unknown whether the change is stored"):
                await job.patch_checkpoint_config(PATCH)
            job.cancel()
            await world.until(lambda: store.jobs.list_ids() == [])
            update = job._shell.core._update
            assert update.is_busy
            record.errors.clear()
            await world.until(lambda: not update.is_busy)

    @pytest.mark.row("571.6")
    async def test_second_of_two_concurrent_patches_is_refused(self, tmp_path: Path) -> None:
        async with self.with_errors(tmp_path) as (job, _, record, _):
            record.gate.clear()
            first = asyncio.create_task(job.patch_checkpoint_config(PATCH))
            await asyncio.sleep(0)
            with pytest.raises(UpdateInProgress, match=JOB):
                await job.patch_checkpoint_config(None)
            record.gate.set()
            assert (await first).settings.timeout_ms == 77_000

    @pytest.mark.row("571.1")
    @pytest.mark.parametrize("errors", [(), (StorageError("away", "x"),), (NotLeaderError("another leads", "x"),)])
    async def test_patch_of_a_job_that_ends_names_its_end(self, tmp_path: Path, errors: tuple[Exception, ...]) -> None:
        async with self.with_errors(tmp_path, *errors) as (job, _, record, world):
            record.gate.clear()
            patching = asyncio.create_task(job.patch_checkpoint_config(PATCH))
            await asyncio.sleep(0)
            job.cancel()
            await world.status(job, JobStatus.CANCELED)
            record.gate.set()
            with pytest.raises(JobTerminated, match="CANCELED"):
                await patching

    async def test_patch_that_would_break_the_next_start_is_never_stored(self, tmp_path: Path) -> None:
        async with self.with_errors(tmp_path) as (job, store, _, _):
            with pytest.raises(InvalidRequest, match="timeout_ms is 3"):
                await job.patch_checkpoint_config(CheckpointOverrides(timeout_ms=3))
            assert store.jobs.get(JOB).checkpoint_overrides is None
