"""The provider's DAG, installed as a user does it; its tasks wait in the triggerer at once, and outlive many kills."""

from __future__ import annotations

from datetime import timedelta

from airflow_provider_ckpt.dags import ckpt_upgrade

for name in ("stop_with_savepoint", "start_and_watch"):
    task = ckpt_upgrade.get_task(name)
    task.defer_after = 0
    task.poll_interval = 0.5
    task.retries = 20
    task.retry_delay = timedelta(0)
