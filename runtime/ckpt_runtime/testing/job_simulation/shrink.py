"""Finds whether a schedule fails, and makes a failing one small; see ``testing/simulation/shrink.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckpt_runtime.testing.job_simulation.scenario import Action, Scenario, random_scenario
from ckpt_runtime.testing.job_simulation.world import World
from ckpt_runtime.testing.simulation.choices import FaultKey
from ckpt_runtime.testing.simulation.shrink import kind_of, leave_out

MAX_RUNS = 300


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

    def report(self, last: int = 60) -> str:
        """What is needed to understand it, newest last."""
        scenario = self.scenario
        lines = [f"seed {self.seed}: {self.error}", f"settings: {scenario.submitted}", f"options: {scenario.options}"]
        for vertex in scenario.topology.vertices:
            cost = f", {vertex.cost_ms} ms a row" if vertex.cost_ms else ""
            slow = ", slow" if vertex.name in scenario.slow else ""
            count = scenario.parallelism[vertex.group]
            lines.append(f"vertex {vertex.name}: {' -> '.join(vertex.operators)}, parallelism {count}{cost}{slow}")
        lines += [f"edge {source} -> {target}: {kind.value}" for source, target, kind in scenario.topology.edges]
        lines += [f"rows: {rows}" for rows in scenario.topology.sources]
        lines += [f"action at step {action.at}: {action.kind} ({action.value})" for action in scenario.actions]
        lines += [f"fault: {kind}, number {number}" for kind, number in self.faults]
        if len(self.trace) > last:
            lines.append(f"... {len(self.trace) - last} steps before")
        return "\n".join([*lines, *self.trace[-last:]])


def find_failure(
    seed: int,
    scenario: Scenario | None = None,
    muted: frozenset[FaultKey] = frozenset(),
    *,
    tracing: bool = True,
) -> Failure | None:
    """Runs one schedule; None when it holds."""
    chosen = random_scenario(seed) if scenario is None else scenario
    world: World | None = None
    try:
        world = World(seed, chosen, muted=muted, tracing=tracing)
        world.run()
    except Exception as error:  # whatever the real parts raise is a finding
        text = f"{type(error).__name__}: {error}"
        trace = () if world is None else tuple(world.trace)
        faults = () if world is None else tuple(world.choices.fired)
        return Failure(seed, chosen, text, kind_of(text), trace, faults, muted)
    return None


def failing_seeds(seeds: Sequence[int]) -> list[int]:
    """The seeds that fail, in order."""
    return [seed for seed in seeds if find_failure(seed, tracing=False) is not None]


def explain(seed: int) -> Failure:
    """The shrunk failure of a seed. Raises ValueError when it does not fail."""
    failure = find_failure(seed)
    if failure is None:
        raise ValueError(f"seed {seed} does not fail")
    return shrink(failure)


def shrink(failure: Failure) -> Failure:
    """The smallest schedule found that fails in the same way, after at most ``MAX_RUNS`` runs."""
    return _Shrinker(failure).run()


class _Shrinker:
    def __init__(self, failure: Failure) -> None:
        self._best = failure
        self._runs = 0

    def run(self) -> Failure:
        while True:
            before = (len(self._best.scenario.actions), len(self._best.faults))
            leave_out(self._best.scenario.actions, self._try_actions)
            leave_out(self._best.faults, self._try_faults)
            if self._runs >= MAX_RUNS or before == (len(self._best.scenario.actions), len(self._best.faults)):
                return self._best

    def _try(self, scenario: Scenario | None = None, muted: frozenset[FaultKey] | None = None) -> bool:
        if self._runs >= MAX_RUNS:
            return False
        self._runs += 1
        best = self._best
        found = find_failure(
            best.seed, best.scenario if scenario is None else scenario, best.muted if muted is None else muted
        )
        if found is None or found.kind != best.kind:
            return False
        self._best = found
        return True

    def _try_actions(self, actions: Sequence[Action]) -> bool:
        return self._try(scenario=replace(self._best.scenario, actions=tuple(actions)))

    def _try_faults(self, faults: Sequence[FaultKey]) -> bool:
        return self._try(muted=self._best.muted | (frozenset(self._best.faults) - frozenset(faults)))
