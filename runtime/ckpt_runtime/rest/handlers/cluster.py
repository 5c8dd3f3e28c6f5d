"""The session: overview, options, task managers, thread dumps, logs, uploaded pipelines, retired job ids, shutdown.

A task manager is a slot agent; thread dumps and logs concern the worker that runs its tasks. Logs contain the last
lines of the process, which are kept in memory; recognisable secrets are masked. The paths of pipelines are Flink's
``/jars``.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from fastapi import Depends, Request
from msgspec import structs
from pydantic import model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import PlainTextResponse

from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.contract import cluster as contract
from ckpt_runtime.contract.cluster import Nothing
from ckpt_runtime.contract.jobs import ApplicationDetails, Applications, PlanPreview, StartedJob
from ckpt_runtime.jobmaster.gateway_values import GatewayError, NotFound, RunRequest, StoredPipeline
from ckpt_runtime.jobmaster.health import job_warnings
from ckpt_runtime.jobmaster.metric_table import CLUSTER, PROCESS, running, texts, values
from ckpt_runtime.processes.thread_dump import ThreadInfo
from ckpt_runtime.rest import job_answers, parameters
from ckpt_runtime.rest.exchange import (
    PART_NAME,
    BadRequest,
    TheDispatcher,
    flink_router,
    now_ms,
    receive_pipeline,
    whole_request,
)
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import (
    Aggregations,
    ApplicationId,
    Body,
    Condition,
    EntryPoint,
    Flag,
    HexId,
    HoldOwner,
    JobId,
    Location,
    LogName,
    MetricNames,
    OneOf,
    Options,
    PipelineId,
    SelectedTaskManagers,
    SlotAgentId,
    Texts,
    Within,
    aggregations,
    body_of,
    listed,
    spelled,
)
from ckpt_runtime.scheduler.job_status import JobStatus

cluster = flink_router(tags=["cluster"])
dashboard = flink_router(tags=["dashboard"])
diagnosis = flink_router(tags=["diagnosis"])
pipelines = flink_router(prefix="/jars", tags=["pipelines"])
job_ids = flink_router(prefix="/retired-job-ids", tags=["pipelines"])
routers = (cluster, dashboard, diagnosis, pipelines, job_ids)


_OF_DRIVER, _OF_WORKER = "driver.log", "worker.log"
_ONE = errors(400, 404)


@cluster.get("/overview", responses=errors())
async def overview(dispatcher: TheDispatcher) -> contract.ClusterOverview:
    """Slots, and jobs by state."""
    dashboard, found = await dispatcher.dashboard_config(), await dispatcher.cluster_overview()
    return contract.ClusterOverview(
        slot_agents=found.slot_agents,
        slots_total=found.slots_total,
        slots_available=found.slots_available,
        jobs_running=running(found),
        jobs_finished=found.jobs_by_status.get(JobStatus.FINISHED, 0),
        jobs_cancelled=found.jobs_by_status.get(JobStatus.CANCELED, 0),
        jobs_failed=found.jobs_by_status.get(JobStatus.FAILED, 0),
        flink_version=dashboard.flink_version,
        flink_commit=dashboard.flink_revision,
        ckpt_version=dashboard.ckpt_version,
    )


@cluster.get("/config", responses=errors())
async def config(dispatcher: TheDispatcher) -> contract.DashboardConfig:
    """Versions and features of this server, and how often pages should refresh."""
    return await dispatcher.dashboard_config()


@cluster.get("/jobmanager/config", responses=errors())
async def cluster_configuration(dispatcher: TheDispatcher) -> list[contract.OptionValue]:
    """The options of the cluster."""
    return [contract.OptionValue(key, value) for key, value in (await dispatcher.cluster_configuration()).items()]


@cluster.get("/jobmanager/metrics", responses=errors())
async def driver_metrics(dispatcher: TheDispatcher, names: MetricNames = None) -> list[contract.Metric]:
    """Names or values of the metrics of the session and of the driver's process."""
    found = texts(CLUSTER, await dispatcher.cluster_overview())
    return parameters.listing({**found, **texts(PROCESS, await dispatcher.process_figures())}, listed(names))


@cluster.delete("/cluster", responses=errors(400, 408, 413), dependencies=[Depends(whole_request)])
async def shutdown(dispatcher: TheDispatcher) -> Nothing:
    """End the session; running jobs are suspended."""
    await dispatcher.shutdown_cluster()
    return Nothing()


# --- applications and task managers


@dashboard.get("/applications/overview", responses=errors())
async def applications(dispatcher: TheDispatcher) -> Applications:
    """Each job as an application of its own."""
    now = now_ms()
    return Applications(tuple(job_answers.application(job, now) for job in await dispatcher.list_jobs()))


