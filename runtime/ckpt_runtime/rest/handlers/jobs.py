"""Jobs and their vertices: lists, details, plan, metrics, failures, result, health, events, upgrades, cancelling."""

from __future__ import annotations

import math
from typing import Annotated

from fastapi import Depends, Header, Query, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import StringConstraints
from starlette.responses import Response

from ckpt_runtime.configuration.pipeline_options import ExecutionOptions
from ckpt_runtime.contract.checkpoints import CanceledJob
from ckpt_runtime.contract.cluster import AggregatedMetric, Metric, Nothing, OptionValue
from ckpt_runtime.contract.configuration import JobConfig
from ckpt_runtime.contract.jobs import (
    Backpressure,
    ExceptionHistory,
    Exceptions,
    ExecutionResult,
    FlameGraph,
    JobAccumulators,
    JobDetails,
    JobHealth,
    JobLines,
    JobState,
    JobStates,
    JobStatusAnswer,
    PlanAnswer,
    ProgressReports,
    Subtask,
    SubtaskAccumulators,
    UpgradeInProgress,
    VertexAccumulators,
    VertexDetails,
    VertexTaskManagers,
    VertexTimes,
)
from ckpt_runtime.jobmaster import gateway_values, health
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import JobNotFound, JobTerminated, NotFound, VertexNotFound
from ckpt_runtime.jobmaster.metric_table import text_of
from ckpt_runtime.rest import checkpoint_answers, job_answers, parameters, prometheus
from ckpt_runtime.rest.event_stream import EventStreamResponse, EventStreams
from ckpt_runtime.rest.exchange import ApiError, BadRequest, TheDispatcher, echo, flink_router, now_ms, whole_request
from ckpt_runtime.rest.handlers.cluster import cluster_configuration
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import (
    HEX_ID_PATTERN,
    OWNER_PATTERN,
    Aggregations,
    Attempt,
    Body,
    Condition,
    FailureLabels,
    FlameGraphKind,
    HexIds,
    JobId,
    Location,
    MaxExceptions,
    MetricNames,
    OneSubtask,
    Owner,
    Requester,
    SelectedJobs,
    SelectedSubtasks,
    SubtaskIndex,
    VertexId,
    Within,
    aggregations,
    body_of,
    listed,
    selected_jobs,
    selected_subtasks,
    spelled,
)
from ckpt_runtime.scheduler.job_status import JobStatus

jobs = flink_router(prefix="/jobs", tags=["jobs"])
vertices = flink_router(prefix="/jobs/{jobid}/vertices/{vertexid}", tags=["vertices"])
events = flink_router(tags=["events"])
healths = flink_router(tags=["health"])
lineages = flink_router(prefix="/jobs/{jobid}/upgrade", tags=["lineages"])

_READ = errors(400, 404)


@jobs.get("", responses=errors())
async def listing(dispatcher: TheDispatcher) -> JobStates:
    """Ids and states of all jobs."""
    return JobStates(tuple(JobState(job.job_id, job.status) for job in await dispatcher.list_jobs()))


@jobs.get("/overview", responses=errors())
async def overview(dispatcher: TheDispatcher) -> JobLines:
    """All jobs with their task counts."""
    now = now_ms()
    return JobLines(tuple(job_answers.job_line(job, now) for job in await dispatcher.list_jobs()))


@jobs.get("/metrics", responses=errors(400))
async def aggregated_metrics(
    dispatcher: TheDispatcher, names: MetricNames = None, kinds: Aggregations = None, jobs: SelectedJobs = None
) -> list[AggregatedMetric]:
    """Metrics aggregated over jobs."""
    wanted, samples = selected_jobs(jobs), []
    for job in await dispatcher.list_jobs():
        if wanted is not None and job.job_id not in wanted:
            continue
        found = {}
        for name, text in dispatcher.jobs[job.job_id].metrics().items():
            try:
                number = float(text)
            except ValueError:
                continue
            if math.isfinite(number):
                found[name] = number
        samples.append(found)
    return parameters.aggregated(samples, listed(names), aggregations(kinds))


