"""Rescales in the simulation: asks for them, has the slots and the stored graph that they need, and checks each step.

What is checked is written from the rules alone: slots first, then a fresh checkpoint, then stored, then deployed; what
is stored is old or new; what was reserved is given back; each request is answered once, with the truth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from ckpt_runtime.graph.job_graph import JobGraph, Partitioning
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler.core_events import ChangeOutcome
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from tests.simulation.protocols.driver_storage import Outcome
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

Shape = tuple[int, ...]
_PAUSE_MS = 15
_SETTLED = (ChangeOutcome.APPLIED, ChangeOutcome.NOT_STORED)


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


class RescaleEndpoint:
    """Of one driver. ``shape`` is that of the graph which the driver has to deploy next."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world
        self.shape = shape(driver.world.ha.graph)
        self._wish: str | None = None
        self._answered = True
        self._reserved: int | None = None
        self._pointers: frozenset[int] | None = None
        self._wanted: Shape | None = None
        self._asked = 0
        self._answers: list[ChangeOutcome] = []

    @property
    def is_settled(self) -> bool:
        return self._wish is None

    def ask(self, value: Random) -> None:
        """A user's request, now. Who asks when the job has ended and that is not stored yet, waits for that."""
        driver = self._driver
        if driver.machine.state.is_terminal:
            return
        bounds = random_bounds(driver.core.graph, value)
        self._asked += 1
        name = f"rescale-{driver.epoch}-{self._asked}"
        state, before, busy = driver.machine.state, driver.plan.seen(), self._wish is not None
        fits, allowed = possible(driver.core.graph, bounds), driver.plan.may_replace()
        if not busy:
            self._wish, self._answered, self._wanted = name, False, None
            self._pointers = None if state is JobState.RUNNING else frozenset()
        self._answers.clear()
        driver.tell(core.RescaleRequested(name, bounds))
        outcome = self._answers[0] if self._answers else None
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

    def answered(self, answer: core.ChangeAnswered) -> None:
        """The user hears of it, once."""
        self._answers.append(answer.outcome)
        if answer.outcome is ChangeOutcome.JOB_ENDED:
            self._driver.checker.told_of_the_end()
        if answer.outcome is ChangeOutcome.BUSY:
            return
        self._require(answer.request_id == self._wish, f"{answer.request_id} is answered again")
        self._require(not self._answered, f"{answer.request_id} is answered twice")
        self._answered = True
        if self._driver.leads and self._wanted is not None and answer.outcome in _SETTLED:
            is_new = shape(self._world.ha.graph) == self._wanted
            applied = answer.outcome is ChangeOutcome.APPLIED
            self._require(is_new == applied, f"{answer.outcome.name}, and {shape(self._world.ha.graph)} is stored")
        if answer.outcome is not ChangeOutcome.UNKNOWN:
            self._wish = None

    # --- slots

    def reserve(self, order: core.ReserveSlots) -> None:
        """They come late, fewer than wanted, or never; one that came may be lost."""
        choices = self._world.choices
        self._reserved = 0
        late = choices.delay("reserve", 0, 200 if choices.fault("slots are late", 0.2) else 15)
        if choices.fault("slots never come", 0.15):
            self._later(late, partial(self._reserve, order, None))
            return
        few = choices.fault("slots are few", 0.2)
        self._later(late, partial(self._reserve, order, order.least if few else order.count))
        if choices.fault("a reserved slot is lost", 0.1):
            self._later(late + choices.delay("loss", 1, 40), partial(self._reserve, order, None))

    def _reserve(self, order: core.ReserveSlots, count: int | None) -> None:
        if order.request_id != self._wish or self._reserved is None:
            return
        if count is None:
            self._reserved = 0
            self._driver.tell(core.SlotsNotReserved(order.request_id, "simulated"))
        else:
            self._reserved = count
            self._pointers = frozenset(self._world.ha.pointers)
            self._driver.tell(core.SlotsReserved(order.request_id, count))

    def release(self, order: core.ReleaseReserve) -> None:
        self._reserved = None

    def acquires(self) -> None:
        """The next deployment takes what was reserved, once it is one at the new parallelism."""
        if self._wish is None:
            self._reserved = None

    # --- the stored plan

    def store(self, order: core.StoreGraph) -> None:
        if order.attempt == 0:
            self._may_store(order)
            self._store(order)
        else:
            self._later(_PAUSE_MS * order.attempt, partial(self._store, order))

    def _may_store(self, order: core.StoreGraph) -> None:
        """From now on old or new may be stored, and nothing else."""
        self._wanted = shape(order.graph)
        self._require(order.request_id == self._wish, "a graph is stored that nobody asked for")
        self._require(self._pointers is not None, "a graph is stored before its slots are there")
        if self._pointers:
            fresh = self._world.ha.pointers.keys() - self._pointers
            self._require(bool(fresh), "a graph is stored without a fresh checkpoint")
            self._require(bool(self._reserved), "a graph is stored whose slots were lost")

    def _store(self, order: core.StoreGraph) -> None:
        ha = self._world.ha
        if order.attempt and ha.graph == order.graph and ha.job_is_stored:
            self._later(1, partial(self._written, order, Outcome.DONE))  # what was unknown has been done
            return
        self._driver.storage.write(
            "graph",
            partial(self._write, order.graph, ha.revision),
            partial(self._written, order),
            faults=0.1 if order.attempt == 0 else 0.6,
        )

    def _write(self, graph: JobGraph, revision: int) -> bool:
        ha = self._world.ha
        if ha.revision != revision or not ha.job_is_stored:
            return False
        if ha.graph != graph and self._driver.leads and not self._world.job_has_ended:
            self._require(self._wish is not None, f"{shape(graph)} is stored when the rescale is settled")
        ha.graph = graph
        ha.revision += 1
        return True

    def _written(self, order: core.StoreGraph | core.SettleGraph, outcome: Outcome) -> None:
        name = order.request_id
        if outcome is Outcome.UNKNOWN:
            self._driver.tell(core.ChangeUnknown(name, "simulated"))
        elif outcome is Outcome.DONE and self._world.ha.graph == order.graph:
            self.shape, told = shape(order.graph), self._answered
            self._driver.tell(core.GraphStored(name))
            self._wish = None if told else self._wish
        else:
            told = self._answered
            settled = isinstance(order, core.SettleGraph) and outcome is Outcome.DONE
            self._driver.tell(core.ChangeNotStored(name, "simulated", settled or not self._world.ha.job_is_stored))
            if told and self._driver.core.wanted_graph is not order.graph:
                self._wish = None

    def settle(self, order: core.SettleGraph) -> None:
        """As it is, under a new revision."""
        self._later(_PAUSE_MS * (order.attempt + 1), partial(self._settle, order))

    def _settle(self, order: core.SettleGraph) -> None:
        ha = self._world.ha
        write = partial(self._write, ha.graph, ha.revision)
        self._driver.storage.write("graph", write, partial(self._written, order), faults=0.3)

    # --- what follows

    def deploys(self, graph: JobGraph) -> None:
        """What is stored, as far as the driver has been told; never a mixture."""
        self._require(shape(graph) == self.shape, f"{shape(graph)} is deployed, {self.shape} is in force")
        if self._driver.leads and self._wish is None and not self._world.job_has_ended:
            stored = shape(self._world.ha.graph)
            self._require(shape(graph) == stored, f"{shape(graph)} is deployed, {stored} is stored")

    def check(self) -> None:
        """After each step: what is in force runs, and without a rescale nothing is reserved but for what comes next."""
        state, deployment = self._driver.machine.state, self._driver.deployment
        about_to_deploy = state in (JobState.CLEARING, JobState.BACKING_OFF, JobState.STOPPING, JobState.ENDING)
        kept = self._wish is not None or about_to_deploy or state.is_terminal
        self._require(kept or self._reserved is None, "slots stay reserved for a rescale that is over")
        if state is JobState.RUNNING and deployment is not None:
            runs = shape(deployment.graph)
            self._require(runs == self.shape, f"{runs} goes on running, {self.shape} is in force")

    def _later(self, delay: int, call: Callable[..., None]) -> None:
        self._world.loop.at(self._world.loop.now + delay, self._driver.process, call)

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"rescale: {message}")
