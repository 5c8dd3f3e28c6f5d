"""A real coordinator on a real directory: effects become files, timers and messages, and come back as events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import (
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.jobmaster import checkpoint_shell, snapshot_deletions
from ckpt_runtime.jobmaster.checkpoint_shell import CheckpointShell
from ckpt_runtime.jobmaster.job_record import VolatileRecord
from ckpt_runtime.jobmaster.snapshot_deletions import SnapshotDeletions
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.disposal import SnapshotDisposal
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import make_directory, resolve
from ckpt_runtime.storage.snapshot_metadata import read_metadata

JOB = "0123456789abcdef" * 2
GRAPH = JobGraph("job", (JobVertex("v", (OperatorNode("u", "Source", "source"),), 2),), ())
TASKS = tuple(ExecutionId("v", index, 0) for index in range(2))
TIMEOUT_S = 20


class Listener:
    """A job master that notes what it is told; ``changed`` is set each time."""

    def __init__(self) -> None:
        self.triggers: list[tuple[int, Any]] = []
        self.completed: list[int] = []
        self.aborted: list[int] = []
        self.answers: list[Any] = []
        self.changed = asyncio.Event()

    def send_trigger(self, checkpoint_id: int, timestamp: int, options: Any, tasks: tuple[ExecutionId, ...]) -> None:
        assert tasks == TASKS
        self.triggers.append((checkpoint_id, options))
        self.changed.set()

    def send_complete(self, checkpoint_id: int, tasks: tuple[ExecutionId, ...]) -> None:
        self.completed.append(checkpoint_id)
        self.changed.set()

    def send_aborted(self, checkpoint_id: int, latest_completed: int, tasks: tuple[ExecutionId, ...]) -> None:
        self.aborted.append(checkpoint_id)
        self.changed.set()

    def checkpoint_answer(self, effect: Any) -> None:
        self.answers.append(effect)
        self.changed.set()


class Pointers(VolatileRecord):
    """Pointers whose calls fail as told: the errors are raised one after the other, then all is well."""

    def __init__(self) -> None:
        super().__init__()
        self.present: dict[int, bool] = {}
        self.add_errors: list[Exception] = []
        self.remove_errors: list[Exception] = []

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        if self.add_errors:
            raise self.add_errors.pop(0)
        self.present[checkpoint.id] = owned

    def contains(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self.present

    def remove(self, checkpoint_id: int, disposal: SnapshotDisposal | None = None) -> None:
        if self.remove_errors:
            raise self.remove_errors.pop(0)
        self.present.pop(checkpoint_id, None)


class Bench:
    """The shell on ``directory``, with the tasks' part played by hand."""

    def __init__(self, directory: Path, pool: ThreadPoolExecutor, **settings: Any) -> None:
        self.directory = directory / JOB
        self.storage = CheckpointStorage(str(directory), JOB)
        self.storage.initialize()
        self.listener = Listener()
        self.pointers = Pointers()
        self.pool = pool
        coordinator = CheckpointCoordinator(JOB, GRAPH, CheckpointConfiguration(**settings))
        self.shell = CheckpointShell(
            JOB, coordinator, self.storage, self.pointers, self.listener, pool, SnapshotDeletions(pool)
        )
        self.shell.handle(on.JobRunning(TASKS))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.listener.changed.clear()
                await self.listener.changed.wait()

    async def settle(self) -> None:
        """Waits until the pool has nothing to do and its answers were taken."""
        for _ in range(10):
            await asyncio.get_running_loop().run_in_executor(self.pool, int)
            await asyncio.sleep(0)

    async def trigger(self, kind: CheckpointType = CheckpointType.CHECKPOINT, target: str | None = None) -> Any:
        """Up to the trigger message; gives id and options."""
        triggers, answers = self.listener.triggers, self.listener.answers
        known = len(triggers), len(answers)
        self.shell.handle(on.TriggerRequested("r", CheckpointProperties(kind), target))
        await self.until(lambda: (len(triggers), len(answers)) != known)
        return triggers[-1] if len(triggers) > known[0] else (None, None)

    def acknowledge(self, checkpoint_id: int, directory: str) -> list[Path]:
        """Every task writes one file and acknowledges."""
        files = []
        for task in TASKS:
            file = Path(directory.removeprefix("file://")) / f"state-{task.subtask}"
            file.write_bytes(b"state")
            handle = KeyedStateHandle(KeyGroupRange(0, 127), StateFile(file.name, 5, "xxh64:0"), ())
            state = SubtaskState({"u": OperatorSubtaskState((handle,))}, 5)
            self.shell.handle(on.Acknowledged(checkpoint_id, task, directory, state))
            files.append(file)
        return files

    async def checkpoint(self) -> tuple[int, list[Path]]:
        """A whole one."""
        checkpoint_id, options = await self.trigger()
        files = self.acknowledge(checkpoint_id, options.directory)
        await self.until(lambda: checkpoint_id in self.listener.completed)
        await self.settle()
        return checkpoint_id, files

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir() if path.name.startswith("chk-"))


