"""The accumulators of aggregates over groups: what they keep in state, how they add rows and compute results."""
