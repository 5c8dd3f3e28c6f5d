"""Schedules of a job's protocols."""

from __future__ import annotations

from tests.simulation.protocols.scenario import Scenario, random_scenario
from tests.simulation.protocols.world import World
from tests.simulation.schedules.simulation import Simulation

PROTOCOLS: Simulation[Scenario] = Simulation(
    "protocols", "simulated schedules of a job's protocols", random_scenario, World, shrink_runs=600
)
