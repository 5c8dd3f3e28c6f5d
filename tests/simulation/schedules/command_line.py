"""The command line of a simulation: runs schedules, or shows one.

``--seeds N`` runs N of them from ``--first`` on; ``--show SEED`` prints the shrunk trace of one that fails, or the
whole trace of one that holds. Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.simulation.schedules.runner import run_seeds
from tests.simulation.schedules.shrink import explain
from tests.simulation.schedules.simulation import S, Simulation


def command_line(simulation: Simulation[S], arguments: Sequence[str] | None = None) -> int:
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


def _show(simulation: Simulation[S], seed: int) -> int:
    try:
        report = explain(simulation, seed).report(last=400)
    except ValueError:
        world = simulation.world(seed, simulation.scenario(seed), tracing=True)
        world.run()
        _say("\n".join([*world.trace, f"seed {seed} holds"]))
        return 0
    _say(report)
    return 1


def _run(simulation: Simulation[S], first: int, count: int, processes: int | None) -> int:
    started = time.monotonic()
    done = 0
    failed: list[int] = []
    for size, found in run_seeds(simulation, first, count, processes):
        done += size
        failed += found
        for seed in found:
            _say(f"seed {seed} fails")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {count} schedules, {len(failed)} fail")
    seconds = time.monotonic() - started
    _say(f"{simulation.name}: {done} schedules from seed {first} on in {seconds:.0f} s: {len(failed)} fail")
    if failed:
        _say(explain(simulation, min(failed)).report())
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
