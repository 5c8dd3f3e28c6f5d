"""An independent account of what one driver's job runs: what was submitted, replaced, refused and deployed.

Written from the rules alone (FLIP-530), as a second opinion on the job core's. What is stored of it, and its
parallelism, are ``plan_endpoint``'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.scheduler.core_events import DeployTasks
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.restart_strategies import RestartHistory, RestartStrategy
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

_ENDING = (CoordinatorState.CLOSING, CoordinatorState.CLOSED)
_NO_NEXT_DEPLOYMENT = (
    JobState.STOPPING,
    JobState.ENDING,
    JobState.CANCELLING,
    JobState.FAILING,
    JobState.FINISHED,
    JobState.FAILED,
    JobState.CANCELED,
    JobState.SUSPENDED,
)


class PlanModel:
    """``strategy_refused``: a strategy has said that the job must fail."""

    def __init__(self, driver: Driver, plan: JobPlan) -> None:
        self._driver = driver
        self.plan = plan
        self.earlier_failures = 0
        self.strategy: ObservedStrategy | None = None
        self.strategy_refused = False
        self._failures = 0
        self._attempts = 0
        self._restart_at: int | None = None
        self._slots: dict[int, int] = {}

    @property
    def settings(self) -> CheckpointConfiguration:
        """In force, before overrides."""
        return self.plan.settings

    # --- replacements

    def may_replace(self) -> bool:
        """Whether the state of the job leaves room for another deployment."""
        return self._driver.machine.state not in _NO_NEXT_DEPLOYMENT

    def seen(self) -> tuple[object, ...]:
        """What a replacement that is refused must not change."""
        core = self._driver.core
        machine = core.machine
        in_force = (core.graph, core.configuration, core.settings, core.overrides, core.coordinator.configuration)
        return (*in_force, machine.state, machine.attempt, machine.tasks.executions, core.coordinator.pending_ids)

    def in_force(self, plan: JobPlan, strategy: ObservedStrategy | None) -> None:
        """It is stored, and its driver is about to hear of it."""
        self.plan = plan
        self.strategy = strategy or self.strategy

    # --- deployments

    def acquires(self, attempt: int) -> None:
        self._slots[attempt] = self._driver.core.graph.slots

    def deploys(self, order: DeployTasks) -> None:
        """With what was accepted last, exactly the subtasks of the graph, in slots that were asked for."""
        subtasks = [(vertex.id, index) for vertex in order.graph.vertices for index in range(vertex.parallelism)]
        deployed_with = order.configuration
        self._require(deployed_with == self.plan.configuration, f"{deployed_with} is deployed")
        deployed = [execution.key for execution in order.executions]
        self._require(deployed == subtasks, f"{deployed} are deployed, the graph in force has {subtasks}")
        self._require(all(e.attempt == order.attempt for e in order.executions), "subtasks of another attempt")
        slots = self._slots.get(order.attempt, 0)
        self._require(slots == order.graph.slots, f"{order.graph.slots} slots are used, {slots} were asked for")

    def check(self) -> None:
        """After each step: while tasks exist, what the core says they run is what they run."""
        driver = self._driver
        deployment = driver.deployment
        if deployment is not None and driver.machine.state.has_tasks:
            shown = driver.core.graph
            self._require(shown is deployment.graph, "the core tells of a graph that has not been deployed")
        if driver.coordinator.state not in _ENDING and driver.leads:
            accepted, own = driver.core.accepted_plan.own, self.plan.own
            self._require(accepted == own, f"version {accepted.version} is in force, stored is {own.version}")
        asked, failed = self._failures, len(driver.failures) - self.earlier_failures
        self._require(asked <= failed, f"{asked} restarts count, there were {failed} failures")

    # --- restarts

    def failure(self, strategy: ObservedStrategy, history: RestartHistory) -> None:
        """The strategy in force is asked, and knows of all failures that an earlier one was asked about."""
        self._failures += 1
        self._require(strategy is self.strategy, "a restart strategy is asked that was replaced")
        known = (len(history.failures), history.attempts, history.restart_at)
        expected = (self._failures, self._attempts, self._restart_at)
        self._require(known == expected, f"the restart strategy knows {known}, there were {expected}")

    def decided(self, delay: int | None, history: RestartHistory, now: int) -> None:
        self._attempts = history.attempts
        self._restart_at = self._restart_at if delay is None else now + delay
        self.strategy_refused = self.strategy_refused or delay is None

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"plan: {message}")


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
