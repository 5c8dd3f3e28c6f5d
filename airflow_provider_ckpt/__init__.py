"""Airflow provider for checkpointing stream jobs: it speaks REST to a running job manager and nothing else."""

__version__ = "0.1.0"
