"""Simulation of whole jobs: real subtasks, gates, channels, coordinator, state and storage in a seeded order of steps.

``world.World`` runs one schedule, ``runner`` many, ``shrink`` makes a failing one small. See docs/simulation.md.
"""
