"""Seeded schedules over coordinator and job machine, with protocol checkers on every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.simulation.coordinator_world import World

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "500"))
BLOCK = 50


@pytest.mark.row("571.3")
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_protocol_holds_under_faults(first: int) -> None:
    for seed in range(first, min(first + BLOCK, SEEDS)):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_schedules_are_worth_running() -> None:
    """Guards against a simulation in which nothing happens."""
    completed = aborted = deployments = steps = 0
    for seed in range(30):
        world = World(seed)
        world.run()
        counts = world.coordinator.statistics().counts
        completed += counts.completed
        aborted += counts.failed
        deployments += world.machine.attempt
        steps += world.steps
    assert completed > 300
    assert aborted > 100
    assert deployments > 60
    assert steps > 20_000


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    code = "from tests.simulation.coordinator_world import World; print([World(s).run() for s in (3, 4, 5)])"
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
        for hash_seed in ("1", "2", "2")
    }
    assert len(traces) == 1
