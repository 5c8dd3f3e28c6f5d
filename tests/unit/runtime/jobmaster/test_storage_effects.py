"""A real coordinator on a real directory: effects become files, timers and messages, and come back as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointProperties, CheckpointType
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.jobmaster import job_host, storage_effects
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.scheduler.core_events import JobInput, LeadershipLost
from ckpt_runtime.scheduler.job_events import SuspendRequested
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import make_directory, resolve
from tests.unit.runtime.jobmaster.shell_bench import TASKS, TIMEOUT_S, opened


@pytest.fixture(autouse=True)
def hasty_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 1)


class Mount:
    """A file system that goes away and comes back, as its users see it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._away = path.with_name("away")

    def goes_away(self) -> None:
        self.path.rename(self._away)
        self.path.mkdir()

    def comes_back(self) -> None:
        self.path.rmdir()
        self._away.rename(self.path)


async def test_newer_checkpoint_replaces_the_older_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as bench:
        for _ in range(3):
            checkpoint_id, _ = await bench.checkpoint()
        assert bench.names() == [f"chk-{checkpoint_id}"]
        assert list(bench.pointers.present) == [checkpoint_id]


async def test_state_that_comes_after_the_abort_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
        checkpoint_id, options = await bench.trigger()
        reason = CheckpointFailureReason.CHECKPOINT_DECLINED
        bench.shell.tell(on.Declined(checkpoint_id, TASKS[1], reason, "no"))
        await bench.settle()
        make_directory(resolve(options.directory))
        late = bench.acknowledge(checkpoint_id, options.directory)[0]
        await bench.settle()
        assert not late.exists()


async def test_a_checkpoint_expires_by_the_clock(tmp_path: Path) -> None:
    async with opened(tmp_path, timeout_ms=10, tolerable_failed_checkpoints=5) as bench:
        bench.shell.tell(on.TriggerRequested("r", CheckpointProperties()))
        await bench.until(lambda: bool(bench.listener.answers))
        (answer,) = bench.listener.answers
        assert isinstance(answer, out.RequestFailed)
        assert answer.reason is CheckpointFailureReason.CHECKPOINT_EXPIRED


@pytest.mark.parametrize("target", [None, "", "relative", "nosuch://x"])
async def test_savepoint_without_a_usable_target_fails_before_any_task_is_triggered(
    tmp_path: Path, target: str | None
) -> None:
    async with opened(tmp_path) as bench:
        await bench.trigger(CheckpointType.SAVEPOINT, target)
        (answer,) = bench.listener.answers
        assert isinstance(answer, out.RequestFailed)
        assert not answer.reached_tasks
        assert bench.listener.triggers == []


async def test_a_checkpoint_directory_that_cannot_be_made_fails_the_checkpoint(tmp_path: Path) -> None:
    async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
        for number in range(1, 4):
            (bench.directory / f"chk-{number}").write_text("in the way")
        await bench.trigger()
        assert isinstance(bench.listener.answers[0], out.RequestFailed)


class TestMetadata:
    def write(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception, happens: bool = False) -> None:
        """Writes of metadata fail with these errors in turn, having happened all the same or not."""
        real, left = storage_effects.write_metadata, list(errors)

        def write(*arguments: Any) -> str:
            if left:
                if happens:
                    real(*arguments)
                raise left.pop(0)
            return real(*arguments)

        monkeypatch.setattr(storage_effects, "write_metadata", write)

    async def test_a_write_that_failed_fails_the_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write(monkeypatch, StorageError("full", "x"))

        async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            await bench.settle()
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert "full" in bench.listener.answers[0].message
            assert bench.names() == []
            assert bench.pointers.present == {}

    @pytest.mark.parametrize("happens", [True, False])
    async def test_an_unknown_outcome_is_settled_by_looking(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
    ) -> None:
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), StorageError("late", "x"), happens=happens)

        async with opened(tmp_path) as bench:
            checkpoint_id, _ = await bench.checkpoint()
            assert (bench.directory / f"chk-{checkpoint_id}" / "_metadata").exists()

    async def test_refused_second_attempt_leaves_the_outcome_of_the_first_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusals = [InvalidLocationError("no such store", "x"), CorruptFileError("foreign", "x"), ValueError("odd")]
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), *refusals)

        async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
            checkpoint_id, _ = await bench.checkpoint()
            assert (bench.directory / f"chk-{checkpoint_id}" / "_metadata").exists()
            assert bench.listener.aborted == []

    async def test_attempt_whose_directory_is_missing_is_known_to_have_failed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), NotFoundError("gone", "x"))

        async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert "gone" in bench.listener.answers[0].message

    async def test_a_savepoint_whose_record_fails_is_complete_once_it_is_recorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        errors = [StorageError("away", "x"), AmbiguousWriteError("timeout", "x"), StorageError("away", "x")]

        def settle(record: JobRecord, checkpoint_id: int) -> None:
            if errors:
                assert bench.listener.answers == []
                raise errors.pop(0)

        monkeypatch.setattr(JobRecord, "settle_savepoint", settle)
        async with opened(tmp_path) as bench:
            checkpoint_id, options = await bench.trigger(CheckpointType.SAVEPOINT, str(tmp_path / "savepoints"))
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            assert isinstance(bench.listener.answers[0], out.RequestCompleted)
            assert errors == []


