"""Seeded schedules over drivers, coordinator, job machine, storage and tasks, with checkers on every step."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides
from ckpt_runtime.graph.job_graph import Partitioning
from tests.simulation.checks import (
    assert_found,
    assert_holds,
    assert_same_trace_under_any_hash_seed,
    assert_shrinks,
    plant,
)
from tests.simulation.planted_bugs import BUGS, ENOUGH
from tests.simulation.protocols.files import DIRECTORY
from tests.simulation.protocols.scenario import Scenario, random_scenario, simple_graph
from tests.simulation.protocols.tasks import Deployment
from tests.simulation.protocols.world import PROTOCOLS, World
from tests.simulation.schedules.runner import read_seeds

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "200"))
SEEDS_OF_A_LONG_RUN = max(SEEDS, 5_000)
BLOCK = 200
OBSERVED = 60
"""How many of the seeds show whether the schedules are worth running."""
KEPT = read_seeds(Path(__file__).with_name("kept_seeds.txt"))
MINUTE = 60_000


@pytest.mark.row("571.3")
@pytest.mark.timeout(600)
def test_the_protocols_hold() -> None:
    seen: Counter[str] = Counter()
    reasons = set()

    def observe(world: World) -> None:
        if world.seed >= OBSERVED:
            return
        seen["events"] += world.loop.events
        seen["drivers"] += world.drivers
        seen["deployments"] += world.deployments
        seen["completed"] += len(world.checker.completed)
        seen["aborted"] += len(world.checker.aborted)
        seen["savepoints"] += len(world.files.savepoints)
        seen["disposed"] += world.files.disposed
        seen["late metadata"] += len(world.files.late)
        seen["late events"] += world.late_events
        seen["rescaled"] += world.ha.graph is not world.scenario.graph
        seen[f"ended {world.ha.result.status if world.ha.result else None}"] += 1
        reasons.update(world.checker.reasons)
        seen.update(action.kind for action in world.scenario.actions)

    assert_holds(PROTOCOLS, 0, SEEDS, observe)
    assert seen["events"] > 20_000
    assert seen["drivers"] > 100
    assert seen["deployments"] > 200
    assert seen["completed"] > 450
    assert seen["aborted"] > 100
    assert seen["savepoints"] + seen["disposed"] > 30
    assert seen["disposed"] > 5
    assert seen["rescaled"] > 5
    assert seen["late events"] > 20
    assert min(seen[f"ended {status}"] for status in ("FINISHED", "CANCELED", "FAILED")) > 1
    assert {"CHECKPOINT_EXPIRED", "FINALIZE_CHECKPOINT_FAILURE", "CHECKPOINT_SUBSUMED", "IO_EXCEPTION"} <= {
        reason.name for reason in reasons
    }


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_OF_A_LONG_RUN, BLOCK))
def test_more_of_them_hold(first: int) -> None:
    assert_holds(PROTOCOLS, first, min(BLOCK, SEEDS_OF_A_LONG_RUN - first))


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_holds(seed: int) -> None:
    assert_holds(PROTOCOLS, seed)


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    assert_same_trace_under_any_hash_seed("tests.simulation.protocols.world", 5)


# --- the simulator is graded


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [planted.name for planted in BUGS])
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(BUGS, name, monkeypatch)
    assert_found(PROTOCOLS, ENOUGH, planted.seed)


def test_a_failing_seed_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(BUGS, "a pointer whose removal failed counts as gone", monkeypatch)
    small = assert_shrinks(PROTOCOLS, ENOUGH, most=6, first=planted.seed)
    assert any("removal" in kind for kind, _ in small.faults)


# --- the example of the design


@pytest.mark.row("571.3")
def test_a_checkpoint_at_95_percent_is_rescued(monkeypatch: pytest.MonkeyPatch) -> None:
    """At ten minutes less ten seconds, extended to fifteen minutes; completes at ten minutes and two seconds."""
    started: list[int] = []
    original = Deployment._snapshot

    def slow(self: Deployment, task, checkpoint_id: int) -> None:
        """One of twenty subtasks needs ten minutes and two seconds for its upload, the others one second."""
        world = self.world
        if checkpoint_id != 1 or checkpoint_id <= task.last_id:
            original(self, task, checkpoint_id)
            return
        task.last_id = checkpoint_id
        task.uploading.add(checkpoint_id)
        started.append(world.loop.now)
        takes = 10 * MINUTE + 2_000 if task.execution.subtask == 19 else 1_000
        world.loop.at(world.loop.now + takes, None, self._uploaded, task, checkpoint_id, task.options[checkpoint_id])

    monkeypatch.setattr(Deployment, "_snapshot", slow)
    settings = CheckpointConfiguration(interval_ms=30 * MINUTE, timeout_ms=10 * MINUTE, incremental=True)
    world = World(
        1,
        Scenario(simple_graph(1, 20, (Partitioning.HASH,)), settings, calm=False, fault_scale=0.0, plain=True),
        tracing=True,
    )
    with world.entered():
        while not started:
            world.loop.run_until(world.loop.now + 100)
        begun = world.present.checker.open[1].started
        world.loop.run_until(begun + 10 * MINUTE - 10_000)
        written = set(world.files.files)
        assert len(world.files.in_directory(f"{DIRECTORY}/chk-1")) == 19
        world.present.patch(CheckpointOverrides(timeout_ms=15 * MINUTE))
        world.loop.run_until(begun + 10 * MINUTE + 1_000)
        assert 1 not in world.checker.aborted
        world.loop.run_until(begun + 10 * MINUTE + 2_500)
    assert world.checker.completed == {1: True}
    checkpoint = world.ha.pointers[1].checkpoint
    assert not world.files.missing(checkpoint)
    assert written <= set(world.files.files)
    assert not any("Discard" in line or "DeleteShared" in line for line in world.trace)


@pytest.mark.row("571.3")
def test_without_the_extension_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Deployment._uploaded
    monkeypatch.setattr(
        Deployment,
        "_uploaded",
        lambda self, task, number, options: (
            None if task.execution.subtask == 1 else original(self, task, number, options)
        ),
    )
    settings = CheckpointConfiguration(interval_ms=1_000, timeout_ms=10 * MINUTE, tolerable_failed_checkpoints=9)
    world = World(1, Scenario(simple_graph(1, 2, ()), settings, calm=False, fault_scale=0.0, plain=True))
    with world.entered():
        world.loop.run_until(11 * MINUTE + 2_000)
    assert 1 in world.checker.aborted


def test_settings_of_a_scenario_can_be_replaced() -> None:
    scenario = random_scenario(3)
    quiet = replace(scenario, actions=(), fault_scale=0.0, restored=None)
    world = World(3, quiet)
    world.run()
    assert world.drivers == 1
    assert world.choices.fired == []