@jobs.get("/{jobid}", responses=_READ)
async def details(job_id: JobId, dispatcher: TheDispatcher) -> JobDetails:
    """Everything about one job."""
    found = await dispatcher.job_details(job_id)
    warnings = health.job_warnings(found, dispatcher.jobs[job_id].checkpoint_config().settings)
    return job_answers.job_details(found, warnings, now_ms())


@jobs.patch(
    "/{jobid}", status_code=202, responses=errors(308, 400, 404, 408, 409, 413), dependencies=[Depends(whole_request)]
)
async def cancel(
    job_id: JobId,
    dispatcher: TheDispatcher,
    condition: Condition,
    mode: Annotated[str, Query(description="cancel")] = "cancel",
    retain: Annotated[bool, Query(description="the job's checkpoints outlive it, whatever its options say")] = False,
) -> CanceledJob | Nothing:
    """Cancel a job. With `retain` the answer names the checkpoint from which a later job can start."""
    if mode.lower() == "stop":
        raise ApiError(308, f"The termination mode 'stop' has been removed; use /jobs/{job_id}/stop.")
    if mode.lower() != "cancel":
        raise BadRequest(f"mode: {echo(mode)} is not acceptable, it must be cancel")
    try:
        kept = await dispatcher.cancel_job(job_id, retain=retain, condition=condition)
    except JobTerminated as error:
        message = "Job cancellation failed because the job has already reached another terminal state"
        raise ApiError(409, f"{message} ({error.status.value}).") from None
    return checkpoint_answers.retained(kept) if retain else Nothing()


@jobs.get("/{jobid}/status", responses=_READ)
async def status(job_id: JobId, dispatcher: TheDispatcher) -> JobStatusAnswer:
    """The state of a job."""
    return JobStatusAnswer(dispatcher.jobs[job_id].status)


@jobs.get("/{jobid}/plan", responses=_READ)
async def plan(job_id: JobId, dispatcher: TheDispatcher) -> PlanAnswer:
    """Vertices and edges."""
    return PlanAnswer(job_answers.plan(job_id, (await dispatcher.job_details(job_id)).graph))


@jobs.get("/{jobid}/metrics", responses=_READ)
async def job_metrics(job_id: JobId, dispatcher: TheDispatcher, names: MetricNames = None) -> list[Metric]:
    """Names or values of parameters."""
    return parameters.listing(dispatcher.jobs[job_id].metrics(), listed(names))


@jobs.get("/{jobid}/accumulators", responses=_READ)
async def accumulators(job_id: JobId, dispatcher: TheDispatcher) -> JobAccumulators:
    """Always empty: there are no accumulators."""
    dispatcher.jobs[job_id]  # Raises if it is not known.
    return JobAccumulators()


@jobs.get("/{jobid}/exceptions", responses=_READ)
async def exceptions(
    job_id: JobId, dispatcher: TheDispatcher, max_exceptions: MaxExceptions = 20, labels: FailureLabels = None
) -> Exceptions:
    """Failures, newest first."""
    found = dispatcher.jobs[job_id].exception_history(max_exceptions)
    if listed(labels):  # no failure has labels, so none matches
        return Exceptions(ExceptionHistory((), False))
    return Exceptions(ExceptionHistory(tuple(map(job_answers.exception, found.entries)), found.truncated))


@jobs.get("/{jobid}/execution-result", responses=_READ)
async def execution_result(job_id: JobId, dispatcher: TheDispatcher) -> ExecutionResult:
    """How the job ended."""
    return job_answers.execution_result(dispatcher.jobs[job_id].result())


@jobs.get("/{jobid}/progress", responses=_READ)
async def progress(job_id: JobId, dispatcher: TheDispatcher) -> ProgressReports:
    """The progress of a job's queries between completed checkpoints, in Spark's form, oldest first."""
    return ProgressReports(tuple(await dispatcher.jobs[job_id].progress()))