class TestPointers:
    async def test_pointer_that_cannot_be_added_fails_the_checkpoint(self, tmp_path: Path) -> None:
        async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
            bench.pointers.add_errors = [StorageError("no", "x")]
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            await bench.settle()
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert bench.names() == []

    async def test_an_unknown_outcome_is_settled(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as bench:
            bench.pointers.add_errors = [AmbiguousWriteError("timeout", "x")] * 3
            checkpoint_id, _ = await bench.checkpoint()
            assert bench.pointers.present == {checkpoint_id: True}

    async def test_failed_second_attempt_leaves_the_outcome_of_the_first_unknown(self, tmp_path: Path) -> None:
        async with opened(tmp_path, tolerable_failed_checkpoints=5) as bench:
            bench.pointers.add_errors = [AmbiguousWriteError("timeout", "x"), *[StorageError("away", "x")] * 3]
            checkpoint_id, _ = await bench.checkpoint()
            assert bench.pointers.present == {checkpoint_id: True}
            assert bench.names() == [f"chk-{checkpoint_id}"]
            assert bench.listener.aborted == []

    async def test_removal_of_a_pointer_is_repeated_before_files_are_deleted(self, tmp_path: Path) -> None:
        async with opened(tmp_path) as bench:
            await bench.checkpoint()
            bench.pointers.remove_errors = [StorageError("no", "x")] * 2
            second, _ = await bench.checkpoint()
            bench.shell.tell(on.Shutdown("SUSPENDED"))
            await bench.until(lambda: isinstance(bench.listener.answers[-1], out.ShutdownComplete))
            assert bench.names() == [f"chk-{second}"]
            assert list(bench.pointers.present) == [second]


async def test_files_that_cannot_be_deleted_do_not_stop_the_job_and_are_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = storage_effects.delete_checkpoint
    storage_is_away = [True]

    def refuse(*arguments: Any) -> None:
        if storage_is_away:
            raise StorageError("read-only", "x")
        delete(*arguments)

    monkeypatch.setattr(storage_effects, "delete_checkpoint", refuse)
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1_000_000)
    monkeypatch.setattr(job_host, "MAX_DELETION_PAUSE_MS", 1_000_000)

    async with opened(tmp_path) as bench:
        await bench.checkpoint()
        await bench.checkpoint()
        assert bench.names() == ["chk-1", "chk-2"]
        storage_is_away.clear()
        await bench.checkpoint()
        await bench.settle()
        assert bench.names() == ["chk-3"]


async def test_failed_deletions_are_repeated_after_the_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = storage_effects.delete_checkpoint
    refusals = [StorageError("away", "x")] * 5

    def refuse(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        delete(*arguments)

    monkeypatch.setattr(storage_effects, "delete_checkpoint", refuse)
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1)

    async with opened(tmp_path) as bench:
        await bench.checkpoint()
        bench.shell.clean_up_after(JobStatus.FINISHED)
        await bench.until(lambda: isinstance(bench.listener.answers[-1], out.ShutdownComplete))
        async with asyncio.timeout(TIMEOUT_S):
            while bench.directory.exists():
                await asyncio.sleep(0.001)


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mount:
    monkeypatch.setattr(job_host, "DELETION_PAUSE_MS", 1)
    monkeypatch.setattr(job_host, "MAX_DELETION_PAUSE_MS", 10)
    (tmp_path / "mount").mkdir()
    return Mount(tmp_path / "mount")


