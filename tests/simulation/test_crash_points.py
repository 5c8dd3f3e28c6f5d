"""Every crash point, and pairs of them, of runs with PATCH, PUT, completion, subsumption, stops and recovery."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.graph.job_graph import Partitioning
from tests.simulation.protocols.scenario import Scenario, simple_graph
from tests.simulation.protocols.world import World
from tests.simulation.schedules.schedule import Action
from tests.simulation.schedules.simulation import collections_by_hand
from tests.support.effort import THOROUGH

SETTINGS = CheckpointConfiguration(
    interval_ms=50, timeout_ms=500, tolerable_failed_checkpoints=1_000, retained=1, incremental=True
)


def scenario(*actions: Action, end: int) -> Scenario:
    return Scenario(
        graph=simple_graph(2, 1, (Partitioning.HASH,)),
        submitted=SETTINGS,
        calm=False,
        chaos_ms=end,
        calm_ms=250,
        actions=actions,
        fault_scale=0.0,
        plain=True,
    )


RESCALE = 1
"""What makes ``random_bounds`` choose another parallelism for all vertices."""

RESTARTS, LIVE = 7, 5
"""Configurations that need a restart, and none."""

POINTS = 36
"""So many of a run's points; what follows repeats them."""

NEAR = 5 if THOROUGH else 2
"""A second crash within so many points of the first lies in what the first one left half done, or in its recovery."""

RUNS = {
    "patch": scenario(Action(30, "patch", 7), Action(60, "reset overrides", 0), end=90),
    "completion and subsumption": scenario(end=150),
    "savepoint and recovery": scenario(Action(40, "savepoint", 0), Action(70, "fail a task", 3), end=130),
    "stop with savepoint": scenario(Action(90, "stop", 1), end=200),
    "rescale": scenario(Action(30, "rescale", RESCALE), end=130),
    "configuration": scenario(Action(30, "replace the configuration", RESTARTS), end=130),
    "overrides and configuration": scenario(
        Action(20, "patch", 7), Action(45, "replace the configuration", LIVE), Action(70, "reset overrides", 0), end=100
    ),
    "cancel with a savepoint": scenario(Action(40, "cancel with a savepoint", 0), end=130),
    "cancel": scenario(Action(90, "cancel", 1), end=130),
}


def points_of(run: Scenario) -> list[str]:
    world = World(1, run)
    world.run()
    return world.crash_points


@pytest.mark.row("571.6")
@pytest.mark.parametrize("name", RUNS)
def test_every_crash_point_and_a_second_one_soon_after(name: str) -> None:
    run = RUNS[name]
    relevant = range(min(len(points_of(run)), POINTS))
    survives(name, run, [(point,) for point in relevant])
    survives(name, run, [pair for pair in combinations(relevant, 2) if pair[1] - pair[0] <= NEAR])


@pytest.mark.long
@pytest.mark.row("571.6")
@pytest.mark.parametrize("name", RUNS)
def test_every_pair_of_crash_points(name: str) -> None:
    run = RUNS[name]
    survives(name, run, combinations(range(min(len(points_of(run)), POINTS)), 2))


def survives(name: str, run: Scenario, crashes: Iterable[tuple[int, ...]]) -> None:
    """The points are counted over all drivers of a run, so that a later one may lie in the recovery."""
    for points in collections_by_hand(crashes):
        world = World(1, run, crash_at=frozenset(points))
        try:
            world.run()
        except Exception as error:
            names = [world.crash_points[number] for number in points if number < len(world.crash_points)]
            raise AssertionError(f"{name}: crashed {names} (points {points}): {error}") from error


def test_a_configuration_needs_a_restart_and_another_one_none() -> None:
    deployments = {}
    for name in ("configuration", "overrides and configuration"):
        world = World(1, RUNS[name])
        world.run()
        deployments[name] = world.deployments
    assert deployments == {"configuration": 2, "overrides and configuration": 1}


def test_the_points_are_those_of_the_protocols() -> None:
    """Guards against runs in which nothing durable happens."""
    everything = {point for run in RUNS.values() for point in points_of(run)}
    assert {"writing checkpoint id", "checkpoint-reserved", "checkpoint-located"} <= everything
    assert {"writing metadata", "metadata-after", "writing savepoint"} <= everything
    assert {"writing pointer", "pointer-after", "notify-before", "notify-after"} <= everything
    assert {"writing removal", "removal-after", "checkpoint-half-deleted", "checkpoint-deleted"} <= everything
    assert {"writing overrides", "patch-persisted", "before the answer"} <= everything
    assert {"received", "validated", "writing graph", "plan-persisted"} <= everything
    assert {"writing attempt", "attempt-recorded", "deploy-before"} <= everything
    assert {"writing result", "end-stored", "forgetting the job", "the job is removed"} <= everything
