"""Applications and task managers, which Flink's dashboard requests."""

from __future__ import annotations

from typing import Any

from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.jobmaster.gateway_errors import NotFound
from ckpt_runtime.jobmaster.gateway_values import SlotOverview
from ckpt_runtime.jobmaster.metric_table import PROCESS, texts, values
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.handlers.jobs import aggregations
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import (
    Aggregations,
    ApplicationId,
    Gateway,
    MetricNames,
    SelectedTaskManagers,
    SlotAgentId,
    listed,
)
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import dashboard as shapes
from ckpt_runtime.rest.shapes import metrics

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


@router.get("/taskmanagers/metrics", responses=errors(400))
async def aggregated_metrics(
    gateway: Gateway, names: MetricNames = None, kinds: Aggregations = None, agents: SelectedTaskManagers = None
) -> list[dict[str, Any]]:
    """Metrics of the workers' processes, aggregated."""
    wanted = listed(agents)
    samples = [
        values(PROCESS, agent.process)
        for agent in await gateway.slot_agents()
        if agent.process is not None and (wanted is None or agent.slot_id in wanted)
    ]
    return metrics.aggregated(samples, listed(names), aggregations(kinds))


@router.get("/taskmanagers/{taskmanagerid}/metrics", responses=errors(400, 404))
async def worker_metrics(agent_id: SlotAgentId, gateway: Gateway, names: MetricNames = None) -> list[dict[str, Any]]:
    """Names or values of the metrics of a worker's process. Empty before its first heartbeat."""
    process = (await _agent(agent_id, gateway)).process
    return metrics.listing({} if process is None else texts(PROCESS, process), listed(names))


@router.get("/taskmanagers/{taskmanagerid}", responses=errors(400, 404))
async def task_manager(agent_id: SlotAgentId, gateway: Gateway) -> dict[str, Any]:
    """One slot agent."""
    return shapes.task_manager_details(await _agent(agent_id, gateway))


async def _agent(agent_id: str, gateway: DispatcherGateway) -> SlotOverview:
    """The slot agent. Raises NotFound."""
    found = next((known for known in await gateway.slot_agents() if known.slot_id == agent_id), None)
    if found is None:
        raise NotFound(f"Task manager {agent_id} not found")
    return found
