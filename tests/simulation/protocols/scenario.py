"""What one schedule simulates: a job, its settings, the transport, and what users and the world do to it, by seed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.scheduler.restart_strategies import (
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    RestartStrategy,
)
from tests.simulation.schedules.schedule import Action, Schedule, weighted

USER_ACTIONS = (
    ("checkpoint", 24),
    ("savepoint", 16),
    ("patch", 18),
    ("reset overrides", 3),
    ("stop", 6),
    ("cancel", 1),
    ("rescale", 10),
    ("replace the configuration", 9),
    ("replace the restart strategy", 3),
    ("fail a task", 12),
    ("cut a connection", 8),
    ("crash the driver", 6),
    ("pause the driver", 4),
    ("suspend the driver", 2),
    ("jump the clock", 3),
    ("toggle the backlog", 2),
)
_KINDS = weighted(USER_ACTIONS)


@dataclass(frozen=True, slots=True)
class Scenario(Schedule):
    """``lossy``: messages may be lost, repeated and swapped, which TCP excludes, but the coordinator has to stand.

    ``calm``: the settings under which the job must make progress when the faults have ended. ``restored`` is the mode
    in which the job was started from a snapshot of another job; None for a fresh one. ``waits`` are vertices whose
    subtasks need a final checkpoint, as sinks always do. ``standby``: another driver takes over by the lease, by clocks
    of their own; otherwise another one is started when the present one is gone.
    """

    graph: JobGraph
    submitted: CheckpointConfiguration
    calm: bool = True
    bounded: bool = False
    lossy: bool = False
    late_timers: bool = False
    restored: RecoveryClaimMode | None = None
    waits: frozenset[str] = frozenset()
    standby: bool = False
    strategy: str = "exponential"
    chaos_ms: int = 2_500
    calm_ms: int = 2_200

    def describe(self) -> list[str]:
        return [
            f"settings: {self.submitted}",
            f"restored {self.restored}, lossy {self.lossy}, late timers {self.late_timers}, standby {self.standby}",
            f"bounded {self.bounded}, wait at the end: {sorted(self.waits)}",
            f"vertices {[(vertex.id, vertex.parallelism) for vertex in self.graph.vertices]}",
        ]

    def restart_strategy(self) -> RestartStrategy:
        """What the job was submitted with."""
        return STRATEGIES[self.strategy]


STRATEGIES: dict[str, RestartStrategy] = {
    "exponential": ExponentialDelay(10, 200, 1.5, 5_000),
    "fixed": FixedDelay(3, 50),
    "rate": FailureRate(4, 1_000, 20),
    "none": NoRestart(),
}


def other_settings(settings: CheckpointConfiguration, rng: Random) -> CheckpointConfiguration:
    """What a user may write into the job's configuration instead."""
    return replace(
        settings,
        interval_ms=rng.choice((None, 50, 150, 300)),
        timeout_ms=rng.choice((60, 200, 500, 2_000)),
        min_pause_ms=rng.choice((0, 30, 100)),
        tolerable_failed_checkpoints=rng.choice((0, 2, 1_000)),
        retained=rng.choice((1, 2, 3)),
    )


@cache
def simple_graph(vertices: int, parallelism: int, edges: tuple[Partitioning, ...]) -> JobGraph:
    """A chain of one source, perhaps middles, one sink."""
    names = ("source", "middle", "sink") if vertices == 3 else ("source", "sink")[:vertices]
    nodes = tuple(
        JobVertex(f"v-{name}", (OperatorNode(f"v-{name}", name, "source" if name == "source" else "map"),), parallelism)
        for name in names
    )
    links = tuple(JobEdge(a.id, b.id, kind) for (a, b), kind in zip(pairwise(nodes), edges, strict=False))
    return JobGraph("job", nodes, links)


