"""Snapshots without a job: the one way to read one, to prove it undamaged, and to find what to delete with it."""
