"""Pure translations of gateway values to Flink's JSON shapes, one module per topic."""
