"""The table of requests: one function per call of the REST API, returning a :class:`Call` that either client executes.

A call that starts something carries an id, chosen here if the caller gives none, so that the server can tell a repeated
request from a second one. Every call may therefore be repeated after a lost answer. (The id of an upload is the hash of
its content; Flink keeps a repeated upload as another file.)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

from ckpt_runtime.contract.checkpoints import (
    CanceledJob,
    Checkpoint,
    CheckpointStatistics,
    OperationStatus,
    RetainedCheckpoint,
    Savepoint,
)
from ckpt_runtime.contract.cluster import ClusterOverview, Pipeline, RetiredJobId, TaskManager, ThreadInfo
from ckpt_runtime.contract.configuration import Bounds, CheckpointConfig, CheckpointConfigPatch, ConfigChange, JobConfig
from ckpt_runtime.contract.jobs import (
    Backpressure,
    ExceptionHistory,
    ExecutionResult,
    JobDetails,
    JobHealth,
    JobLine,
    PlanPreview,
    ProgressReports,
    RunOptions,
    SubtaskTimes,
    UpgradeInProgress,
    VertexDetails,
)
from ckpt_runtime.contract.spelling import read, reader

T_co = TypeVar("T_co", covariant=True)

Format = Literal["NATIVE", "CANONICAL"]
OperationKind = Literal["checkpoint", "savepoint", "savepoint-disposal"]


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """One request and how to read its answer.

    ``upload`` is the name and the content of a file. ``lookup`` is for calls whose repetition a server may refuse
    because it has already carried them out. It is sent before the call is repeated after a lost answer: its answer is
    that of the call, and "not found" means that the request never arrived. ``feature`` names the feature that a server
    without this call lacks.
    """

    method: str
    path: str
    parse: Callable[[Any], T_co]
    body: Mapping[str, Any] | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    upload: tuple[str, bytes] | None = None
    lookup: Call[Any] | None = None
    feature: str | None = None


_RETIRED = "/retired-job-ids"
_RETIRING = "retired job ids"
_LINEAGES = "lineages of jobs"
_HOLDS = "holds of uploaded programs"
_RESCALE = "live rescale, changes of a running job's resource requirements"
_CATALOGUE = "the savepoint catalogue"
_FLIP_530 = "FLIP-530, changes of a running job's configuration"
_FLIP_571 = "FLIP-571, changes of a running job's checkpoint configuration"


def new_id() -> str:
    """Make a random trigger or job id: 32 hex digits."""
    return secrets.token_hex(16)


def _segment(value: str) -> str:
    return quote(value, safe="")


def _job(job_id: str, rest: str = "") -> str:
    return f"/jobs/{_segment(job_id)}{rest}"


def _nothing(_: Any) -> None:
    return None


_request_id = reader(str, "request-id")


def cluster_overview() -> Call[ClusterOverview]:
    """Count slots, and jobs by state."""
    return Call("GET", "/overview", reader(ClusterOverview))


def dashboard_config() -> Call[Mapping[str, Any]]:
    """Read the server's version and features, as it sends them."""
    return Call("GET", "/config", reader(dict[str, Any]))


def cluster_configuration() -> Call[dict[str, str]]:
    """Read the cluster's options."""
    return Call("GET", "/jobmanager/config", lambda items: {item["key"]: item["value"] for item in items})


def shutdown_cluster() -> Call[None]:
    """End the session; running jobs are suspended."""
    return Call("DELETE", "/cluster", _nothing)


def upload_pipeline(filename: str, content: bytes) -> Call[str]:
    """Upload a ``.py`` or ``.zip``; returns its id."""
    return Call("POST", "/jars/upload", _uploaded_id, upload=(filename, content))


def _uploaded_id(document: Any) -> str:
    """Read the id: the last part of the path by which the server names the file."""
    return read(document["filename"], str).rstrip("/").rpartition("/")[2]


def list_pipelines() -> Call[tuple[Pipeline, ...]]:
    """List uploaded pipelines, newest first."""
    return Call("GET", "/jars", reader(tuple[Pipeline, ...], "files"))


def delete_pipeline(pipeline_id: str) -> Call[None]:
    """Delete an uploaded pipeline; its jobs keep running."""
    return Call("DELETE", f"/jars/{_segment(pipeline_id)}", _nothing)


