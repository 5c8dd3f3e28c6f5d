"""What the tests of every simulation ask: that seeds hold, that a seed is a schedule, that bugs are found."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.planted.registry import PlantedBug
from tests.simulation.schedules.shrink import explain, shrink
from tests.simulation.schedules.simulation import Failure, S, Simulation

ROOT = Path(__file__).resolve().parents[2]


def assert_holds(
    simulation: Simulation[S], first: int, count: int = 1, observe: Callable[[Any], None] | None = None
) -> None:
    """Runs the seeds, and shows the first that fails, shrunk. ``observe`` gets the world of each that holds."""
    failed = simulation.failing_seeds(range(first, first + count), observe)
    if failed:
        report = explain(simulation, failed[0]).report()
        raise AssertionError(f"{len(failed)} seeds fail, {failed[:20]}; the first:\n{report}")


def assert_same_trace_under_any_hash_seed(module: str, seeds: int) -> None:
    """``module`` has a ``World``; its traces must not depend on the order of sets.

    This process has a hash seed by chance, or the one that ``PYTHONHASHSEED`` names; the other one has another.
    """
    code = f"from {module} import World\nprint([World(seed, tracing=True).run() for seed in range({seeds})])"
    other = "77" if os.environ.get("PYTHONHASHSEED") != "77" else "1"
    traces = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": other, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"},
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    world = importlib.import_module(module).World
    assert traces == f"{[world(seed, tracing=True).run() for seed in range(seeds)]}\n"


def plant(bugs: list[PlantedBug], name: str, monkeypatch: pytest.MonkeyPatch) -> PlantedBug:
    planted = next(known for known in bugs if known.name == name)
    for owner, attribute, replacement in planted.patches():
        if isinstance(owner, dict):
            assert attribute in owner, f"nothing is called {attribute!r}: the bug would not be one"
            monkeypatch.setitem(owner, attribute, replacement)
        else:
            # A property may stand for an attribute of the instances.
            known = hasattr(owner, attribute) or isinstance(replacement, property)
            assert known, f"{owner} has no {attribute}: the bug would not be one"
            monkeypatch.setattr(owner, attribute, replacement, raising=False)
    return planted


def assert_found(simulation: Simulation[S], enough: int, first: int = 0) -> None:
    """Within ``enough`` seeds, beginning with ``first``."""
    found = simulation.first_failing([*range(first, enough), *range(first)])
    assert found is not None, f"not found within {enough} seeds"
    failure = simulation.find_failure(found, tracing=False)
    # A bug that no longer fits what it is planted in would be found by its own error.
    assert failure is not None
    assert not failure.error.startswith(("AttributeError", "NameError", "TypeError")), failure.error


def assert_shrinks(simulation: Simulation[S], enough: int, most: int, first: int = 0) -> Failure[S]:
    """A bug is planted, which ``first`` shows: what is left fails in the same way, is small, and can be run again."""
    seed = simulation.first_failing(range(first, enough))
    assert seed is not None
    failure = simulation.find_failure(seed)
    assert failure is not None
    small = shrink(simulation, failure)
    assert small.kind == failure.kind
    assert len(small.scenario.actions) + len(small.faults) <= most
    assert f"seed {seed}: Violation" in small.report()
    again = simulation.find_failure(seed, small.scenario, small.muted)
    assert again is not None
    assert again.trace == small.trace
    return small
