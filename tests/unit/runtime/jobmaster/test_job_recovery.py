"""Jobs outlive their driver: crashes at every write, unknown outcomes, clean-up that the next driver finishes."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.jobmaster import known_jobs, storage_effects
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.gateway_values import (
    ExceptionEntry,
    NotReady,
    RescaleInProgress,
    SavepointRequest,
)
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.job_view import MAX_STORED, MAX_STORED_CHARS, FailureLog
from ckpt_runtime.jobmaster.known_jobs import FoundJob, find_jobs
from ckpt_runtime.jobmaster.operations import OperationFailure
from ckpt_runtime.network.control_messages import DeclineCheckpoint, TriggerCheckpoint, WorkerCommand
from ckpt_runtime.rest import checkpoint_answers as answers
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.snapshots.job_claims import claim_snapshot
from ckpt_runtime.storage import checkpoint_storage, job_store, metadata, versioned_document
from ckpt_runtime.storage.claims import Claimant
from ckpt_runtime.storage.errors import AmbiguousWriteError, StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.metadata import METADATA_NAME
from ckpt_runtime.storage.versioned_document import encode_document
from tests.support.patience import patient
from tests.unit.runtime.jobmaster.drivers import (
    UnsurePlan,
    canceled_with_savepoint,
    checkpoint,
    crash,
    driver,
    files_in,
    found_by,
    make_hasty,
    names,
    stored_job,
    submission_found_by,
    taken_over,
)
from tests.unit.runtime.jobmaster.fake_slots import JOB, FakeWorker, World

PATCH = CheckpointOverrides(timeout_ms=77_000)
RETAIN = {"execution__checkpointing__externalized_checkpoint_retention": "RETAIN_ON_CANCELLATION"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    make_hasty(monkeypatch)


@pytest.mark.row("571.5")
async def test_a_new_driver_continues_with_overrides_from_the_latest_checkpoint(tmp_path: Path) -> None:
    async with stored_job(tmp_path, execution__checkpointing__timeout="1 min") as (world, job, _):
        assert (await job.patch_checkpoint_config(PATCH)).settings.timeout_ms == 77_000
        await checkpoint(job)
        latest = await checkpoint(job)
        await crash(job)

        submission = submission_found_by(driver(tmp_path, 2))
        assert submission.archive == b"archive"
        recovered = world.recover_job(submission)
        await world.running(recovered)
        assert world.active()[0].deployment.restored_checkpoint_id == latest
        assert world.active()[0].deployment.attempt == 1
        assert recovered.metrics()["numRestarts"] == "0"
        shown = recovered.checkpoint_config()
        assert (shown.settings.timeout_ms, shown.overrides) == (77_000, ("timeout_ms",))
        assert recovered.overview().start_time_ms == job.overview().start_time_ms
        assert await checkpoint(recovered) > latest
        assert (await recovered.patch_checkpoint_config(None)).settings.timeout_ms == 60_000
        await crash(recovered)
        third = found_by(driver(tmp_path, 3)).submission
        assert third is not None
        assert third.history.overrides is None


@pytest.mark.row("203.14")
async def test_a_new_driver_continues_at_the_stored_parallelism(tmp_path: Path) -> None:
    async with stored_job(tmp_path) as (world, job, _):
        assert {bounds.upper for bounds in job.resource_requirements().values()} == {2}
        await job.rescale(dict.fromkeys("sk", ParallelismBounds(3, 3)))
        await world.running(job)
        latest = await checkpoint(job)
        assert [slot.owner is not None for slot in world.slot_pool.all()] == [True] * 3
        assert world.slots.launched == ["0", "1", "2"]
        await crash(job)

        recovered = await taken_over(world, driver(tmp_path, 2))
        assert recovered.graph.slots == 3
        assert world.active()[0].deployment.restored_checkpoint_id == latest
        assert len(world.active()) == 3
        await recovered.rescale(dict.fromkeys("sk", ParallelismBounds(1, 1)))
        await world.until(lambda: sum(slot.owner is not None for slot in world.slot_pool.all()) == 1)
        assert JobGraph.from_json(driver(tmp_path, 3).jobs.get(JOB).graph).slots == 1


@pytest.mark.row("203.14")
async def test_the_same_rescale_again_is_that_one_and_another_one_is_refused(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        job = world.start_job()
        await world.running(job)
        same, other = (dict.fromkeys("sk", ParallelismBounds(number, number)) for number in (3, 1))
        answers = await asyncio.gather(job.rescale(same), job.rescale(same), job.rescale(other), return_exceptions=True)
        assert [type(answer) for answer in answers] == [type(None), type(None), RescaleInProgress]
        await world.running(job)
        await job.rescale(same)
        assert job.metrics()["numRestarts"] == "1"


@pytest.mark.row("203.14")
async def test_a_rescale_that_was_not_stored_after_all_leaves_the_job_as_it_was(tmp_path: Path) -> None:
    async with stored_job(tmp_path, record=UnsurePlan(driver(tmp_path), JOB)) as (world, job, _):
        with pytest.raises(NotReady, match="unknown whether the change is stored"):
            await job.rescale(dict.fromkeys("sk", ParallelismBounds(3, 3)))
        await world.until(lambda: {bounds.upper for bounds in job.resource_requirements().values()} == {2})
        await world.until(lambda: sum(slot.owner is not None for slot in world.slot_pool.all()) == 2)
        assert job.metrics()["numRestarts"] == "0"
        (entry,) = job.exception_history(5).entries
        assert entry.failure.exception == "RescaleException"


@pytest.mark.row("571.7")
async def test_a_job_stored_without_overrides_recovers(tmp_path: Path) -> None:
    async with stored_job(tmp_path) as (world, job, store):
        await crash(job)
        assert JOB_CHECKPOINT_OVERRIDES not in store.jobs.get(JOB).configuration
        recovered = await taken_over(world, driver(tmp_path, 2))
        assert recovered.checkpoint_config().overrides == ()
        assert world.active()[0].deployment.restored_checkpoint_id is None


async def test_a_job_without_a_checkpoint_of_its_own_starts_from_its_savepoint_again(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        location = await canceled_with_savepoint(world, tmp_path)
        store = driver(tmp_path)
        job = world.submit_durably(store, savepoint=known_jobs.read_snapshot(location))
        await world.running(job)
        assert [pointer.owned for pointer in store.pointers(JOB).list().values()] == [False]
        await crash(job)
        recovered = await taken_over(world, driver(tmp_path, 2))
        assert world.active()[0].deployment.snapshot_directory == location
        await checkpoint(recovered)
        assert (Path(location.removeprefix("file://")) / "_metadata").exists()


async def test_next_driver_deletes_exactly_the_files_that_a_crashed_driver_did_not_delete(tmp_path: Path) -> None:
    foreign = tmp_path / "checkpoints" / JOB / "chk-3"
    foreign.mkdir(parents=True)
    (foreign / "_metadata").touch()

    async with stored_job(tmp_path) as (world, job, _):
        latest = await checkpoint(job)
        assert latest == 4
        await world.until(lambda: "chk-4" in names(tmp_path))
        await crash(job)
        root = foreign.parent
        shutil.copytree(root / "chk-4", root / "chk-5")  # completed, but its pointer never was
        (root / "chk-6").mkdir()  # never completed
        driver(tmp_path).counters(JOB).reserve_checkpoint(6)
        (root / "chk-9").mkdir()  # of another driver
        recovered = await taken_over(world, driver(tmp_path, 2))
        assert names(tmp_path) == ["chk-3", "chk-4", "chk-5", "chk-6", "chk-9"]
        assert await checkpoint(recovered) == 7
        await world.until(lambda: names(tmp_path) == ["chk-3", "chk-7", "chk-9"])


@pytest.mark.row("203.6")
@pytest.mark.parametrize("crash_at", ["first file", "settling"])
async def test_a_claimed_snapshot_whose_deletion_a_crash_interrupted_is_deleted_by_the_next_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: str
) -> None:
    """It lies outside the job's directory, and its metadata, which knows its files, goes first."""
    crashed = threading.Event()
    execute, delete = checkpoint_storage.SnapshotDisposal.execute, checkpoint_storage.delete_file

    def dies(file: Any) -> None:
        if crashed.is_set():
            raise StorageError("the driver is gone", "x")
        delete(file)
        crashed.set()

    def dies_at_its_end(order: checkpoint_storage.SnapshotDisposal) -> None:
        execute(order)
        crashed.set()
        raise StorageError("the driver is gone", "x")

    async with World.start(tmp_path) as world:
        location = await canceled_with_savepoint(world, tmp_path)
        claimed = Path(location.removeprefix("file://"))
        assert len(files_in(claimed)) > 1
        (claimed / "notes.txt").write_text("not of this job")
        store = driver(tmp_path)
        snapshot = known_jobs.read_snapshot(location)
        claims = claim_snapshot(snapshot, Claimant(JOB, store.root.url, (tmp_path / "checkpoints" / JOB).as_uri()))
        assert "claim" in files_in(claimed)
        job = world.submit_durably(store, savepoint=snapshot, claim_mode=RecoveryClaimMode.CLAIM, claims=claims)
        await world.running(job)
        with monkeypatch.context() as patch:
            if crash_at == "first file":
                patch.setattr(checkpoint_storage, "delete_file", dies)
            else:
                patch.setattr(checkpoint_storage.SnapshotDisposal, "execute", dies_at_its_end)
            latest = await checkpoint(job)
            await world.until(crashed.is_set)
            await crash(job)
        assert list(store.pointers(JOB).disposals()) == [snapshot.id]
        assert not (claimed / "_metadata").exists()

        later = driver(tmp_path, 2)
        await taken_over(world, later)
        assert world.active()[0].deployment.restored_checkpoint_id == latest
        await world.until(lambda: not later.pointers(JOB).disposals())
        assert files_in(claimed) == ["notes.txt"], "the claim has gone with the rest, as the next driver knows of it"


