"""The command line of a simulation: runs schedules, or shows one.

``--seeds N`` runs N of them from ``--first`` on; ``--show SEED`` prints the shrunk trace of one that fails, or the
whole trace of one that holds. Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckpt_runtime.testing.simulation.runner import run_seeds


@dataclass(frozen=True, slots=True)
class Simulation:
    """``failing`` runs seeds and says which fail; ``explain`` reports one that fails, with so many steps of its trace;

    ``trace`` runs one that holds. ``explain`` raises ValueError for a seed that holds.
    """

    name: str
    description: str
    failing: Callable[[Sequence[int]], list[int]]
    explain: Callable[[int, int], str]
    trace: Callable[[int], list[str]]


def command_line(simulation: Simulation, arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog=simulation.name, description=simulation.description)
    parser.add_argument("--seeds", type=int, default=5_000, help="how many schedules (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=None, help="how many at a time (default: one per processor)")
    parser.add_argument("--show", type=int, default=None, metavar="SEED", help="print the trace of one seed instead")
    options = parser.parse_args(arguments)
    if options.show is not None:
        return _show(simulation, options.show)
    return _run(simulation, options.first, options.seeds, options.processes)


def _show(simulation: Simulation, seed: int) -> int:
    try:
        report = simulation.explain(seed, 400)
    except ValueError:
        _say("\n".join([*simulation.trace(seed), f"seed {seed} holds"]))
        return 0
    _say(report)
    return 1


def _run(simulation: Simulation, first: int, count: int, processes: int | None) -> int:
    started = time.monotonic()
    done = 0
    failed: list[int] = []
    for size, found in run_seeds(first, count, processes, simulation.failing):
        done += size
        failed += found
        for seed in found:
            _say(f"seed {seed} fails")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {count} schedules, {len(failed)} fail")
    seconds = time.monotonic() - started
    _say(f"{simulation.name}: {done} schedules from seed {first} on in {seconds:.0f} s: {len(failed)} fail")
    if failed:
        _say(simulation.explain(min(failed), 60))
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
