"""Simulation of a job's protocols: the real coordinator, job machine, overrides and restart strategies, all else fake.

Seeded schedules of faults, users and clocks in virtual time, with checkers on every step. ``world.World`` runs one,
``runner`` many, ``shrink`` makes a failing one small; ``python -m ckpt_runtime.testing.simulation`` does it by hand.
See docs/simulation.md. It simulates no data: which records a snapshot covers is not its concern.
"""
