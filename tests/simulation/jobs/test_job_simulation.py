"""Seeded schedules of whole jobs: real subtasks, channels, coordinator and storage, with checkers on every step."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.checks import (
    assert_found,
    assert_holds,
    assert_same_trace_under_any_hash_seed,
    assert_shrinks,
    plant,
)
from tests.simulation.jobs.planted_job_bugs import BUGS, ENOUGH, RARE
from tests.simulation.jobs.rows import SourceRows, flat_mapped, joined, windowed
from tests.simulation.jobs.world import JOBS, World
from tests.simulation.schedules.runner import read_seeds

SEEDS = int(os.environ.get("JOB_SIMULATION_SEEDS", "100"))
"""All but the rarest of the planted bugs show in a few dozen of them."""
SEEDS_OF_A_LONG_RUN = max(SEEDS, 5_000)
BLOCK = 100
OBSERVED = 50
"""How many of the seeds show whether the schedules are worth running."""
KEPT = read_seeds(Path(__file__).with_name("kept_job_seeds.txt"))


@pytest.mark.row("76.1", "76.2", "76.6", "76.7", "76.8", "203.3", "203.6", "203.11")
@pytest.mark.timeout(600)
def test_whole_jobs_hold() -> None:
    seen: Counter[str] = Counter()

    def observe(world: World) -> None:
        if world.seed < OBSERVED:
            seen.update(world.seen)
            seen["runs"] += world.runs
            seen["restores"] += world.restores
            seen["completed"] += world.completed

    assert_holds(JOBS, 0, SEEDS, observe)
    assert seen["runs"] > 37
    assert seen["restores"] > 50
    assert seen["completed"] > 55
    assert seen["with in-flight data"] > 12
    assert seen["with output data"] > 6
    assert seen["restores with in-flight data"] > 3
    assert seen["rescaled with in-flight data"] > 1
    assert seen["rescaled live"] > 5
    assert seen["rescale NOT_STORED"] > 2
    assert seen["increments"] > 6
    assert seen["takeovers"] > 2
    assert seen["claimed"] > 0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS_OF_A_LONG_RUN, BLOCK))
def test_more_of_them_hold(first: int) -> None:
    assert_holds(JOBS, first, min(BLOCK, SEEDS_OF_A_LONG_RUN - first))


@pytest.mark.parametrize("seed", KEPT)
def test_a_kept_seed_holds(seed: int) -> None:
    assert_holds(JOBS, seed)


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    assert_same_trace_under_any_hash_seed("tests.simulation.jobs.world", 3)


# --- what a job must make of its rows is computed without the engine


def test_rows_of_a_split_rise_in_event_time() -> None:
    rows = SourceRows(0, 20, 3, 4)
    for split in range(3):
        times = [rows.ts(number) for number in rows.split(split)]
        assert times == sorted(set(times))
    assert sorted(number for split in range(3) for number in rows.split(split)) == list(range(20))


def test_the_reference_results() -> None:
    left = [(1, 5, 10, 0), (2, 6, 70, 0)]
    right = [(4097, 5, 20, 0), (4098, 5, 30, 0)]
    assert [(row[1], row[2]) for row in joined(left, right)] == [(5, 20), (5, 30)]
    assert [(row[1], row[3]) for row in windowed([*left, *right])] == [(5, 3), (6, 1)]
    copies = [len(flat_mapped((number << 4, 0, 0, 0))) for number in range(5)]
    assert copies == [1, 1, 2, 0, 1]


# --- the simulator is graded


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(bug.name, marks=[pytest.mark.long] if bug.name in RARE else []) for bug in BUGS]
)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(BUGS, name, monkeypatch)
    assert_found(JOBS, ENOUGH, planted.seed)


def test_a_failing_seed_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = plant(BUGS, "the rest of the batch in work is not recorded", monkeypatch)
    assert_shrinks(JOBS, ENOUGH, most=4, first=planted.seed)
