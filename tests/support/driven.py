"""Pure cores by hand: events go in at times that a test chooses, and what each leads to is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, TypeVar

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointProperties
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.restart_strategies import NoRestart

E = TypeVar("E")
START = Instant(0, 1_000_000)
CAUSE = job_on.FailureInfo("ValueError", "boom")


def later(now: Instant, millis: int) -> Instant:
    """Returns the point in time at which that many milliseconds have passed."""
    return Instant(now.rel_ms + millis, now.abs_ms + millis)


class Driven:
    """``last`` is what the last event led to, ``trace`` what all have led to."""

    def __init__(self, handle: Callable[[Any, Instant], list[Any]], now: Instant = START) -> None:
        self._handle = handle
        self.now = now
        self.last: list[Any] = []
        self.trace: list[Any] = []

    def step(self, event: Any, after_ms: int = 0) -> list[Any]:
        self.now = later(self.now, after_ms)
        self.last = self._handle(event, self.now)
        self.trace += self.last
        return self.last

    def steps(self, *events: Any) -> Self:
        """One after the other, at one time."""
        for event in events:
            self.step(event)
        return self

    def kinds(self) -> list[type]:
        return [type(found) for found in self.last]

    def of(self, kind: type[E]) -> list[E]:
        """Of a kind, in the last step."""
        return [found for found in self.last if isinstance(found, kind)]

    def one(self, kind: type[E]) -> E:
        (found,) = self.of(kind)
        return found


class DrivenMachine(Driven):
    """The machine of a job whose subtasks are those of vertex "v"."""

    def __init__(self, machine: JobMachine, handle: Callable[[Any, Instant], list[Any]] | None = None) -> None:
        super().__init__(handle or machine.handle)
        self.machine = machine

    def task(self, index: int) -> ExecutionId:
        return ExecutionId("v", index, self.machine.attempt)

    def each(self, kind: Callable[..., Any], *more: object) -> Self:
        return self.steps(*(kind(execution, *more) for execution in self.machine.tasks.alive))


class DrivenJob(DrivenMachine):
    """A core, from slots to running tasks."""

    def __init__(self, core: JobCore) -> None:
        super().__init__(core.machine, core.handle)
        self.core = core

    def acquire(self) -> Self:
        return self.steps(job_on.Start())

    def restore(self) -> Self:
        return self.acquire().steps(job_on.SlotsAcquired(self.machine.attempt))

    def deploy(self) -> Self:
        return self.restore().steps(core.AttemptRecorded(self.machine.attempt))

    def run(self) -> Self:
        return self.deploy().each(job_on.TaskRunning)

    def again(self) -> Self:
        """From ACQUIRING to RUNNING, another time."""
        attempt = self.machine.attempt
        return self.steps(job_on.SlotsAcquired(attempt), core.AttemptRecorded(attempt)).each(job_on.TaskRunning)

    def finish(self) -> Self:
        return self.run().each(job_on.TaskFinished)


# --- every event there is, for tables of states and events


def job_events(task: ExecutionId) -> tuple[Any, ...]:
    """Of the job machine."""
    return (
        job_on.Start(),
        job_on.CancelRequested(),
        job_on.SuspendRequested(),
        job_on.StopRequested("other"),
        job_on.RedeployRequested((("v", 0), ("v", 1))),
        job_on.RestartStrategyReplaced(NoRestart()),
        job_on.SlotsAcquired(0),
        job_on.SlotsFailed(0, CAUSE),
        job_on.StateRestored(0),
        job_on.StateRestoreFailed(0, CAUSE),
        job_on.SavepointCompleted("stop", "sp"),
        job_on.SavepointFailed("stop", "m"),
        job_on.RestartTimerFired(1),
        job_on.TaskRunning(task),
        job_on.TaskFinished(task),
        job_on.TaskCanceled(task),
        job_on.TaskFailed(task, CAUSE),
        job_on.JobFailed(CAUSE),
    )


def checkpoint_events(tasks: Sequence[ExecutionId], other_graph: JobGraph) -> tuple[Any, ...]:
    """Of the coordinator."""
    task = tasks[0]
    return (
        on.JobRunning(tuple(tasks)),
        on.TasksLeftRunning(),
        on.SubtaskFinished(task),
        on.EndOfDataReached(task),
        on.RestoreRequested("restore-0"),
        on.PeriodicTriggerStopped(),
        on.PeriodicTriggerStarted(),
        on.Shutdown("CANCELED"),
        on.ConfigurationPatched(CheckpointConfiguration()),
        on.RetentionAsked(),
        on.GraphReplaced(other_graph),
        on.BacklogChanged(processing_backlog=True),
        on.TriggerRequested("r2", CheckpointProperties()),
        on.CheckpointWanted(),
        on.TimerFired(on.TimerId(on.TimerKind.PERIODIC), 1),
        on.TimerFired(on.TimerId(on.TimerKind.CANCELLER, 1), 0),
        on.TimerFired(on.TimerId(on.TimerKind.FINAL_CHECKPOINT), 0),
        on.LocationReady(1, "dir/1"),
        on.LocationReady(99, "dir/99"),
        on.LocationFailed(1, "m"),
        on.TriggerFailed(1, "m"),
        on.Acknowledged(1, task, "dir/1", SubtaskState()),
        on.Declined(1, task, CheckpointFailureReason.CHECKPOINT_DECLINED),
        on.ProgressReported(1, task, CheckpointMetrics()),
        on.MetadataWritten(1),
        on.MetadataFailed(1, "m"),
        on.MetadataUnknown(1),
        on.StoreAdded(1),
        on.StoreFailed(1, "m"),
        on.StoreUnknown(1),
        on.StoreRemoved(1),
        on.StoreRemoveFailed(1),
        on.CleanupDone(1),
        on.LeftoversFound(((1, "dir/1"),), ("/shared/x",)),
    )