@jobs.get("/{jobid}/jobmanager/config", responses=_READ, tags=["cluster"])
async def job_cluster_configuration(job_id: JobId, dispatcher: TheDispatcher) -> list[OptionValue]:
    """The options of the cluster."""
    dispatcher.jobs[job_id]  # Raises if it is not known.
    return await cluster_configuration(dispatcher)


# --- health


async def _health(job_id: str, dispatcher: Dispatcher) -> JobHealth:
    details = await dispatcher.job_details(job_id)
    job, pressures = dispatcher.jobs[job_id], {}
    if details.overview.status is JobStatus.RUNNING:
        for vertex in details.vertices:
            pressures[vertex.vertex_id] = await dispatcher.vertex_backpressure(job_id, vertex.vertex_id)
    return health.job_health(
        details,
        job.checkpoint_statistics(),
        job.checkpoint_config().settings,
        pressures,
        int(job.metrics().get("numRestarts", 0)),
        _stall_timeout_ms(job.config_info()),
        now_ms(),
    )


def _stall_timeout_ms(configuration: JobConfig) -> int:
    option = ExecutionOptions.STALL_TIMEOUT
    for known in configuration.effective:
        if known.key == option.key and known.value is not None:
            return option.parse(known.value)
    return option.default


@healths.get("/jobs/{jobid}/health", responses=_READ)
async def job_health(job_id: JobId, dispatcher: TheDispatcher) -> JobHealth:
    """A verdict with its reasons and figures."""
    return await _health(job_id, dispatcher)


@healths.get("/metrics", include_in_schema=False)
async def prometheus_metrics(dispatcher: TheDispatcher) -> Response:
    """The session, its workers and its living jobs for Prometheus. The series of a job end with it."""
    jobs = []
    for job in await dispatcher.list_jobs():
        if job.status.is_globally_terminal:
            continue
        try:
            jobs.append((job, dispatcher.jobs[job.job_id].metrics(), await _health(job.job_id, dispatcher)))
        except JobNotFound:
            continue
    series, left_out = await dispatcher.task_metrics()
    moment = prometheus.Moment(
        await dispatcher.cluster_overview(),
        await dispatcher.process_figures(),
        await dispatcher.worker_figures(),
        jobs,
        series,
        left_out,
    )
    return Response(prometheus.text(moment), media_type=CONTENT_TYPE_LATEST)


# --- events

_Jobs = Annotated[
    list[Annotated[str, StringConstraints(pattern=HEX_ID_PATTERN)]] | None,
    Query(alias="job", description="job id, may be repeated; default: all jobs", max_length=1_000),
]
_LastEventId = Annotated[
    str | None,
    Header(alias="Last-Event-ID", description="id of the last event that the client has received; later ones are sent"),
]


@events.get("/events", status_code=200, response_class=EventStreamResponse, responses=errors(400))
async def all_events(
    request: Request, dispatcher: TheDispatcher, job: _Jobs = None, last_event_id: _LastEventId = None
) -> EventStreamResponse:
    """One stream for any number of jobs. Jobs that do not exist yet may be named."""
    jobs = None if job is None else frozenset(map(str.lower, job))
    streams: EventStreams = request.app.state.event_streams
    return EventStreamResponse(streams.follow(await dispatcher.event_log(), jobs, last_event_id))


@events.get("/jobs/{jobid}/events", status_code=200, response_class=EventStreamResponse, responses=_READ)
async def job_events(
    request: Request, job_id: JobId, dispatcher: TheDispatcher, last_event_id: _LastEventId = None
) -> EventStreamResponse:
    """The stream of one job. It continues when the job has ended."""
    dispatcher.jobs[job_id]  # Raises if it is not known.
    streams: EventStreams = request.app.state.event_streams
    return EventStreamResponse(streams.follow(await dispatcher.event_log(), frozenset((job_id,)), last_event_id))


# --- upgrades

_MAX_DURATION_MS = 30 * 24 * 3_600_000