@dashboard.get("/applications/{applicationid}", responses=_ONE)
async def application(application_id: ApplicationId, dispatcher: TheDispatcher) -> ApplicationDetails:
    """One job as an application; its id is that of the job."""
    return job_answers.application_details(await dispatcher.job_details(application_id), now_ms())


@dashboard.get("/taskmanagers", responses=errors())
async def task_managers(dispatcher: TheDispatcher) -> contract.TaskManagers:
    """The slot agents, each with its one slot."""
    return contract.TaskManagers(await dispatcher.slot_agents())


@dashboard.get("/taskmanagers/metrics", responses=errors(400))
async def aggregated_metrics(
    dispatcher: TheDispatcher,
    names: MetricNames = None,
    kinds: Aggregations = None,
    agents: SelectedTaskManagers = None,
) -> list[contract.AggregatedMetric]:
    """Metrics of the workers' processes, aggregated."""
    wanted = listed(agents)
    samples = [
        values(PROCESS, worker.process)
        for worker in await dispatcher.worker_figures()
        if worker.process is not None and (wanted is None or worker.slot_id in wanted)
    ]
    return parameters.aggregated(samples, listed(names), aggregations(kinds))


@dashboard.get("/taskmanagers/{taskmanagerid}/metrics", responses=_ONE)
async def worker_metrics(
    agent_id: SlotAgentId, dispatcher: TheDispatcher, names: MetricNames = None
) -> list[contract.Metric]:
    """Names or values of the metrics of a worker's process. Empty before its first heartbeat."""
    for worker in await dispatcher.worker_figures():
        if worker.slot_id == agent_id:
            found = {} if worker.process is None else texts(PROCESS, worker.process)
            return parameters.listing(found, listed(names))
    raise NotFound(f"Task manager {agent_id} not found")


@dashboard.get("/taskmanagers/{taskmanagerid}", responses=_ONE)
async def task_manager(agent_id: SlotAgentId, dispatcher: TheDispatcher) -> contract.TaskManagerDetails:
    """One slot agent."""
    found = next((known for known in await dispatcher.slot_agents() if known.id == agent_id), None)
    if found is None:
        raise NotFound(f"Task manager {agent_id} not found")
    return contract.TaskManagerDetails(**structs.asdict(found))


# --- thread dumps and logs


@diagnosis.get("/jobmanager/thread-dump", responses=errors())
async def threads_of_driver(dispatcher: TheDispatcher) -> contract.ThreadDump:
    """The threads of the driver with their stacks."""
    return _threads(await dispatcher.thread_dump(None))


@diagnosis.get("/taskmanagers/{taskmanagerid}/thread-dump", responses=_ONE)
async def threads_of_worker(agent_id: SlotAgentId, dispatcher: TheDispatcher) -> contract.ThreadDump:
    """The threads of a worker with their stacks. A worker whose tasks are stuck answers, too."""
    return _threads(await dispatcher.thread_dump(agent_id))


def _threads(threads: tuple[ThreadInfo, ...]) -> contract.ThreadDump:
    return contract.ThreadDump(tuple(contract.ThreadInfo(info.name, info.text) for info in threads))


@diagnosis.get("/jobmanager/logs", responses=errors())
async def logs_of_driver(dispatcher: TheDispatcher) -> contract.LogFiles:
    """The log of the driver, and the last logs of workers that ended unexpectedly, with their sizes."""
    own = contract.LogFile(_OF_DRIVER, len((await dispatcher.recent_log(None)).encode()), now_ms())
    ended = (
        contract.LogFile(_name_of(log.worker_id), len(log.text.encode()), log.ended_at_ms)
        for log in await dispatcher.ended_worker_logs()
    )
    return contract.LogFiles((own, *ended))


def _name_of(worker_id: str) -> str:
    return f"worker-{worker_id}.log"


@diagnosis.get("/taskmanagers/{taskmanagerid}/logs", responses=_ONE)
async def logs_of_worker(agent_id: SlotAgentId, dispatcher: TheDispatcher) -> contract.LogFiles:
    """The log of a worker, with its size."""
    size = len((await dispatcher.recent_log(agent_id)).encode())
    return contract.LogFiles((contract.LogFile(_OF_WORKER, size, now_ms()),))


@diagnosis.get("/jobmanager/log", responses=errors(), response_class=PlainTextResponse)
async def log_of_driver(dispatcher: TheDispatcher) -> PlainTextResponse:
    """The last lines that the driver has logged."""
    return PlainTextResponse(await dispatcher.recent_log(None))


