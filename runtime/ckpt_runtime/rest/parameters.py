"""Path and query parameters, checked by the framework and described in the OpenAPI document.

Ids are 32 ASCII hex digits in any case and reach handlers in lower case. A value that does not match is a 400.
"""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Header, Path, Query, Request
from pydantic import AfterValidator

from ckpt_runtime.jobmaster.gateway import DispatcherGateway

HEX_ID_PATTERN = "^[0-9a-fA-F]{32}$"
_JOB, _VERTEX = "fa461ac280c9aa36bde4a060aa97618c", "f74362dd18da632fe7d708268d6f8693"
_TRIGGER = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"


def _hex_id(alias: str, description: str, example: str) -> Any:
    return Path(alias=alias, description=description, pattern=HEX_ID_PATTERN, examples=[example])


_LOWER = AfterValidator(str.lower)


async def gateway_of(request: Request) -> DispatcherGateway:
    """Finds the application's gateway. A coroutine, because others get a thread for each request."""
    gateway: DispatcherGateway = request.app.state.gateway
    return gateway


Gateway = Annotated[DispatcherGateway, Depends(gateway_of)]
JobId = Annotated[str, _hex_id("jobid", "job id, 32 hex digits", _JOB), _LOWER]
ApplicationId = Annotated[str, _hex_id("applicationid", "the job's id", _JOB), _LOWER]
VertexId = Annotated[str, _hex_id("vertexid", "vertex id, 32 hex digits", _VERTEX), _LOWER]
TriggerId = Annotated[str, _hex_id("triggerid", "trigger id, 32 hex digits", _TRIGGER), _LOWER]
CheckpointId = Annotated[
    str, Path(alias="checkpointid", description="checkpoint id", pattern="^[0-9]{1,19}$", examples=["42"])
]
PipelineId = Annotated[
    str, Path(alias="jarid", description="id of an uploaded pipeline", pattern="^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")
]
HoldOwner = Annotated[
    str,
    Path(alias="owner", description="who holds it", pattern="^[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}$", examples=["me"]),
]
MetricNames = Annotated[
    str | None, Query(alias="get", description="comma-separated metric names", max_length=8192, examples=["uptime"])
]
Aggregations = Annotated[
    str | None,
    Query(alias="agg", description="comma-separated: min, max, avg, sum, skew", max_length=200, examples=["min,max"]),
]
MaxExceptions = Annotated[int, Query(alias="maxExceptions", ge=1, le=1000, description="how many entries at most")]
REQUESTER_HEADER = "Ckpt-Requester"
Requester = Annotated[
    str | None,
    Header(
        alias=REQUESTER_HEADER,
        description="who asks, in his own words, percent-encoded; kept in the savepoint catalogue",
        pattern="^[ -~]{1,600}$",
        examples=["airflow: nightly/savepoint"],
    ),
    AfterValidator(lambda text: None if text is None else unquote(text, errors="replace")[:200]),
]
SavepointDirectory = Annotated[
    str | None,
    Query(
        alias="directory",
        description="absolute path or URL; without it the configured savepoint directory",
        min_length=1,
        max_length=4096,
        examples=["/data/savepoints"],
    ),
]
SavepointsOfJob = Annotated[
    str | None,
    Query(alias="job", description="id or name of a job", min_length=1, max_length=1000, examples=["flights"]),
]
