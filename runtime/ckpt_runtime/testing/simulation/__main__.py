"""``python -m ckpt_runtime.testing.simulation``: schedules of a job's protocols. See ``command_line``."""

from __future__ import annotations

import sys

from ckpt_runtime.testing.simulation.command_line import Simulation, command_line
from ckpt_runtime.testing.simulation.runner import explain, failing_seeds
from ckpt_runtime.testing.simulation.world import World


def _report(seed: int, last: int) -> str:
    return explain(seed).report(last)


def _trace(seed: int) -> list[str]:
    world = World(seed, tracing=True)
    world.run()
    return world.trace


PROTOCOLS = Simulation("protocols", "simulated schedules of a job's protocols", failing_seeds, _report, _trace)

if __name__ == "__main__":
    sys.exit(command_line(PROTOCOLS))
