"""One vertex of a job: details, times, metrics, backpressure."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ckpt_runtime.jobmaster.gateway import DispatcherGateway, VertexDetails, VertexNotFound
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.handlers.jobs import aggregations
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import Aggregations, Gateway, JobId, MetricNames, VertexId
from ckpt_runtime.rest.responses import FlinkResponse
from ckpt_runtime.rest.shapes import jobs as shapes
from ckpt_runtime.rest.shapes import metrics

router = APIRouter(prefix="/jobs/{jobid}/vertices/{vertexid}", tags=["vertices"], default_response_class=FlinkResponse)

_ONE_VERTEX = errors(400, 404)


async def vertex_of(job_id: str, vertex_id: str, gateway: DispatcherGateway) -> VertexDetails:
    """Raises VertexNotFound, or what the gateway raises."""
    for vertex in (await gateway.job_details(job_id)).vertices:
        if vertex.vertex_id == vertex_id:
            return vertex
    raise VertexNotFound(vertex_id)


@router.get("", responses=_ONE_VERTEX)
async def details(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """Subtasks with their states and metrics."""
    return shapes.vertex_details(await vertex_of(job_id, vertex_id, gateway), now_ms())


@router.get("/subtasktimes", responses=_ONE_VERTEX)
async def subtask_times(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """When each subtask entered which state."""
    return shapes.subtask_times(await vertex_of(job_id, vertex_id, gateway), now_ms())


@router.get("/taskmanagers", responses=_ONE_VERTEX)
async def task_managers(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """Subtasks by the slot agent that runs them."""
    return shapes.vertex_task_managers(await vertex_of(job_id, vertex_id, gateway), now_ms())


@router.get("/watermarks", responses=_ONE_VERTEX)
async def watermarks(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> list[dict[str, Any]]:
    """Always empty: no subtask reports its watermark."""
    await vertex_of(job_id, vertex_id, gateway)
    return []


@router.get("/accumulators", responses=_ONE_VERTEX)
async def accumulators(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """Always empty: there are no accumulators."""
    await vertex_of(job_id, vertex_id, gateway)
    return {"id": vertex_id, "user-accumulators": []}


@router.get("/backpressure", responses=_ONE_VERTEX)
async def backpressure(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """Backpressured, idle and busy shares."""
    return shapes.backpressure(await gateway.vertex_backpressure(job_id, vertex_id))


@router.get("/metrics", responses=_ONE_VERTEX)
async def vertex_metrics(
    job_id: JobId, vertex_id: VertexId, gateway: Gateway, names: MetricNames = None
) -> list[dict[str, Any]]:
    """Names or values, prefixed by the subtask's index."""
    values = metrics.by_subtask(await gateway.vertex_metrics(job_id, vertex_id))
    return metrics.listing(values, metrics.split_names(names))


@router.get("/subtasks/metrics", responses=_ONE_VERTEX)
async def aggregated_metrics(
    job_id: JobId, vertex_id: VertexId, gateway: Gateway, names: MetricNames = None, kinds: Aggregations = None
) -> list[dict[str, Any]]:
    """Metrics aggregated over subtasks."""
    samples = (await gateway.vertex_metrics(job_id, vertex_id)).values()
    return metrics.aggregated(samples, metrics.split_names(names), aggregations(kinds))
