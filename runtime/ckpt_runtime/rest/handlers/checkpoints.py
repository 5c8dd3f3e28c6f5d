"""Checkpoints and savepoints: statistics, details, triggering, polling, disposal, and the savepoint catalogue.

Flink has no catalogue: the savepoints in a directory, the latest good one, and marks of verifications and drills.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.checkpoint.statistics import CheckpointStats
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.contract.checkpoints import (
    Checkpoint,
    CheckpointStatistics,
    KnownSavepoints,
    OperationStatus,
    Savepoint,
    SavepointList,
    Triggered,
    UnreadDirectory,
    VertexCheckpoint,
)
from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import (
    AfterSavepoint,
    CheckpointKind,
    CheckpointNotFound,
    NotFound,
    OperationKind,
    SavepointRequest,
)
from ckpt_runtime.rest import checkpoint_answers
from ckpt_runtime.rest.exchange import BadRequest, TheDispatcher, flink_router, now_ms
from ckpt_runtime.rest.openapi import errors, json_body
from ckpt_runtime.rest.parameters import (
    TRIGGER_ID,
    Body,
    CheckpointId,
    CompletedBefore,
    Condition,
    Flag,
    HexId,
    JobId,
    Location,
    Note,
    OneOf,
    Requester,
    SavepointDirectory,
    SavepointsOfJob,
    TriggerId,
    VertexId,
    Within,
    body_of,
    refused,
    spelled,
)
from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind

checkpoints = flink_router(prefix="/jobs/{jobid}/checkpoints", tags=["checkpoints"])
savepoints = flink_router(tags=["savepoints"])
catalogue = flink_router(prefix="/savepoints", tags=["savepoints"])
routers = (checkpoints, savepoints, catalogue)

_TRIGGER_ID = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"
_SAVEPOINT_PATH = "file:/data/savepoints/savepoint-fa461a-5dcf0ae7b2f1"
_READ = errors(400, 404)
_TRIGGER = errors(400, 404, 408, 409, 413)


@checkpoints.get("", responses=_READ)
async def statistics(job_id: JobId, dispatcher: TheDispatcher) -> CheckpointStatistics:
    """Counts, summary, the latest checkpoints and the history."""
    return checkpoint_answers.statistics(dispatcher.jobs[job_id].checkpoint_statistics())


def _checkpoint(job_id: str, checkpoint_id: str, dispatcher: Dispatcher) -> CheckpointStats:
    stats = dispatcher.jobs[job_id].checkpoint_statistics().checkpoint(int(checkpoint_id))
    if stats is None:
        raise CheckpointNotFound(int(checkpoint_id))
    return stats


@checkpoints.get("/details/{checkpointid}", responses=_READ)
async def details(job_id: JobId, checkpoint_id: CheckpointId, dispatcher: TheDispatcher) -> Checkpoint:
    """One checkpoint by vertex."""
    return checkpoint_answers.checkpoint(_checkpoint(job_id, checkpoint_id, dispatcher), with_tasks=True)


@checkpoints.get("/details/{checkpointid}/subtasks/{vertexid}", responses=_READ)
async def subtasks(
    job_id: JobId, checkpoint_id: CheckpointId, vertex_id: VertexId, dispatcher: TheDispatcher
) -> VertexCheckpoint:
    """One vertex of a checkpoint by subtask."""
    stats = _checkpoint(job_id, checkpoint_id, dispatcher)
    vertex = stats.vertices.get(vertex_id)
    if vertex is None:
        raise NotFound(f"There is no checkpoint statistics for task {vertex_id}.")
    return checkpoint_answers.vertex_checkpoint(vertex, stats)


# --- triggering and polling


def _not_incremental(value: object) -> object:
    if isinstance(value, str) and value.upper() == "INCREMENTAL":
        raise refused("incremental checkpoints cannot be triggered; use CONFIGURED or FULL")
    return value


class CheckpointTriggerRequestBody(Body):
    """What a triggered checkpoint writes."""

    kind: Annotated[CheckpointKind, OneOf(CheckpointKind), BeforeValidator(_not_incremental)] = spelled(
        "checkpointType", "checkpoint-type", default=CheckpointKind.CONFIGURED
    )
    trigger_id: HexId | None = TRIGGER_ID


class _SnapshotBody(Body):
    """``type`` is FLIP-203's spelling of the format; native is the default."""

    savepoint_format: Annotated[SavepointFormat, OneOf(SavepointFormat)] = spelled(
        "formatType", "format-type", "type", default=SavepointFormat.NATIVE
    )
    trigger_id: HexId | None = TRIGGER_ID


