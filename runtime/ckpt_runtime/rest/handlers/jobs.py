"""Jobs: lists, details, plan, configuration, metrics, exceptions, result, cancelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, Query

from ckpt_runtime.jobmaster.gateway_errors import JobNotFound, JobTerminated
from ckpt_runtime.jobmaster.gateway_values import ExceptionHistory
from ckpt_runtime.jobmaster.health import job_warnings
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.errors import ApiError, BadRequest, echo
from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import (
    Aggregations,
    Condition,
    FailureLabels,
    Gateway,
    JobId,
    MaxExceptions,
    MetricNames,
    SelectedJobs,
    listed,
    selected_jobs,
)
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import checkpoints as checkpoint_shapes
from ckpt_runtime.rest.shapes import jobs as shapes
from ckpt_runtime.rest.shapes import metrics

router = flink_router(prefix="/jobs", tags=["jobs"])

_ONE_JOB = errors(400, 404)


@router.get("", responses=errors())
async def listing(gateway: Gateway) -> dict[str, Any]:
    """Ids and states of all jobs."""
    return {"jobs": [{"id": job.job_id, "status": job.status.value} for job in await gateway.list_jobs()]}


@router.get("/overview", responses=errors())
async def overview(gateway: Gateway) -> dict[str, Any]:
    """All jobs with their task counts."""
    now = now_ms()
    return {"jobs": [shapes.job_line(job, now) for job in await gateway.list_jobs()]}


@router.get("/metrics", responses=errors(400))
async def aggregated_metrics(
    gateway: Gateway, names: MetricNames = None, kinds: Aggregations = None, jobs: SelectedJobs = None
) -> list[dict[str, Any]]:
    """Metrics aggregated over jobs."""
    wanted, samples = selected_jobs(jobs), []
    for job in await gateway.list_jobs():
        if wanted is not None and job.job_id not in wanted:
            continue
        try:
            samples.append(_numbers(await gateway.job_metrics(job.job_id)))
        except JobNotFound:
            continue
    return metrics.aggregated(samples, listed(names), aggregations(kinds))


def aggregations(texts: list[str] | None) -> list[str]:
    """The requested aggregations; all of them if none is named."""
    kinds = [kind.lower() for kind in listed(texts) or metrics.AGGREGATIONS]
    for kind in kinds:
        if kind not in metrics.AGGREGATIONS:
            raise BadRequest(f"agg: {echo(kind)} is not acceptable, it must be of {', '.join(metrics.AGGREGATIONS)}")
    return kinds


def _numbers(values: Mapping[str, str]) -> dict[str, float]:
    """The values that are finite numbers; others cannot be aggregated."""
    found = {}
    for name, text in values.items():
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number):
            found[name] = number
    return found


@router.get("/{jobid}", responses=_ONE_JOB)
async def details(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Everything about one job."""
    found = await gateway.job_details(job_id)
    warnings = job_warnings(found, (await gateway.checkpoint_config(job_id)).settings)
    return shapes.job_details(found, now_ms()) | {"warnings": list(warnings)}


@router.patch(
    "/{jobid}",
    status_code=202,
    responses=errors(308, 400, 404, 408, 409, 413),
    dependencies=[Depends(whole_request)],
)
async def cancel(
    job_id: JobId,
    gateway: Gateway,
    condition: Condition,
    mode: Annotated[str, Query(description="cancel")] = "cancel",
    retain: Annotated[bool, Query(description="the job's checkpoints outlive it, whatever its options say")] = False,
) -> dict[str, Any]:
    """Cancel. With ``retain`` the answer names the checkpoint to go on from."""
    if mode.lower() == "stop":
        raise ApiError(308, f"The termination mode 'stop' has been removed; use /jobs/{job_id}/stop.")
    if mode.lower() != "cancel":
        raise BadRequest(f"mode: {echo(mode)} is not acceptable, it must be cancel")
    try:
        kept = await gateway.cancel_job(job_id, retain=retain, condition=condition)
    except JobTerminated as error:
        message = "Job cancellation failed because the job has already reached another terminal state"
        raise ApiError(409, f"{message} ({error.status.value}).") from None
    return checkpoint_shapes.retained(kept) if retain else {}


@router.get("/{jobid}/status", responses=_ONE_JOB)
async def status(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """State."""
    return {"status": (await gateway.job_status(job_id)).value}


@router.get("/{jobid}/plan", responses=_ONE_JOB)
async def plan(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Vertices and edges."""
    return {"plan": shapes.plan(job_id, (await gateway.job_details(job_id)).graph)}


@router.get("/{jobid}/metrics", responses=_ONE_JOB)
async def job_metrics(job_id: JobId, gateway: Gateway, names: MetricNames = None) -> list[dict[str, Any]]:
    """Names or values of metrics."""
    return metrics.listing(await gateway.job_metrics(job_id), listed(names))


@router.get("/{jobid}/accumulators", responses=_ONE_JOB)
async def accumulators(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Always empty."""
    await gateway.job_status(job_id)
    return {"job-accumulators": [], "user-task-accumulators": [], "serialized-user-task-accumulators": {}}


@router.get("/{jobid}/exceptions", responses=_ONE_JOB)
async def exceptions(
    job_id: JobId, gateway: Gateway, max_exceptions: MaxExceptions = 20, labels: FailureLabels = None
) -> dict[str, Any]:
    """Failures, newest first."""
    history = await gateway.exception_history(job_id, max_exceptions)
    return shapes.exceptions(ExceptionHistory((), False) if listed(labels) else history)


@router.get("/{jobid}/execution-result", responses=_ONE_JOB)
async def execution_result(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """How the job ended."""
    return shapes.execution_result(await gateway.execution_result(job_id))
