"""Typed expressions, as Spark's analyzer has typed them, and their evaluation over Arrow batches. Pure: no clock, thread or file."""
