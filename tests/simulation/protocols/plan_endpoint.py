"""Changes of a job's plan in the simulation, of its parallelism and of its configuration.

Asks for them and checks each step.

What is checked is written from the rules alone: for another parallelism slots first, then a fresh checkpoint; then
stored, then deployed; what is stored is old or new; what was reserved is given back; each request is answered once,
with the truth. A configuration that was made of one that is not in force any more is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import ParallelismBounds, declared_bounds
from tests.simulation.protocols.plan_model import ObservedStrategy
from tests.simulation.protocols.scenario import STRATEGIES, other_settings

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

Shape = tuple[int, ...]
_ENDING = (CoordinatorState.CLOSING, CoordinatorState.CLOSED)
_STRATEGIES = ("exponential",) * 5 + ("fixed", "rate", "none")
_SETTLED = (ChangeOutcome.APPLIED, ChangeOutcome.NOT_STORED)


Bounds = Mapping[str, ParallelismBounds]


def shape(graph: JobGraph) -> Shape:
    """Parallelisms, in the order of the vertices."""
    return tuple(vertex.parallelism for vertex in graph.vertices)


def random_bounds(graph: JobGraph, rng: Random) -> dict[str, ParallelismBounds]:
    """Mostly another parallelism, mostly one that is possible."""
    names = [vertex.id for vertex in graph.vertices]
    match rng.choice(("all", "all", "all", "range", "range", "each", "each", "none", "too many", "missing", "unknown")):
        case "all":
            wanted = [ParallelismBounds(number := rng.choice((1, 2, 3)), number)] * len(names)
        case "range":
            wanted = [ParallelismBounds(rng.choice((1, 1, 2)), rng.choice((2, 3, 4)))] * len(names)
        case "none":
            wanted = [ParallelismBounds(0, 2)] * len(names)
        case "too many":
            wanted = [ParallelismBounds(1, 129)] * len(names)
        case "missing":
            return {}
        case "unknown":
            return {name: ParallelismBounds(1, 1) for name in (*names, "other")}
        case _:
            wanted = [ParallelismBounds(number, number) for number in (rng.choice((1, 2, 3)) for _ in names)]
    return dict(zip(names, wanted, strict=True))


def possible(graph: JobGraph, bounds: Mapping[str, ParallelismBounds]) -> bool:
    """Whether they are bounds of this graph's vertices, within the key groups and with FORWARD edges kept."""
    forward = [edge for edge in graph.edges if edge.partitioning is Partitioning.FORWARD]
    return (
        bounds.keys() == {vertex.id for vertex in graph.vertices}
        and all(1 <= wanted.lower <= wanted.upper <= 128 for wanted in bounds.values())
        and all(bounds[edge.source] == bounds[edge.target] for edge in forward)
    )


