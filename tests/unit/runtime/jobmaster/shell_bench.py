"""A real checkpoint coordinator and shell on a real directory, with the tasks' part played by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.jobmaster.job_host import LoopHost
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.job_shell import JobShell
from ckpt_runtime.jobmaster.submission import JobSubmission
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.replacement import subtasks_of
from ckpt_runtime.scheduler.restart_strategies import NoRestart
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, SnapshotDisposal
from ckpt_runtime.storage.driver_pools import DriverPools

JOB = "0123456789abcdef" * 2
GRAPH = JobGraph("job", (JobVertex("v", (OperatorNode("u", "Source", "source"),), 2),), ())
TASKS = tuple(ExecutionId("v", index, 0) for index in range(2))
TIMEOUT_S = 60
ANSWERS = (
    out.RequestCompleted,
    out.RequestFailed,
    out.RestoreFrom,
    out.RestoreFailed,
    out.FailJob,
    out.ShutdownComplete,
)


class Listener(TaskGateway):
    """Workers that get no message; notes what would be sent to them and what the coordinator decides.

    ``changed`` is set each time.
    """

    def __init__(self) -> None:
        super().__init__(b"")
        self.triggers: list[tuple[int, CheckpointOptions]] = []
        self.completed: list[int] = []
        self.aborted: list[int] = []
        self.answers: list[Any] = []
        self.changed = asyncio.Event()

    def trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: Iterable[ExecutionId]
    ) -> bool:
        assert tasks == TASKS
        self.triggers.append((checkpoint_id, options))
        self.changed.set()
        return True

    def complete(self, checkpoint_id: int, tasks: Iterable[ExecutionId]) -> None:
        self.completed.append(checkpoint_id)
        self.changed.set()

    def abort(self, checkpoint_id: int, latest_completed: int, tasks: Iterable[ExecutionId]) -> None:
        self.aborted.append(checkpoint_id)
        self.changed.set()


class NotedCoordinator(CheckpointCoordinator):
    """Tells the listener of decisions that concern the job."""

    listener: Listener

    def handle(self, event: on.CoordinatorEvent, now: Instant) -> list[out.Effect]:
        effects = super().handle(event, now)
        answers = [effect for effect in effects if isinstance(effect, ANSWERS)]
        if answers:
            self.listener.answers += answers
            self.listener.changed.set()
        return effects


class Pointers(JobRecord):
    """Pointers whose calls raise the given errors, one after the other, and succeed after them."""

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

    def __init__(self, directory: Path, pool: Executor, pools: DriverPools | None = None, **settings: Any) -> None:
        self.directory = directory / JOB
        self.storage = CheckpointStorage(str(directory), JOB)
        self.storage.initialize()
        self.listener = Listener()
        self.pointers = Pointers()
        self.pool = pool
        self.ids = CheckpointIdCounter()
        coordinator = NotedCoordinator(JOB, GRAPH, CheckpointConfiguration(**settings), self.ids)
        coordinator.listener = self.listener
        plan = JobPlan(GRAPH, Configuration({}), CheckpointConfiguration(**settings))
        self.pools = pools or DriverPools(own=pool, deletions=pool, paths=lambda _: pool, planning=pool)
        self.shell = JobShell(
            JobSubmission(
                job_id=JOB,
                graph=GRAPH,
                defaults=plan.configuration,
                own=plan.own,
                archive=b"",
                program_id="program",
                entry="module:pipeline",
                arguments=(),
                default_checkpoint_directory=str(directory),
                record=self.pointers,
            ),
            JobCore(plan, JobMachine(subtasks_of(GRAPH), NoRestart()), coordinator),
            LoopHost(cast(Any, None), self.pools),
            self.storage,
            self.listener,
        )
        self.shell.tell(on.JobRunning(TASKS))

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
        self.shell.tell(on.TriggerRequested("r", CheckpointProperties(kind), target))
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
            self.shell.tell(on.Acknowledged(checkpoint_id, task, directory, state))
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


@asynccontextmanager
async def opened(directory: Path, **settings: Any) -> AsyncIterator[Bench]:
    with ThreadPoolExecutor(1) as pool:
        bench = Bench(directory, pool, **settings)
        try:
            yield bench
        finally:
            bench.shell.close()
