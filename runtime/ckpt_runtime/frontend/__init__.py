"""Translates PySpark's plans to the engine's. The only package that knows Spark's plan classes."""
