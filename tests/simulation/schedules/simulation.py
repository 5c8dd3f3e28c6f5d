"""A kind of schedules, and how one of them is run."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from tests.simulation.schedules.choices import Choices, FaultKey
from tests.simulation.schedules.schedule import Schedule

S = TypeVar("S", bound=Schedule)
T = TypeVar("T")
S_contra = TypeVar("S_contra", bound=Schedule, contravariant=True)


class SimulatedWorld(Protocol):
    """One schedule, ready to run. ``trace`` has its steps as text, if it was made with ``tracing``."""

    trace: list[str]
    choices: Choices

    def run(self) -> str:
        """Ends quietly or raises what the schedule found."""


class WorldFactory(Protocol[S_contra]):
    """``muted`` faults do not happen."""

    def __call__(
        self, seed: int, scenario: S_contra, *, muted: frozenset[FaultKey] = frozenset(), tracing: bool = False
    ) -> SimulatedWorld: ...


_SCHEDULES_A_COLLECTION = 20


@dataclass(frozen=True, slots=True)
class Failure(Generic[S]):
    """A schedule that fails: ``kind`` is its error without numbers, ``muted`` the faults that are left out."""

    seed: int
    scenario: S
    error: str
    kind: str
    trace: tuple[str, ...]
    faults: tuple[FaultKey, ...]
    muted: frozenset[FaultKey] = frozenset()

    def report(self, last: int = 60) -> str:
        """What is needed to understand it, newest last."""
        lines = [f"seed {self.seed}: {self.error}", *self.scenario.describe()]
        lines += [f"action at {action.at}: {action.kind} ({action.value})" for action in self.scenario.actions]
        lines += [f"fault: {kind}, number {number}" for kind, number in self.faults]
        if len(self.trace) > last:
            lines.append(f"... {len(self.trace) - last} steps before")
        return "\n".join([*lines, *self.trace[-last:]])


@dataclass(frozen=True, slots=True)
class Simulation(Generic[S]):
    """``scenario`` makes a schedule of a seed, ``world`` runs one. ``shrink_runs``: how often a failure may be rerun.

    Both are names of modules: a simulation is sent to other processes.
    """

    name: str
    scenario: Callable[[int], S]
    world: WorldFactory[S]
    shrink_runs: int

    def find_failure(
        self,
        seed: int,
        scenario: S | None = None,
        muted: frozenset[FaultKey] = frozenset(),
        *,
        tracing: bool = True,
        observe: Callable[[Any], None] | None = None,
    ) -> Failure[S] | None:
        """Runs one schedule; None when it holds. ``observe`` gets its world then."""
        chosen = self.scenario(seed) if scenario is None else scenario
        world: SimulatedWorld | None = None
        try:
            world = self.world(seed, chosen, muted=muted, tracing=tracing)
            world.run()
        except Exception as error:  # whatever the real parts raise is a finding
            text = f"{type(error).__name__}: {error}"
            trace = () if world is None else tuple(world.trace)
            faults = () if world is None else tuple(world.choices.fired)
            return Failure(seed, chosen, text, _kind_of(text), trace, faults, muted)
        if observe is not None:
            observe(world)
        return None

    def first_failing(self, seeds: Sequence[int]) -> int | None:
        """The first of the seeds that fails; None when all hold."""
        return next(self._failing(seeds), None)

    def failing_seeds(self, seeds: Sequence[int], observe: Callable[[Any], None] | None = None) -> list[int]:
        """The seeds that fail, in order. ``observe`` gets the world of each other one."""
        return list(self._failing(seeds, observe))

    def _failing(self, seeds: Sequence[int], observe: Callable[[Any], None] | None = None) -> Iterator[int]:
        for seed in collections_by_hand(seeds):
            if self.find_failure(seed, tracing=False, observe=observe) is not None:
                yield seed


def collections_by_hand(schedules: Iterable[T]) -> Iterator[T]:
    """Gives what is to be run, with the garbage collector off, and collects a few schedules' worlds at once.

    A world is one knot of references that lives until its schedule ends; looking through it again and again while it
    runs takes a tenth of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number, schedule in enumerate(schedules, start=1):
            yield schedule
            if number % _SCHEDULES_A_COLLECTION == 0:
                gc.collect(0)
    finally:
        gc.collect(0)
        if enabled:
            gc.enable()


def _kind_of(text: str) -> str:
    """What tells failures apart: the text without its numbers."""
    return re.sub(r"[\d\[\]'., -]+", " ", text)[:80]
