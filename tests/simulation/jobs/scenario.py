"""What one schedule simulates, by seed: a job, its settings, how fast its parts are, and what happens to it when."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

from ckpt_runtime.checkpoint.configuration import (
    CheckpointConfiguration,
    CheckpointConfigurationError,
    CheckpointOverrides,
)
from tests.simulation.jobs.topology import KEYED, Topology, random_topology
from tests.simulation.schedules.schedule import Action, Schedule, weighted

ACTIONS = (
    ("checkpoint", 8),
    ("savepoint", 8),
    ("patch", 20),
    ("expire what is pending", 14),
    ("crash a worker", 12),
    ("fail a task", 12),
    ("rescale", 8),
    ("restore a savepoint", 4),
    ("stop", 6),
    ("fail a task behind", 16),
    ("crash a worker behind", 6),
    ("rescale behind", 14),
    ("live rescale", 14),
    ("live rescale behind", 8),
)
_KINDS = weighted(ACTIONS)
_SHARING = (
    ("checkpoint", 30),
    ("savepoint", 14),
    ("canonical savepoint", 3),
    ("dispose of a savepoint", 8),
    ("restore a savepoint", 6),
    ("start from a retained checkpoint", 9),
    ("the driver dies", 6),
    ("live rescale", 6),
    ("stop", 3),
    ("fail a task", 6),
    ("crash a worker", 3),
)
"""What happens to a job whose checkpoints share files, beside the rest."""
_SHARING_KINDS = weighted(_SHARING)
_CROWDED = 8
"""Every so many seeds checkpoints crowd."""
_SHARES = 4
"""Every so many seeds checkpoints share files."""


@dataclass(frozen=True, slots=True)
class Scenario(Schedule):
    """``parallelism`` by group of vertices. ``weights`` say how often what moves: subtasks, frames, messages, storage.

    ``slow`` are vertices that rarely get their turn, ``late_slots`` workers that hear late of the driver, ``skew_ms``
    the wall clocks of the slots against the driver's. ``waits`` are operators by uid that require a final checkpoint.
    """

    topology: Topology
    parallelism: tuple[int, ...]
    submitted: CheckpointConfiguration
    options: dict[str, str]
    source_rows: int = 3
    weights: tuple[float, float, float, float] = (6.0, 3.0, 1.5, 1.0)
    slow: frozenset[str] = frozenset()
    late_slots: frozenset[int] = frozenset()
    skew_ms: tuple[int, ...] = (0, 0, 0)
    step_ms: float = 0.2
    waits: frozenset[str] = frozenset()

    @property
    def shares(self) -> bool:
        """Whether its checkpoints refer to files of earlier ones."""
        return self.submitted.incremental

    def describe(self) -> list[str]:
        lines = [f"settings: {self.submitted}", f"options: {self.options}", f"wait at the end: {sorted(self.waits)}"]
        for vertex in self.topology.vertices:
            cost = f", {vertex.cost_ms} ms a row" if vertex.cost_ms else ""
            slow = ", slow" if vertex.name in self.slow else ""
            count = self.parallelism[vertex.group]
            lines.append(f"vertex {vertex.name}: {' -> '.join(vertex.operators)}, parallelism {count}{cost}{slow}")
        lines += [f"edge {source} -> {target}: {kind.value}" for source, target, kind in self.topology.edges]
        return [*lines, *(f"rows: {rows}" for rows in self.topology.sources)]


def random_scenario(seed: int) -> Scenario:
    """Everything from the seed."""
    rng = Random(seed)
    topology = random_topology(rng)
    names = [vertex.name for vertex in topology.vertices]
    slow = frozenset(name for name in names if rng.random() < 0.2) | {rng.choice(names)}
    scenario = Scenario(
        topology=topology,
        parallelism=random_parallelism(rng, topology),
        submitted=random_configuration(rng),
        options={
            "taskmanager.network.memory.buffers-per-channel": str(rng.choice((1, 1, 2, 4))),
            "taskmanager.network.memory.max-buffers-per-channel": str(rng.choice((1, 2, 4, 8))),
            "taskmanager.network.buffer.max-rows": str(rng.choice((1, 2, 4, 12))),
            "execution.buffer-timeout.interval": rng.choice(("0 ms", "1 ms", "5 ms", "20 ms")),
            "state.storage.fs.memory-threshold": rng.choice(("0 b", "0 b", "300 b", "20 kb")),
        },
        source_rows=rng.choice((1, 2, 3, 5)),
        weights=(6.0, rng.choice((0.7, 3.0, 6.0)), rng.choice((0.4, 1.5, 4.0)), rng.choice((0.2, 1.0, 3.0))),
        slow=slow,
        late_slots=frozenset(slot for slot in (1, 2, 0, 1, 2) if rng.random() < 0.15),
        skew_ms=tuple(rng.choice((0, 0, 0, -6, 8)) for _ in range(3)),
        step_ms=rng.choice((0.05, 0.2, 0.4)),
        actions=_random_actions(rng),
        fault_scale=rng.choice((0.0, 0.5, 1.0, 2.0)),
    )
    scenario = _ending(scenario, Random(f"the end of {seed}"))
    scenario = _crowded(scenario) if seed % _CROWDED == 2 else scenario
    return _sharing(scenario, seed) if seed % _SHARES == 1 else scenario


def _sharing(scenario: Scenario, seed: int) -> Scenario:
    """With incremental checkpoints, which come often, and with all that may happen to the files that they share."""
    rng = Random(f"sharing {seed}")
    topology = scenario.topology
    while not any(operator in KEYED for vertex in topology.vertices for operator in vertex.operators):
        topology = random_topology(rng)
    submitted = replaced(
        scenario.submitted,
        interval_ms=rng.choice((10, 15, 25)),
        timeout_ms=2_000,
        tolerable_failed_checkpoints=1_000,
        max_concurrent=rng.choice((1, 2, 3, 3)),
        retained=rng.choice((1, 1, 2, 3)),
        incremental=True,
    )
    actions = []
    step = rng.randint(80, 200)
    while step < 900:
        actions.append(Action(step, rng.choice(_SHARING_KINDS), rng.getrandbits(32)))
        step += rng.choice((rng.randint(10, 60), rng.randint(60, 200)))
    return replace(
        scenario,
        topology=topology,
        parallelism=random_parallelism(rng, topology),
        submitted=submitted,
        options=scenario.options | {"state.backend.type": "rocksdb", "state.storage.fs.memory-threshold": "0 b"},
        source_rows=1,
        late_slots=frozenset({rng.randrange(2)}) if rng.random() < 0.6 else frozenset(),
        slow=frozenset({rng.choice(topology.vertices).name}) if rng.random() < 0.5 else frozenset(),
        actions=tuple(actions),
    )


def _ending(scenario: Scenario, rng: Random) -> Scenario:
    """Which operators wait at their end, and whether there are checkpoints behind the first one's."""
    uids = [vertex.uid(kind) for vertex in scenario.topology.vertices for kind in vertex.operators]
    likely = rng.choice((0.0, 0.0, 0.3, 1.0))
    scenario = replace(scenario, waits=frozenset(uid for uid in uids if rng.random() < likely))
    if rng.random() < 0.8:
        return scenario
    return replace(
        scenario,
        submitted=replaced(scenario.submitted, checkpoints_after_tasks_finish=False),
        options=scenario.options | {"execution.checkpointing.checkpoints-after-tasks-finish": "false"},
    )