def hold_pipeline(pipeline_id: str, owner: str) -> Call[Pipeline]:
    """Have the session keep an uploaded pipeline until it is released.

    A deleted pipeline that a job still runs is restored.
    """
    return Call("PUT", _hold(pipeline_id, owner), reader(Pipeline), feature=_HOLDS)


def release_pipeline(pipeline_id: str, owner: str) -> Call[None]:
    """Release a hold; a missing hold is not an error."""
    return Call("DELETE", _hold(pipeline_id, owner), _nothing, feature=_HOLDS)


def _hold(pipeline_id: str, owner: str) -> str:
    return f"/jars/{_segment(pipeline_id)}/holds/{_segment(owner)}"


def run_pipeline(
    pipeline_id: str, options: RunOptions | None = None, *, job_id: str | None = None, owner: str | None = None
) -> Call[str]:
    """Start a job of an uploaded pipeline; returns its id. The same ``job_id`` again returns the same job.

    ``owner``: the request belongs to this owner's upgrade, see :func:`hold_lineage`.
    """
    return replace(_start(pipeline_id, "run", options or RunOptions(), job_id), headers=_owned(owner))


def hold_lineage(
    job_id: str,
    owner: str,
    duration_ms: int,
    *,
    own_jobs: tuple[str, ...] = (),
    snapshot: str | None = None,
    requester: str | None = None,
) -> Call[UpgradeInProgress]:
    """Begin or extend an upgrade of the job's lineage: requests of other owners to end or start its jobs are refused.

    ``own_jobs`` are the jobs that the upgrade itself may have started; ``snapshot`` is retained for the upgrade. A
    conflict if another owner holds the lineage, or has started a job in place of this one.
    """
    body: dict[str, Any] = {"owner": owner, "duration": duration_ms, "ownJobs": list(own_jobs)}
    if snapshot is not None:
        body["snapshot"] = snapshot
    path, headers = _job(job_id, "/upgrade"), _asked_by(requester)
    return Call("PUT", path, reader(UpgradeInProgress), body=body, headers=headers, feature=_LINEAGES)


def release_lineage(job_id: str, owner: str | None = None) -> Call[None]:
    """End the upgrade of this owner, or of any owner if None. No upgrade in progress is not an error."""
    query = {} if owner is None else {"owner": owner}
    return Call("DELETE", _job(job_id, "/upgrade"), _nothing, query=query, feature=_LINEAGES)


def _owned(owner: str | None, incarnation: int | None = None) -> dict[str, str]:
    """Headers with the conditions of a request; Flink ignores them."""
    owned = {} if owner is None else {"Ckpt-Upgrade-Owner": owner}
    return owned if incarnation is None else {**owned, "Ckpt-Expected-Incarnation": str(incarnation)}


def retire_job_id(job_id: str) -> Call[None]:
    """Retire a job id: no later request can start a job with it, not even one already on its way. Idempotent.

    A conflict while a job with this id has not ended. Flink has no such call.
    """
    return Call("PUT", f"{_RETIRED}/{_segment(job_id)}", _nothing, feature=_RETIRING)


def retired_job_ids() -> Call[tuple[RetiredJobId, ...]]:
    """List the retired job ids, with which no job can be started."""
    return Call("GET", _RETIRED, reader(tuple[RetiredJobId, ...], "job-ids"), feature=_RETIRING)


def run_drill(pipeline_id: str, options: RunOptions, *, job_id: str | None = None) -> Call[str]:
    """Start a restore drill of ``options.savepoint_path``: a throwaway job without any external effects.

    Returns its id; the same ``job_id`` again returns the same job. A server without drills starts nothing.
    """
    return _start(pipeline_id, "drill", options, job_id, feature="restore drills")


def _start(
    pipeline_id: str, action: str, options: RunOptions, job_id: str | None, feature: str | None = None
) -> Call[str]:
    job_id = job_id or new_id()
    body = {**_run_body(options), "jobId": job_id}
    path = f"/jars/{_segment(pipeline_id)}/{action}"
    started = Call("GET", _job(job_id), reader(str, "jid"))
    return Call("POST", path, reader(str, "jobid"), body=body, lookup=started, feature=feature)


