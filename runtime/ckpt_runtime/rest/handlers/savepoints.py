"""Savepoints: taking one, stopping with one, disposing of one, and polling these operations."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ckpt_runtime.jobmaster.gateway import DispatcherGateway, OperationKind, SavepointFormat
from ckpt_runtime.rest.errors import BadRequest
from ckpt_runtime.rest.fields import BodyFields
from ckpt_runtime.rest.json_body import read_object
from ckpt_runtime.rest.openapi import HEX_ID_SCHEMA, PATH_SCHEMA, errors, json_body
from ckpt_runtime.rest.parameters import Gateway, JobId, TriggerId
from ckpt_runtime.rest.shapes import checkpoints as shapes

router = APIRouter(tags=["savepoints"])

_SAVEPOINT, _DISPOSAL = OperationKind.SAVEPOINT, OperationKind.SAVEPOINT_DISPOSAL
_FORMAT = {"enum": [member.value for member in SavepointFormat]}
_TRIGGER_ID = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"
_SAVEPOINT_BODY = json_body(
    {
        "target-directory": PATH_SCHEMA,
        "cancel-job": {"type": "boolean"},
        "formatType": _FORMAT,
        "triggerId": HEX_ID_SCHEMA,
    },
    {
        "native": {"target-directory": "file:///data/savepoints", "formatType": "NATIVE"},
        "into the configured directory, and cancel": {"cancel-job": True, "triggerId": _TRIGGER_ID},
    },
)
_STOP_BODY = json_body(
    {
        "targetDirectory": PATH_SCHEMA,
        "drain": {"type": "boolean"},
        "formatType": _FORMAT,
        "triggerId": HEX_ID_SCHEMA,
    },
    {
        "to resume later": {"targetDirectory": "s3://bucket/savepoints", "drain": False, "formatType": "NATIVE"},
        "for good": {"targetDirectory": "s3://bucket/savepoints", "drain": True, "triggerId": _TRIGGER_ID},
    },
)
_DISPOSAL_BODY = json_body(
    {"savepoint-path": PATH_SCHEMA, "triggerId": HEX_ID_SCHEMA},
    {"one savepoint": {"savepoint-path": "file:///data/savepoints/savepoint-fa461a-5dcf0ae7b2f1"}},
    required=("savepoint-path",),
)
_TRIGGER = errors(400, 404, 408, 409, 413)


def _format(fields: BodyFields) -> SavepointFormat:
    """``type`` is FLIP-203's spelling; native is the default."""
    return fields.choice(SavepointFormat, "formatType", "format-type", "type") or SavepointFormat.NATIVE


def _trigger_id(fields: BodyFields) -> str | None:
    return fields.hex_id("triggerId", "trigger-id")


async def _directory(fields: BodyFields, job_id: str, gateway: DispatcherGateway, spelling: str) -> str:
    directory = fields.path("target-directory", "targetDirectory")
    directory = directory or await gateway.default_savepoint_directory(job_id)
    if directory is None:
        raise BadRequest(
            f"Config key [execution.checkpointing.savepoint-dir] is not set. Property [{spelling}] must be provided."
        )
    return directory


@router.post(
    "/jobs/{jobid}/savepoints",
    status_code=202,
    responses=_TRIGGER,
    openapi_extra=_SAVEPOINT_BODY,
)
async def trigger(job_id: JobId, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Take a savepoint."""
    fields = BodyFields(await read_object(request, expected="SavepointTriggerRequestBody"))
    cancel_job = fields.boolean("cancel-job", "cancelJob", default=False)
    savepoint_format, trigger_id = _format(fields), _trigger_id(fields)
    directory = await _directory(fields, job_id, gateway, "target-directory")
    trigger_id = await gateway.trigger_savepoint(job_id, directory, savepoint_format, cancel_job, trigger_id)
    return {"request-id": trigger_id}


@router.post(
    "/jobs/{jobid}/stop",
    status_code=202,
    responses=_TRIGGER,
    openapi_extra=_STOP_BODY,
)
async def stop(job_id: JobId, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Stop with a savepoint."""
    fields = BodyFields(await read_object(request, expected="StopWithSavepointRequestBody"))
    drain = fields.boolean("drain", default=False)
    savepoint_format, trigger_id = _format(fields), _trigger_id(fields)
    directory = await _directory(fields, job_id, gateway, "targetDirectory")
    trigger_id = await gateway.stop_with_savepoint(job_id, directory, savepoint_format, drain, trigger_id)
    return {"request-id": trigger_id}


@router.get("/jobs/{jobid}/savepoints/{triggerid}", responses=errors(400, 404))
async def operation(job_id: JobId, trigger_id: TriggerId, gateway: Gateway) -> dict[str, Any]:
    """State of a savepoint or stop."""
    return shapes.operation(_SAVEPOINT, await gateway.operation_status(_SAVEPOINT, trigger_id, job_id))


@router.post("/savepoint-disposal", responses=errors(400, 408, 409, 413), openapi_extra=_DISPOSAL_BODY)
async def dispose(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Delete a savepoint."""
    fields = BodyFields(await read_object(request, expected="SavepointDisposalRequest"))
    path = fields.path("savepoint-path", "savepointPath")
    if path is None:
        raise BadRequest("Field savepoint-path must not be omitted or be null.")
    return {"request-id": await gateway.dispose_savepoint(path, _trigger_id(fields))}


@router.get("/savepoint-disposal/{triggerid}", responses=errors(400, 404))
async def disposal(trigger_id: TriggerId, gateway: Gateway) -> dict[str, Any]:
    """State of a disposal."""
    return shapes.operation(_DISPOSAL, await gateway.operation_status(_DISPOSAL, trigger_id, None))
