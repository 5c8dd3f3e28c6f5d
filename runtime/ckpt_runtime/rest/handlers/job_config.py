"""A job's configuration: reading it, and changing it while the job runs (FLIP-530)."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from pydantic import BeforeValidator

from ckpt_runtime.jobmaster.configuration_requests import ConfigurationRequest
from ckpt_runtime.rest.bodies import ClosedBody, Options, OptionsPatch, Within, body_of
from ckpt_runtime.rest.errors import BadRequest, echo
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import Gateway, JobId
from ckpt_runtime.rest.responses import flink_router
from ckpt_runtime.rest.shapes import jobs as shapes

router = flink_router(prefix="/jobs/{jobid}/config", tags=["job configuration"])

_MAX_BY_CHARS = 200
_ETAG = re.compile(r'"?([0-9]{1,9})"?')
_INTERVAL = "execution.checkpointing.interval"


class JobConfigurationBody(ClosedBody):
    """The whole configuration, and the version that it was made of."""

    configuration: Options
    version: Annotated[int, Within(1, (1 << 31) - 1)]


class JobConfigurationPatchBody(ClosedBody):
    """Options to change; null removes one."""

    configuration: OptionsPatch


_PUT_BODY = json_body(
    JobConfigurationBody,
    {"checkpoint every 5 s": {"configuration": {_INTERVAL: "5 s", "parallelism.default": "2"}, "version": 1}},
)
_PATCH_BODY = json_body(
    JobConfigurationPatchBody,
    {"set one, remove another": {"configuration": {_INTERVAL: "5 s", "execution.checkpointing.timeout": None}}},
)
_ANSWERS = errors(400, 404, 408, 409, 413)


def _flag(value: object) -> bool:
    if value not in ("true", "false", False):
        raise ValueError("it must be true or false")
    return value == "true"


DryRun = Annotated[
    bool, BeforeValidator(_flag), Query(alias="dry-run", description="only say what would change, and what it takes")
]
Changes = Annotated[
    bool,
    BeforeValidator(_flag),
    Query(description="answer with what has changed; the answer to a change is {} without"),
]
IfMatch = Annotated[str | None, Header(alias="If-Match", description="the version that the change was made of")]


@router.get("", responses=errors(400, 404))
async def config(job_id: JobId, gateway: Gateway, response: Response) -> dict[str, Any]:
    """Configuration and its version (FLIP-530)."""
    found = await gateway.job_config(job_id)
    response.headers["ETag"] = f'"{found.version}"'
    return shapes.job_config(found)


@router.put("", responses=_ANSWERS, openapi_extra=_PUT_BODY)
async def replace(
    job_id: JobId,
    gateway: Gateway,
    request: Request,
    body: Annotated[JobConfigurationBody, body_of(JobConfigurationBody)],
    dry_run: DryRun = False,
    changes: Changes = False,
) -> dict[str, Any]:
    """Replace it while the job runs."""
    change = ConfigurationRequest(body.configuration, body.version, dry_run=dry_run, by=_sender(request))
    answer = shapes.changed_config(await gateway.change_job_config(job_id, change))
    return answer if changes or dry_run else {}


@router.patch("", responses=_ANSWERS, openapi_extra=_PATCH_BODY)
async def change(
    job_id: JobId,
    gateway: Gateway,
    request: Request,
    body: Annotated[JobConfigurationPatchBody, body_of(JobConfigurationPatchBody)],
    dry_run: DryRun = False,
    if_match: IfMatch = None,
) -> dict[str, Any]:
    """Change options of it while the job runs."""
    wanted = ConfigurationRequest(body.configuration, _version(if_match), True, dry_run, _sender(request))
    return shapes.changed_config(await gateway.change_job_config(job_id, wanted))


def _version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    found = _ETAG.fullmatch(if_match.strip())
    if found is None:
        raise BadRequest(f'If-Match: {echo(if_match)} is not acceptable, it must be one version, such as "3", or *')
    return int(found[1])


def _sender(request: Request) -> str:
    """The sender of a request: its address and its user agent."""
    host = "" if request.client is None else request.client.host
    agent = "".join(character for character in request.headers.get("user-agent", "") if character.isprintable())
    return f"{host} ({agent})"[:_MAX_BY_CHARS]
