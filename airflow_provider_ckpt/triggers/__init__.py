"""Triggers: the waiting of operators and sensors, in the triggerer."""
