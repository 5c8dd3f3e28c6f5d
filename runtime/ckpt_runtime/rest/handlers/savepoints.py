"""Savepoints: taking one, stopping with one, disposing of one, and polling these operations."""

from __future__ import annotations

from typing import Annotated, Any

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_values import OperationKind
from ckpt_runtime.rest.bodies import TRIGGER_ID, Body, Flag, HexId, Location, OneOf, body_of, spelled
from ckpt_runtime.rest.errors import BadRequest
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Condition, Gateway, JobId, Requester, TriggerId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import checkpoints as shapes

router = flink_router(tags=["savepoints"])

_SAVEPOINT, _DISPOSAL = OperationKind.SAVEPOINT, OperationKind.SAVEPOINT_DISPOSAL
_TRIGGER_ID = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"


class _SnapshotBody(Body):
    """``type`` is FLIP-203's spelling of the format; native is the default."""

    savepoint_format: Annotated[SavepointFormat, OneOf(SavepointFormat)] = spelled(
        "formatType", "format-type", "type", default=SavepointFormat.NATIVE
    )
    trigger_id: HexId | None = TRIGGER_ID


class SavepointTriggerRequestBody(_SnapshotBody):
    """Where a savepoint goes, and whether the job ends with it."""

    directory: Location | None = spelled("target-directory", "targetDirectory", default=None)
    cancel_job: Flag = spelled("cancel-job", "cancelJob", default=False)


class StopWithSavepointRequestBody(_SnapshotBody):
    """``drain`` ends the job for good: its sources are at their end."""

    directory: Location | None = spelled("targetDirectory", "target-directory", default=None)
    drain: Flag = False


class SavepointDisposalRequest(Body):
    """Names the savepoint to delete."""

    path: Location = spelled("savepoint-path", "savepointPath")
    trigger_id: HexId | None = TRIGGER_ID


_SAVEPOINT_BODY = json_body(
    SavepointTriggerRequestBody,
    {
        "native": {"target-directory": "file:///data/savepoints", "formatType": "NATIVE"},
        "into the configured directory, and cancel": {"cancel-job": True, "triggerId": _TRIGGER_ID},
    },
)
_STOP_BODY = json_body(
    StopWithSavepointRequestBody,
    {
        "to resume later": {"targetDirectory": "s3://bucket/savepoints", "drain": False, "formatType": "NATIVE"},
        "for good": {"targetDirectory": "s3://bucket/savepoints", "drain": True, "triggerId": _TRIGGER_ID},
    },
)
_DISPOSAL_BODY = json_body(
    SavepointDisposalRequest,
    {"one savepoint": {"savepoint-path": "file:///data/savepoints/savepoint-fa461a-5dcf0ae7b2f1"}},
)
_TRIGGER = errors(400, 404, 408, 409, 413)


async def _directory(given: str | None, job_id: str, gateway: DispatcherGateway, spelling: str) -> str:
    directory = given or await gateway.default_savepoint_directory(job_id)
    if directory is None:
        raise BadRequest(
            f"Config key [execution.checkpointing.savepoint-dir] is not set. Property [{spelling}] must be provided."
        )
    return directory


@router.post("/jobs/{jobid}/savepoints", status_code=202, responses=_TRIGGER, openapi_extra=_SAVEPOINT_BODY)
async def trigger(
    job_id: JobId,
    gateway: Gateway,
    body: Annotated[SavepointTriggerRequestBody, body_of(SavepointTriggerRequestBody)],
    condition: Condition,
    requester: Requester = None,
) -> dict[str, Any]:
    """Take a savepoint."""
    directory = await _directory(body.directory, job_id, gateway, "target-directory")
    trigger_id = await gateway.trigger_savepoint(
        job_id, directory, body.savepoint_format, body.cancel_job, body.trigger_id, requester, condition
    )
    return {"request-id": trigger_id}


@router.post("/jobs/{jobid}/stop", status_code=202, responses=_TRIGGER, openapi_extra=_STOP_BODY)
async def stop(
    job_id: JobId,
    gateway: Gateway,
    body: Annotated[StopWithSavepointRequestBody, body_of(StopWithSavepointRequestBody)],
    condition: Condition,
    requester: Requester = None,
) -> dict[str, Any]:
    """Stop with a savepoint."""
    directory = await _directory(body.directory, job_id, gateway, "targetDirectory")
    trigger_id = await gateway.stop_with_savepoint(
        job_id, directory, body.savepoint_format, body.drain, body.trigger_id, requester, condition
    )
    return {"request-id": trigger_id}


@router.get("/jobs/{jobid}/savepoints/{triggerid}", responses=errors(400, 404))
async def operation(job_id: JobId, trigger_id: TriggerId, gateway: Gateway) -> dict[str, Any]:
    """State of a savepoint or stop."""
    return shapes.operation(_SAVEPOINT, await gateway.operation_status(_SAVEPOINT, trigger_id, job_id))


@router.post("/savepoint-disposal", responses=errors(400, 408, 409, 413), openapi_extra=_DISPOSAL_BODY)
async def dispose(
    gateway: Gateway, body: Annotated[SavepointDisposalRequest, body_of(SavepointDisposalRequest)]
) -> dict[str, Any]:
    """Delete a savepoint."""
    return {"request-id": await gateway.dispose_savepoint(body.path, body.trigger_id)}


@router.get("/savepoint-disposal/{triggerid}", responses=errors(400, 404))
async def disposal(trigger_id: TriggerId, gateway: Gateway) -> dict[str, Any]:
    """State of a disposal."""
    return shapes.operation(_DISPOSAL, await gateway.operation_status(_DISPOSAL, trigger_id, None))