def plan_pipeline(pipeline_id: str, options: RunOptions | None = None) -> Call[PlanPreview]:
    """Preview the plan of a job of an uploaded pipeline, and whether the snapshot it would start from fits."""
    body = _run_body(options or RunOptions())
    return Call("POST", f"/jars/{_segment(pipeline_id)}/plan", reader(PlanPreview), body=body)


def _run_body(chosen: RunOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "programArgsList": list(chosen.arguments),
        "flinkConfiguration": dict(chosen.configuration),
        "allowNonRestoredState": chosen.allow_non_restored_state,
    }
    if chosen.entry_point is not None:
        body["entryClass"] = chosen.entry_point
    if chosen.parallelism is not None:
        body["parallelism"] = chosen.parallelism
    if chosen.like_job is not None:
        body["likeJob"] = chosen.like_job
    if chosen.fork:
        body["fork"] = True
    if chosen.savepoint_path is not None:
        body |= {"savepointPath": chosen.savepoint_path, "claimMode": chosen.claim_mode}
    if chosen.source_positions:
        body["sourcePositions"] = dict(chosen.source_positions)
    return body


def slot_agents() -> Call[tuple[TaskManager, ...]]:
    """List the slot agents, whose workers run the tasks."""
    return Call("GET", "/taskmanagers", reader(tuple[TaskManager, ...], "taskmanagers"))


def thread_dump(slot_agent: str | None = None) -> Call[tuple[ThreadInfo, ...]]:
    """Read the threads of a slot agent's worker, or of the driver, with their stacks."""
    return Call("GET", _process(slot_agent, "/thread-dump"), reader(tuple[ThreadInfo, ...], "threadInfos"))


def recent_log(slot_agent: str | None = None) -> Call[str]:
    """Read the last lines that a slot agent's worker, or the driver, has logged."""
    return Call("GET", _process(slot_agent, "/log"), str)


def _process(slot_agent: str | None, rest: str) -> str:
    return f"/jobmanager{rest}" if slot_agent is None else f"/taskmanagers/{_segment(slot_agent)}{rest}"


def list_jobs() -> Call[tuple[JobLine, ...]]:
    """List running and ended jobs."""
    return Call("GET", "/jobs/overview", reader(tuple[JobLine, ...], "jobs"))


def job_details(job_id: str) -> Call[JobDetails]:
    """Read everything about one job."""
    return Call("GET", _job(job_id), reader(JobDetails))


def job_health(job_id: str) -> Call[JobHealth]:
    """Read whether the job is healthy, and the reasons if not. Flink has no such call."""
    return Call("GET", _job(job_id, "/health"), reader(JobHealth), feature="the health of jobs")


def job_status(job_id: str) -> Call[str]:
    """Read the job's state."""
    return Call("GET", _job(job_id, "/status"), reader(str, "status"))


def job_plan(job_id: str) -> Call[Mapping[str, Any]]:
    """Read the vertices and their inputs, as the server sends them."""
    return Call("GET", _job(job_id, "/plan"), reader(dict[str, Any], "plan"))


def job_config(job_id: str) -> Call[JobConfig]:
    """Read the job's configuration and its version."""
    return Call("GET", _job(job_id, "/config"), reader(JobConfig))


def replace_job_config(
    job_id: str, configuration: Mapping[str, str], version: int, *, dry_run: bool = False
) -> Call[ConfigChange]:
    """Replace the job's whole configuration, edited from ``version``; only options whose meaning differs change."""
    body = {"configuration": dict(configuration), "version": version}
    query = {"changes": "true", **_dry(dry_run)}
    return Call("PUT", _job(job_id, "/config"), reader(ConfigChange), body=body, query=query, feature=_FLIP_530)


def patch_job_config(
    job_id: str, changes: Mapping[str, str | None], version: int | None = None, *, dry_run: bool = False
) -> Call[ConfigChange]:
    """Change options of the job's configuration; None removes an option.

    ``version``, if given, is the version from which the changes were made.
    """
    headers = {} if version is None else {"If-Match": f'"{version}"'}
    body, path = {"configuration": dict(changes)}, _job(job_id, "/config")
    return Call("PATCH", path, reader(ConfigChange), body=body, query=_dry(dry_run), headers=headers, feature=_FLIP_530)


def _dry(dry_run: bool) -> dict[str, str]:
    return {"dry-run": "true"} if dry_run else {}


