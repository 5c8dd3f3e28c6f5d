"""Applications and task managers, which Flink's dashboard asks for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import ApplicationId, Gateway
from ckpt_runtime.rest.responses import FlinkResponse
from ckpt_runtime.rest.shapes import dashboard as shapes

router = APIRouter(tags=["dashboard"], default_response_class=FlinkResponse)


@router.get("/applications/overview", responses=errors())
async def overview(gateway: Gateway) -> dict[str, Any]:
    """Each job as an application of its own."""
    now = now_ms()
    return {"applications": [shapes.application_line(job, now) for job in await gateway.list_jobs()]}


@router.get("/applications/{applicationid}", responses=errors(400, 404))
async def details(application_id: ApplicationId, gateway: Gateway) -> dict[str, Any]:
    """One job as an application; its id is the job's."""
    return shapes.application(await gateway.job_details(application_id), now_ms())


@router.get("/taskmanagers", responses=errors())
async def task_managers(gateway: Gateway) -> dict[str, Any]:
    """The slot agents, each with its one slot."""
    return {"taskmanagers": [shapes.task_manager(agent) for agent in await gateway.slot_agents()]}
