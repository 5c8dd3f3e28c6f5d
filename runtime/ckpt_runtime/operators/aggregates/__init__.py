"""The accumulators of aggregates over groups: what state holds of them, how rows are added, what the result is."""
