"""The cluster: overview, configuration, shutdown."""

from __future__ import annotations

from typing import Any

from fastapi import Depends

from ckpt_runtime.jobmaster.gateway_values import ClusterOverview
from ckpt_runtime.jobmaster.metric_table import CLUSTER, PROCESS, running, texts
from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import Gateway, JobId, MetricNames, listed
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import metrics
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.version import VERSION

router = flink_router(tags=["cluster"])


@router.get("/overview", responses=errors())
async def overview(gateway: Gateway) -> dict[str, Any]:
    """Slots and jobs by state."""
    dashboard = await gateway.dashboard_config()
    return _overview(await gateway.cluster_overview(), dashboard.version, dashboard.revision)


def _overview(cluster: ClusterOverview, version: str, revision: str) -> dict[str, Any]:
    jobs = cluster.jobs_by_status
    return {
        "taskmanagers": cluster.slot_agents,
        "slots-total": cluster.slots_total,
        "slots-available": cluster.slots_available,
        "jobs-running": running(cluster),
        "jobs-finished": jobs.get(JobStatus.FINISHED, 0),
        "jobs-cancelled": jobs.get(JobStatus.CANCELED, 0),
        "jobs-failed": jobs.get(JobStatus.FAILED, 0),
        "flink-version": version,
        "flink-commit": revision,
        "ckpt-version": VERSION,
    }


@router.get("/config", responses=errors())
async def config(gateway: Gateway) -> dict[str, Any]:
    """Versions and features of this server, and how often pages should refresh."""
    dashboard = await gateway.dashboard_config()
    return {
        "refresh-interval": dashboard.refresh_interval_ms,
        "timezone-name": dashboard.timezone_name,
        "timezone-offset": dashboard.timezone_offset_ms,
        "flink-version": dashboard.version,
        "flink-revision": dashboard.revision,
        "ckpt-version": VERSION,
        "features": {
            "web-submit": True,
            "web-cancel": False,
            "web-rescale": False,
            "web-history": False,
            "cancel-and-retain": True,
        },
    }


@router.get("/jobmanager/config", responses=errors())
async def cluster_configuration(gateway: Gateway) -> list[dict[str, str]]:
    """The cluster's options."""
    return [{"key": key, "value": value} for key, value in (await gateway.cluster_configuration()).items()]


@router.get("/jobmanager/metrics", responses=errors())
async def driver_metrics(gateway: Gateway, names: MetricNames = None) -> list[dict[str, Any]]:
    """Names or values of the metrics of the session and of the driver's process."""
    cluster = texts(CLUSTER, await gateway.cluster_overview())
    return metrics.listing({**cluster, **texts(PROCESS, await gateway.process_figures())}, listed(names))


@router.get("/jobs/{jobid}/jobmanager/config", responses=errors(400, 404))
async def job_cluster_configuration(job_id: JobId, gateway: Gateway) -> list[dict[str, str]]:
    """The cluster's options."""
    await gateway.job_status(job_id)
    return await cluster_configuration(gateway)


@router.delete("/cluster", responses=errors(400, 408, 413), dependencies=[Depends(whole_request)])
async def shutdown(gateway: Gateway) -> dict[str, Any]:
    """End the session; running jobs are suspended."""
    await gateway.shutdown_cluster()
    return {}