class TestStorageThatIsAway:
    """A mount that is missing shows an empty directory in its place; what was on it comes back with it."""

    async def test_aborted_checkpoint_is_deleted_when_storage_returns(self, mount: Mount) -> None:
        async with opened(mount.path, tolerable_failed_checkpoints=5) as bench:
            _, options = await bench.trigger()
            (Path(options.directory.removeprefix("file://")) / "state-0").touch()
            mount.goes_away()
            bench.shell.tell(on.TasksLeftRunning())
            await bench.settle()
            mount.comes_back()
            await once(lambda: bench.names() == [])

    async def test_files_are_not_written_in_place_of_a_missing_mount(self, mount: Mount) -> None:
        async with opened(mount.path, tolerable_failed_checkpoints=5) as bench:
            mount.goes_away()
            await bench.trigger()
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert "its storage is away" in bench.listener.answers[0].message
            assert list(mount.path.iterdir()) == []

    @pytest.mark.parametrize("keeps_nothing", [True, False])
    async def test_directory_of_an_ended_job_is_deleted_when_storage_returns(
        self, mount: Mount, keeps_nothing: bool
    ) -> None:
        retention = None if keeps_nothing else CheckpointRetention.RETAIN_ON_CANCELLATION
        settings = {} if retention is None else {"retention": retention}
        async with opened(mount.path, tolerable_failed_checkpoints=5, **settings) as bench:
            bench.shell.storage.prepare()
            checkpoint_id, _ = await bench.trigger()
            mount.goes_away()
            bench.shell.clean_up_after(JobStatus.CANCELED)
            await bench.until(lambda: isinstance(bench.listener.answers[-1], out.ShutdownComplete))
            await bench.settle()
            mount.comes_back()
            assert (bench.directory / f"chk-{checkpoint_id}").exists()
            await once(lambda: not bench.directory.exists())

    async def test_outcome_of_a_write_stays_unknown_until_storage_returns(
        self, mount: Mount, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = storage_effects.write_metadata
        monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 1)

        def written_but_unknown(*arguments: Any) -> None:
            monkeypatch.setattr(storage_effects, "write_metadata", real)
            real(*arguments)
            mount.goes_away()
            raise AmbiguousWriteError("no answer", "x")

        monkeypatch.setattr(storage_effects, "write_metadata", written_but_unknown)

        async with opened(mount.path, tolerable_failed_checkpoints=5) as bench:
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.settle()
            assert bench.listener.completed == bench.listener.aborted == []
            mount.comes_back()
            await bench.until(lambda: bench.listener.completed == [checkpoint_id])

    async def test_files_left_by_a_killed_worker_are_searched_when_storage_returns(self, mount: Mount) -> None:
        async with opened(mount.path, tolerable_failed_checkpoints=5) as bench:
            checkpoint_id, _ = await bench.trigger()
            left = bench.directory / "shared" / f"chk-{checkpoint_id}-left"
            left.touch()
            bench.shell.tell(on.TasksLeftRunning())
            mount.goes_away()
            for attempt in range(2):
                bench.shell.tell(on.RestoreRequested(f"restore-{attempt}", None, RecoveryClaimMode.NO_CLAIM))
            await bench.settle()
            mount.comes_back()
            bench.shell.tell(on.JobRunning(TASKS))
            while left.exists():
                await bench.checkpoint()


async def once(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not holds():
            await asyncio.sleep(0.001)


async def test_requests_and_timers_are_dropped_after_closing(tmp_path: Path) -> None:
    async with opened(tmp_path, interval_ms=10) as bench:
        bench.shell.tell(on.TriggerRequested("r", CheckpointProperties()))
        bench.shell.close()
        await bench.settle()
        assert bench.listener.triggers == []
        assert bench.listener.answers == []
        assert not bench.shell._timers._started


@pytest.mark.parametrize("event", [SuspendRequested(), LeadershipLost()])
async def test_files_of_a_suspended_job_that_another_driver_may_write_stay(tmp_path: Path, event: JobInput) -> None:
    async with opened(tmp_path) as bench:
        await bench.checkpoint()
        (bench.directory / "chk-2").mkdir()
        (bench.directory / "chk-2" / "state-0").write_bytes(b"its metadata comes last")
        bench.shell.tell(event)
        await bench.until(lambda: any(isinstance(answer, out.ShutdownComplete) for answer in bench.listener.answers))
        await bench.settle()
        assert bench.names() == ["chk-1", "chk-2"]


def test_waits_between_retries_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_effects, "RETRY_BASE_MS", 200)
    assert [storage_effects.backoff_ms(attempt) for attempt in (0, 1, 2, 3, 100)] == [0, 200, 400, 800, 30_000]


def test_pointers_count_as_stored_without_high_availability() -> None:
    record = JobRecord()
    record.remove(1)
    assert record.contains(1)
