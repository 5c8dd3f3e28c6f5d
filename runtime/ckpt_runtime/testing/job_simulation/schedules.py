"""Schedules of whole jobs."""

from __future__ import annotations

from ckpt_runtime.testing.job_simulation.scenario import Scenario, random_scenario
from ckpt_runtime.testing.job_simulation.world import World
from ckpt_runtime.testing.schedules.simulation import Simulation

JOBS: Simulation[Scenario] = Simulation(
    "jobs", "simulated schedules of whole jobs", random_scenario, World, shrink_runs=300
)
