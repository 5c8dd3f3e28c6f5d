"""One vertex of a job: details, times, metrics, backpressure."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_errors import NotFound, VertexNotFound
from ckpt_runtime.jobmaster.gateway_values import SubtaskDetails, VertexDetails
from ckpt_runtime.jobmaster.metric_table import text_of
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.handlers.jobs import aggregations
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import (
    Aggregations,
    Attempt,
    Gateway,
    JobId,
    MetricNames,
    SelectedSubtasks,
    SubtaskIndex,
    VertexId,
    listed,
    selected_subtasks,
)
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import jobs as shapes
from ckpt_runtime.rest.shapes import metrics

router = flink_router(prefix="/jobs/{jobid}/vertices/{vertexid}", tags=["vertices"])

_ONE_VERTEX = errors(400, 404)


async def vertex_of(job_id: str, vertex_id: str, gateway: DispatcherGateway) -> VertexDetails:
    """The vertex's details. Raises VertexNotFound and the gateway's errors."""
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
    """The input watermark of each subtask that has one."""
    return [
        {"id": f"{subtask.index}.currentInputWatermark", "value": text_of(subtask.measures.input_watermark)}
        for subtask in (await vertex_of(job_id, vertex_id, gateway)).subtasks
        if subtask.measures is not None and subtask.measures.input_watermark is not None
    ]


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
    return metrics.listing(values, listed(names))


@router.get("/jm-operator-metrics", responses=_ONE_VERTEX)
async def driver_metrics(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> list[dict[str, Any]]:
    """Always empty: no operator has a part in the driver."""
    await vertex_of(job_id, vertex_id, gateway)
    return []


# Routes with fixed names come before those with a subtask's index, which would match the names.
@router.get("/subtasks/metrics", responses=_ONE_VERTEX)
async def aggregated_metrics(
    job_id: JobId,
    vertex_id: VertexId,
    gateway: Gateway,
    names: MetricNames = None,
    kinds: Aggregations = None,
    subtasks: SelectedSubtasks = None,
) -> list[dict[str, Any]]:
    """Metrics aggregated over subtasks."""
    is_wanted = selected_subtasks(subtasks)
    found = await gateway.vertex_metrics(job_id, vertex_id)
    samples = [values for index, values in found.items() if is_wanted(index)]
    return metrics.aggregated(samples, listed(names), aggregations(kinds))


@router.get("/subtasks/accumulators", responses=_ONE_VERTEX)
async def subtask_accumulators(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """Always without any."""
    vertex = await vertex_of(job_id, vertex_id, gateway)
    return {"id": vertex_id, "parallelism": vertex.parallelism, "subtasks": []}


@router.get("/subtasks/{subtaskindex}", responses=_ONE_VERTEX)
async def subtask(job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, gateway: Gateway) -> dict[str, Any]:
    """One subtask."""
    return shapes.subtask(await _subtask_of(job_id, vertex_id, index, gateway), now_ms())


@router.get("/subtasks/{subtaskindex}/attempts/{attempt}", responses=_ONE_VERTEX)
async def attempt(
    job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, number: Attempt, gateway: Gateway
) -> dict[str, Any]:
    """Its present attempt; earlier ones are not kept."""
    found = await _subtask_of(job_id, vertex_id, index, gateway)
    if found.attempt != number:
        raise NotFound(f"Subtask {index} of vertex {vertex_id} has no attempt {number}, only {found.attempt}")
    return shapes.subtask(found, now_ms())


@router.get("/subtasks/{subtaskindex}/metrics", responses=_ONE_VERTEX)
async def subtask_metrics(
    job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, gateway: Gateway, names: MetricNames = None
) -> list[dict[str, Any]]:
    """Names or values of one subtask's metrics."""
    await _subtask_of(job_id, vertex_id, index, gateway)
    measured = (await gateway.vertex_metrics(job_id, vertex_id)).get(index, {})
    return metrics.listing({name: text_of(value) for name, value in measured.items()}, listed(names))


async def _subtask_of(job_id: str, vertex_id: str, index: int, gateway: DispatcherGateway) -> SubtaskDetails:
    """The subtask's details. Raises NotFound and the gateway's errors."""
    for found in (await vertex_of(job_id, vertex_id, gateway)).subtasks:
        if found.index == index:
            return found
    raise NotFound(f"Vertex {vertex_id} has no subtask {index}")
