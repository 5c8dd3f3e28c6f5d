"""Uploaded pipelines under Flink's ``/jars`` paths: upload, list, delete, run."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, Request
from pydantic import model_validator
from pydantic_core import PydanticCustomError

from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.jobmaster.gateway_errors import GatewayError
from ckpt_runtime.jobmaster.gateway_values import RunRequest, StoredPipeline
from ckpt_runtime.jobmaster.health import job_warnings
from ckpt_runtime.rest.bodies import (
    Body,
    EntryPoint,
    Flag,
    HexId,
    Location,
    OneOf,
    Options,
    Texts,
    Within,
    body_of,
    spelled,
)
from ckpt_runtime.rest.errors import BadRequest
from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Condition, Gateway, HoldOwner, PipelineId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import plans as shapes
from ckpt_runtime.rest.uploads import PART_NAME, receive_pipeline

router = flink_router(prefix="/jars", tags=["pipelines"])

MAX_PARALLELISM = 32768
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


class JarRunRequestBody(Body):
    """``restoreMode`` is the older name of ``claimMode``. What is not given is as of the job ``likeJob``.

    ``fork``: the job writes elsewhere than the one whose snapshot it starts from, and may run beside it.
    """

    entry_point: EntryPoint | None = spelled("entryClass", "entry-class", default=None)
    arguments: Texts = spelled("programArgsList", default=())
    parallelism: Annotated[int, Within(1, MAX_PARALLELISM)] | None = None
    job_id: HexId | None = spelled("jobId", default=None)
    like_job: HexId | None = spelled("likeJob", default=None)
    savepoint_path: Location | None = spelled("savepointPath", default=None)
    allow_non_restored_state: Flag = spelled("allowNonRestoredState", default=False)
    claim_mode: Annotated[RecoveryClaimMode, OneOf(RecoveryClaimMode)] = spelled(
        "claimMode", "restoreMode", default=RecoveryClaimMode.NO_CLAIM
    )
    configuration: Options = spelled("flinkConfiguration", default={})
    fork: Flag = False

    @model_validator(mode="before")
    @classmethod
    def _arguments_in_a_list(cls, document: dict[str, Any]) -> dict[str, Any]:
        if document.get("programArgs") is not None:
            raise PydanticCustomError("text", "programArgs: is not accepted, give a list of strings in programArgsList")
        return document


_RUN_BODY = json_body(
    JarRunRequestBody,
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


_DRILL_BODY = json_body(
    JarRunRequestBody,
    {
        "of a savepoint": {
            "savepointPath": "file:///data/savepoints/savepoint-fa461a-5dcf0ae7b2f1",
            "programArgsList": ["--output", "/data/out"],
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
        "holders": [{"owner": owner, "since": since} for owner, since in sorted(stored.holds.items())],
    }


@router.delete("/{jarid}", responses=errors(400, 404, 408, 409, 413), dependencies=[Depends(whole_request)])
async def delete(pipeline_id: PipelineId, gateway: Gateway) -> dict[str, Any]:
    """Delete a pipeline."""
    await gateway.delete_pipeline(pipeline_id)
    return {}


@router.put("/{jarid}/holds/{owner}", responses=errors(400, 404, 408, 413), dependencies=[Depends(whole_request)])
async def hold(pipeline_id: PipelineId, owner: HoldOwner, gateway: Gateway) -> dict[str, Any]:
    """Keep a pipeline until it is released, also for the next driver."""
    return _line(await gateway.hold_pipeline(pipeline_id, owner))


@router.delete("/{jarid}/holds/{owner}", responses=errors(400, 408, 413), dependencies=[Depends(whole_request)])
async def release(pipeline_id: PipelineId, owner: HoldOwner, gateway: Gateway) -> dict[str, Any]:
    """Give up a hold."""
    await gateway.release_pipeline(pipeline_id, owner)
    return {}


async def _no_parameters(request: Request) -> None:
    if request.query_params:
        names = ", ".join(sorted(request.query_params)[:10])
        raise BadRequest(f"Query parameters are not accepted here ({names[:200]}); give them in the body.")


_SUBMISSION: dict[str, Any] = {
    "responses": errors(400, 404, 408, 409, 413),
    "dependencies": [Depends(_no_parameters)],
}
_Body = Annotated[JarRunRequestBody, body_of(JarRunRequestBody)]


@router.post("/{jarid}/plan", openapi_extra=_RUN_BODY, **_SUBMISSION)
async def plan(pipeline_id: PipelineId, gateway: Gateway, body: _Body) -> dict[str, Any]:
    """Plan a job of a pipeline, and see how a snapshot fits it; nothing is started."""
    return shapes.plan_preview(await gateway.plan_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body))))


@router.post("/{jarid}/run", openapi_extra=_RUN_BODY, **_SUBMISSION)
async def run(pipeline_id: PipelineId, gateway: Gateway, body: _Body, condition: Condition) -> dict[str, Any]:
    """Start a job of a pipeline. ``warnings`` are there only if there are any: Flink's answer has none."""
    job_id = await gateway.run_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body), condition=condition))
    answer: dict[str, Any] = {"jobid": job_id, "applicationId": job_id}
    with suppress(GatewayError):  # the job has been started, whatever its state is by now
        settings = (await gateway.checkpoint_config(job_id)).settings
        if warnings := job_warnings(await gateway.job_details(job_id), settings):
            answer["warnings"] = list(warnings)
    return answer


@router.post("/{jarid}/drill", openapi_extra=_DRILL_BODY, **_SUBMISSION)
async def drill(pipeline_id: PipelineId, gateway: Gateway, body: _Body) -> dict[str, Any]:
    """Start a restore drill: a job to be thrown away, which touches nothing outside."""
    # Drills have a path of their own, so that a server without drills cannot start a real job instead.
    job_id = await gateway.run_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body), drill=True))
    return {"jobid": job_id, "applicationId": job_id}
