"""Makes a failing schedule small: leaves out actions and faults as long as it still fails in the same way.

Delta debugging over the list of actions and faults. What is left is printed with its trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ckpt_runtime.testing.simulation.choices import FaultKey
from ckpt_runtime.testing.simulation.scenario import Action, Scenario, random_scenario
from ckpt_runtime.testing.simulation.world import World

T = TypeVar("T")
MAX_RUNS = 600


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that fails: ``kind`` is its error without numbers, ``muted`` the faults that are left out."""

    seed: int
    scenario: Scenario
    error: str
    kind: str
    trace: tuple[str, ...]
    faults: tuple[FaultKey, ...]
    muted: frozenset[FaultKey] = frozenset()
    plain: bool = False

    def report(self, last: int = 60) -> str:
        """What is needed to understand it, newest last."""
        lines = [f"seed {self.seed}: {self.error}", f"settings: {self.scenario.submitted}"]
        lines.append(
            f"restored {self.scenario.restored}, lossy {self.scenario.lossy}, late timers {self.scenario.late_timers}, "
            f"incremental {self.scenario.incremental}, bounded {self.scenario.bounded}, "
            f"vertices {[(v.id, v.parallelism) for v in self.scenario.graph.vertices]}"
        )
        lines += [f"action at {action.at}: {action.kind} ({action.value})" for action in self.scenario.actions]
        lines += [f"fault: {kind}, number {number}" for kind, number in self.faults]
        if len(self.trace) > last:
            lines.append(f"... {len(self.trace) - last} steps before")
        return "\n".join([*lines, *self.trace[-last:]])


def find_failure(
    seed: int,
    scenario: Scenario | None = None,
    muted: frozenset[FaultKey] = frozenset(),
    *,
    plain: bool = False,
    tracing: bool = True,
) -> Failure | None:
    """Runs one schedule; None when it holds."""
    chosen = random_scenario(seed) if scenario is None else scenario
    world: World | None = None
    try:
        world = World(seed, chosen, muted=muted, plain=plain, tracing=tracing)
        world.run()
    except Exception as error:  # whatever the cores raise is a finding
        text = f"{type(error).__name__}: {error}"
        trace = () if world is None else tuple(world.trace)
        faults = () if world is None else tuple(world.choices.fired)
        return Failure(seed, chosen, text, kind_of(text), trace, faults, muted, plain)
    return None


def kind_of(text: str) -> str:
    """What tells failures apart: the text without its numbers."""
    return re.sub(r"[\d\[\]'., -]+", " ", text)[:80]


def shrink(failure: Failure) -> Failure:
    """The smallest schedule found that fails in the same way, after at most ``MAX_RUNS`` runs."""
    return _Shrinker(failure).run()


class _Shrinker:
    def __init__(self, failure: Failure) -> None:
        self._best = failure
        self._runs = 0

    def run(self) -> Failure:
        self._try(plain=True)
        while True:
            before = (len(self._best.scenario.actions), len(self._best.faults))
            leave_out(self._best.scenario.actions, self._try_actions)
            leave_out(self._best.faults, self._try_faults)
            if self._runs >= MAX_RUNS or before == (len(self._best.scenario.actions), len(self._best.faults)):
                return self._best

    def _try(
        self, scenario: Scenario | None = None, muted: frozenset[FaultKey] | None = None, plain: bool = False
    ) -> bool:
        if self._runs >= MAX_RUNS:
            return False
        self._runs += 1
        best = self._best
        found = find_failure(
            best.seed,
            best.scenario if scenario is None else scenario,
            best.muted if muted is None else muted,
            plain=plain or best.plain,
        )
        if found is None or found.kind != best.kind:
            return False
        self._best = found
        return True

    def _try_actions(self, actions: Sequence[Action]) -> bool:
        return self._try(scenario=replace(self._best.scenario, actions=tuple(actions)))

    def _try_faults(self, faults: Sequence[FaultKey]) -> bool:
        return self._try(muted=self._best.muted | (frozenset(self._best.faults) - frozenset(faults)))


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
