"""What can change while a job runs: its configuration (FLIP-530), its checkpoint settings (FLIP-571), its parallelism.

A change is all or nothing: every field of a request is checked before the dispatcher is called.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Header, Query, Request, Response
from pydantic import BeforeValidator, RootModel, create_model

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.configuration.checkpointing_options import PATCHABLE, CheckpointSetting
from ckpt_runtime.contract.cluster import Nothing
from ckpt_runtime.contract.configuration import (
    PERIODIC_OFF,
    CheckpointConfig,
    ConfigChange,
    Externalization,
    JobConfig,
    ParallelismRange,
    VertexRequirements,
)
from ckpt_runtime.jobmaster.gateway_values import ConfigurationRequest, EffectiveCheckpointConfig
from ckpt_runtime.rest.exchange import BadRequest, TheDispatcher, echo, flink_router, whole_request
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import (
    Body,
    ClosedBody,
    Condition,
    Flag,
    HexId,
    JobId,
    Options,
    OptionsPatch,
    Within,
    body_of,
    spelled,
)
from ckpt_runtime.scheduler.replacement import ParallelismBounds

job_configuration = flink_router(prefix="/jobs/{jobid}/config", tags=["job configuration"])
checkpoint_configuration = flink_router(prefix="/jobs/{jobid}/checkpoints", tags=["checkpoint configuration"])
requirements = flink_router(prefix="/jobs/{jobid}/resource-requirements", tags=["rescaling"])
routers = (job_configuration, requirements, checkpoint_configuration)

_READ = errors(400, 404)
_CHANGE = errors(400, 404, 408, 409, 413)

# --- the checkpoint settings


def _field(setting: CheckpointSetting) -> Any:
    return Flag if setting.patch_range is None else Annotated[int, Within(*setting.patch_range)]


_FIELDS: dict[str, Any] = {name: (_field(setting), None) for name, setting in PATCHABLE.items()}
PatchBody = create_model("CheckpointConfigurationRequestBody", __base__=ClosedBody, **_FIELDS)
_CHECKPOINT_PATCH = json_body(
    PatchBody,
    {
        "extend the timeout of pending checkpoints": {"checkpointTimeout": 900_000},
        "checkpoint more often": {"checkpointInterval": 10_000, "minPauseBetweenCheckpoints": 1_000},
    },
)


def shown_settings(effective: EffectiveCheckpointConfig) -> CheckpointConfig:
    """Flink's fields, then ``max_inflight_data_bytes`` and ``overrides`` (FLIP-571)."""
    settings = effective.settings
    return CheckpointConfig(
        mode="exactly_once" if effective.exactly_once else "at_least_once",
        interval=PERIODIC_OFF if settings.interval_ms is None else settings.interval_ms,
        timeout_ms=settings.timeout_ms,
        min_pause_ms=settings.min_pause_ms,
        max_concurrent=settings.max_concurrent,
        tolerable_failed_checkpoints=settings.tolerable_failed_checkpoints,
        aligned_timeout_ms=settings.aligned_timeout_ms,
        unaligned=settings.unaligned_enabled,
        max_inflight_data_bytes=settings.max_inflight_data_bytes,
        checkpoints_after_tasks_finish=settings.checkpoints_after_tasks_finish,
        externalization=Externalization(not settings.discards_on("FAILED"), settings.discards_on("CANCELED")),
        state_backend=effective.state_backend,
        checkpoint_storage=effective.checkpoint_storage,
        overrides=tuple(name for name, setting in PATCHABLE.items() if setting.field in effective.overrides),
    )


def overrides_of(body: ClosedBody) -> CheckpointOverrides:
    """The overrides for the fields given in the request."""
    return CheckpointOverrides(**{PATCHABLE[name].field: getattr(body, name) for name in body.model_fields_set})


@checkpoint_configuration.get("/config", responses=_READ)
async def effective(job_id: JobId, dispatcher: TheDispatcher) -> CheckpointConfig:
    """The checkpoint settings in effect."""
    return shown_settings(dispatcher.jobs[job_id].checkpoint_config())


@checkpoint_configuration.get("/configuration", responses=_READ)
async def effective_by_either_name(job_id: JobId, dispatcher: TheDispatcher) -> CheckpointConfig:
    """The checkpoint settings in effect, as at /config."""
    return await effective(job_id, dispatcher)


@checkpoint_configuration.patch("/configuration", responses=_CHANGE, openapi_extra=_CHECKPOINT_PATCH)
async def patch(
    job_id: JobId, dispatcher: TheDispatcher, body: Annotated[ClosedBody, body_of(PatchBody)]
) -> CheckpointConfig:
    """Change checkpoint settings while the job runs."""
    return shown_settings(await dispatcher.jobs[job_id].living().patch_checkpoint_config(overrides_of(body)))


