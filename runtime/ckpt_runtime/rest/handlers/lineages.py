"""Upgrades in progress: while their owner replaces, suspends or resumes a job, requests of others are refused."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Query

from ckpt_runtime.jobmaster.gateway_values import HoldRequest
from ckpt_runtime.rest.bodies import Body, HexId, Location, Owner, Within, body_of, spelled
from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import OWNER_PATTERN, Gateway, JobId, Requester
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import jobs as shapes

router = flink_router(prefix="/jobs/{jobid}/upgrade", tags=["lineages"])

_MAX_DURATION_MS = 30 * 24 * 3_600_000


class HoldLineageBody(Body):
    """``ownJobs`` are the jobs that the upgrade itself may have started; ``snapshot`` is kept for it."""

    owner: Owner
    duration_ms: Annotated[int, Within(1, _MAX_DURATION_MS)] = spelled("duration")
    own_jobs: tuple[HexId, ...] = spelled("ownJobs", default=())
    snapshot: Location | None = None


_BODY = json_body(
    HoldLineageBody,
    {
        "for an hour": {
            "owner": "upgrade-54c685fb3b425ccf81c55b3e8da1aa68",
            "duration": 3_600_000,
            "ownJobs": ["54c685fb3b425ccf81c55b3e8da1aa68"],
        }
    },
)


@router.put("", responses=errors(400, 404, 408, 409, 413), openapi_extra=_BODY)
async def hold(
    job_id: JobId,
    gateway: Gateway,
    body: Annotated[HoldLineageBody, body_of(HoldLineageBody)],
    requester: Requester = None,
) -> dict[str, Any]:
    """Begin an upgrade of the job's lineage, or prolong it; only its owner ends or starts jobs of it until then."""
    return shapes.upgrade(await gateway.hold_lineage(job_id, HoldRequest(**dict(body), requester=requester)))


@router.delete("", responses=errors(400, 404, 408, 413), dependencies=[Depends(whole_request)])
async def release(
    job_id: JobId,
    gateway: Gateway,
    owner: Annotated[
        str | None,
        Query(description="whose upgrade ends; without one, whoever's it is", pattern=OWNER_PATTERN),
    ] = None,
) -> dict[str, Any]:
    """End an upgrade; one that is not in progress, or is somebody else's, is left alone."""
    await gateway.release_lineage(job_id, owner)
    return {}
