"""The provider's DAGs, as anybody installs them, and one that waits for the savepoints of a job."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_ckpt.assets import savepoints_of
from airflow_provider_ckpt.dags import ckpt_lifecycle, ckpt_patch, ckpt_savepoint_now, ckpt_scheduled_savepoints

__all__ = ["ckpt_lifecycle", "ckpt_patch", "ckpt_savepoint_now", "ckpt_scheduled_savepoints", "new_savepoints"]


@task
def payloads(triggering_asset_events: Any = None) -> list[dict[str, Any]]:
    """What the events say that have started this run."""
    return [event.extra["payload"] for events in triggering_asset_events.values() for event in events]


with DAG("system_new_savepoint", schedule=[savepoints_of("system job", poll_interval=0.5)]) as new_savepoints:
    payloads()