def job_metrics(job_id: str, names: tuple[str, ...]) -> Call[dict[str, str]]:
    """Read the named metrics; metrics that do not exist are left out."""
    return Call("GET", _job(job_id, "/metrics"), _metric_values, query={"get": ",".join(names)})


def _metric_values(document: Any) -> dict[str, str]:
    return {item["id"]: item["value"] for item in document}


def job_exceptions(job_id: str, max_entries: int = 20) -> Call[ExceptionHistory]:
    """List failures of the job, newest first."""
    query = {"maxExceptions": str(max_entries)}
    return Call("GET", _job(job_id, "/exceptions"), reader(ExceptionHistory, "exceptionHistory"), query=query)


def job_progress(job_id: str) -> Call[ProgressReports]:
    """Read the progress of the job's queries between completed checkpoints, oldest first."""
    return Call("GET", _job(job_id, "/progress"), reader(ProgressReports))


def execution_result(job_id: str) -> Call[ExecutionResult]:
    """Read the result of the job, or that it has not ended."""
    return Call("GET", _job(job_id, "/execution-result"), reader(ExecutionResult))


def cancel_job(job_id: str, *, owner: str | None = None, incarnation: int | None = None) -> Call[None]:
    """Start cancelling; does nothing to a canceled job, and is a conflict for a finished or failed one.

    With ``incarnation``, the request fails with a conflict unless the job is this run of its lineage.
    """
    return Call("PATCH", _job(job_id), _nothing, query={"mode": "cancel"}, headers=_owned(owner, incarnation))


def cancel_and_retain(
    job_id: str, *, owner: str | None = None, incarnation: int | None = None
) -> Call[RetainedCheckpoint | None]:
    """Cancel as :func:`cancel_job` and retain the job's checkpoints, regardless of its options.

    Returns the latest checkpoint so far. Flink ignores the argument and answers with an empty body, which is an error.
    """
    query = {"mode": "cancel", "retain": "true"}
    return Call(
        "PATCH",
        _job(job_id),
        lambda document: read(document, CanceledJob).retained_checkpoint,
        query=query,
        headers=_owned(owner, incarnation),
    )


def vertex_details(job_id: str, vertex_id: str) -> Call[VertexDetails]:
    """Read one vertex with its subtasks."""
    return Call("GET", _job(job_id, f"/vertices/{_segment(vertex_id)}"), reader(VertexDetails))


def subtask_times(job_id: str, vertex_id: str) -> Call[tuple[SubtaskTimes, ...]]:
    """Read when the subtasks of a vertex entered their states."""
    path = _job(job_id, f"/vertices/{_segment(vertex_id)}/subtasktimes")
    return Call("GET", path, reader(tuple[SubtaskTimes, ...], "subtasks"))


def vertex_backpressure(job_id: str, vertex_id: str) -> Call[Backpressure]:
    """Read the backpressured, idle and busy shares of a vertex's subtasks."""
    return Call("GET", _job(job_id, f"/vertices/{_segment(vertex_id)}/backpressure"), reader(Backpressure))


def vertex_metrics(job_id: str, vertex_id: str, names: tuple[str, ...]) -> Call[dict[str, str]]:
    """Read metrics named ``<subtask>.<metric>``; metrics that do not exist are left out."""
    path = _job(job_id, f"/vertices/{_segment(vertex_id)}/metrics")
    return Call("GET", path, _metric_values, query={"get": ",".join(names)})


def subtask_metric_names(job_id: str, vertex_id: str) -> Call[tuple[str, ...]]:
    """List the metrics of a vertex's subtasks that can be aggregated."""
    path = _job(job_id, f"/vertices/{_segment(vertex_id)}/subtasks/metrics")
    return Call("GET", path, lambda document: tuple(item["id"] for item in document))


def subtask_metric_sums(job_id: str, vertex_id: str, names: tuple[str, ...]) -> Call[dict[str, float]]:
    """Read the sums of metrics over all subtasks; metrics that do not exist are left out."""
    path = _job(job_id, f"/vertices/{_segment(vertex_id)}/subtasks/metrics")
    query = {"get": ",".join(names), "agg": "sum"}
    return Call("GET", path, lambda document: {item["id"]: float(item["sum"]) for item in document}, query=query)