def run(directory: Path, test: Callable[[Bench], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def inside() -> None:
        with ThreadPoolExecutor(1) as pool:
            bench = Bench(directory, pool, **settings)
            try:
                await test(bench)
            finally:
                bench.shell.close()

    asyncio.run(inside())


@pytest.fixture(autouse=True)
def hasty_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_shell, "_RETRY_BASE_S", 0.001)


def test_a_checkpoint_ends_as_files_with_metadata_and_a_pointer(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        checkpoint_id, files = await bench.checkpoint()
        directory = bench.directory / f"chk-{checkpoint_id}"
        assert sorted(path.name for path in directory.iterdir()) == ["_metadata", "state-0", "state-1"]
        found = CompletedCheckpoint.from_json(read_metadata(str(directory)).document)
        assert (found.id, found.job_id, found.state_size) == (checkpoint_id, JOB, 10)
        assert bench.pointers.present == {checkpoint_id: True}
        assert isinstance(bench.listener.answers[0], out.RequestCompleted)
        assert bench.listener.answers[0].external_path == directory.as_uri()
        assert files[0].exists()

    run(tmp_path, test)


def test_a_newer_checkpoint_takes_the_place_of_the_older(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for _ in range(3):
            checkpoint_id, _ = await bench.checkpoint()
        assert bench.names() == [f"chk-{checkpoint_id}"]
        assert list(bench.pointers.present) == [checkpoint_id]

    run(tmp_path, test)


def test_a_declined_checkpoint_leaves_no_files(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        checkpoint_id, options = await bench.trigger()
        (Path(options.directory.removeprefix("file://")) / "state-0").write_bytes(b"x")
        reason = CheckpointFailureReason.CHECKPOINT_DECLINED
        bench.shell.handle(on.Declined(checkpoint_id, TASKS[1], reason, "no"))
        await bench.until(lambda: bool(bench.listener.aborted))
        await bench.settle()
        assert bench.names() == []
        assert bench.listener.aborted == [checkpoint_id]

    run(tmp_path, test, tolerable_failures=5)


def test_state_that_comes_after_the_abort_is_deleted(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        checkpoint_id, options = await bench.trigger()
        reason = CheckpointFailureReason.CHECKPOINT_DECLINED
        bench.shell.handle(on.Declined(checkpoint_id, TASKS[1], reason, "no"))
        await bench.settle()
        make_directory(resolve(options.directory))
        late = bench.acknowledge(checkpoint_id, options.directory)[0]
        await bench.settle()
        assert not late.exists()

    run(tmp_path, test, tolerable_failures=5)


def test_a_checkpoint_expires_by_the_clock(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.shell.handle(on.TriggerRequested("r", CheckpointProperties()))
        await bench.until(lambda: bool(bench.listener.answers))
        (answer,) = bench.listener.answers
        assert isinstance(answer, out.RequestFailed)
        assert answer.reason is CheckpointFailureReason.CHECKPOINT_EXPIRED

    run(tmp_path, test, timeout_ms=10, tolerable_failures=5)


def test_periodic_checkpoints_are_triggered_by_the_clock(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.until(lambda: bool(bench.listener.triggers))

    run(tmp_path, test, interval_ms=10)


def test_a_savepoint_gets_a_directory_of_its_own(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        target = tmp_path / "savepoints"
        checkpoint_id, options = await bench.trigger(CheckpointType.SAVEPOINT, str(target))
        bench.acknowledge(checkpoint_id, options.directory)
        await bench.until(lambda: bool(bench.listener.answers))
        (directory,) = target.iterdir()
        assert directory.name.startswith(f"savepoint-{JOB[:6]}-")
        assert (directory / "_metadata").exists()
        assert bench.pointers.present == {}
        assert bench.listener.completed == []

    run(tmp_path, test)


@pytest.mark.parametrize("target", [None, "", "relative", "nosuch://x"])
def test_a_savepoint_without_a_usable_target_fails_before_any_task_hears_of_it(
    tmp_path: Path, target: str | None
) -> None:
    async def test(bench: Bench) -> None:
        await bench.trigger(CheckpointType.SAVEPOINT, target)
        (answer,) = bench.listener.answers
        assert isinstance(answer, out.RequestFailed)
        assert not answer.reached_tasks
        assert bench.listener.triggers == []

    run(tmp_path, test)


def test_a_checkpoint_directory_that_cannot_be_made_fails_the_checkpoint(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for number in range(1, 4):
            (bench.directory / f"chk-{number}").write_text("in the way")
        await bench.trigger()
        assert isinstance(bench.listener.answers[0], out.RequestFailed)

    run(tmp_path, test, tolerable_failures=5)


class TestMetadata:
    def write(self, monkeypatch: pytest.MonkeyPatch, *errors: Exception, happens: bool = False) -> None:
        """Writes of metadata fail with these errors in turn, having happened all the same or not."""
        real, left = checkpoint_shell.write_metadata, list(errors)

        def write(*arguments: Any) -> str:
            if left:
                if happens:
                    real(*arguments)
                raise left.pop(0)
            return real(*arguments)

        monkeypatch.setattr(checkpoint_shell, "write_metadata", write)

    def test_a_write_that_failed_fails_the_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(monkeypatch, StorageError("full", "x"))

        async def test(bench: Bench) -> None:
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            await bench.settle()
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert "full" in bench.listener.answers[0].message
            assert bench.names() == []
            assert bench.pointers.present == {}

        run(tmp_path, test, tolerable_failures=5)

    @pytest.mark.parametrize("happens", [True, False])
    def test_an_unknown_outcome_is_settled_by_looking(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, happens: bool
    ) -> None:
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), StorageError("late", "x"), happens=happens)

        async def test(bench: Bench) -> None:
            checkpoint_id, _ = await bench.checkpoint()
            assert (bench.directory / f"chk-{checkpoint_id}" / "_metadata").exists()

        run(tmp_path, test)

    def test_a_second_attempt_that_is_refused_does_not_tell_what_became_of_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusals = [InvalidLocationError("no such store", "x"), CorruptFileError("foreign", "x"), ValueError("odd")]
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), *refusals)

        async def test(bench: Bench) -> None:
            checkpoint_id, _ = await bench.checkpoint()
            assert (bench.directory / f"chk-{checkpoint_id}" / "_metadata").exists()
            assert bench.listener.aborted == []

        run(tmp_path, test, tolerable_failures=5)

    def test_without_its_local_directory_the_first_attempt_left_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.write(monkeypatch, AmbiguousWriteError("timeout", "x"), NotFoundError("gone", "x"))

        async def test(bench: Bench) -> None:
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert "gone" in bench.listener.answers[0].message

        run(tmp_path, test, tolerable_failures=5)


class TestPointers:
    def test_one_that_cannot_be_added_fails_the_checkpoint(self, tmp_path: Path) -> None:
        async def test(bench: Bench) -> None:
            bench.pointers.add_errors = [StorageError("no", "x")]
            checkpoint_id, options = await bench.trigger()
            bench.acknowledge(checkpoint_id, options.directory)
            await bench.until(lambda: bool(bench.listener.answers))
            await bench.settle()
            assert isinstance(bench.listener.answers[0], out.RequestFailed)
            assert bench.names() == []

        run(tmp_path, test, tolerable_failures=5)

    def test_an_unknown_outcome_is_settled(self, tmp_path: Path) -> None:
        async def test(bench: Bench) -> None:
            bench.pointers.add_errors = [AmbiguousWriteError("timeout", "x")] * 3
            checkpoint_id, _ = await bench.checkpoint()
            assert bench.pointers.present == {checkpoint_id: True}

        run(tmp_path, test)

    def test_a_second_attempt_that_fails_does_not_tell_what_became_of_the_first(self, tmp_path: Path) -> None:
        async def test(bench: Bench) -> None:
            bench.pointers.add_errors = [AmbiguousWriteError("timeout", "x"), *[StorageError("away", "x")] * 3]
            checkpoint_id, _ = await bench.checkpoint()
            assert bench.pointers.present == {checkpoint_id: True}
            assert bench.names() == [f"chk-{checkpoint_id}"]
            assert bench.listener.aborted == []

        run(tmp_path, test, tolerable_failures=5)

    def test_one_that_cannot_be_removed_is_tried_again_before_files_go(self, tmp_path: Path) -> None:
        async def test(bench: Bench) -> None:
            await bench.checkpoint()
            bench.pointers.remove_errors = [StorageError("no", "x")] * 2
            second, _ = await bench.checkpoint()
            bench.shell.handle(on.Shutdown("SUSPENDED"))
            await bench.until(lambda: isinstance(bench.listener.answers[-1], out.ShutdownComplete))
            assert bench.names() == [f"chk-{second}"]
            assert list(bench.pointers.present) == [second]

        run(tmp_path, test)


def test_files_that_cannot_be_deleted_do_not_stop_the_job_and_go_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = checkpoint_shell.delete_checkpoint
    storage_is_away = [True]

    def refuse(*arguments: Any) -> None:
        if storage_is_away:
            raise StorageError("read-only", "x")
        delete(*arguments)

    monkeypatch.setattr(checkpoint_shell, "delete_checkpoint", refuse)
    monkeypatch.setattr(snapshot_deletions, "RETRY_BASE_S", 1000.0)
    monkeypatch.setattr(snapshot_deletions, "RETRY_MAX_S", 1000.0)

    async def test(bench: Bench) -> None:
        await bench.checkpoint()
        await bench.checkpoint()
        assert bench.names() == ["chk-1", "chk-2"]
        storage_is_away.clear()
        await bench.checkpoint()
        await bench.settle()
        assert bench.names() == ["chk-3"]

    run(tmp_path, test)


def test_deletions_that_failed_go_on_after_the_end_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = checkpoint_shell.delete_checkpoint
    refusals = [StorageError("away", "x")] * 5

    def refuse(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        delete(*arguments)

    monkeypatch.setattr(checkpoint_shell, "delete_checkpoint", refuse)
    monkeypatch.setattr(snapshot_deletions, "RETRY_BASE_S", 0.001)

    async def test(bench: Bench) -> None:
        await bench.checkpoint()
        bench.shell.handle(on.Shutdown("FINISHED"))
        await bench.until(lambda: isinstance(bench.listener.answers[-1], out.ShutdownComplete))
        assert bench.names() == ["chk-1"]
        bench.shell.finish(clean_up=True)
        async with asyncio.timeout(TIMEOUT_S):
            while bench.directory.exists():
                await asyncio.sleep(0.001)

    run(tmp_path, test)


def test_after_closing_nothing_is_answered_and_no_timer_fires(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.shell.handle(on.TriggerRequested("r", CheckpointProperties()))
        bench.shell.close()
        await bench.settle()
        assert bench.listener.triggers == []
        assert bench.listener.answers == []
        assert not bench.shell._timers

    run(tmp_path, test, interval_ms=10)


def test_waits_between_retries_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_shell, "_RETRY_BASE_S", 0.2)
    assert [checkpoint_shell._backoff(attempt) for attempt in (0, 1, 2, 3, 100)] == [0.0, 0.2, 0.4, 0.8, 30.0]


def test_without_high_availability_every_pointer_counts_as_there() -> None:
    record = VolatileRecord()
    record.remove(1)
    assert record.contains(1)
