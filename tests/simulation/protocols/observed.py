"""The real machines, each with a checker that looks at every step, and a restart strategy that notes what it is asked.

Nothing is decided here: an event goes in and the effects come out as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CoordinatorEvent
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.scheduler.job_effects import JobEffect
from ckpt_runtime.scheduler.job_events import JobEvent
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.restart_strategies import RestartHistory, RestartStrategy

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver
    from tests.simulation.protocols.plan_model import PlanModel


class ObservedCoordinator(CheckpointCoordinator):
    """``driver`` is set before the first event."""

    driver: Driver

    def handle(self, event: CoordinatorEvent, now: Instant) -> list[Effect]:
        driver = self.driver
        world, checker = driver.world, driver.checker
        world.note(driver, event)
        checker.before(event)
        effects = super().handle(event, now)
        if world.tracing:
            world.note_all(driver, effects)
        checker.after(event, effects)
        return effects


class ObservedMachine(JobMachine):
    """``driver`` is set before the first event."""

    driver: Driver

    def handle(self, event: JobEvent, now: Instant) -> list[JobEffect]:
        driver = self.driver
        world = driver.world
        world.note(driver, event)
        before = self.state
        effects = super().handle(event, now)
        if world.tracing:
            world.note_all(driver, effects)
        driver.checker.job_step(event, before)
        return effects


class ObservedStrategy:
    """The restart strategy that ``plan`` says is in force, or none that may be asked any more."""

    def __init__(self, strategy: RestartStrategy, plan: PlanModel) -> None:
        self._strategy = strategy
        self._plan = plan

    def __repr__(self) -> str:
        return repr(self._strategy)

    def delay(self, history: RestartHistory, now: int) -> int | None:
        self._plan.failure(self, history)
        delay = self._strategy.delay(history, now)
        self._plan.decided(delay, history, now)
        return delay
