"""Checkpoints: statistics, details, and triggering one."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from ckpt_runtime.checkpoint.statistics import CheckpointStats
from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_errors import CheckpointNotFound, NotFound
from ckpt_runtime.jobmaster.gateway_values import CheckpointKind, OperationKind
from ckpt_runtime.rest.bodies import TRIGGER_ID, Body, HexId, OneOf, body_of, refused, spelled
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import CheckpointId, Gateway, JobId, TriggerId, VertexId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import checkpoints as shapes

router = flink_router(prefix="/jobs/{jobid}/checkpoints", tags=["checkpoints"])

_READ = errors(400, 404)


def _not_incremental(value: object) -> object:
    if isinstance(value, str) and value.upper() == "INCREMENTAL":
        raise refused("an incremental checkpoint cannot be asked for, use CONFIGURED or FULL")
    return value


class CheckpointTriggerRequestBody(Body):
    """What a triggered checkpoint writes."""

    kind: Annotated[CheckpointKind, OneOf(CheckpointKind), BeforeValidator(_not_incremental)] = spelled(
        "checkpointType", "checkpoint-type", default=CheckpointKind.CONFIGURED
    )
    trigger_id: HexId | None = TRIGGER_ID


_TRIGGER_BODY = json_body(
    CheckpointTriggerRequestBody,
    {
        "as configured": {},
        "a full one, which may be sent again": {
            "checkpointType": "FULL", "triggerId": "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"
        },
    },
)  # fmt: skip


@router.get("", responses=_READ)
async def statistics(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Counts, summary, latest ones and history."""
    return shapes.statistics(await gateway.checkpoint_statistics(job_id))


async def _checkpoint(job_id: str, checkpoint_id: str, gateway: DispatcherGateway) -> CheckpointStats:
    stats = (await gateway.checkpoint_statistics(job_id)).checkpoint(int(checkpoint_id))
    if stats is None:
        raise CheckpointNotFound(int(checkpoint_id))
    return stats


@router.get("/details/{checkpointid}", responses=_READ)
async def details(job_id: JobId, checkpoint_id: CheckpointId, gateway: Gateway) -> dict[str, Any]:
    """One checkpoint by vertex."""
    return shapes.checkpoint(await _checkpoint(job_id, checkpoint_id, gateway), with_tasks=True)


@router.get("/details/{checkpointid}/subtasks/{vertexid}", responses=_READ)
async def subtasks(job_id: JobId, checkpoint_id: CheckpointId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """One vertex by subtask."""
    stats = await _checkpoint(job_id, checkpoint_id, gateway)
    vertex = stats.vertices.get(vertex_id)
    if vertex is None:
        raise NotFound(f"There is no checkpoint statistics for task {vertex_id}.")
    return shapes.subtasks(vertex, stats)


@router.post("", status_code=202, responses=errors(400, 404, 408, 409, 413), openapi_extra=_TRIGGER_BODY)
async def trigger(
    job_id: JobId,
    gateway: Gateway,
    body: Annotated[CheckpointTriggerRequestBody, body_of(CheckpointTriggerRequestBody)],
) -> dict[str, Any]:
    """Trigger a checkpoint."""
    return {"request-id": await gateway.trigger_checkpoint(job_id, body.kind, body.trigger_id)}


@router.get("/{triggerid}", responses=_READ)
async def operation(job_id: JobId, trigger_id: TriggerId, gateway: Gateway) -> dict[str, Any]:
    """State of a triggered checkpoint."""
    kind = OperationKind.CHECKPOINT
    return shapes.operation(kind, await gateway.operation_status(kind, trigger_id, job_id))