@pytest.mark.parametrize("crash_at", ["the first file", "the metadata"])
async def test_a_savepoint_that_a_crash_interrupted_leaves_no_directory_and_a_complete_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash_at: str
) -> None:
    savepoints = tmp_path / "savepoints"

    def writes_and_says_nothing(worker: FakeWorker, message: WorkerCommand) -> bool:
        if isinstance(message, TriggerCheckpoint):
            (Path(message.options.directory.removeprefix("file://")) / f"state-{worker.index}").write_bytes(b"state")
        return isinstance(message, TriggerCheckpoint)

    def dies(record: DurableRecord, checkpoint_id: int) -> None:
        raise StorageError("the driver is gone", "x")

    async with stored_job(tmp_path) as (world, job, _):
        with monkeypatch.context() as patch:
            if crash_at == "the first file":
                patch.setattr(world.slots.workers[0], "behaviour", writes_and_says_nothing)
                taken = job.take_savepoint(SavepointRequest(str(savepoints)))
                taking = asyncio.ensure_future(taken)
                await world.until(lambda: savepoints.exists() and "state-0" in files_in(savepoints))
            else:
                patch.setattr(DurableRecord, "settle_savepoint", dies)
                taken = job.take_savepoint(SavepointRequest(str(savepoints)))
                taking = asyncio.ensure_future(taken)
                await world.until(lambda: savepoints.exists() and METADATA_NAME in files_in(savepoints))
            await crash(job)
        assert len(driver(tmp_path).pointers(JOB).pending_savepoints()) == 1
        later = driver(tmp_path, 2)
        recovered = await taken_over(world, later)
        # A worker of the dead driver may still write: what it writes is deleted once a checkpoint is complete.
        while later.pointers(JOB).pending_savepoints():
            await checkpoint(recovered)
        kept = [directory for directory in savepoints.iterdir() if (directory / "_metadata").exists()]
        assert list(savepoints.iterdir()) == kept
        assert len(kept) == (crash_at == "the metadata")
        with pytest.raises(OperationFailure, match="shutdown"):
            await taking


