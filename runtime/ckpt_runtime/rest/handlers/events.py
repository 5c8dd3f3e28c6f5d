"""Live streams of job events, as server-sent events."""

from __future__ import annotations

from typing import Annotated

from fastapi import Header, Query, Request
from pydantic import StringConstraints

from ckpt_runtime.rest.event_stream import EventStreamResponse, EventStreams
from ckpt_runtime.rest.openapi import errors
from ckpt_runtime.rest.parameters import HEX_ID_PATTERN, Gateway, JobId
from ckpt_runtime.rest.responses import flink_router

router = flink_router(tags=["events"])

_Jobs = Annotated[
    list[Annotated[str, StringConstraints(pattern=HEX_ID_PATTERN)]] | None,
    Query(alias="job", description="job id, may be repeated; all jobs without any", max_length=1_000),
]
_LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", description="the last id that the client has seen: what came behind it is sent"),
]


@router.get("/events", status_code=200, response_class=EventStreamResponse, responses=errors(400))
async def events(
    request: Request, gateway: Gateway, job: _Jobs = None, last_event_id: _LastEventId = None
) -> EventStreamResponse:
    """One stream for any number of jobs; those that do not exist yet may be named."""
    jobs = None if job is None else frozenset(map(str.lower, job))
    streams: EventStreams = request.app.state.event_streams
    return EventStreamResponse(streams.follow(await gateway.event_log(), jobs, last_event_id))


@router.get("/jobs/{jobid}/events", status_code=200, response_class=EventStreamResponse, responses=errors(400, 404))
async def job_events(
    request: Request, job_id: JobId, gateway: Gateway, last_event_id: _LastEventId = None
) -> EventStreamResponse:
    """One job's stream. It goes on when the job has ended."""
    await gateway.job_status(job_id)
    streams: EventStreams = request.app.state.event_streams
    return EventStreamResponse(streams.follow(await gateway.event_log(), frozenset((job_id,)), last_event_id))
