"""Path and query parameters, checked by the framework and described in the OpenAPI document.

Ids are 32 ASCII hex digits in any case and reach handlers in lower case. A value that does not match is a 400.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Path, Query, Request
from pydantic import AfterValidator

from ckpt_runtime.jobmaster.gateway import DispatcherGateway

HEX_ID_PATTERN = "^[0-9a-fA-F]{32}$"
MAX_LONG = 2**63 - 1


def _lower(value: str) -> str:
    return value.lower()


def gateway_of(request: Request) -> DispatcherGateway:
    """The gateway that the application was made with."""
    gateway: DispatcherGateway = request.app.state.gateway
    return gateway


Gateway = Annotated[DispatcherGateway, Depends(gateway_of)]
JobId = Annotated[
    str, Path(alias="jobid", description="job id, 32 hex digits", pattern=HEX_ID_PATTERN), AfterValidator(_lower)
]
VertexId = Annotated[
    str, Path(alias="vertexid", description="vertex id, 32 hex digits", pattern=HEX_ID_PATTERN), AfterValidator(_lower)
]
TriggerId = Annotated[
    str,
    Path(alias="triggerid", description="trigger id, 32 hex digits", pattern=HEX_ID_PATTERN),
    AfterValidator(_lower),
]
CheckpointId = Annotated[str, Path(alias="checkpointid", description="checkpoint id", pattern="^[0-9]{1,19}$")]
PipelineId = Annotated[
    str, Path(alias="jarid", description="id of an uploaded pipeline", pattern="^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")
]
MetricNames = Annotated[str | None, Query(alias="get", description="comma-separated metric names", max_length=8192)]
Aggregations = Annotated[str | None, Query(alias="agg", description="comma-separated: min, max, avg, sum, skew")]
MaxExceptions = Annotated[int, Query(alias="maxExceptions", ge=1, le=1000, description="how many entries at most")]