class SavepointTriggerRequestBody(_SnapshotBody):
    """The directory of a savepoint, and whether the job is canceled with it."""

    directory: Location | None = spelled("target-directory", "targetDirectory", default=None)
    cancel_job: Flag = spelled("cancel-job", "cancelJob", default=False)


class StopWithSavepointRequestBody(_SnapshotBody):
    """``drain`` ends the job for good: its sources emit their end before the savepoint."""

    directory: Location | None = spelled("targetDirectory", "target-directory", default=None)
    drain: Flag = False


class SavepointDisposalRequest(Body):
    """Names the savepoint to delete."""

    path: Location = spelled("savepoint-path", "savepointPath")
    trigger_id: HexId | None = TRIGGER_ID


_CHECKPOINT_BODY = json_body(
    CheckpointTriggerRequestBody,
    {"as configured": {}, "a full one, which may be sent again": {"checkpointType": "FULL", "triggerId": _TRIGGER_ID}},
)
_SAVEPOINT_BODY = json_body(
    SavepointTriggerRequestBody,
    {
        "native": {"target-directory": "file:///data/savepoints", "formatType": "NATIVE"},
        "into the configured directory, and cancel": {"cancel-job": True, "triggerId": _TRIGGER_ID},
    },
)
_STOP_BODY = json_body(
    StopWithSavepointRequestBody,
    {
        "to resume later": {"targetDirectory": "s3://bucket/savepoints", "drain": False, "formatType": "NATIVE"},
        "for good": {"targetDirectory": "s3://bucket/savepoints", "drain": True, "triggerId": _TRIGGER_ID},
    },
)
_DISPOSAL_BODY = json_body(SavepointDisposalRequest, {"one savepoint": {"savepoint-path": _SAVEPOINT_PATH}})


@checkpoints.post("", status_code=202, responses=_TRIGGER, openapi_extra=_CHECKPOINT_BODY)
async def trigger_checkpoint(
    job_id: JobId,
    dispatcher: TheDispatcher,
    body: Annotated[CheckpointTriggerRequestBody, body_of(CheckpointTriggerRequestBody)],
) -> Triggered:
    """Trigger a checkpoint."""
    return Triggered(await dispatcher.trigger_checkpoint(job_id, body.kind, body.trigger_id))


async def _poll(kind: OperationKind, trigger_id: str, job_id: str | None, dispatcher: Dispatcher) -> OperationStatus:
    return checkpoint_answers.operation(kind, await dispatcher.operation_status(kind, trigger_id, job_id))


@checkpoints.get("/{triggerid}", responses=_READ)
async def checkpoint_operation(job_id: JobId, trigger_id: TriggerId, dispatcher: TheDispatcher) -> OperationStatus:
    """The state of a triggered checkpoint."""
    return await _poll(OperationKind.CHECKPOINT, trigger_id, job_id, dispatcher)


def _directory(given: str | None, job_id: str, dispatcher: Dispatcher, spelling: str) -> str:
    directory = given or dispatcher.jobs[job_id].configuration.get(CheckpointingOptions.SAVEPOINT_DIRECTORY)
    if directory is None:
        raise BadRequest(
            f"Config key [execution.checkpointing.savepoint-dir] is not set. Property [{spelling}] must be provided."
        )
    return directory


@savepoints.post("/jobs/{jobid}/savepoints", status_code=202, responses=_TRIGGER, openapi_extra=_SAVEPOINT_BODY)
async def trigger_savepoint(
    job_id: JobId,
    dispatcher: TheDispatcher,
    body: Annotated[SavepointTriggerRequestBody, body_of(SavepointTriggerRequestBody)],
    condition: Condition,
    requester: Requester = None,
) -> Triggered:
    """Trigger a savepoint."""
    directory = _directory(body.directory, job_id, dispatcher, "target-directory")
    then = AfterSavepoint.CANCEL if body.cancel_job else AfterSavepoint.CONTINUE
    wanted = SavepointRequest(directory, then, body.savepoint_format, body.trigger_id, requester, condition)
    return Triggered(await dispatcher.take_savepoint(job_id, wanted))


