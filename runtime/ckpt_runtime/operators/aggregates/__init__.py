"""The accumulators of aggregates over groups: their state, how they add rows, and how they compute results."""
