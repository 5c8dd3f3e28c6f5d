"""``python -m ckpt_runtime.testing.simulation``: runs schedules, or shows one.

``--seeds N`` runs N of them from ``--first`` on; ``--show SEED`` prints the shrunk trace of one that fails, or the
whole trace of one that holds. Exit code 1 when one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ckpt_runtime.testing.simulation.runner import explain, run_seeds
from ckpt_runtime.testing.simulation.world import World


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="simulation", description="simulated schedules of a job's protocols")
    parser.add_argument("--seeds", type=int, default=5_000, help="how many schedules (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default %(default)s)")
    parser.add_argument("--processes", type=int, default=None, help="how many at a time (default: one per processor)")
    parser.add_argument("--show", type=int, default=None, metavar="SEED", help="print the trace of one seed instead")
    options = parser.parse_args(arguments)
    if options.show is not None:
        return _show(options.show)
    return _run(options.first, options.seeds, options.processes)


def _show(seed: int) -> int:
    try:
        failure = explain(seed)
    except ValueError:
        world = World(seed, tracing=True)
        world.run()
        _say("\n".join([*world.trace, f"seed {seed} holds"]))
        return 0
    _say(failure.report(last=400))
    return 1


def _run(first: int, count: int, processes: int | None) -> int:
    started = time.monotonic()
    done = 0
    failed: list[int] = []
    for size, found in run_seeds(first, count, processes):
        done += size
        failed += found
        for seed in found:
            _say(f"seed {seed} fails")
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{done} of {count} schedules, {len(failed)} fail")
    seconds = time.monotonic() - started
    _say(f"{done} schedules from seed {first} on in {seconds:.0f} s: {len(failed)} fail")
    if failed:
        _say(explain(min(failed)).report())
    return 1 if failed else 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
