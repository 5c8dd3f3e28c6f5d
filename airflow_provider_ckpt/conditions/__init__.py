"""Conditions that tasks wait for, and the wait itself; see :mod:`airflow_provider_ckpt.conditions.base`."""
