"""A checkpointing stream engine that runs inside a Spark application."""
