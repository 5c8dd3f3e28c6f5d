"""Sensors: wait for something that a job does by itself."""