class HoldLineageBody(Body):
    """``ownJobs`` are the jobs that the upgrade itself may have started; ``snapshot`` is kept for it."""

    owner: Owner
    duration_ms: Annotated[int, Within(1, _MAX_DURATION_MS)] = spelled("duration")
    own_jobs: HexIds = spelled("ownJobs", default=())
    snapshot: Location | None = None


_HOLD_BODY = json_body(
    HoldLineageBody,
    {
        "for an hour": {
            "owner": "upgrade-54c685fb3b425ccf81c55b3e8da1aa68",
            "duration": 3_600_000,
            "ownJobs": ["54c685fb3b425ccf81c55b3e8da1aa68"],
        }
    },
)


@lineages.put("", responses=errors(400, 404, 408, 409, 413), openapi_extra=_HOLD_BODY)
async def hold(
    job_id: JobId,
    dispatcher: TheDispatcher,
    body: Annotated[HoldLineageBody, body_of(HoldLineageBody)],
    requester: Requester = None,
) -> UpgradeInProgress:
    """Begin or prolong an upgrade of the job's lineage; until its end only its owner may end or start jobs of it."""
    request = gateway_values.HoldRequest(**dict(body), requester=requester)
    return job_answers.upgrade(await dispatcher.hold_lineage(job_id, request))


@lineages.delete("", responses=errors(400, 404, 408, 413), dependencies=[Depends(whole_request)])
async def release(
    job_id: JobId,
    dispatcher: TheDispatcher,
    owner: Annotated[
        str | None, Query(description="owner whose upgrade ends; default: any owner", pattern=OWNER_PATTERN)
    ] = None,
) -> Nothing:
    """End an upgrade. Does nothing if no upgrade is in progress, or if it belongs to another owner."""
    await dispatcher.release_lineage(job_id, owner)
    return Nothing()


# --- vertices


async def _vertex(job_id: str, vertex_id: str, dispatcher: Dispatcher) -> gateway_values.VertexDetails:
    """The vertex's details. Raises VertexNotFound and the dispatcher's errors."""
    for vertex in (await dispatcher.job_details(job_id)).vertices:
        if vertex.vertex_id == vertex_id:
            return vertex
    raise VertexNotFound(vertex_id)


async def _subtask(job_id: str, vertex_id: str, index: int, dispatcher: Dispatcher) -> gateway_values.SubtaskDetails:
    """The subtask's details. Raises NotFound and the dispatcher's errors."""
    for found in (await _vertex(job_id, vertex_id, dispatcher)).subtasks:
        if found.index == index:
            return found
    raise NotFound(f"Vertex {vertex_id} has no subtask {index}")


