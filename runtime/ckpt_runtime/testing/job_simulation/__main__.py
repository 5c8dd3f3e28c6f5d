"""``python -m ckpt_runtime.testing.job_simulation``: schedules of whole jobs."""

from __future__ import annotations

import sys

from ckpt_runtime.testing.job_simulation.shrink import explain, failing_seeds
from ckpt_runtime.testing.job_simulation.world import World
from ckpt_runtime.testing.simulation.command_line import Simulation, command_line


def _report(seed: int, last: int) -> str:
    return explain(seed).report(last)


def _trace(seed: int) -> list[str]:
    world = World(seed, tracing=True)
    world.run()
    return world.trace


JOBS = Simulation("jobs", "simulated schedules of whole jobs", failing_seeds, _report, _trace)

if __name__ == "__main__":
    sys.exit(command_line(JOBS))
