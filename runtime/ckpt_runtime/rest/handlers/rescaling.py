"""Resource requirements: the parallelism of each vertex, and changing it while the job runs (live rescale)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import RootModel

from ckpt_runtime.rest.bodies import Body, HexId, Within, body_of, spelled
from ckpt_runtime.rest.errors import BadRequest
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Condition, Gateway, JobId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.scheduler.replacement import ParallelismBounds

router = flink_router(prefix="/jobs/{jobid}/resource-requirements", tags=["rescaling"])

_Bound = Annotated[int, Within(-(1 << 31), (1 << 31) - 1)]


class _Parallelism(Body):
    lower: _Bound = spelled("lowerBound", default=0)
    upper: _Bound = spelled("upperBound", default=0)


class _Vertex(Body):
    parallelism: _Parallelism


class JobResourceRequirementsBody(RootModel[dict[HexId, _Vertex]]):
    """By vertex id."""


_BODY = json_body(
    JobResourceRequirementsBody,
    {
        "the second of three vertices, as wide as slots allow": {
            "1b429432bb0f0efe4f02d82e0562d934": {"parallelism": {"lowerBound": 2, "upperBound": 2}},
            "f74362dd18da632fe7d708268d6f8693": {"parallelism": {"lowerBound": 2, "upperBound": 8}},
            "c55caaaf736ffafeffafd0c2ee81ce8d": {"parallelism": {"lowerBound": 2, "upperBound": 2}},
        }
    },
)


@router.get("", responses=errors(400, 404, 409))
async def requirements(job_id: JobId, gateway: Gateway) -> dict[str, Any]:
    """The bounds of each vertex's parallelism as they were declared; both are the parallelism where none were."""
    found = await gateway.resource_requirements(job_id)
    return {
        vertex: {"parallelism": {"lowerBound": bounds.lower, "upperBound": bounds.upper}}
        for vertex, bounds in found.items()
    }


@router.put("", responses=errors(400, 404, 408, 409, 413), openapi_extra=_BODY)
async def rescale(
    job_id: JobId,
    gateway: Gateway,
    condition: Condition,
    body: Annotated[JobResourceRequirementsBody, body_of(JobResourceRequirementsBody)],
) -> dict[str, Any]:
    """Rescale the job while it runs; answered when the new parallelism is stored and being deployed."""
    if not body.root:
        raise BadRequest("Request body does not specify resource requirements.")
    bounds = {
        vertex: ParallelismBounds(wanted.parallelism.lower, wanted.parallelism.upper)
        for vertex, wanted in body.root.items()
    }
    await gateway.update_resource_requirements(job_id, bounds, condition)
    return {}
