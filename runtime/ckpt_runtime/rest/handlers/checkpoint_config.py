"""Checkpoint configuration: the present values, and changing them while the job runs (FLIP-571).

A change is all or nothing: every field is checked before the gateway is called.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends
from pydantic import create_model

from ckpt_runtime.checkpoint.overrides import CheckpointOverrides
from ckpt_runtime.configuration.checkpoint_settings import PATCHABLE, CheckpointSetting
from ckpt_runtime.rest.bodies import ClosedBody, Flag, Within, body_of
from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Gateway, JobId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import checkpoints as shapes

router = flink_router(prefix="/jobs/{jobid}/checkpoints", tags=["checkpoint configuration"])


def _field(setting: CheckpointSetting) -> Any:
    return Flag if setting.patch_range is None else Annotated[int, Within(*setting.patch_range)]


_FIELDS: dict[str, Any] = {name: (_field(setting), None) for name, setting in PATCHABLE.items()}
PatchBody = create_model("CheckpointConfigurationRequestBody", __base__=ClosedBody, **_FIELDS)
_PATCH_BODY = json_body(
    PatchBody,
    {
        "extend the timeout of pending checkpoints": {"checkpointTimeout": 900_000},
        "checkpoint more often": {"checkpointInterval": 10_000, "minPauseBetweenCheckpoints": 1_000},
    },
)


def overrides_of(body: ClosedBody) -> CheckpointOverrides:
    """The overrides for the fields given in the request."""
    return CheckpointOverrides(**{PATCHABLE[name].field: getattr(body, name) for name in body.model_fields_set})


@router.get("/config", responses=errors(400, 404))
async def effective(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """What holds now."""
    return shapes.config(await gateway.checkpoint_config(job_id))


@router.get("/configuration", responses=errors(400, 404))
async def effective_by_either_name(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """The same as /config."""
    return await effective(job_id, gateway)


@router.patch("/configuration", responses=errors(400, 404, 408, 409, 413), openapi_extra=_PATCH_BODY)
async def patch(job_id: JobId, gateway: Gateway, body: Annotated[ClosedBody, body_of(PatchBody)]) -> dict[str, Any]:
    """Change it while the job runs."""
    return shapes.config(await gateway.patch_checkpoint_config(job_id, overrides_of(body)))


@router.delete("/configuration", responses=errors(400, 404, 408, 409, 413), dependencies=[Depends(whole_request)])
async def reset(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Return to the submitted values."""
    return shapes.config(await gateway.delete_checkpoint_config_overrides(job_id))
