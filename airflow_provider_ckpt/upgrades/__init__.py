"""Replacing, suspending and resuming a job, step by step; see :mod:`airflow_provider_ckpt.upgrades.steps`."""