@diagnosis.get("/jobmanager/logs/{filename}", responses=_ONE, response_class=PlainTextResponse)
async def named_log_of_driver(name: LogName, dispatcher: TheDispatcher) -> PlainTextResponse:
    """A log by the name that `/jobmanager/logs` lists. That of an ended worker begins with the cause of its end."""
    if name == _OF_DRIVER:
        return await log_of_driver(dispatcher)
    for log in await dispatcher.ended_worker_logs():
        if name == _name_of(log.worker_id):
            return PlainTextResponse(f"worker {log.worker_id} of slot {log.slot_id}: {log.reason}\n\n{log.text}")
    raise NotFound(f"There is no log file {name}; GET /jobmanager/logs lists those that exist")


@diagnosis.get("/taskmanagers/{taskmanagerid}/log", responses=_ONE, response_class=PlainTextResponse)
async def log_of_worker(agent_id: SlotAgentId, dispatcher: TheDispatcher) -> PlainTextResponse:
    """The last lines that a worker has logged."""
    return PlainTextResponse(await dispatcher.recent_log(agent_id))


@diagnosis.get("/taskmanagers/{taskmanagerid}/logs/{filename}", responses=_ONE, response_class=PlainTextResponse)
async def named_log_of_worker(agent_id: SlotAgentId, name: LogName, dispatcher: TheDispatcher) -> PlainTextResponse:
    """A log of a worker, by the name that `/taskmanagers/:taskmanagerid/logs` lists."""
    if name != _OF_WORKER:
        raise NotFound(f"There is no log file {name}, only {_OF_WORKER}")
    return await log_of_worker(agent_id, dispatcher)


# --- pipelines

MAX_PARALLELISM = 32768
_FORM = {"type": "object", "required": [PART_NAME], "properties": {PART_NAME: {"type": "string", "format": "binary"}}}
_UPLOAD_BODY = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_SAVEPOINT_PATH, _JOB = "file:///data/savepoints/savepoint-fa461a-5dcf0ae7b2f1", "fa461ac280c9aa36bde4a060aa97618c"


class JarRunRequestBody(Body):
    """``restoreMode`` is the older name of ``claimMode``. Options that are not given are those of the job ``likeJob``.

    ``fork``: the job has another output than the job whose snapshot it starts from, and both may run at the same time.
    ``sourcePositions``: where sources continue in place of their positions in the snapshot, by uid: ``earliest``,
    ``latest``, a time, or offsets as JSON.
    """

    entry_point: EntryPoint | None = spelled("entryClass", "entry-class", default=None)
    arguments: Texts = spelled("programArgsList", default=())
    parallelism: Annotated[int, Within(1, MAX_PARALLELISM)] | None = None
    job_id: HexId | None = spelled("jobId", default=None)
    like_job: HexId | None = spelled("likeJob", default=None)
    savepoint_path: Location | None = spelled("savepointPath", default=None)
    allow_non_restored_state: Flag = spelled("allowNonRestoredState", default=False)
    claim_mode: Annotated[RecoveryClaimMode, OneOf(RecoveryClaimMode)] = spelled(
        "claimMode", "restoreMode", default=RecoveryClaimMode.NO_CLAIM
    )
    configuration: Options = spelled("flinkConfiguration", default={})
    fork: Flag = False
    source_positions: Options = spelled("sourcePositions", default={})

    @model_validator(mode="before")
    @classmethod
    def _arguments_in_a_list(cls, document: dict[str, Any]) -> dict[str, Any]:
        if document.get("programArgs") is not None:
            raise PydanticCustomError("text", "programArgs: is not accepted; pass a list of strings in programArgsList")
        return document


_RUN_BODY = json_body(
    JarRunRequestBody,
    {
        "fresh": {
            "entryClass": "flights:pipeline",
            "programArgsList": ["--output", "/data/out"],
            "parallelism": 2,
            "flinkConfiguration": {"execution.checkpointing.interval": "10s"},
        },
        "from a savepoint": {
            "savepointPath": _SAVEPOINT_PATH,
            "claimMode": "NO_CLAIM",
            "allowNonRestoredState": False,
            "jobId": _JOB,
        },
        "from a savepoint, and orders since a time": {
            "savepointPath": _SAVEPOINT_PATH,
            "sourcePositions": {"orders": "2026-11-01T09:00"},
        },
    },
)
_DRILL = {"savepointPath": _SAVEPOINT_PATH, "programArgsList": ["--output", "/data/out"], "jobId": _JOB}
_DRILL_BODY = json_body(JarRunRequestBody, {"of a savepoint": _DRILL})


@pipelines.post("/upload", responses=errors(400, 408, 413), openapi_extra=_UPLOAD_BODY)
async def upload(request: Request, dispatcher: TheDispatcher) -> contract.UploadedPipeline:
    """Upload a pipeline."""
    stored = await receive_pipeline(request, dispatcher, request.app.state.max_upload_bytes)
    return contract.UploadedPipeline(f"pipelines/{stored.id}")


