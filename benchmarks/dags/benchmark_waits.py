"""The DAG whose one task waits, as often as there are triggers."""

from __future__ import annotations

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG

with DAG("benchmark_waits", schedule=None):
    EmptyOperator(task_id="wait")
