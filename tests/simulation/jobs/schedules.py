"""Schedules of whole jobs."""

from __future__ import annotations

from tests.simulation.jobs.scenario import Scenario, random_scenario
from tests.simulation.jobs.world import World
from tests.simulation.schedules.simulation import Simulation

JOBS: Simulation[Scenario] = Simulation(
    "jobs", "simulated schedules of whole jobs", random_scenario, World, shrink_runs=300
)