@savepoints.post("/jobs/{jobid}/stop", status_code=202, responses=_TRIGGER, openapi_extra=_STOP_BODY)
async def stop(
    job_id: JobId,
    dispatcher: TheDispatcher,
    body: Annotated[StopWithSavepointRequestBody, body_of(StopWithSavepointRequestBody)],
    condition: Condition,
    requester: Requester = None,
) -> Triggered:
    """Stop a job with a savepoint."""
    directory = _directory(body.directory, job_id, dispatcher, "targetDirectory")
    then = AfterSavepoint.DRAIN if body.drain else AfterSavepoint.STOP
    wanted = SavepointRequest(directory, then, body.savepoint_format, body.trigger_id, requester, condition)
    return Triggered(await dispatcher.take_savepoint(job_id, wanted))


@savepoints.get("/jobs/{jobid}/savepoints/{triggerid}", responses=_READ)
async def savepoint_operation(job_id: JobId, trigger_id: TriggerId, dispatcher: TheDispatcher) -> OperationStatus:
    """The state of a savepoint or stop."""
    return await _poll(OperationKind.SAVEPOINT, trigger_id, job_id, dispatcher)


@savepoints.post("/savepoint-disposal", responses=errors(400, 408, 409, 413), openapi_extra=_DISPOSAL_BODY)
async def dispose(
    dispatcher: TheDispatcher, body: Annotated[SavepointDisposalRequest, body_of(SavepointDisposalRequest)]
) -> Triggered:
    """Delete a savepoint."""
    return Triggered(await dispatcher.dispose_savepoint(body.path, body.trigger_id))


@savepoints.get("/savepoint-disposal/{triggerid}", responses=_READ)
async def disposal(trigger_id: TriggerId, dispatcher: TheDispatcher) -> OperationStatus:
    """The state of a disposal."""
    return await _poll(OperationKind.SAVEPOINT_DISPOSAL, trigger_id, None, dispatcher)


# --- the savepoint catalogue

_MAX_DURATION_MS = 10 * 365 * 86_400_000


class SavepointMarkRequest(Body):
    """The result of a verification or a restore drill of one savepoint."""

    path: Location = spelled("savepoint-path", "savepointPath")
    kind: Annotated[MarkKind, OneOf(MarkKind)]
    passed: Flag
    by: Note | None = None
    detail: Note = ""
    duration_ms: Annotated[int, Within(0, _MAX_DURATION_MS)] | None = Field(default=None, validation_alias="duration")


_MARK_BODY = json_body(
    SavepointMarkRequest,
    {
        "a drill that passed": {
            "savepoint-path": _SAVEPOINT_PATH,
            "kind": "DRILL",
            "passed": True,
            "by": "airflow: drills/restore",
            "detail": "RUNNING after 4.1 s, 3 checkpoints after 9.8 s",
            "duration": 9800,
        },
        "a verification that failed": {
            "savepoint-path": _SAVEPOINT_PATH,
            "kind": "VERIFICATION",
            "passed": False,
            "detail": "operator 'totals': the file is missing",
        },
    },
)


@catalogue.get("", responses=errors(400, 404, 409))
async def listing(
    dispatcher: TheDispatcher, directory: SavepointDirectory = None, job: SavepointsOfJob = None
) -> SavepointList:
    """Savepoints below a directory."""
    found = await dispatcher.list_savepoints(directory, job)
    return SavepointList(found.directory, tuple(map(checkpoint_answers.savepoint, found.savepoints)))


@catalogue.get("/known", responses=errors(400))
async def known(dispatcher: TheDispatcher, job: SavepointsOfJob = None) -> KnownSavepoints:
    """Savepoints below every directory that the session knows."""
    found = await dispatcher.known_savepoints(job)
    unread = tuple(UnreadDirectory(directory, problem) for directory, problem in found.unread.items())
    return KnownSavepoints(found.directories, unread, tuple(map(checkpoint_answers.savepoint, found.savepoints)))


@catalogue.get("/latest", responses=errors(400, 404, 409))
async def latest(
    dispatcher: TheDispatcher,
    directory: SavepointDirectory = None,
    job: SavepointsOfJob = None,
    before_ms: CompletedBefore = None,
) -> Savepoint:
    """The latest good savepoint; with `before` the latest that had completed by then."""
    return checkpoint_answers.savepoint(await dispatcher.latest_savepoint(directory, job, before_ms))


@catalogue.post("/marks", responses=_TRIGGER, openapi_extra=_MARK_BODY)
async def mark(
    dispatcher: TheDispatcher, body: Annotated[SavepointMarkRequest, body_of(SavepointMarkRequest)]
) -> Savepoint:
    """Record the result of a verification or drill."""
    result = Mark(now_ms(), body.passed, body.by, body.detail, body.duration_ms)
    return checkpoint_answers.savepoint(await dispatcher.mark_savepoint(body.path, body.kind, result))
