"""Applications and task managers, which Flink's dashboard requests."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.gateway_errors import NotFound
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import ApplicationId, Gateway, SlotAgentId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import dashboard as shapes

router = flink_router(tags=["dashboard"])


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


@router.get("/taskmanagers/{taskmanagerid}", responses=errors(400, 404))
async def task_manager(agent_id: SlotAgentId, gateway: Gateway) -> dict[str, Any]:
    """One slot agent."""
    found = next((known for known in await gateway.slot_agents() if known.slot_id == agent_id), None)
    if found is None:
        raise NotFound(f"Task manager {agent_id} not found")
    return shapes.task_manager_details(found)