async def test_a_driver_that_was_paused_while_it_wrote_a_savepoints_metadata_does_not_call_it_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, paused, resumed = storage_effects.write_metadata, threading.Event(), threading.Event()

    def pauses(directory: Location, document: Mapping[str, Any]) -> str:
        paused.set()
        assert resumed.wait(patient(60))
        Path(directory.path).mkdir(parents=True)  # an object store writes into a directory that is gone
        return write(directory, document)

    async with stored_job(tmp_path) as (world, job, _):
        monkeypatch.setattr(storage_effects, "write_metadata", pauses)
        taken = job.take_savepoint(SavepointRequest(str(tmp_path / "savepoints")))
        taking = asyncio.ensure_future(taken)
        await world.until(paused.is_set)
        later = driver(tmp_path, 2)
        await taken_over(world, later)
        await world.until(lambda: not any((tmp_path / "savepoints").iterdir()))
        resumed.set()
        await world.until(lambda: job.status is JobStatus.SUSPENDED)
        assert files_in(tmp_path / "savepoints") == [METADATA_NAME], "its state is gone"
        with pytest.raises(OperationFailure, match="shutdown"):
            await taking


@pytest.mark.parametrize("end", ["complete", "aborted"])
async def test_a_savepoint_that_has_ended_is_expected_no_longer(tmp_path: Path, end: str) -> None:
    def declines(worker: FakeWorker, message: WorkerCommand) -> bool:
        if not isinstance(message, TriggerCheckpoint) or end == "complete":
            return False
        reason = CheckpointFailureReason.CHECKPOINT_DECLINED.name
        worker.peer.send(DeclineCheckpoint(worker.number, "k", worker.index, message.checkpoint_id, reason, "not now"))
        return True

    async with stored_job(tmp_path) as (world, job, store):
        world.on_message = declines
        taken = await asyncio.gather(
            job.take_savepoint(SavepointRequest(str(tmp_path / "savepoints"))), return_exceptions=True
        )
        assert isinstance(taken[0], OperationFailure) == (end == "aborted")
        if end == "aborted":
            job.cancel()  # until then a task may write state for it
        await world.until(lambda: not store.pointers(JOB).pending_savepoints())
        assert len(list((tmp_path / "savepoints").iterdir())) == (end == "complete")


