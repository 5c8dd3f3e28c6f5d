"""``python -m tests.simulation protocols`` runs schedules of a job's protocols, ``jobs`` those of whole jobs.

``--seeds N`` runs N of them from ``--first`` on; ``--show SEED`` prints the shrunk trace of one that fails, or the
whole trace of one that holds. Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from tests.simulation.jobs.world import JOBS
from tests.simulation.protocols.world import PROTOCOLS
from tests.simulation.schedules.runner import run_seeds
from tests.simulation.schedules.shrink import explain
from tests.simulation.schedules.simulation import Simulation

SIMULATIONS: dict[str, Simulation[Any]] = {"protocols": PROTOCOLS, "jobs": JOBS}


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description="Simulated schedules")
    parser.add_argument("simulation", choices=sorted(SIMULATIONS))
    parser.add_argument("--seeds", type=int, default=5_000, help="how many schedules (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=None, help="how many at a time (default: one per processor)")
    parser.add_argument("--show", type=int, default=None, metavar="SEED", help="print the trace of one seed instead")
    options = parser.parse_args()
    simulation = SIMULATIONS[options.simulation]
    if options.show is not None:
        return _show(simulation, options.show)
    return _run(simulation, options.first, options.seeds, options.processes)


def _show(simulation: Simulation[Any], seed: int) -> int:
    try:
        report = explain(simulation, seed).report(last=400)
    except ValueError:
        world = simulation.world(seed, simulation.scenario(seed), tracing=True)
        world.run()
        _say("\n".join([*world.trace, f"seed {seed} holds"]))
        return 0
    _say(report)
    return 1


def _run(simulation: Simulation[Any], first: int, count: int, processes: int | None) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