def _crowded(scenario: Scenario) -> Scenario:
    """With several unaligned checkpoints at once, which otherwise hardly ever meet at one subtask."""
    submitted = replaced(
        scenario.submitted,
        interval_ms=10,
        timeout_ms=2_000,
        min_pause_ms=0,
        max_concurrent=3,
        tolerable_failed_checkpoints=1_000,
        unaligned_enabled=True,
        aligned_timeout_ms=0,
        max_inflight_data_bytes=None,
    )
    return replace(scenario, submitted=submitted)


def random_parallelism(rng: Random, topology: Topology) -> tuple[int, ...]:
    """By group; often a single source, whose worker is not the one of most other subtasks."""
    most = min(3, topology.max_parallelism)
    single = {vertex.group for vertex in topology.vertices if "source" in vertex.operators and rng.random() < 0.4}
    return tuple(1 if group in single else rng.randint(1, most) for group in range(topology.groups))


def random_configuration(rng: Random) -> CheckpointConfiguration:
    """What a job is submitted with."""
    configuration = CheckpointConfiguration(
        interval_ms=rng.choice((None, 10, 15, 25, 40)),
        timeout_ms=rng.choice((20, 40, 200, 2_000)),
        min_pause_ms=rng.choice((0, 0, 0, 10)),
        max_concurrent=rng.choice((1, 1, 2, 3)),
        tolerable_failed_checkpoints=rng.choice((0, 1_000, 1_000, 1_000)),
        retained=rng.choice((1, 1, 2)),
    )
    if rng.random() < 0.75:
        configuration = replaced(
            configuration,
            unaligned_enabled=True,
            aligned_timeout_ms=rng.choice((0, 0, 0, 3, 10, 30)),
            max_inflight_data_bytes=rng.choice((None, None, None, 0, 100, 400, 1_000)),
        )
    return configuration


def replaced(configuration: CheckpointConfiguration, **changes: Any) -> CheckpointConfiguration:
    """With these changes; the same when they do not fit together."""
    try:
        return replace(configuration, **changes)
    except CheckpointConfigurationError:
        return configuration


def random_overrides(value: int) -> CheckpointOverrides:
    """One or two settings to be changed."""
    rng = Random(value)
    chosen = {}
    for _ in range(rng.choice((1, 1, 2))):
        name, values = rng.choice(_PATCHES)
        chosen[name] = rng.choice(values)
    return CheckpointOverrides(**chosen)


_PATCHES: tuple[tuple[str, tuple[int | bool, ...]], ...] = (
    ("interval_ms", (10, 15, 30)),
    ("timeout_ms", (15, 50, 100, 500)),
    ("max_concurrent", (1, 2, 3)),
    ("min_pause_ms", (0, 5)),
    ("unaligned_enabled", (True, True, False)),
    ("aligned_timeout_ms", (0, 0, 5, 20)),
    ("max_inflight_data_bytes", (0, 150, 600)),
)


def _random_actions(rng: Random) -> tuple[Action, ...]:
    actions = []
    step = rng.randint(0, 150)
    end = rng.choice((0, 300, 600, 600, 900))
    while step < end:
        actions.append(Action(step, rng.choice(_KINDS), rng.getrandbits(32)))
        step += rng.choice((rng.randint(0, 10), rng.randint(10, 200), rng.randint(50, 250)))
    return tuple(actions)
