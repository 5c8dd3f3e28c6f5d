"""Installs the DAG ``ckpt_upgrade`` in Airflow's DAG folder."""

from airflow_provider_ckpt.dags import ckpt_upgrade

__all__ = ["ckpt_upgrade"]
