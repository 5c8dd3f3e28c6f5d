"""What only Flink's own dashboard asks for, and there is nothing of here: JVMs, their logs and profiles.

Answered below ``/flink/`` alone, with nothing in Flink's shapes, so that its pages are empty and not broken. Other
clients get 404, as for everything that does not exist.
"""

from __future__ import annotations

import platform
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from starlette.responses import PlainTextResponse, Response

from ckpt_runtime.jobmaster.gateway import NotFound
from ckpt_runtime.rest.errors import ApiError, original_path
from ckpt_runtime.rest.handlers.vertices import vertex_of
from ckpt_runtime.rest.parameters import Gateway, JobId, MetricNames, VertexId
from ckpt_runtime.rest.responses import FlinkResponse
from ckpt_runtime.rest.shapes import dashboard as shapes
from ckpt_runtime.rest.shapes.metrics import split_names

_NO_LOG = "Logs are not served here: the driver's lies beside its session file, those of workers are Spark's.\n"
_HEAP = ("heapUsed", "heapCommitted", "heapMax", "nonHeapUsed", "nonHeapCommitted", "nonHeapMax", "directCount")
_BUFFERS = ("directUsed", "directMax", "mappedCount", "mappedUsed", "mappedMax", "memorySegmentsAvailable")
_SEGMENTS = ("memorySegmentsTotal", "nettyShuffleMemorySegmentsAvailable", "nettyShuffleMemorySegmentsUsed")
_SHUFFLE = (
    "nettyShuffleMemorySegmentsTotal",
    "nettyShuffleMemoryAvailable",
    "nettyShuffleMemoryUsed",
    "nettyShuffleMemoryTotal",
)


async def _for_the_dashboard(request: Request) -> None:
    if request.scope.get("ckpt.flink_dashboard") is None:
        raise ApiError(404, f"Not found: {original_path(request)}")


router = APIRouter(
    include_in_schema=False, dependencies=[Depends(_for_the_dashboard)], default_response_class=FlinkResponse
)
_JVMS = ("/jobmanager", "/taskmanagers/{agent}")
_Agent = Annotated[str, Path(max_length=200)]


@router.get("/jobmanager/environment")
async def environment() -> dict[str, Any]:
    """There is a Python instead of a JVM."""
    version = f"Python {platform.python_version()}, no JVM"
    return {"jvm": {"version": version, "arch": platform.machine(), "options": []}, "classpath": []}


@router.get("/taskmanagers/{agent}")
async def task_manager(agent: _Agent, gateway: Gateway) -> dict[str, Any]:
    """A slot agent has no pools of memory."""
    found = next((known for known in await gateway.slot_agents() if known.slot_id == agent), None)
    if found is None:
        raise NotFound(f"Task manager {agent} not found")
    figures: dict[str, Any] = dict.fromkeys((*_HEAP, *_BUFFERS, *_SEGMENTS, *_SHUFFLE), 0)
    return {**shapes.task_manager(found), "allocatedSlots": [], "metrics": {**figures, "garbageCollectors": []}}


@router.get("/jobs/{jobid}/vertices/{vertexid}/subtasks/accumulators")
async def accumulators(job_id: JobId, vertex_id: VertexId, gateway: Gateway) -> dict[str, Any]:
    """No subtask has any."""
    vertex = await vertex_of(job_id, vertex_id, gateway)
    return {"id": vertex_id, "parallelism": vertex.parallelism, "subtasks": []}


async def _metrics(names: MetricNames = None) -> list[dict[str, str]]:
    return [{"id": name, "value": "0"} for name in split_names(names) or ()]


async def _logs() -> dict[str, Any]:
    return {"logs": []}


async def _log() -> Response:
    return PlainTextResponse(_NO_LOG)


async def _threads() -> dict[str, Any]:
    return {"threadInfos": []}


async def _profiles() -> dict[str, Any]:
    return {"profilingList": []}


for _path in _JVMS:
    router.add_api_route(f"{_path}/metrics", _metrics)
    router.add_api_route(f"{_path}/logs", _logs)
    router.add_api_route(f"{_path}/log", _log)
    router.add_api_route(f"{_path}/stdout", _log)
    router.add_api_route(f"{_path}/thread-dump", _threads)
    router.add_api_route(f"{_path}/profiler", _profiles)
