"""Seeded schedules over drivers, coordinator, job machine, storage and tasks, with checkers on every step."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.testing.simulation.runner import explain, read_seeds, run_seeds
from ckpt_runtime.testing.simulation.scenario import Scenario, random_scenario, simple_graph
from ckpt_runtime.testing.simulation.shrink import find_failure, shrink
from ckpt_runtime.testing.simulation.tasks import Deployment
from ckpt_runtime.testing.simulation.world import World
from tests.simulation.planted_bugs import BUGS, ENOUGH, PlantedBug

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "5000"))
BLOCK = 1_000
KEPT = read_seeds(Path(__file__).with_name("kept_seeds.txt"))
MINUTE = 60_000


def check(failed: list[int]) -> None:
    if failed:
        raise AssertionError(f"{len(failed)} seeds fail, {failed[:20]}; the first:\n{explain(min(failed)).report()}")


@pytest.mark.row("571.3")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_the_protocols_hold(first: int) -> None:
    check([seed for _, failed in run_seeds(first, min(BLOCK, SEEDS - first)) for seed in failed])


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_holds(seed: int) -> None:
    check([] if find_failure(seed, tracing=False) is None else [seed])


def test_the_schedules_are_worth_running() -> None:
    """Guards against a simulation in which nothing happens."""
    seen: Counter[str] = Counter()
    reasons = set()
    for seed in range(120):
        world = World(seed)
        world.run()
        seen["events"] += world.loop.events
        seen["drivers"] += world.drivers
        seen["deployments"] += world.deployments
        seen["completed"] += len(world.checker.completed)
        seen["aborted"] += len(world.checker.aborted)
        seen["savepoints"] += len(world.files.savepoints)
        seen["late pointers"] += len(world.ha.stale)
        seen[f"ended {world.ha.result.status if world.ha.result else None}"] += 1
        reasons |= world.checker.reasons
        seen.update(action.kind for action in world.scenario.actions)
    assert seen["events"] > 40_000
    assert seen["drivers"] > 200
    assert seen["deployments"] > 400
    assert seen["completed"] > 1_200
    assert seen["aborted"] > 500
    assert seen["savepoints"] > 80
    assert min(seen[f"ended {status}"] for status in ("FINISHED", "CANCELED", "FAILED")) > 3
    assert {"CHECKPOINT_EXPIRED", "FINALIZE_CHECKPOINT_FAILURE", "CHECKPOINT_SUBSUMED", "IO_EXCEPTION"} <= {
        reason.name for reason in reasons
    }


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    code = (
        "from ckpt_runtime.testing.simulation.world import World\n"
        "print([World(seed, tracing=True).run() for seed in range(25)])"
    )
    root = Path(__file__).resolve().parents[2]
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{root}:{root / 'runtime'}"},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2", "77")
    }
    assert len(traces) == 1


# --- the simulator is graded


def first_failing_seed(planted: PlantedBug, monkeypatch: pytest.MonkeyPatch, enough: int = ENOUGH) -> int | None:
    for owner, name, replacement in planted.patches():
        if isinstance(owner, dict):
            monkeypatch.setitem(owner, name, replacement)
        else:
            monkeypatch.setattr(owner, name, replacement)
    return next((seed for seed in range(enough) if find_failure(seed, tracing=False) is not None), None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("planted", BUGS, ids=lambda planted: planted.name)
def test_a_planted_bug_is_found(planted: PlantedBug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_failing_seed(planted, monkeypatch) is not None, f"not found within {ENOUGH} seeds"


def test_a_failing_seed_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left is enough to fail, fails in the same way, and is small."""
    planted = next(known for known in BUGS if known.name == "a pointer whose removal failed counts as gone")
    seed = first_failing_seed(planted, monkeypatch)
    assert seed is not None
    failure = find_failure(seed)
    assert failure is not None
    small = shrink(failure)
    assert small.kind == failure.kind
    assert len(small.scenario.actions) + len(small.faults) <= 6
    assert any("removal" in kind for kind, _ in small.faults)
    assert f"seed {seed}: Violation" in small.report()
    again = find_failure(seed, small.scenario, small.muted, plain=small.plain)
    assert again is not None
    assert again.trace == small.trace


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
    settings = CheckpointConfiguration(interval_ms=30 * MINUTE, timeout_ms=10 * MINUTE)
    world = World(
        1,
        Scenario(simple_graph(1, 20, (Partitioning.HASH,)), settings, calm=False, fault_scale=0.0, incremental=True),
        plain=True,
        tracing=True,
    )
    while not started:
        world.loop.run_until(world.loop.now + 100)
    begun = world.present.checker.open[1].started
    world.loop.run_until(begun + 10 * MINUTE - 10_000)
    written = set(world.files.directories["chk-1"]) | world.files.shared
    assert len([name for name in written if not name.startswith("/")]) == 19
    world.present.endpoint.patch(CheckpointOverrides(timeout_ms=15 * MINUTE))
    world.loop.run_until(begun + 10 * MINUTE + 1_000)
    assert 1 not in world.checker.aborted
    world.loop.run_until(begun + 10 * MINUTE + 2_500)
    assert world.checker.completed == {1: True}
    checkpoint = world.ha.pointers[1].checkpoint
    assert not world.files.missing(checkpoint)
    assert written <= set(world.files.directories["chk-1"]) | world.files.shared
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
    settings = CheckpointConfiguration(interval_ms=1_000, timeout_ms=10 * MINUTE, tolerable_failures=9)
    world = World(1, Scenario(simple_graph(1, 2, ()), settings, calm=False, fault_scale=0.0), plain=True)
    world.loop.run_until(11 * MINUTE + 2_000)
    assert 1 in world.checker.aborted


def test_settings_of_a_scenario_can_be_replaced() -> None:
    scenario = random_scenario(3)
    quiet = replace(scenario, actions=(), fault_scale=0.0, restored=None)
    world = World(3, quiet)
    world.run()
    assert world.drivers == 1
    assert world.choices.fired == []
