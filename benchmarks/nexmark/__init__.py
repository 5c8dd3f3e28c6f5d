"""Nexmark: the queries on an online auction that stream processors are compared by, as PySpark programs."""
