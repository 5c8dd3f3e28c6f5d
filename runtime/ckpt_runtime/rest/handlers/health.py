"""The health of jobs: a verdict for each job, and metrics for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_errors import JobNotFound
from ckpt_runtime.jobmaster.health import JobHealth, job_health
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import Gateway, JobId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import prometheus
from ckpt_runtime.scheduler.job_status import JobStatus

router = flink_router(tags=["health"])


async def _health(job_id: str, gateway: DispatcherGateway) -> JobHealth:
    details = await gateway.job_details(job_id)
    pressures = {}
    if details.overview.status is JobStatus.RUNNING:
        for vertex in details.vertices:
            pressures[vertex.vertex_id] = await gateway.vertex_backpressure(job_id, vertex.vertex_id)
    metrics = await gateway.job_metrics(job_id)
    return job_health(
        details,
        await gateway.checkpoint_statistics(job_id),
        (await gateway.checkpoint_config(job_id)).settings,
        pressures,
        int(metrics.get("numRestarts", 0)),
        await _stall_timeout_ms(job_id, gateway),
        now_ms(),
    )


async def _stall_timeout_ms(job_id: str, gateway: DispatcherGateway) -> int:
    option = ExecutionOptions.STALL_TIMEOUT
    for known in (await gateway.job_config(job_id)).effective:
        if known.key == option.key and known.value is not None:
            return option.parse(known.value)
    return option.default


@router.get("/jobs/{jobid}/health", responses=errors(400, 404))
async def health(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """A verdict with its reasons, and what it was made from."""
    found = await _health(job_id, gateway)
    return {
        "verdict": found.verdict.value,
        "reasons": list(found.reasons),
        "state": found.status.value,
        "checkpoints": {
            "success-rate": found.success_rate,
            "ended": found.ended,
            "last-completed-age": found.checkpoint_age_ms,
        },
        "restarts": found.restarts,
        "backpressure": {"ratio": found.backpressure, "vertex": found.backpressured_vertex},
    }


@router.get("/metrics", include_in_schema=False)
async def metrics(gateway: Gateway) -> Response:
    """The session, its workers and its living jobs in the format of Prometheus. The series of a job end with it."""
    jobs = []
    for job in await gateway.list_jobs():
        if job.status.is_globally_terminal:
            continue
        try:
            jobs.append((job, await gateway.job_metrics(job.job_id), await _health(job.job_id, gateway)))
        except JobNotFound:
            continue
    series, left_out = await gateway.task_metrics()
    moment = prometheus.Moment(
        await gateway.cluster_overview(),
        await gateway.process_figures(),
        await gateway.slot_agents(),
        jobs,
        series,
        left_out,
    )
    return Response(prometheus.text(moment), media_type=CONTENT_TYPE_LATEST)
