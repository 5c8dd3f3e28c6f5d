"""Bugs to plant, small patches of the cores, the shell or what is simulated, after the pitfalls that other engines met.

They lie in ``planted``, by subject; importing them lists them. The simulator is graded with them: one that it does not
find within ``ENOUGH`` seeds is a defect of the simulator.
"""

from __future__ import annotations

from tests.simulation.planted import completion, settings, storage, takeovers, tasks, wiring
from tests.simulation.planted.registry import BUGS, PlantedBug

__all__ = ["BUGS", "ENOUGH", "PlantedBug", "completion", "settings", "storage", "takeovers", "tasks", "wiring"]

ENOUGH = 2_000