@checkpoint_configuration.delete("/configuration", responses=_CHANGE, dependencies=[Depends(whole_request)])
async def reset(job_id: JobId, dispatcher: TheDispatcher) -> CheckpointConfig:
    """Return to the submitted checkpoint settings."""
    return shown_settings(await dispatcher.jobs[job_id].living().patch_checkpoint_config(None))


# --- the configuration of the job

_MAX_BY_CHARS = 200
_ETAG = re.compile(r'"?([0-9]{1,9})"?')
_INTERVAL = "execution.checkpointing.interval"


class JobConfigurationBody(ClosedBody):
    """The whole configuration, and the version from which it was made."""

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


def _flag(value: object) -> bool:
    if value not in ("true", "false", False):
        raise ValueError("it must be true or false")
    return value == "true"


DryRun = Annotated[
    bool, BeforeValidator(_flag), Query(alias="dry-run", description="show what would change, and change nothing")
]
Changes = Annotated[
    bool,
    BeforeValidator(_flag),
    Query(description="answer with what has changed; without it the answer to a change is {}"),
]
IfMatch = Annotated[str | None, Header(alias="If-Match", description="the version from which the change was made")]


@job_configuration.get("", responses=_READ)
async def config(job_id: JobId, dispatcher: TheDispatcher, response: Response) -> JobConfig:
    """Configuration of a job and its version (FLIP-530)."""
    found = dispatcher.jobs[job_id].config_info()
    response.headers["ETag"] = f'"{found.version}"'
    return found


@job_configuration.put("", responses=_CHANGE, openapi_extra=_PUT_BODY)
async def replace(
    job_id: JobId,
    dispatcher: TheDispatcher,
    request: Request,
    body: Annotated[JobConfigurationBody, body_of(JobConfigurationBody)],
    dry_run: DryRun = False,
    changes: Changes = False,
) -> ConfigChange | Nothing:
    """Replace the configuration while the job runs."""
    change = ConfigurationRequest(body.configuration, body.version, dry_run=dry_run, by=_sender(request))
    answer = await dispatcher.change_job_config(job_id, change)
    return answer if changes or dry_run else Nothing()


@job_configuration.patch("", responses=_CHANGE, openapi_extra=_PATCH_BODY)
async def change(
    job_id: JobId,
    dispatcher: TheDispatcher,
    request: Request,
    body: Annotated[JobConfigurationPatchBody, body_of(JobConfigurationPatchBody)],
    dry_run: DryRun = False,
    if_match: IfMatch = None,
) -> ConfigChange:
    """Change options of the configuration while the job runs."""
    wanted = ConfigurationRequest(body.configuration, _version(if_match), True, dry_run, _sender(request))
    return await dispatcher.change_job_config(job_id, wanted)


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


# --- parallelism

_Bound = Annotated[int, Within(-(1 << 31), (1 << 31) - 1)]


class _Parallelism(Body):
    lower: _Bound = spelled("lowerBound", default=0)
    upper: _Bound = spelled("upperBound", default=0)


class _Vertex(Body):
    parallelism: _Parallelism


class JobResourceRequirementsBody(RootModel[dict[HexId, _Vertex]]):
    """By vertex id."""


_REQUIREMENTS_BODY = json_body(
    JobResourceRequirementsBody,
    {
        "the second of three vertices uses up to eight slots": {
            "1b429432bb0f0efe4f02d82e0562d934": {"parallelism": {"lowerBound": 2, "upperBound": 2}},
            "f74362dd18da632fe7d708268d6f8693": {"parallelism": {"lowerBound": 2, "upperBound": 8}},
            "c55caaaf736ffafeffafd0c2ee81ce8d": {"parallelism": {"lowerBound": 2, "upperBound": 2}},
        }
    },
)


@requirements.get("", responses=errors(400, 404, 409))
async def resource_requirements(job_id: JobId, dispatcher: TheDispatcher) -> dict[str, VertexRequirements]:
    """The declared bounds of each vertex's parallelism; both are its parallelism if none were declared."""
    found = dispatcher.jobs[job_id].living().resource_requirements()
    return {
        vertex: VertexRequirements(ParallelismRange(bounds.lower, bounds.upper)) for vertex, bounds in found.items()
    }


@requirements.put("", responses=_CHANGE, openapi_extra=_REQUIREMENTS_BODY)
async def rescale(
    job_id: JobId,
    dispatcher: TheDispatcher,
    condition: Condition,
    body: Annotated[JobResourceRequirementsBody, body_of(JobResourceRequirementsBody)],
) -> Nothing:
    """Rescale a running job. The answer is sent when the new parallelism is stored and being deployed."""
    if not body.root:
        raise BadRequest("Request body does not specify resource requirements.")
    bounds = {
        vertex: ParallelismBounds(wanted.parallelism.lower, wanted.parallelism.upper)
        for vertex, wanted in body.root.items()
    }
    await dispatcher.update_resource_requirements(job_id, bounds, condition)
    return Nothing()