def random_scenario(seed: int) -> Scenario:
    """Everything from the seed."""
    rng = Random(seed)
    partitioning = (rng.choice((Partitioning.FORWARD, Partitioning.HASH)), Partitioning.HASH)
    graph = simple_graph(rng.choice((1, 2, 2, 2, 3)), rng.choice((1, 1, 2, 2, 3)), partitioning)
    chaos_ms = rng.choice((1_000, 2_000, 3_000))
    submitted = _random_configuration(rng)
    actions = _random_actions(rng, chaos_ms)
    calm, bounded = rng.random() < 0.75, rng.random() < 0.3
    if bounded and rng.random() < 0.5:
        # Nothing but the end of the data triggers the last checkpoint.
        calm = False
        submitted = replace(submitted, interval_ms=None, timeout_ms=500, tolerable_failed_checkpoints=1_000)
        triggers = ("patch", "replace the configuration", "checkpoint", "stop")
        actions = tuple(action for action in actions if action.kind not in triggers)
    end = Random(f"the end of {seed}")
    likely = end.choice((0.0, 0.5, 1.0))
    return Scenario(
        graph=graph,
        submitted=replace(submitted, checkpoints_after_tasks_finish=end.random() < 0.8, **_random_rescue(seed)),
        waits=frozenset(vertex.id for vertex in graph.vertices if end.random() < likely),
        standby=Random(f"the standby of {seed}").random() < 0.4,
        calm=calm,
        bounded=bounded,
        lossy=rng.random() < 0.3,
        late_timers=rng.random() < 0.3,
        restored=rng.choice((None, None, None, RecoveryClaimMode.NO_CLAIM, RecoveryClaimMode.CLAIM)),
        strategy=rng.choice(("exponential",) * 7 + ("fixed", "rate", "none")),
        chaos_ms=chaos_ms,
        actions=(*actions, *_random_cancel(seed, chaos_ms)),
        fault_scale=rng.choice((0.0, 0.5, 1.0, 1.0, 2.0)),
    )


def _random_configuration(rng: Random) -> CheckpointConfiguration:
    configuration = CheckpointConfiguration(
        interval_ms=rng.choice((None, 40, 100, 200, 400)),
        timeout_ms=rng.choice((60, 200, 500, 2_000)),
        min_pause_ms=rng.choice((0, 0, 30, 100)),
        max_concurrent=rng.choice((1, 1, 2, 3)),
        tolerable_failed_checkpoints=rng.choice((0, 1, 3, 1_000)),
        retained=rng.choice((1, 1, 2, 3)),
        retention=rng.choice(tuple(CheckpointRetention)),
        incremental=rng.random() < 0.5,
    )
    if rng.random() < 0.15:
        configuration = replace(configuration, interval_during_backlog_ms=rng.choice((0, 500)))
    if rng.random() < 0.15:
        configuration = replace(configuration, unaligned_enabled=True)
    return configuration


def _random_rescue(seed: int) -> dict[str, Any]:
    """The policy that extends timeouts; off in most jobs, as it is by default."""
    rng = Random(f"the rescue of {seed}")
    if rng.random() < 0.6:
        return {}
    return {
        "rescue_enabled": True,
        "rescue_min_progress": rng.choice((1, 50, 90, 100)),
        "rescue_extension_ms": rng.choice((10, 60, 300)),
        "rescue_max_extension_ms": rng.choice((10, 100, 1_000)),
    }


def _random_cancel(seed: int, chaos_ms: int) -> tuple[Action, ...]:
    """Some jobs are cancelled with a savepoint, and meanwhile asked for checkpoints, or broken."""
    rng = Random(f"the cancellation of {seed}")
    if rng.random() < 0.8:
        return ()
    at = rng.randint(100, chaos_ms)
    others = ("checkpoint", "savepoint", "patch", "fail a task", "cancel with a savepoint", "rescale")
    more = [Action(at + rng.randint(0, 120), rng.choice(others), rng.getrandbits(32)) for _ in range(rng.randint(0, 4))]
    return (Action(at, "cancel with a savepoint", rng.getrandbits(32)), *sorted(more, key=lambda action: action.at))


def _random_actions(rng: Random, chaos_ms: int) -> tuple[Action, ...]:
    actions = []
    time = rng.randint(0, 200)
    while time < chaos_ms:
        actions.append(Action(time, rng.choice(_KINDS), rng.getrandbits(32)))
        time += rng.choice((rng.randint(0, 20), rng.randint(10, 300)))
    return tuple(actions)