class PlanEndpoint:
    """Of one driver. ``shape`` is that of the graph which the driver has to deploy next."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world
        self.shape = shape(driver.world.ha.graph)
        self.savepoints: set[str] = set()
        """Requests of users that a redeployment waits for."""
        self._graph = driver.world.ha.graph
        self._desired: str | None = None
        self._configuring: core.ConfigurationRequested | None = None
        self._needed = self._deployed = 0
        self._before = JobState.INITIALIZING, 0
        self._answered = True
        self._reserved: int | None = None
        self._pointers: frozenset[int] | None = None
        self._wanted: tuple[Shape, Bounds, int] | None = None
        self._bounds: Bounds = {}
        self._asked = 0
        self._answers: list[ChangeOutcome] = []
        self._order: core.StorePlan | core.SettlePlan | None = None
        self._applies = False
        self._drops: JobGraph | None = None

    @property
    def is_settled(self) -> bool:
        return self._desired is None

    @property
    def is_configuring(self) -> bool:
        """Whether settings are part of what is being changed."""
        return self._desired is not None and self._configuring is not None

    def ask(self, kind: str, value: Random) -> None:
        """A user's request."""
        if kind == "rescale":
            self._rescale(value)
        else:
            self._plan_configuration(kind, value)

    @property
    def _is_due(self) -> bool:
        """Whether a running deployment is to end when a savepoint has."""
        return self._driver.machine.state is JobState.RUNNING and self._deployed != self._needed

    def _rescale(self, value: Random) -> None:
        """Now. Who asks when the job has ended and that is not stored yet, waits for that."""
        driver = self._driver
        if driver.machine.state.is_terminal:
            return
        bounds = random_bounds(driver.core.graph, value)
        self._asked += 1
        name = f"rescale-{driver.epoch}-{self._asked}"
        state, before, busy = driver.machine.state, driver.plan.seen(), self._desired is not None or self._is_due
        fits, allowed = possible(driver.core.graph, bounds), driver.plan.may_replace()
        if not busy:
            self._desired, self._answered, self._wanted, self._configuring = name, False, None, None
            self._bounds = bounds
            self._pointers = None if state is JobState.RUNNING else frozenset()
        self._answers.clear()
        driver.tell(core.RescaleRequested(name, bounds))
        outcome = self._answers[0] if self._answers else None
        if not busy and outcome is ChangeOutcome.BUSY:
            self._desired = None  # with settings that only a deposed driver is still storing, or else a violation below
        if not driver.leads or driver.core.is_fenced:
            return
        if outcome in (ChangeOutcome.BUSY, ChangeOutcome.NOT_NOW, ChangeOutcome.REFUSED):
            expected = ChangeOutcome.BUSY if busy else ChangeOutcome.REFUSED if allowed else ChangeOutcome.NOT_NOW
            self._require(outcome is expected, f"{outcome.name} to a request in {state.value}, not {expected.name}")
            self._require(driver.plan.seen() == before, "a rescale is refused, and something has changed")
        else:
            self._require(not busy, "two rescales at the same time")
            self._require(allowed, f"a rescale is accepted in {state.value}")
        self._require(busy or not allowed or fits == (outcome is not ChangeOutcome.REFUSED), f"{bounds}: {outcome}")

    def _plan_configuration(self, kind: str, value: Random) -> None:
        """It is handed over when it is planned."""
        driver, options = self._driver, self._world.options
        self._world.crash_point(driver, "received")
        base = driver.core.accepted_plan
        meaning = options.meaning(base.own.given)
        changes_strategy, restarts = kind == "replace the restart strategy", value.random() < 0.6
        if changes_strategy:
            meaning, restarts = replace(meaning, strategy=value.choice(_STRATEGIES)), False
        else:
            meaning = replace(meaning, settings=other_settings(meaning.settings, value))
        own = options.other(base.own, meaning, value)
        graph = replace(base.graph)
        if restarts and value.random() < 0.3:
            graph = graph.with_parallelism(
                dict.fromkeys((vertex.id for vertex in graph.vertices), value.choice((1, 2, 3)))
            )
        effective = options.effective(own.given)
        plan = replace(base, graph=graph, configuration=effective, settings=meaning.settings, own=own)
        strategy = ObservedStrategy(STRATEGIES[meaning.strategy], driver.plan) if changes_strategy else None
        self._asked += 1
        event = core.ConfigurationRequested(f"configure-{driver.epoch}-{self._asked}", plan, base, restarts, strategy)
        self._later(value.choice((0, 5, 40)), partial(self._configure, event))

    def _configure(self, event: core.ConfigurationRequested) -> None:
        driver, graph = self._driver, event.plan.graph
        state = driver.machine.state
        if state.is_terminal:
            return
        self._world.crash_point(driver, "validated")
        same = shape(graph) == self.shape
        patched = driver.leads and self._world.checker.clients.is_storing
        busy = self._desired is not None or patched or (self._is_due and not same)
        stale = event.base.own != driver.plan.plan.own or event.base.graph is not self._graph
        allowed, before = driver.plan.may_replace(), driver.plan.seen()
        if not busy:
            self._desired, self._answered, self._wanted, self._configuring = event.request_id, False, None, event
            self._pointers = None if state is JobState.RUNNING and not same else frozenset()
        self._answers.clear()
        driver.tell(event)
        outcome = self._answers[0] if self._answers else None
        if not busy and outcome is ChangeOutcome.BUSY:
            self._desired = None  # with settings that only a deposed driver is still storing, or else a violation below
        if not driver.leads or driver.core.is_fenced:
            return
        refused = (ChangeOutcome.BUSY, ChangeOutcome.NOT_NOW, ChangeOutcome.STALE)
        expected = refused[0] if busy else refused[1] if not allowed else refused[2] if stale else None
        found = outcome if outcome in refused else None
        self._require(found is expected, f"{found} to a configuration in {state.value}, not {expected}")
        self._require(expected is None or driver.plan.seen() == before, "it is refused, and something has changed")

    def answered(self, answer: core.ChangeAnswered) -> None:
        """The user hears of it, once."""
        self._answers.append(answer.outcome)
        if answer.outcome is ChangeOutcome.APPLIED:
            self._world.crash_point(self._driver, "before the answer")
        if answer.outcome is ChangeOutcome.JOB_ENDED:
            self._driver.checker.told_of_the_end()
        if answer.outcome is ChangeOutcome.BUSY:
            return
        self._require(answer.request_id == self._desired, f"{answer.request_id} is answered again")
        self._require(not self._answered, f"{answer.request_id} is answered twice")
        self._answered = True
        if self._driver.leads and self._wanted is not None and answer.outcome in _SETTLED:
            applied = answer.outcome is ChangeOutcome.APPLIED
            self._require(
                (self._stored == self._wanted) == applied, f"{answer.outcome.name}, and {self._stored} is stored"
            )
        if self._driver.leads and self._configuring is None and answer.outcome is ChangeOutcome.APPLIED:
            stored = declared_bounds(self._world.ha.graph)
            self._require(stored == self._bounds, f"{self._bounds} are declared, {stored} are stored")
        if answer.outcome is not ChangeOutcome.UNKNOWN:
            self._desired = None

    # --- slots

    def reserve(self, order: core.ReserveSlots) -> None:
        self._reserved = 0

    def reserved(self, event: core.SlotsReserved | core.SlotsNotReserved) -> None:
        if event.request_id == self._desired and self._reserved is not None:
            self._reserved = 0
            if isinstance(event, core.SlotsReserved):
                self._reserved = event.slots
                self._pointers = frozenset(self._world.ha.pointers)

    def release(self, order: core.ReleaseReserve) -> None:
        self._reserved = None

    def acquires(self) -> None:
        """The next deployment takes what was reserved, once it is one at the new parallelism."""
        self._reserved = None

    # --- the stored plan

    @property
    def _stored(self) -> tuple[Shape, Bounds, int]:
        graph = self._world.ha.graph
        return shape(graph), declared_bounds(graph), self._world.ha.document.version

    def storing(self, order: core.StorePlan) -> None:
        """From now on old or new may be stored, and nothing else."""
        self._order = order
        if order.attempt:
            return
        self._wanted = shape(order.graph), declared_bounds(order.graph), order.own.version
        self._require(order.request_id == self._desired, "a graph is stored that no request asked for")
        if shape(order.graph) == self.shape and self._configuring is None:
            return  # what is declared alone
        self._require(self._pointers is not None, "a graph is stored before its slots are there")
        if self._pointers:
            fresh = self._world.ha.pointers.keys() - self._pointers
            self._require(bool(fresh), "a graph is stored without a fresh checkpoint")
            self._require(bool(self._reserved), "a graph is stored whose slots were lost")

    def settling(self, order: core.SettlePlan) -> None:
        self._order = order

    def stores(self, graph: JobGraph) -> None:
        """It takes effect, perhaps long after its answer: the driver must still be at it."""
        if self._world.ha.graph != graph and self._driver.leads and not self._world.job_has_ended:
            self._require(self._desired is not None, f"{shape(graph)} is stored when the rescale is settled")

    def written(self, event: core.PlanStored | core.ChangeNotStored) -> None:
        """The driver is about to hear whether it is stored."""
        order = self._order
        if order is None or event.request_id != order.request_id:
            return
        if isinstance(event, core.PlanStored):
            self._in_force(order)
            if self._answered:
                self._desired = None
        else:
            self._drops = order.graph if self._answered else None

    def _in_force(self, order: core.StorePlan | core.SettlePlan) -> None:
        event = self._configuring
        before = self.shape
        self.shape, self._graph = shape(order.graph), order.graph
        if self.shape != before if event is None else event.restarts:
            self._needed += 1
        if event is not None and event.request_id == order.request_id:
            strategy = event.strategy
            self._driver.plan.in_force(event.plan, strategy if isinstance(strategy, ObservedStrategy) else None)
            self._applies = True

    def heard(self) -> None:
        """The driver has: settings are in force, or a change without an answer has come to nothing."""
        driver, graph = self._driver, self._drops
        if self._applies and driver.leads and driver.coordinator.state not in _ENDING:
            self._world.checker.clients.in_force(driver)
        if graph is not None and driver.core.target_graph is not graph:
            self._desired = None
        self._applies, self._drops = False, None

    # --- what follows

    def deploys(self, graph: JobGraph) -> None:
        """What is stored, as far as the driver knows; never a mixture."""
        self._deployed = self._needed
        self._require(shape(graph) == self.shape, f"{shape(graph)} is deployed, {self.shape} is in force")
        if self._driver.leads and self._desired is None and not self._world.job_has_ended:
            stored = shape(self._world.ha.graph)
            self._require(shape(graph) == stored, f"{shape(graph)} is deployed, {stored} is stored")

    def before(self) -> None:
        """Each step."""
        self._before = self._driver.machine.state, len(self._driver.failures)

    def cancels(self) -> None:
        """A deployment ends: without a failure not as long as a user waits for a savepoint of it."""
        now = JobState.CLEARING, self._before[1]
        redeploys = self._before[0] is JobState.RUNNING and now == (
            self._driver.machine.state,
            len(self._driver.failures),
        )
        self._require(not (redeploys and self.savepoints), f"a redeployment ends {sorted(self.savepoints)}")

    def check(self) -> None:
        """After each step: what is in force runs; slots are reserved for a rescale, what comes next, or the end."""
        state, deployment = self._driver.machine.state, self._driver.deployment
        about_to_deploy = state in (JobState.CLEARING, JobState.BACKING_OFF, JobState.STOPPING, JobState.ENDING)
        ends = state.is_terminal or state in (JobState.CANCELLING, JobState.FAILING)
        waits = bool(self.savepoints) or self._driver.checker.is_cancelled_next
        kept = self._desired is not None or about_to_deploy or ends or waits
        self._require(kept or self._reserved is None, "slots stay reserved for a rescale that is over")
        if state is JobState.RUNNING and deployment is not None and not waits:
            runs = shape(deployment.graph)
            self._require(runs == self.shape, f"{runs} continues to run, {self.shape} is in force")
            self._require(
                self._deployed == self._needed, "a deployment continues that was to end for another configuration"
            )

    def _later(self, delay: int, call: Callable[..., None]) -> None:
        self._world.loop.at(self._world.loop.now + delay, self._driver.process, call)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise self._world.broke(f"rescale: {message}")