def checkpoint_statistics(job_id: str) -> Call[CheckpointStatistics]:
    """Read counts, summary, the latest checkpoints and the history."""
    return Call("GET", _job(job_id, "/checkpoints"), reader(CheckpointStatistics))


def checkpoint_details(job_id: str, checkpoint_id: int) -> Call[Checkpoint]:
    """Read one checkpoint with its vertices."""
    return Call("GET", _job(job_id, f"/checkpoints/details/{int(checkpoint_id)}"), reader(Checkpoint))


def checkpoint_subtasks(job_id: str, checkpoint_id: int, vertex_id: str) -> Call[Mapping[str, Any]]:
    """Read one vertex of one checkpoint by subtask, as the server sends it."""
    path = _job(job_id, f"/checkpoints/details/{int(checkpoint_id)}/subtasks/{_segment(vertex_id)}")
    return Call("GET", path, reader(dict[str, Any]))


def checkpoint_config(job_id: str) -> Call[CheckpointConfig]:
    """Read the checkpoint configuration now in effect."""
    return Call("GET", _job(job_id, "/checkpoints/config"), reader(CheckpointConfig))


def patch_checkpoint_config(job_id: str, patch: CheckpointConfigPatch) -> Call[CheckpointConfig]:
    """Change the checkpoint configuration of a running job (FLIP-571); returns the resulting configuration."""
    path = _job(job_id, "/checkpoints/configuration")
    return Call("PATCH", path, reader(CheckpointConfig), body=patch.to_json(), feature=_FLIP_571)


def reset_checkpoint_config(job_id: str) -> Call[CheckpointConfig]:
    """Return to the submitted checkpoint configuration."""
    path = _job(job_id, "/checkpoints/configuration")
    return Call("DELETE", path, reader(CheckpointConfig), feature=_FLIP_571)


def resource_requirements(job_id: str) -> Call[dict[str, int]]:
    """Read the desired parallelism of each vertex, by vertex id: the upper bound if bounds were declared."""
    return Call("GET", _requirements(job_id), _upper_bounds, feature=_RESCALE)


def parallelism_bounds(job_id: str) -> Call[dict[str, Bounds]]:
    """Read the lower and the upper bound of each vertex's parallelism, by vertex id, as they were declared."""
    return Call("GET", _requirements(job_id), _bounds, feature=_RESCALE)


def update_resource_requirements(job_id: str, parallelism: Mapping[str, int | Bounds]) -> Call[None]:
    """Rescale a running job: maps each vertex id to its parallelism, or to a lower and an upper bound of it.

    The server answers when the rescale is done; a repeated request joins the rescale in progress.
    """
    bounds = {vertex: (wanted, wanted) if isinstance(wanted, int) else wanted for vertex, wanted in parallelism.items()}
    body = {
        vertex: {"parallelism": {"lowerBound": lower, "upperBound": upper}} for vertex, (lower, upper) in bounds.items()
    }
    return Call("PUT", _requirements(job_id), _nothing, body=body, feature=_RESCALE)


def _requirements(job_id: str) -> str:
    return _job(job_id, "/resource-requirements")


def _upper_bounds(document: Any) -> dict[str, int]:
    return {vertex: upper for vertex, (_, upper) in _bounds(document).items()}


def _bounds(document: Any) -> dict[str, Bounds]:
    found = {vertex: wanted["parallelism"] for vertex, wanted in document.items()}
    return {vertex: (read(its["lowerBound"], int), read(its["upperBound"], int)) for vertex, its in found.items()}


def trigger_checkpoint(job_id: str, *, full: bool = False, trigger_id: str | None = None) -> Call[str]:
    """Start a checkpoint; returns the trigger id to poll."""
    body = {"checkpointType": "FULL" if full else "CONFIGURED", "triggerId": trigger_id or new_id()}
    return Call("POST", _job(job_id, "/checkpoints"), _request_id, body=body)


def trigger_savepoint(
    job_id: str,
    directory: str | None = None,
    *,
    savepoint_format: Format = "NATIVE",
    cancel_job: bool = False,
    trigger_id: str | None = None,
    requester: str | None = None,
) -> Call[str]:
    """Start a savepoint in ``directory``, or in the configured one; returns the trigger id to poll.

    ``requester`` names the requester in the savepoint catalogue.
    """
    body: dict[str, Any] = {
        "cancel-job": cancel_job,
        "formatType": savepoint_format,
        "triggerId": trigger_id or new_id(),
    }
    if directory is not None:
        body["target-directory"] = directory
    return Call("POST", _job(job_id, "/savepoints"), _request_id, body=body, headers=_asked_by(requester))


