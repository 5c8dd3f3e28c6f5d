"""Uploaded pipelines under Flink's ``/jars`` paths: upload, list, delete, run."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request

from ckpt_runtime.jobmaster.gateway import ClaimMode, RunRequest, StoredPipeline
from ckpt_runtime.rest.errors import BadRequest
from ckpt_runtime.rest.fields import BodyFields
from ckpt_runtime.rest.json_body import read_object, whole_request
from ckpt_runtime.rest.openapi import HEX_ID_SCHEMA, PATH_SCHEMA, errors, json_body
from ckpt_runtime.rest.parameters import Gateway, PipelineId
from ckpt_runtime.rest.uploads import PART_NAME, receive_pipeline

router = APIRouter(prefix="/jars", tags=["pipelines"])

MAX_PARALLELISM = 32768
_TEXT = {"type": "string"}
_UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": [PART_NAME],
                    "properties": {PART_NAME: {"type": "string", "format": "binary"}},
                }
            }
        },
    }
}
_RUN_BODY = json_body(
    {
        "entryClass": {"type": "string", "description": "module:function"},
        "programArgsList": {"type": "array", "items": _TEXT},
        "parallelism": {"type": "integer", "minimum": 1, "maximum": MAX_PARALLELISM},
        "jobId": HEX_ID_SCHEMA,
        "savepointPath": PATH_SCHEMA,
        "allowNonRestoredState": {"type": "boolean"},
        "claimMode": {"enum": [mode.value for mode in ClaimMode]},
        "flinkConfiguration": {"type": "object", "additionalProperties": _TEXT},
    },
    {
        "fresh": {
            "entryClass": "flights:pipeline",
            "programArgsList": ["--output", "/data/out"],
            "parallelism": 2,
            "flinkConfiguration": {"execution.checkpointing.interval": "10s"},
        },
        "from a savepoint": {
            "savepointPath": "file:///data/savepoints/savepoint-fa461a-5dcf0ae7b2f1",
            "claimMode": "NO_CLAIM",
            "allowNonRestoredState": False,
            "jobId": "fa461ac280c9aa36bde4a060aa97618c",
        },
    },
)


@router.post("/upload", responses=errors(400, 408, 413), openapi_extra=_UPLOAD_BODY)
async def upload(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Upload a pipeline."""
    stored = await receive_pipeline(request, gateway, request.app.state.max_upload_bytes)
    return {"filename": f"pipelines/{stored.id}", "status": "success"}


@router.get("", responses=errors())
async def listing(request: Request, gateway: Gateway) -> dict[str, Any]:
    """Uploaded pipelines."""
    files = sorted(await gateway.list_pipelines(), key=lambda stored: stored.uploaded_at_ms, reverse=True)
    return {"address": str(request.base_url).rstrip("/"), "files": [_line(stored) for stored in files]}


def _line(stored: StoredPipeline) -> dict[str, Any]:
    return {
        "id": stored.id,
        "name": stored.name,
        "uploaded": stored.uploaded_at_ms,
        "entry": [{"name": entry_point, "description": None} for entry_point in stored.entry_points],
    }


@router.delete("/{jarid}", responses=errors(400, 404, 408, 413), dependencies=[Depends(whole_request)])
async def delete(pipeline_id: PipelineId, gateway: Gateway) -> dict[str, Any]:
    """Delete a pipeline."""
    await gateway.delete_pipeline(pipeline_id)
    return {}


@router.post("/{jarid}/run", responses=errors(400, 404, 408, 409, 413), openapi_extra=_RUN_BODY)
async def run(pipeline_id: PipelineId, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Start a job of a pipeline."""
    if request.query_params:
        names = ", ".join(sorted(request.query_params)[:10])
        raise BadRequest(f"Query parameters are not accepted here ({names[:200]}); give them in the body.")
    document = await read_object(request, expected="JarRunRequestBody")
    job_id = await gateway.run_pipeline(run_request(pipeline_id, BodyFields(document)))
    return {"jobid": job_id, "applicationId": job_id}


def run_request(pipeline_id: str, fields: BodyFields) -> RunRequest:
    """The body's fields, checked. ``restoreMode`` is the older name of ``claimMode``."""
    if fields.present("programArgs") is not None:
        raise BadRequest("programArgs: is not accepted, give a list of strings in programArgsList")
    return RunRequest(
        pipeline_id=pipeline_id,
        entry_point=fields.entry_point("entryClass", "entry-class"),
        arguments=fields.texts("programArgsList"),
        parallelism=fields.integer("parallelism", minimum=1, maximum=MAX_PARALLELISM),
        configuration=fields.options("flinkConfiguration"),
        savepoint_path=fields.path("savepointPath"),
        allow_non_restored_state=fields.boolean("allowNonRestoredState", default=False),
        claim_mode=fields.choice(ClaimMode, "claimMode", "restoreMode") or ClaimMode.NO_CLAIM,
        job_id=fields.hex_id("jobId"),
    )