async def test_a_directory_without_the_name_of_a_savepoint_is_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()

    async with stored_job(tmp_path) as (world, job, _):
        await checkpoint(job)
        await crash(job)
        driver(tmp_path).pointers(JOB).expect_savepoint(99, (tmp_path / "precious").as_uri())
        recovered = await taken_over(world, driver(tmp_path, 2))
        await checkpoint(recovered)
        assert (tmp_path / "precious").exists()


@pytest.mark.parametrize("noted", [{"directory": 7}, {"directory": "/x", "files": ["../y"]}, {}])
async def test_a_disposal_that_cannot_be_trusted_deletes_nothing_and_stops_no_job(
    tmp_path: Path, noted: dict[str, Any]
) -> None:
    async with stored_job(tmp_path) as (world, job, _):
        await checkpoint(job)
        await crash(job)
        driver(tmp_path).pointers(JOB).remove(99, noted)
        submission = submission_found_by(driver(tmp_path, 2))
        assert not submission.history.disposals
        await world.running(world.recover_job(submission))


class TestHistory:
    """What a new driver shows of the time before it."""

    async def test_retained_checkpoints_are_shown(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path, execution__checkpointing__num_retained="2") as (world, job, _):
            ids = [await checkpoint(job) for _ in range(3)]
            await world.until(lambda: job.checkpoint_statistics().history[-1].discarded)
            before = {stats.id: stats for stats in job.checkpoint_statistics().history}
            await crash(job)
            recovered = await taken_over(world, driver(tmp_path, 2))
            shown = recovered.checkpoint_statistics()
            assert [stats.id for stats in shown.history] == [ids[2], ids[1]]
            for stats in shown.history:
                old = before[stats.id]
                assert (stats.status, stats.checkpoint_type) == (old.status, old.checkpoint_type)
                assert (stats.trigger_timestamp, stats.external_path) == (old.trigger_timestamp, old.external_path)
                assert (stats.state_size, stats.num_subtasks) == (old.state_size, old.num_subtasks)
                assert stats.num_acknowledged_subtasks == old.num_acknowledged_subtasks
                assert stats.vertices.keys() == old.vertices.keys()
            assert shown.latest_completed == shown.history[0]
            assert shown.latest_restored is not None
            assert (shown.latest_restored.id, shown.counts.completed) == (ids[2], 0)
            newest = await checkpoint(recovered)
            later = recovered.checkpoint_statistics()
            assert [stats.id for stats in later.history] == [newest, ids[2], ids[1]]
            assert [stats.discarded for stats in later.history] == [False, False, True]

    async def test_failures_are_shown(self, tmp_path: Path) -> None:
        restarting = {
            "restart_strategy__type": "fixed-delay",
            "restart_strategy__fixed_delay__attempts": "99",
            "restart_strategy__fixed_delay__delay": "0 ms",
        }

        async with World.start(tmp_path) as world:
            store = driver(tmp_path)
            job = world.submit_durably(store, **restarting)
            for number in range(3):
                await world.until(lambda: job.metrics()["numRestarts"] == str(number))  # noqa: B023
                await world.running(job)
                world.active()[0].peer.close()
                await world.until(lambda: len(job.exception_history(99).entries) == number + 1)  # noqa: B023
            entries = job.exception_history(99).entries
            await world.until(lambda: len(store.failures(JOB).read().get("entries", ())) == 3)
            await crash(job)
            recovered = await taken_over(world, driver(tmp_path, 2))
            shown = recovered.exception_history(99)
            assert [entry.timestamp_ms for entry in shown.entries] == [entry.timestamp_ms for entry in entries]
            assert [entry.failure for entry in shown.entries] == [entry.failure for entry in entries]
            assert recovered.exception_history(2).truncated
            recovered.cancel()
            await world.status(recovered, JobStatus.CANCELED)
            await world.until(lambda: not (tmp_path / "ha" / "default" / "jobs" / JOB).exists())

    async def test_a_history_that_cannot_be_read_stops_no_job(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path) as (_, job, store):
            await crash(job)
            store.failures(JOB).change(lambda _: {"entries": [{"failure": 7}]})
            submission = submission_found_by(driver(tmp_path, 2))
            assert submission.history.failures == ()

    def test_stored_failures_are_bounded(self) -> None:
        log = FailureLog(1_000)
        for number in range(40):
            cause = FailureCause("ValueError", "no", "x" * 1_000_000)
            log.add(ExceptionEntry(cause, number), concurrent=False)
            log.add(ExceptionEntry(cause, number), concurrent=True)
        stored = log.to_stored()
        assert [entry["timestamp_ms"] for entry in stored] == list(range(39, 39 - MAX_STORED, -1))
        (entry,) = checked(stored[0], ExceptionEntry).concurrent
        assert len(entry.failure.stack_trace) < 30_000

    def test_many_failures_with_all_that_came_along_can_be_stored(self) -> None:
        """Text that a worker should never have sent as well."""
        log = FailureLog(1_000)
        cause = FailureCause("ValueError\ud800", "\ud800" * 20_000_000, "\x00" * 20_000_000)
        for number in range(10):
            for _ in range(40):
                log.add(ExceptionEntry(cause, number), concurrent=number % 2 == 1)
        stored = log.to_stored()
        assert stored[0]["timestamp_ms"] == 8
        assert len(encode_document({"entries": stored})) < 4 * MAX_STORED_CHARS


