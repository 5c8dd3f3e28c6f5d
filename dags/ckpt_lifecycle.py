"""Installs the DAG ``ckpt_lifecycle`` in Airflow's DAG folder; the other DAGs of the provider go the same way."""

from airflow_provider_ckpt.dags import ckpt_lifecycle

__all__ = ["ckpt_lifecycle"]
