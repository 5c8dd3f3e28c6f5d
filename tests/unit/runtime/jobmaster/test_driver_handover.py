"""What a former leader can still do, and what the next driver does with what it left: as the simulation assumes it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedStateHandle, OperatorSubtaskState, StateFile, SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.jobmaster.gateway_values import AfterSavepoint, NotReady, SavepointRequest
from ckpt_runtime.jobmaster.job_record import DurableRecord
from ckpt_runtime.jobmaster.operations import OperationFailure
from ckpt_runtime.network.control_messages import (
    AcknowledgeCheckpoint,
    NotifyCheckpointComplete,
    TriggerCheckpoint,
    WorkerCommand,
)
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage import versioned_document
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotLeaderError, StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.ha_store import HaStore
from tests.support.patience import patient
from tests.unit.runtime.jobmaster.drivers import checkpoint, crash, driver, found_by, make_hasty, names, stored_job
from tests.unit.runtime.jobmaster.fake_slots import JOB, FakeWorker, World

PATCH = CheckpointOverrides(timeout_ms=77_000)
TOLERANT = {"execution__checkpointing__tolerable_failed_checkpoints": "9"}


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    make_hasty(monkeypatch)


class Fence:
    """``error`` is raised from then on; :meth:`close_after` closes it when a document has been written."""

    def __init__(self) -> None:
        self.error: StorageError | None = None
        self.refused = 0
        """How often it was raised."""

    def __call__(self) -> None:
        if self.error is not None:
            self.refused += 1
            raise self.error

    def close_after(self, monkeypatch: pytest.MonkeyPatch, document: str, error: StorageError) -> None:
        publish = versioned_document.publish

        def published(location: Location, data: bytes) -> None:
            publish(location, data)
            if f"/{document}/" in location.path:
                self.error = error

        monkeypatch.setattr(versioned_document, "publish", published)


LOST = NotLeaderError("another driver leads", "x")


class TestFormerLeader:
    """It was paused, another driver leads, and it does not know."""

    async def test_a_pointer_that_came_in_time_is_not_acted_on_without_the_lead(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The new leader resumes from its complete checkpoint; the old one notifies no task and deletes nothing."""
        fence = Fence()

        async with World.start(tmp_path) as world:
            job = world.submit_durably(HaStore(str(tmp_path / "ha"), fence=fence, epoch=1), **TOLERANT)
            await world.running(job)
            await checkpoint(job)
            workers = world.active()
            fence.close_after(monkeypatch, "checkpoints", LOST)
            with pytest.raises(OperationFailure):
                await checkpoint(job)
            await world.status(job, JobStatus.SUSPENDED)
            for worker in workers:
                assert [message.checkpoint_id for message in worker.peer.of(NotifyCheckpointComplete)] == [1]
            assert names(tmp_path) == ["chk-1", "chk-2"]
            found = found_by(driver(tmp_path, 2))
            assert found.submission is not None
            assert [entry.checkpoint.id for entry in found.submission.history.checkpoints] == [1, 2]

    async def test_refused_pointer_does_not_count_as_a_failed_checkpoint(self, tmp_path: Path) -> None:
        """Nothing but the epoch in the document refuses it: no fence would keep its files from being deleted."""

        async with stored_job(tmp_path, **TOLERANT) as (world, job, _):
            world.ignored = (TriggerCheckpoint,)
            late = asyncio.create_task(checkpoint(job))
            await world.until(lambda: all(worker.peer.of(TriggerCheckpoint) for worker in world.active()))
            workers = world.active()
            found_by(driver(tmp_path, 2))
            for worker in workers:
                worker.acknowledge(worker.peer.of(TriggerCheckpoint)[-1])
            with pytest.raises(OperationFailure):
                await late
            await world.status(job, JobStatus.SUSPENDED)
            assert (tmp_path / "checkpoints" / JOB / "chk-1" / "_metadata").exists()
            for worker in workers:
                assert worker.peer.of(NotifyCheckpointComplete) == []

    async def test_a_lease_that_is_not_renewed_in_time_leaves_the_outcome_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fence = Fence()

        async with World.start(tmp_path) as world:
            job = world.submit_durably(HaStore(str(tmp_path / "ha"), fence=fence, epoch=1))
            await world.running(job)
            fence.close_after(monkeypatch, "checkpoints", StorageError("the lease has run out", "x"))
            pending = asyncio.create_task(checkpoint(job))
            await world.until(lambda: fence.error is not None)
            monkeypatch.undo()
            make_hasty(monkeypatch)
            refused = fence.refused
            await world.until(lambda: fence.refused > refused + 1)  # the driver has looked again, and waits again
            assert not pending.done()
            fence.error = None
            assert await pending == 1
            assert names(tmp_path) == ["chk-1"]

    @pytest.mark.parametrize(
        ("document", "write"),
        [
            ("counters", lambda record: record.reserve(5)),
            ("counters", lambda record: record.begin_attempt(5)),
            ("checkpoints", lambda record: record.remove(1)),
            ("plan", lambda record: record.change_overrides(lambda text: '{"checkpointTimeout": 5}')),
            (JOB, lambda record: record.end({"status": "FINISHED"})),
        ],
    )
    async def test_former_leaders_write_of_a_record_does_not_count(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: str, write: Callable[[DurableRecord], Any]
    ) -> None:
        fence = Fence()

        async with stored_job(tmp_path) as (_, job, _):
            await checkpoint(job)
            await crash(job)
            record = DurableRecord(HaStore(str(tmp_path / "ha"), fence=fence, epoch=1), JOB)
            fence.close_after(monkeypatch, document, LOST)
            with pytest.raises(NotLeaderError):
                write(record)

    @pytest.mark.row("571.5")
    @pytest.mark.row("571.6")
    async def test_former_leaders_patch_does_not_overwrite_the_plan_of_the_new_leader(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It has passed the fence and read the plan; then the new leader takes over; then its write goes out."""
        publish = versioned_document.publish
        arrived, go_on = threading.Event(), threading.Event()

        def held(location: Location, data: bytes) -> None:
            if b"77000" in data:
                arrived.set()
                go_on.wait()
            publish(location, data)

        async with stored_job(tmp_path, execution__checkpointing__timeout="1 min") as (world, job, _):
            monkeypatch.setattr(versioned_document, "publish", held)
            patching = asyncio.create_task(job.patch_checkpoint_config(PATCH))
            await world.until(arrived.is_set)
            successor = driver(tmp_path, 2)
            found = found_by(successor)
            go_on.set()
            with pytest.raises(NotReady):
                await patching
            assert found.submission is not None
            assert found.submission.history.overrides is None
            assert successor.jobs.get(JOB).checkpoint_overrides is None

    async def test_former_leader_acknowledges_no_submission(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The new leader may have looked for jobs just before."""
        fence = Fence()

        async with World.start(tmp_path) as world:
            fence.close_after(monkeypatch, "plan", LOST)
            with pytest.raises(NotReady, match="another driver leads"):
                world.submit_durably(HaStore(str(tmp_path / "ha"), fence=fence, epoch=1))

    async def test_former_leaders_result_does_not_end_a_job_that_the_new_leader_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A third driver would take the job for ended in the midst of its run."""
        publish = versioned_document.publish
        arrived, go_on, refused = threading.Event(), threading.Event(), threading.Event()

        def held(location: Location, data: bytes) -> None:
            if b'"CANCELED"' in data:
                arrived.set()
                go_on.wait()
                try:
                    publish(location, data)
                finally:
                    refused.set()
            else:
                publish(location, data)

        async with stored_job(tmp_path) as (world, job, _):
            monkeypatch.setattr(versioned_document, "publish", held)
            job.cancel()
            await world.until(arrived.is_set)
            successor = driver(tmp_path, 2)
            found = found_by(successor)
            assert found.result is None
            assert found.submission is not None
            go_on.set()
            await world.until(refused.is_set)
            assert successor.results.list_ids() == []
            assert found_by(driver(tmp_path, 3)).submission is not None
            await world.status(job, JobStatus.SUSPENDED)


@pytest.mark.row("571.5")
async def test_two_clusters_cannot_run_the_same_job_id_in_one_checkpoint_directory(tmp_path: Path) -> None:
    async with World.start(tmp_path) as world:
        flights, trains = (HaStore(str(tmp_path / "ha"), name, epoch=1) for name in ("flights", "trains"))
        job = world.submit_durably(flights)
        with pytest.raises(StorageError, match="belongs to the job of this id in the cluster .*/flights; choose"):
            world.submit_durably(trains)
        assert trains.jobs.list_ids() == []
        await world.running(job)
        await checkpoint(job)
        job.cancel()
        await world.status(job, JobStatus.CANCELED)
        await world.until(lambda: not (tmp_path / "checkpoints" / JOB).exists())
        await world.running(world.submit_durably(trains))


async def test_result_is_stored_before_files_of_the_job_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before it is stored leaves a job that resumes from its checkpoint, not one that starts from nothing."""
    publish = versioned_document.publish
    refused: list[str] = []
    crashed = threading.Event()

    def refuse(location: Location, data: bytes) -> None:
        """The third try of the first driver is in progress when it crashes, and is lost."""
        if "/results/" not in location.path or b'"epoch":1' not in data:
            publish(location, data)
            return
        refused.append(location.path)
        if len(refused) < 3:
            raise StorageError("away", "x")
        crashed.wait(patient(30))

    async with World.start(tmp_path) as world:
        monkeypatch.setattr(versioned_document, "publish", refuse)
        job = world.submit_durably(driver(tmp_path))
        await world.running(job)
        await checkpoint(job)
        job.cancel()
        await world.until(lambda: len(refused) > 2)
        await crash(job)
        crashed.set()
        found = found_by(driver(tmp_path, 2))
        assert found.result is None
        assert found.submission is not None
        assert [entry.checkpoint.id for entry in found.submission.history.checkpoints] == [1]
        assert names(tmp_path) == ["chk-1"]


def shared_state(directory: Path) -> Callable[[FakeWorker, WorkerCommand], bool]:
    """Workers whose stateful subtasks refer to a shared file each, by a path without a scheme."""

    def acknowledge(worker: FakeWorker, message: WorkerCommand) -> bool:
        if not isinstance(message, TriggerCheckpoint):
            return False
        for vertex_id, subtask in worker.subtasks:
            state = SubtaskState()
            if vertex_id == "k":
                file = directory / f"used-{subtask}"
                file.write_bytes(b"state")
                handle = KeyedStateHandle(key_group_range(128, 2, subtask), StateFile(str(file), 5, "xxh64:0"), ())
                state = SubtaskState({"count": OperatorSubtaskState((handle,))}, 5)
            about = message.checkpoint_id, message.options.directory
            metrics = CheckpointMetrics()
            worker.peer.send(AcknowledgeCheckpoint(worker.number, vertex_id, subtask, *about, state, metrics))
        return True

    return acknowledge


class TestLeftovers:
    async def test_leftovers_are_deleted_with_the_first_completion_and_referenced_files_stay(
        self, tmp_path: Path
    ) -> None:
        root = tmp_path / "checkpoints" / JOB
        shared = root / "shared"

        async with World.start(tmp_path) as world:
            world.on_message = shared_state(shared)
            job = world.submit_durably(driver(tmp_path))
            await world.running(job)
            await checkpoint(job)
            await crash(job)
            half = root / "chk-2"
            half.mkdir()
            (half / "state-0").write_bytes(b"half")
            (shared / "chk-2-unused").write_bytes(b"state")
            driver(tmp_path).counters(JOB).reserve_checkpoint(2)
            found = found_by(driver(tmp_path, 2))
            assert found.submission is not None
            recovered = world.recover_job(found.submission)
            await world.running(recovered)
            assert names(tmp_path) == ["chk-1", "chk-2"]
            assert await checkpoint(recovered) == 3
            await world.until(lambda: names(tmp_path) == ["chk-3"] and not (shared / "chk-2-unused").exists())
            assert sorted(path.name for path in shared.iterdir()) == ["used-0", "used-1"]


class TestDirectoryOfAnEndedJob:
    def litter(self, tmp_path: Path) -> list[Path]:
        """What a driver may leave that crashed in the midst of deleting."""
        root = tmp_path / "checkpoints" / JOB
        files = [root / "chk-77" / "_metadata", root / "shared" / "state", root / "taskowned" / "state"]
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(b"x")
        return files

    async def test_directory_of_an_ended_job_is_deleted_as_a_whole_and_those_of_other_jobs_stay(
        self, tmp_path: Path
    ) -> None:
        other = tmp_path / "checkpoints" / ("f" * 32) / "chk-1" / "_metadata"
        other.parent.mkdir(parents=True)
        other.touch()

        async with stored_job(tmp_path) as (world, job, _):
            await checkpoint(job)
            self.litter(tmp_path)
            job.cancel()
            await world.until(lambda: not (tmp_path / "checkpoints" / JOB).exists())
            assert other.exists()

    async def test_next_driver_completes_the_deletion_of_a_job_directory(self, tmp_path: Path) -> None:
        async with stored_job(tmp_path) as (world, job, store):
            await checkpoint(job)
            await crash(job)
            self.litter(tmp_path)
            store.results.create_dirty(JOB, {"status": "FINISHED"})
            found = found_by(driver(tmp_path, 2))
            assert found.submission is not None
            world.finish_job(found.submission, JobStatus.FINISHED)
            await world.until(lambda: not store.jobs.list_ids() and not store.results.list_ids(dirty_only=True))
            assert not (tmp_path / "checkpoints" / JOB).exists()

    async def test_files_of_an_earlier_job_of_the_same_id_or_of_a_user_stay(self, tmp_path: Path) -> None:
        root = tmp_path / "checkpoints" / JOB
        kept = [root / "chk-3" / "_metadata", root / "shared" / "theirs", root / "savepoint-1" / "_metadata"]
        for file in kept:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x")

        async with stored_job(tmp_path) as (world, job, store):
            assert await checkpoint(job) == 4
            job.cancel()
            await world.until(lambda: not store.jobs.list_ids() and names(tmp_path) == ["chk-3"])
            assert all(file.exists() for file in kept)

    async def test_retained_checkpoint_stays_complete(self, tmp_path: Path) -> None:
        retain = {"execution__checkpointing__externalized_checkpoint_retention": "RETAIN_ON_CANCELLATION"}

        async with stored_job(tmp_path, **retain) as (world, job, store):
            await checkpoint(job)
            shared = self.litter(tmp_path)[1]
            job.cancel()
            await world.until(lambda: not store.jobs.list_ids())
            assert names(tmp_path) == ["chk-1", "chk-77"]
            assert shared.exists()


class TestStopWithSavepoint:
    @staticmethod
    def files(directory: str) -> dict[str, bytes]:
        root = Path(directory.removeprefix("file://"))
        return {path.name: path.read_bytes() for path in root.iterdir()}

    async def test_a_driver_that_dies_before_the_job_has_ended_hands_over_the_savepoint(self, tmp_path: Path) -> None:
        """What the savepoint committed must not be committed again: the next driver resumes from it."""

        async with stored_job(tmp_path) as (world, job, store):
            await checkpoint(job)
            workers = world.active()
            stopping = asyncio.create_task(
                job.take_savepoint(SavepointRequest(str(tmp_path / "savepoints"), AfterSavepoint.STOP))
            )
            await world.until(lambda: all(len(worker.peer.of(NotifyCheckpointComplete)) == 2 for worker in workers))
            await world.until(lambda: list(store.pointers(JOB).list()) == [2])
            await crash(job)
            with pytest.raises(OperationFailure):
                await stopping

            found = found_by(driver(tmp_path, 2))
            assert found.submission is not None
            (entry,) = found.submission.history.checkpoints
            directory = entry.checkpoint.directory
            assert "/savepoints/savepoint-" in directory
            assert not entry.owned
            before = self.files(directory)
            recovered = world.recover_job(found.submission)
            await world.running(recovered)
            assert world.active()[0].deployment.snapshot_directory == directory
            assert await checkpoint(recovered) == 3
            await world.until(lambda: list(store.pointers(JOB).list()) == [3])
            for worker in world.active():
                worker.state(TaskState.FINISHED)
            await world.status(recovered, JobStatus.FINISHED)
            await world.until(lambda: not (tmp_path / "checkpoints" / JOB).exists())
            assert self.files(directory) == before

    async def test_tasks_are_not_notified_of_a_stop_before_its_pointer_is_durable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        publish = versioned_document.publish
        away = [True]
        refused: list[str] = []

        def unsure(location: Location, data: bytes) -> None:
            if away and "/checkpoints/" in location.path and b'"owned"' in data:
                refused.append(location.path)
                raise AmbiguousWriteError("timeout", "x")
            publish(location, data)

        async with stored_job(tmp_path) as (world, job, _):
            workers = world.active()
            monkeypatch.setattr(versioned_document, "publish", unsure)
            stopping = asyncio.create_task(
                job.take_savepoint(SavepointRequest(str(tmp_path / "savepoints"), AfterSavepoint.STOP))
            )
            await world.until(lambda: len(refused) > 10)
            assert all(worker.peer.of(NotifyCheckpointComplete) == [] for worker in workers)
            away.clear()
            await world.until(lambda: all(worker.peer.of(NotifyCheckpointComplete) for worker in workers))
            for worker in workers:
                worker.state(TaskState.FINISHED)
            done = await stopping
            assert job.status is JobStatus.FINISHED
            assert set(self.files(str(done.location))) == {"_metadata", "state-0", "state-1"}
