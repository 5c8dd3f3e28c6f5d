"""Pure cores by hand: events go in at times that a test chooses, and what each leads to is remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine

E = TypeVar("E")
START = Instant(0, 1_000_000)


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