class TestCrashAtEveryWrite:
    """The script of a job's life; storage stops answering before or after the n-th write, and a new driver comes."""

    class Storage:
        def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
            self.left = 1_000_000
            self.after = False
            self.writes = 0
            self.dead = False
            self._lock = threading.Lock()
            for module in (versioned_document, job_store, metadata):
                monkeypatch.setattr(module, "publish", self.wrap(module.publish))

        def wrap(self, publish: Callable[..., None]) -> Callable[..., None]:
            def wrapped(location: Location, data: bytes) -> None:
                with self._lock:
                    self.check()
                    self.writes += 1
                    self.left -= 1
                    self.dead = self.left <= 0
                    if not self.dead or self.after:
                        publish(location, data)
                if self.dead:
                    raise (AmbiguousWriteError if self.after else StorageError)("storage is away", "x")

            return wrapped

        def check(self) -> None:
            if self.dead:
                raise StorageError("storage is away", "x")

    @staticmethod
    async def script(world: World, store: HaStore, reported: dict[str, Any]) -> None:
        job = world.submit_durably(store)
        reported["submitted"] = True
        await world.running(job)
        reported["checkpoint"] = await checkpoint(job)
        await job.patch_checkpoint_config(PATCH)
        reported["patched"] = True
        reported["checkpoint"] = await checkpoint(job)
        for worker in world.active():
            worker.state(TaskState.FINISHED)
        await world.status(job, JobStatus.FINISHED)
        reported["finished"] = True
        await world.until(lambda: JOB not in store.jobs.list_ids() and not store.results.list_ids(dirty_only=True))

    async def life(self, world: World, storage: Storage, store: HaStore) -> dict[str, Any]:
        """Runs up to the first step that fails, or waits for storage; returns the answer to the user."""
        reported: dict[str, Any] = {}
        script = asyncio.ensure_future(self.script(world, store, reported))
        while not script.done() and not storage.dead:
            await asyncio.sleep(0.001)
        await asyncio.wait({script}, timeout=1.0)
        script.cancel()
        with suppress(asyncio.CancelledError, NotReady, OperationFailure):
            await script
        for job in world.jobs:
            await crash(job)
        # No call of the dead driver is under way when storage comes back.
        idle = threading.Barrier(2)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(world.pool.own, idle.wait) for _ in range(2)))
        return reported

    @pytest.mark.row("571.6")
    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("writes", range(1, 20))
    async def test_confirmed_changes_hold(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int, after: bool
    ) -> None:
        storage = self.Storage(monkeypatch)
        storage.left, storage.after = writes, after

        async with World.start(tmp_path) as world:
            reported = await self.life(world, storage, HaStore(str(tmp_path / "ha"), fence=storage.check, epoch=1))
            storage.left, storage.dead = 1_000_000, False
            successor = driver(tmp_path, 2)
            jobs = find_jobs(successor, Configuration())
            if not jobs:
                assert "submitted" not in reported
                return
            (found,) = jobs
            assert found.failure is None
            if found.result is not None:
                assert "checkpoint" in reported
                assert EndedJob(found.result).result().status is JobStatus.FINISHED
                if found.submission is not None:
                    await self.finish(world, found)
                assert successor.jobs.list_ids() == []
                assert successor.results.list_ids(dirty_only=True) == []
                assert names(tmp_path) == []
                return
            assert "finished" not in reported
            assert found.submission is not None
            overrides = CheckpointOverrides.from_document(found.submission.history.overrides)
            assert overrides.given == {"timeout_ms": 77_000} or "patched" not in reported
            latest = max((entry.checkpoint.id for entry in found.submission.history.checkpoints), default=0)
            assert latest >= reported.get("checkpoint", 0)
            recovered = world.recover_job(found.submission)
            await world.running(recovered)
            restored = world.active()[0].deployment
            assert (restored.restored_checkpoint_id or 0) == latest
            if latest:
                files = os.listdir(restored.snapshot_directory.removeprefix("file://"))
                assert sorted(files) == ["_metadata", "state-0", "state-1"]
            newest = await checkpoint(recovered)
            assert newest > latest
            await world.until(lambda: names(tmp_path) == [f"chk-{newest}"])

    @staticmethod
    async def finish(world: World, found: FoundJob) -> None:
        """What the dispatcher does with a job that ended and was not cleaned up."""
        assert found.submission is not None
        world.finish_job(found.submission, JobStatus.FINISHED)
        store = driver(world.directory, 2)
        await world.until(lambda: not store.jobs.list_ids() and not store.results.list_ids(dirty_only=True))

    async def test_script_has_no_more_writes_than_are_tested(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = self.Storage(monkeypatch)

        async with World.start(tmp_path) as world:
            reported = await self.life(world, storage, HaStore(str(tmp_path / "ha"), fence=storage.check, epoch=1))
            assert reported == {"submitted": True, "checkpoint": 2, "patched": True, "finished": True}
            assert storage.writes <= 19


async def ended(world: World, store: HaStore) -> EndedJob:
    """The only job as the next driver knows it, which has ended and is cleaned up."""
    await world.until(lambda: store.results.list_ids() == [JOB] and not store.results.list_ids(dirty_only=True))
    found = found_by(driver(world.directory, 2))
    assert found.submission is None
    assert found.result is not None
    return EndedJob(found.result)


class TestResults:
    async def test_a_cancelled_job_is_listed_by_the_next_driver_and_keeps_what_it_retains(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path, **RETAIN) as (world, job, store):
            await checkpoint(job)
            job.cancel()
            result = await ended(world, store)
            assert store.jobs.list_ids() == []
            assert names(tmp_path) == ["chk-1"]
            assert result.status is JobStatus.CANCELED
            assert result.overview().end_time_ms > 0
            assert result.config_info().configuration == job.config_info().configuration
            assert result.checkpoint_config() == job.checkpoint_config()
            assert [vertex.name for vertex in result.details().vertices] == ["numbers", "count"]
            assert result.result() == job.result()
            assert result.checkpoint_statistics().counts == job.checkpoint_statistics().counts
            assert result.checkpoint_statistics().counts.completed == 1

    @pytest.mark.parametrize("retained", [True, False])
    async def test_next_driver_knows_the_snapshot_to_resume_an_ended_job_from(
        self, tmp_path: Path, retained: bool
    ) -> None:
        async with stored_job(tmp_path, **RETAIN if retained else {}) as (world, job, store):
            await checkpoint(job)
            before = job.checkpoint_statistics().latest_completed
            assert before is not None
            job.cancel()
            statistics = (await ended(world, store)).checkpoint_statistics()
            assert statistics.latest_completed == replace(before, vertices={}, discarded=not retained)
            shown = answers.statistics(statistics).latest_completed
            assert shown is not None
            assert shown.external_path == before.external_path

    async def test_a_failed_job_keeps_its_exceptions(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path) as (world, job, store):
            world.active()[0].fail(only="s")
            await world.status(job, JobStatus.FAILED)
            result = await ended(world, store)
            assert result.exception_history(5) == job.exception_history(5)
            assert result.result() == job.result()
            metrics = job.metrics()
            assert result.metrics() == {name: metrics[name] for name in result.metrics()}
            assert result.metrics()["numRestarts"] == "0"
            assert result.checkpoint_statistics().history == ()

    async def test_end_that_cannot_be_stored_is_not_reported(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with stored_job(tmp_path) as (world, job, _):
            away = [True]
            attempts = []
            publish = versioned_document.publish

            def refuse(*arguments: Any) -> None:
                attempts.append(1)
                if away:
                    raise StorageError("away", "x")
                publish(*arguments)

            monkeypatch.setattr(versioned_document, "publish", refuse)
            job.cancel()
            await world.until(lambda: len(attempts) > 2)
            assert job.status is JobStatus.CANCELLING
            assert job.result().status is None
            away.clear()
            await world.status(job, JobStatus.CANCELED)


class TestUnreadable:
    """Never an older checkpoint, or none, in place of one that cannot be read."""

    @pytest.mark.parametrize("victim", ["plan", "result"])
    async def test_a_damaged_file_of_one_job_does_not_keep_the_others_from_being_found(
        self, tmp_path: Path, victim: str
    ) -> None:
        async with stored_job(tmp_path) as (_, job, _):
            await crash(job)
        store = driver(tmp_path)
        other = "fedcba9876543210" * 2
        store.jobs.put(replace(store.jobs.get(JOB), job_id=other))
        store.results.create_dirty(other, {})
        (tmp_path / "ha" / "default" / "jobs" / ("x" * 32)).mkdir()
        folder = "jobs/" + other + "/plan" if victim == "plan" else "results/" + other
        for file in (tmp_path / "ha" / "default" / folder).iterdir():
            file.write_bytes(file.read_bytes()[:-9])
        found = {job.job_id: job for job in find_jobs(driver(tmp_path, 2), Configuration())}
        assert found[JOB].submission is not None
        assert found[other].submission is None
        assert found[other].failure is not None
        assert "damaged" in found[other].failure
        assert sorted(found) == [JOB, other]

    async def test_an_ended_job_needs_no_savepoint_for_its_clean_up(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path) as (_, job, _):
            await crash(job)
        store = driver(tmp_path)
        request = {"pipeline_id": "p", "arguments": [], "claim_mode": "NO_CLAIM", "savepoint_path": "/gone"}
        properties = {**store.jobs.get(JOB).properties, "request": request}
        store.jobs.update(JOB, lambda job: replace(job, properties=properties))
        assert found_by(driver(tmp_path, 2)).failure is not None
        DurableRecord(driver(tmp_path, 2), JOB).end({"status": "CANCELED"})
        found = found_by(driver(tmp_path, 3))
        assert (found.failure, found.result) == (None, {"status": "CANCELED"})
        assert found.submission is not None

    @pytest.mark.parametrize("victim", ["metadata", "archive", "pointers"])
    async def test_job_whose_record_is_damaged_is_named_and_not_changed(self, tmp_path: Path, victim: str) -> None:
        async with stored_job(tmp_path, execution__checkpointing__num_retained="2") as (_, job, _):
            await checkpoint(job)
            await checkpoint(job)
            await crash(job)
            stored = tmp_path / "ha" / "default" / "jobs" / JOB
            damaged = {
                "metadata": tmp_path / "checkpoints" / JOB / "chk-2" / "_metadata",
                "archive": next(stored.glob("archive-*")),
                "pointers": max((stored / "checkpoints").iterdir()),
            }[victim]
            damaged.write_bytes(b"spoilt")
            found = found_by(driver(tmp_path, 2))
            assert found.submission is None
            assert found.failure is not None
            assert str(damaged) in found.failure
            assert names(tmp_path) == ["chk-1", "chk-2"]

    async def test_recovery_waits_for_storage_that_is_unavailable_for_a_moment(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with stored_job(tmp_path) as (_, job, _):
            await checkpoint(job)
            await crash(job)
            errors = [StorageError("away", "x")] * 3
            read = known_jobs.open_snapshot

            def refuse(url: str) -> Any:
                if errors:
                    raise errors.pop()
                return read(url)

            monkeypatch.setattr(known_jobs, "open_snapshot", refuse)
            assert found_by(driver(tmp_path, 2)).failure is None


async def test_a_job_id_that_is_taken_is_not_taken_over(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        store = driver(tmp_path)
        job = world.submit_durably(store)
        with pytest.raises(NotReady, match="already stored"):
            world.submit_durably(store)
        await world.running(job)
        job.cancel()
        await world.until(lambda: store.jobs.list_ids() == [] and store.results.list_ids() == [JOB])
        with pytest.raises(NotReady, match="already ended"):
            world.submit_durably(store)


@pytest.mark.parametrize("happens", [True, False])
async def test_a_submission_whose_outcome_is_unknown_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
) -> None:
    publish = versioned_document.publish
    errors = [AmbiguousWriteError("timeout", "x")]

    def unsure(*arguments: Any) -> None:
        if errors and "plan" in arguments[0].path:
            if happens:
                publish(*arguments)
            raise errors.pop()
        publish(*arguments)

    async with World.start(tmp_path) as world:
        monkeypatch.setattr(versioned_document, "publish", unsure)
        store = driver(tmp_path)
        job = world.submit_durably(store)
        await world.running(job)
        assert errors == []
        assert store.jobs.list_ids() == [JOB]
