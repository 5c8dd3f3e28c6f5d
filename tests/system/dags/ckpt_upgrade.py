"""The provider's DAG, installed as a user does it; its last task waits in the triggerer at once."""

from __future__ import annotations

from airflow_provider_ckpt.dags import ckpt_upgrade

ckpt_upgrade.get_task("start_and_watch").defer_after = 0
