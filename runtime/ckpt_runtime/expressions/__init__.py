"""Expressions as Spark's analyzer has typed them, and their evaluation over Arrow batches. No clock, thread or file."""