def stop_with_savepoint(
    job_id: str,
    directory: str | None = None,
    *,
    savepoint_format: Format = "NATIVE",
    drain: bool = False,
    trigger_id: str | None = None,
    requester: str | None = None,
    owner: str | None = None,
    incarnation: int | None = None,
) -> Call[str]:
    """Start a stop with a savepoint; returns the trigger id, to be polled like that of a savepoint.

    ``requester``: see :func:`trigger_savepoint`.

    ``owner``: the request belongs to this owner's upgrade, see :func:`hold_lineage`.

    ``incarnation``: see :func:`cancel_job`.
    """
    body: dict[str, Any] = {"drain": drain, "formatType": savepoint_format, "triggerId": trigger_id or new_id()}
    if directory is not None:
        body["targetDirectory"] = directory
    headers = _asked_by(requester) | _owned(owner, incarnation)
    return Call("POST", _job(job_id, "/stop"), _request_id, body=body, headers=headers)


def _asked_by(requester: str | None) -> dict[str, str]:
    """A header that names the requester; servers that do not know it ignore it."""
    return {} if requester is None else {"Ckpt-Requester": quote(requester[:200], safe=" !#$&'()*+,/:;=?@[]")[:600]}


def dispose_savepoint(path: str, *, trigger_id: str | None = None) -> Call[str]:
    """Start deleting a savepoint; returns the trigger id to poll."""
    body = {"savepoint-path": path, "triggerId": trigger_id or new_id()}
    return Call("POST", "/savepoint-disposal", _request_id, body=body)


def list_savepoints(directory: str | None = None, *, job: str | None = None) -> Call[tuple[Savepoint, ...]]:
    """List savepoints below a directory or the configured one, latest first; ``job`` selects a job by id or name."""
    query = _catalogue_query(directory, job)
    return Call("GET", "/savepoints", reader(tuple[Savepoint, ...], "savepoints"), query=query, feature=_CATALOGUE)


def latest_savepoint(
    directory: str | None = None, *, job: str | None = None, before_ms: int | None = None
) -> Call[Savepoint]:
    """Find the latest good savepoint of those that :func:`list_savepoints` lists; not found if there is none.

    With ``before_ms`` (ms since the epoch), only savepoints that had completed by that time count. A job that starts
    from the result reads everything since that time again.
    """
    query = _catalogue_query(directory, job)
    if before_ms is not None:
        query["before"] = str(before_ms)
    return Call("GET", "/savepoints/latest", reader(Savepoint), query=query, feature=_CATALOGUE)


def _catalogue_query(directory: str | None, job: str | None) -> dict[str, str]:
    return {name: value for name, value in (("directory", directory), ("job", job)) if value is not None}


def mark_savepoint(
    path: str,
    kind: Literal["VERIFICATION", "DRILL"],
    *,
    passed: bool,
    by: str | None = None,
    detail: str = "",
    duration_ms: int | None = None,
) -> Call[Savepoint]:
    """Record the result of a verification or a restore drill of a savepoint. A repeated call records it twice."""
    body: dict[str, Any] = {"savepoint-path": path, "kind": kind, "passed": passed, "detail": detail[:1000]}
    body |= {name: value for name, value in (("by", by), ("duration", duration_ms)) if value is not None}
    return Call("POST", "/savepoints/marks", reader(Savepoint), body=body, feature=_CATALOGUE)


def operation_status(kind: OperationKind, trigger_id: str, job_id: str | None = None) -> Call[OperationStatus]:
    """Read the status of an asynchronous operation. ``job_id`` is needed for all but disposals."""
    if kind == "savepoint-disposal":
        return Call("GET", f"/savepoint-disposal/{_segment(trigger_id)}", reader(OperationStatus))
    if job_id is None:
        raise ValueError(f"job_id: is required for a {kind} operation")
    return Call("GET", _job(job_id, f"/{kind}s/{_segment(trigger_id)}"), reader(OperationStatus))
