"""Mapped tasks over the jobs of a session, and the partitions of their savepoints."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from airflow.sdk import Asset
from airflow.sdk.execution_time.context import OutletEventAccessors

from airflow_provider_ckpt.assets import create_asset
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.listing import ListJobsOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator, partition_key
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, JobManager, Task, finish

pytestmark = pytest.mark.row("air.18")
OTHER, ENDED = "1" * 32, "2" * 32


def listed(**given: Any) -> list[tuple[str, str]]:
    found = ListJobsOperator(task_id="t", **given).execute(Task().context())  # type: ignore[arg-type]
    return [(job["name"], job["job_id"]) for job in found]


def test_living_jobs_are_listed_by_name_and_others_on_demand(job_manager: JobManager) -> None:
    job_manager.gateway.add_job(OTHER, "another")
    job_manager.gateway.add_job(ENDED, "an ended one")
    job_manager.gateway.move(ENDED, JobStatus.FINISHED)
    assert listed() == [("another", OTHER), ("contract-job", JOB)]
    assert listed(name="contract*") == [("contract-job", JOB)]
    assert listed(name="nothing like it") == []
    assert listed(states="finished") == [("an ended one", ENDED)]
    bad: dict[str, Any]
    for bad in ({"states": ["gone"]}, {"states": []}, {"name": " "}):
        with pytest.raises(CkptArgumentInvalid):
            listed(**bad)


def test_savepoint_gives_its_outlets_the_partition_of_its_job_and_day(job_manager: JobManager, task: Task) -> None:
    asset, context = create_asset(ckpt_conn_id="ckpt_default", job="all"), task.context()
    context["outlet_events"] = events = OutletEventAccessors()
    given = {
        "task_id": "t",
        "job": JOB,
        "target_directory": "/data",
        "deferrable": False,
        "outlets": [asset, Asset("other")],
    }
    before = datetime.now(UTC)
    result = finish(TakeSavepointOperator(**given, partition_outlets=True), context)
    days = {partition_key("contract-job", at) for at in (before, datetime.now(UTC))}
    assert events[asset].partition_keys == events[Asset("other")].partition_keys
    assert events[asset].partition_keys <= days
    assert events[asset].extra["payload"] == {"job": "contract-job", "job_id": JOB, "path": result["savepoint_path"]}
    context["outlet_events"] = events = OutletEventAccessors()
    finish(TakeSavepointOperator(**given), context)
    assert events[asset].partition_keys == set()


def test_a_partition_key_has_the_day_of_utc_and_fits_airflow() -> None:
    east = timezone(timedelta(hours=9))
    assert partition_key("totals", datetime(2026, 11, 26, 3, tzinfo=east)) == "totals|2026-11-25"
    assert len(partition_key("x" * 500, datetime(2026, 1, 1, tzinfo=UTC))) == 250