@pipelines.get("", responses=errors())
async def listing(request: Request, dispatcher: TheDispatcher) -> contract.Pipelines:
    """Uploaded pipelines."""
    files = sorted(await dispatcher.list_pipelines(), key=lambda stored: stored.uploaded_at_ms, reverse=True)
    return contract.Pipelines(str(request.base_url).rstrip("/"), tuple(map(_pipeline, files)))


def _pipeline(stored: StoredPipeline) -> contract.Pipeline:
    return contract.Pipeline(
        id=stored.id,
        name=stored.name,
        uploaded_at_ms=stored.uploaded_at_ms,
        entries=tuple(map(contract.EntryPoint, stored.entry_points)),
        holders=tuple(contract.Holder(owner, since) for owner, since in sorted(stored.holds.items())),
    )


@pipelines.delete("/{jarid}", responses=errors(400, 404, 408, 409, 413), dependencies=[Depends(whole_request)])
async def delete(pipeline_id: PipelineId, dispatcher: TheDispatcher) -> Nothing:
    """Delete a pipeline."""
    await dispatcher.delete_pipeline(pipeline_id)
    return Nothing()


@pipelines.put("/{jarid}/holds/{owner}", responses=errors(400, 404, 408, 413), dependencies=[Depends(whole_request)])
async def hold(pipeline_id: PipelineId, owner: HoldOwner, dispatcher: TheDispatcher) -> contract.Pipeline:
    """Keep a pipeline until it is released, also for the next driver."""
    return _pipeline(await dispatcher.hold_pipeline(pipeline_id, owner))


@pipelines.delete("/{jarid}/holds/{owner}", responses=errors(400, 408, 413), dependencies=[Depends(whole_request)])
async def release(pipeline_id: PipelineId, owner: HoldOwner, dispatcher: TheDispatcher) -> Nothing:
    """Release a hold."""
    await dispatcher.release_pipeline(pipeline_id, owner)
    return Nothing()


async def _no_parameters(request: Request) -> None:
    if request.query_params:
        names = ", ".join(sorted(request.query_params)[:10])
        raise BadRequest(f"Query parameters are not accepted here ({names[:200]}); pass them in the body.")


_SUBMISSION: dict[str, Any] = {"responses": errors(400, 404, 408, 409, 413), "dependencies": [Depends(_no_parameters)]}
_Body = Annotated[JarRunRequestBody, body_of(JarRunRequestBody)]


@pipelines.post("/{jarid}/plan", openapi_extra=_RUN_BODY, **_SUBMISSION)
async def plan(pipeline_id: PipelineId, dispatcher: TheDispatcher, body: _Body) -> PlanPreview:
    """Show the plan of a job of a pipeline, and how a snapshot fits it. Nothing is started."""
    found = await dispatcher.plan_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body)))
    return job_answers.plan_preview(found)


@pipelines.post("/{jarid}/run", openapi_extra=_RUN_BODY, **_SUBMISSION)
async def run(pipeline_id: PipelineId, dispatcher: TheDispatcher, body: _Body, condition: Condition) -> StartedJob:
    """Start a job of a pipeline. The answer has `warnings` only if there are any: Flink's answer has none."""
    job_id = await dispatcher.run_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body), condition=condition))
    warnings: tuple[str, ...] = ()
    with suppress(GatewayError):  # the job has been started, whatever its state is by now
        settings = dispatcher.jobs[job_id].checkpoint_config().settings
        warnings = tuple(job_warnings(await dispatcher.job_details(job_id), settings))
    return StartedJob(job_id=job_id, application_id=job_id, warnings=warnings)


@pipelines.post("/{jarid}/drill", openapi_extra=_DRILL_BODY, **_SUBMISSION)
async def drill(pipeline_id: PipelineId, dispatcher: TheDispatcher, body: _Body) -> StartedJob:
    """Start a restore drill: a throwaway job without external effects."""
    # Drills have a path of their own, so that a server without drills cannot start a real job instead.
    job_id = await dispatcher.run_pipeline(RunRequest(pipeline_id=pipeline_id, **dict(body), drill=True))
    return StartedJob(job_id=job_id, application_id=job_id)


# --- retired job ids


@job_ids.get("", responses=errors())
async def retired(dispatcher: TheDispatcher) -> contract.RetiredJobIds:
    """Retired job ids, with which no job can be started."""
    found = sorted((await dispatcher.retired_job_ids()).items())
    return contract.RetiredJobIds(tuple(contract.RetiredJobId(job_id, since) for job_id, since in found))


@job_ids.put("/{jobid}", responses=errors(400, 408, 409, 413), dependencies=[Depends(whole_request)])
async def retire(job_id: JobId, dispatcher: TheDispatcher) -> Nothing:
    """Prevent any later start of a job with this id, also by a delayed request."""
    await dispatcher.retire_job_id(job_id)
    return Nothing()
