"""Checkpoint configuration: what holds now, and changing it while the job runs (FLIP-571).

A change is all or nothing: every field is checked before the gateway hears of any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request

from ckpt_runtime.jobmaster.gateway import CheckpointConfigPatch
from ckpt_runtime.rest.errors import BadRequest, echo
from ckpt_runtime.rest.fields import checked_integer, refuse
from ckpt_runtime.rest.json_body import read_object, whole_request
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Gateway, JobId
from ckpt_runtime.rest.shapes import checkpoints as shapes

router = APIRouter(prefix="/jobs/{jobid}/checkpoints", tags=["checkpoint configuration"])

MAX_MILLISECONDS = 10 * 365 * 24 * 3600 * 1000
"""Ten years: beyond it a duration is a mistake, and sums with timestamps would leave a 64-bit integer."""
_MAX_COUNT = 2**31 - 1

_RANGES: Mapping[str, tuple[int, int]] = {
    "interval_ms": (1, MAX_MILLISECONDS),
    "timeout_ms": (1, MAX_MILLISECONDS),
    "min_pause_ms": (0, MAX_MILLISECONDS),
    "max_concurrent": (1, _MAX_COUNT),
    "tolerable_failed_checkpoints": (0, _MAX_COUNT),
    "aligned_timeout_ms": (0, MAX_MILLISECONDS),
    "max_inflight_data_bytes": (1, 2**63 - 1),
}
_ATTRIBUTES = {name: attribute for attribute, name in shapes.OVERRIDE_NAMES.items()}


def _schema(attribute: str) -> dict[str, Any]:
    if attribute not in _RANGES:
        return {"type": "boolean"}
    minimum, maximum = _RANGES[attribute]
    return {"type": "integer", "format": "int64", "minimum": minimum, "maximum": maximum}


_PATCH_BODY = json_body(
    {name: _schema(attribute) for name, attribute in _ATTRIBUTES.items()},
    {
        "extend the timeout of pending checkpoints": {"checkpointTimeout": 900_000},
        "checkpoint more often": {"checkpointInterval": 10_000, "minPauseBetweenCheckpoints": 1_000},
    },
    closed=True,
)


def parse_patch(document: Mapping[str, Any]) -> CheckpointConfigPatch:
    """The whole change, or :class:`BadRequest` with a line for each field that is wrong."""
    if not document:
        raise BadRequest(f"The body names no field to change; it may hold {', '.join(_ATTRIBUTES)}.")
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for name, value in document.items():
        try:
            attribute = _ATTRIBUTES.get(name)
            if attribute is None:
                raise BadRequest(f"{echo(name)} is not a known field; allowed are {', '.join(_ATTRIBUTES)}")
            values[attribute] = _checked(attribute, name, value)
        except BadRequest as error:
            wrong.extend(error.errors)
    if wrong:
        raise BadRequest(*wrong[:20])
    return CheckpointConfigPatch(**values)


def _checked(attribute: str, name: str, value: object) -> int | bool:
    if attribute in _RANGES:
        return checked_integer(name, value, *_RANGES[attribute])
    if not isinstance(value, bool):
        raise refuse(name, value, "it must be true or false")
    return value


@router.get("/config", responses=errors(400, 404))
async def effective(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """What holds now."""
    return shapes.config(await gateway.checkpoint_config(job_id))


@router.get("/configuration", responses=errors(400, 404))
async def effective_by_either_name(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """The same as /config."""
    return await effective(job_id, gateway)


@router.patch(
    "/configuration",
    responses=errors(400, 404, 408, 409, 413),
    openapi_extra=_PATCH_BODY,
)
async def patch(job_id: JobId, request: Request, gateway: Gateway) -> dict[str, Any]:
    """Change it while the job runs."""
    document = await read_object(request, expected="CheckpointConfigurationRequestBody", empty_is_object=False)
    return shapes.config(await gateway.patch_checkpoint_config(job_id, parse_patch(document)))


@router.delete("/configuration", responses=errors(400, 404, 408, 409, 413), dependencies=[Depends(whole_request)])
async def reset(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Return to the submitted values."""
    return shapes.config(await gateway.delete_checkpoint_config_overrides(job_id))
