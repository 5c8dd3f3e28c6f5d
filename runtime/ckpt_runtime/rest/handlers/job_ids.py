"""Retired job ids, with which no job can be started."""

from __future__ import annotations

from typing import Any

from fastapi import Depends

from ckpt_runtime.rest.json_body import whole_request
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import Gateway, JobId
from ckpt_runtime.rest.responses import flink_router

router = flink_router(prefix="/retired-job-ids", tags=["pipelines"])


@router.get("", responses=errors())
async def listing(gateway: Gateway) -> dict[str, Any]:
    """Retired job ids."""
    found = await gateway.retired_job_ids()
    return {"job-ids": [{"id": job_id, "since": since} for job_id, since in sorted(found.items())]}


@router.put("/{jobid}", responses=errors(400, 408, 409, 413), dependencies=[Depends(whole_request)])
async def retire(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """Have no job started with this id any more, by a request that is on its way either."""
    await gateway.retire_job_id(job_id)
    return {}
