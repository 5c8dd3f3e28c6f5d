"""Schedules of a job's protocols."""

from __future__ import annotations

from ckpt_runtime.testing.schedules.simulation import Simulation
from ckpt_runtime.testing.simulation.scenario import Scenario, random_scenario
from ckpt_runtime.testing.simulation.world import World

PROTOCOLS: Simulation[Scenario] = Simulation(
    "protocols", "simulated schedules of a job's protocols", random_scenario, World, shrink_runs=600
)