@vertices.get("", responses=_READ)
async def vertex_details(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> VertexDetails:
    """Subtasks with their states and parameters."""
    return job_answers.vertex_details(await _vertex(job_id, vertex_id, dispatcher), now_ms())


@vertices.get("/subtasktimes", responses=_READ)
async def subtask_times(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> VertexTimes:
    """The times at which each subtask entered its states."""
    return job_answers.vertex_times(await _vertex(job_id, vertex_id, dispatcher), now_ms())


@vertices.get("/taskmanagers", responses=_READ)
async def vertex_task_managers(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> VertexTaskManagers:
    """Subtasks by the slot agent that runs them."""
    return job_answers.vertex_task_managers(await _vertex(job_id, vertex_id, dispatcher), now_ms())


@vertices.get("/watermarks", responses=_READ)
async def watermarks(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> list[Metric]:
    """The input watermark of each subtask that has one."""
    return [
        Metric(f"{subtask.index}.currentInputWatermark", text_of(subtask.measures.input_watermark))
        for subtask in (await _vertex(job_id, vertex_id, dispatcher)).subtasks
        if subtask.measures is not None and subtask.measures.input_watermark is not None
    ]


@vertices.get("/accumulators", responses=_READ)
async def vertex_accumulators(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> VertexAccumulators:
    """Always empty: there are no accumulators."""
    await _vertex(job_id, vertex_id, dispatcher)
    return VertexAccumulators(vertex_id)


@vertices.get("/backpressure", responses=_READ)
async def backpressure(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> Backpressure:
    """Backpressured, idle and busy shares of time."""
    return await dispatcher.vertex_backpressure(job_id, vertex_id)


@vertices.get("/flamegraph", responses=_READ, tags=["diagnosis"])
async def flamegraph(
    job_id: JobId,
    vertex_id: VertexId,
    dispatcher: TheDispatcher,
    kind: FlameGraphKind = "full",
    subtask: OneSubtask = None,
) -> FlameGraph:
    """The code in which the subtasks spend their time. Their workers sample it for two seconds."""
    return job_answers.flame_graph(await dispatcher.sampled_stacks(job_id, vertex_id), kind.lower(), subtask)


@vertices.get("/metrics", responses=_READ)
async def vertex_metrics(
    job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher, names: MetricNames = None
) -> list[Metric]:
    """Names or values, prefixed by the subtask's index."""
    values = parameters.by_subtask(await dispatcher.vertex_metrics(job_id, vertex_id))
    return parameters.listing(values, listed(names))


@vertices.get("/jm-operator-metrics", responses=_READ)
async def driver_metrics(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> list[Metric]:
    """Always empty: no operator has a part in the driver."""
    await _vertex(job_id, vertex_id, dispatcher)
    return []


# Routes with fixed names come before those with a subtask's index, which would match the names.
@vertices.get("/subtasks/metrics", responses=_READ)
async def aggregated_subtask_metrics(
    job_id: JobId,
    vertex_id: VertexId,
    dispatcher: TheDispatcher,
    names: MetricNames = None,
    kinds: Aggregations = None,
    subtasks: SelectedSubtasks = None,
) -> list[AggregatedMetric]:
    """Metrics aggregated over subtasks."""
    is_wanted = selected_subtasks(subtasks)
    found = await dispatcher.vertex_metrics(job_id, vertex_id)
    samples = [values for index, values in found.items() if is_wanted(index)]
    return parameters.aggregated(samples, listed(names), aggregations(kinds))


@vertices.get("/subtasks/accumulators", responses=_READ)
async def subtask_accumulators(job_id: JobId, vertex_id: VertexId, dispatcher: TheDispatcher) -> SubtaskAccumulators:
    """Always empty: there are no accumulators."""
    return SubtaskAccumulators(vertex_id, (await _vertex(job_id, vertex_id, dispatcher)).parallelism)


@vertices.get("/subtasks/{subtaskindex}", responses=_READ)
async def subtask(job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, dispatcher: TheDispatcher) -> Subtask:
    """One subtask."""
    return job_answers.subtask(await _subtask(job_id, vertex_id, index, dispatcher), now_ms())


@vertices.get("/subtasks/{subtaskindex}/attempts/{attempt}", responses=_READ)
async def attempt(
    job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, number: Attempt, dispatcher: TheDispatcher
) -> Subtask:
    """The present attempt of a subtask. Earlier attempts are not kept."""
    found = await _subtask(job_id, vertex_id, index, dispatcher)
    if found.attempt != number:
        raise NotFound(f"Subtask {index} of vertex {vertex_id} has no attempt {number}, only {found.attempt}")
    return job_answers.subtask(found, now_ms())


@vertices.get("/subtasks/{subtaskindex}/metrics", responses=_READ)
async def subtask_metrics(
    job_id: JobId, vertex_id: VertexId, index: SubtaskIndex, dispatcher: TheDispatcher, names: MetricNames = None
) -> list[Metric]:
    """Names or values of the metrics of one subtask."""
    await _subtask(job_id, vertex_id, index, dispatcher)
    measured = (await dispatcher.vertex_metrics(job_id, vertex_id)).get(index, {})
    return parameters.listing({name: text_of(value) for name, value in measured.items()}, listed(names))


routers = (jobs, healths, events, lineages, vertices)
