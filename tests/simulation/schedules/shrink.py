"""Makes a failing schedule small: leaves out actions and faults as long as it still fails in the same way.

Delta debugging over the list of actions and faults. What is left is printed with its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from tests.simulation.schedules.choices import FaultKey
from tests.simulation.schedules.schedule import Action
from tests.simulation.schedules.simulation import Failure, S, Simulation

T = TypeVar("T")


def shrink(simulation: Simulation[S], failure: Failure[S]) -> Failure[S]:
    """The smallest schedule found that fails in the same way, after at most ``simulation.shrink_runs`` runs."""
    return _Shrinker(simulation, failure).run()


def explain(simulation: Simulation[S], seed: int) -> Failure[S]:
    """The shrunk failure of a seed. Raises ValueError when it does not fail."""
    failure = simulation.find_failure(seed)
    if failure is None:
        raise ValueError(f"seed {seed} does not fail")
    return shrink(simulation, failure)


class _Shrinker(Generic[S]):
    def __init__(self, simulation: Simulation[S], failure: Failure[S]) -> None:
        self._simulation = simulation
        self._best = failure
        self._runs = 0

    def run(self) -> Failure[S]:
        self._try(replace(self._best.scenario, plain=True), self._best.muted)
        while True:
            before = (len(self._best.scenario.actions), len(self._best.faults))
            leave_out(self._best.scenario.actions, self._try_actions)
            leave_out(self._best.faults, self._try_faults)
            after = (len(self._best.scenario.actions), len(self._best.faults))
            if self._runs >= self._simulation.shrink_runs or before == after:
                return self._best

    def _try(self, scenario: S, muted: frozenset[FaultKey]) -> bool:
        if self._runs >= self._simulation.shrink_runs:
            return False
        self._runs += 1
        found = self._simulation.find_failure(self._best.seed, scenario, muted)
        if found is None or found.kind != self._best.kind:
            return False
        self._best = found
        return True

    def _try_actions(self, actions: Sequence[Action]) -> bool:
        return self._try(replace(self._best.scenario, actions=tuple(actions)), self._best.muted)

    def _try_faults(self, faults: Sequence[FaultKey]) -> bool:
        left_out = frozenset(self._best.faults) - frozenset(faults)
        return self._try(self._best.scenario, self._best.muted | left_out)


def leave_out(items: Sequence[T], attempt: Callable[[Sequence[T]], bool]) -> None:
    """Leaves out halves, then quarters, down to single ones; ``attempt`` says whether what is kept still fails."""
    kept = list(items)
    size = max(1, len(kept) // 2)
    while kept:
        start = 0
        while start < len(kept):
            candidate = kept[:start] + kept[start + size :]
            if attempt(candidate):
                kept = candidate
            else:
                start += size
        if size == 1:
            return
        size //= 2
