"""Diagnosis of stuck tasks: thread dumps, logs and flame graphs, in Flink's shapes.

A task manager is a slot agent; the answers concern the worker that runs its tasks. Logs contain the last lines of the
process, which are kept in memory; recognisable secrets are masked.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from starlette.responses import PlainTextResponse, Response

from ckpt_runtime.jobmaster.gateway_errors import NotFound
from ckpt_runtime.rest.clock import now_ms
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import Gateway, JobId, LogName, SlotAgentId, VertexId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes.flame_graph import KINDS, flame_graph
from ckpt_runtime.thread_dump import ThreadInfo

router = flink_router(tags=["diagnosis"])

_OF_DRIVER, _OF_WORKER = "driver.log", "worker.log"

FlameGraphKind = Annotated[
    str, Query(alias="type", description="full, on_cpu or off_cpu, in any case", pattern=f"(?i)^({'|'.join(KINDS)})$")
]
OneSubtask = Annotated[int | None, Query(alias="subtaskindex", description="of this subtask only", ge=0, le=32_767)]


@router.get("/jobmanager/thread-dump", responses=errors())
async def threads_of_driver(gateway: Gateway) -> dict[str, Any]:
    """What the threads of the driver do."""
    return _threads(await gateway.thread_dump(None))


@router.get("/taskmanagers/{taskmanagerid}/thread-dump", responses=errors(400, 404))
async def threads_of_worker(agent_id: SlotAgentId, gateway: Gateway) -> dict[str, Any]:
    """What the threads of a worker do. A worker whose tasks are stuck answers all the same."""
    return _threads(await gateway.thread_dump(agent_id))


@router.get("/jobmanager/logs", responses=errors())
async def logs_of_driver(gateway: Gateway) -> dict[str, Any]:
    """The log of the driver, with its size."""
    return _logs(_OF_DRIVER, await gateway.recent_log(None))


@router.get("/taskmanagers/{taskmanagerid}/logs", responses=errors(400, 404))
async def logs_of_worker(agent_id: SlotAgentId, gateway: Gateway) -> dict[str, Any]:
    """The log of a worker, with its size."""
    return _logs(_OF_WORKER, await gateway.recent_log(agent_id))


@router.get("/jobmanager/log", responses=errors(), response_class=PlainTextResponse)
async def log_of_driver(gateway: Gateway) -> Response:
    """The last lines that the driver has logged."""
    return PlainTextResponse(await gateway.recent_log(None))


@router.get("/jobmanager/logs/{filename}", responses=errors(400, 404), response_class=PlainTextResponse)
async def named_log_of_driver(name: LogName, gateway: Gateway) -> Response:
    """The same by the name that ``/jobmanager/logs`` lists."""
    _check(name, _OF_DRIVER)
    return await log_of_driver(gateway)


@router.get("/taskmanagers/{taskmanagerid}/log", responses=errors(400, 404), response_class=PlainTextResponse)
async def log_of_worker(agent_id: SlotAgentId, gateway: Gateway) -> Response:
    """The last lines that a worker has logged."""
    return PlainTextResponse(await gateway.recent_log(agent_id))


@router.get(
    "/taskmanagers/{taskmanagerid}/logs/{filename}", responses=errors(400, 404), response_class=PlainTextResponse
)
async def named_log_of_worker(agent_id: SlotAgentId, name: LogName, gateway: Gateway) -> Response:
    """The same by the name that ``/taskmanagers/:taskmanagerid/logs`` lists."""
    _check(name, _OF_WORKER)
    return await log_of_worker(agent_id, gateway)


@router.get("/jobs/{jobid}/vertices/{vertexid}/flamegraph", responses=errors(400, 404))
async def flamegraph(
    job_id: JobId, vertex_id: VertexId, gateway: Gateway, kind: FlameGraphKind = "full", subtask: OneSubtask = None
) -> dict[str, Any]:
    """In which code the subtasks spend their time: their workers look at them for two seconds."""
    return flame_graph(await gateway.sampled_stacks(job_id, vertex_id), kind.lower(), subtask)


def _threads(threads: tuple[ThreadInfo, ...]) -> dict[str, Any]:
    return {"threadInfos": [{"threadName": info.name, "stringifiedThreadInfo": info.text} for info in threads]}


def _logs(name: str, text: str) -> dict[str, Any]:
    return {"logs": [{"name": name, "size": len(text.encode()), "mtime": now_ms()}]}


def _check(name: str, only: str) -> None:
    if name != only:
        raise NotFound(f"There is no log file {name}, only {only}")
