"""A job that this driver does not run: one that ended under an earlier driver, or one that could not be recovered.

Its stored form is a JSON document, made at the job's end and read by later drivers. It answers what REST asks of any
job; figures of single subtasks and the history of checkpoints ended with the driver that ran it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from ckpt_runtime.checkpoint.statistics import (
    CheckpointCounts,
    CheckpointStats,
    CheckpointStatsSnapshot,
    CheckpointStatsStatus,
    CheckpointType,
)
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.exceptions_history import entry_of
from ckpt_runtime.jobmaster.executions import ExecutionGraph
from ckpt_runtime.jobmaster.gateway import (
    NOT_YET,
    EffectiveCheckpointConfig,
    ExceptionHistory,
    ExecutionResult,
    ExecutionState,
    FailureCause,
    JobConfigInfo,
    JobDetails,
    JobOverview,
    JobStatus,
    RunRequest,
)
from ckpt_runtime.jobmaster.submission import request_of

_TASKS = {JobStatus.FINISHED: ExecutionState.FINISHED, JobStatus.FAILED: ExecutionState.FAILED}


class EndedJob:
    """Read only."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for a document of another shape."""
        self.status = JobStatus(document["status"])
        self.graph = JobGraph.from_json(document["graph"])
        self.configuration = Configuration(document["configuration"])
        self.executions = ExecutionGraph(self.graph)
        self.executions.enter_all(_TASKS.get(self.status, ExecutionState.CANCELED))
        timestamps = {JobStatus(name): int(time) for name, time in document["timestamps"].items()}
        self._overview = JobOverview(
            job_id=document["job_id"],
            name=self.graph.name,
            status=self.status,
            start_time_ms=timestamps[JobStatus.INITIALIZING],
            end_time_ms=timestamps[self.status] if self.status.is_globally_terminal else NOT_YET,
            last_modification_ms=max(timestamps.values()),
            tasks_by_state=self.executions.counts(),
        )
        self._timestamps = timestamps
        self._exceptions = tuple(entry_of(entry) for entry in document["exceptions"])
        self._failure = None if document["failure"] is None else FailureCause(**document["failure"])
        self.request = request_of(document.get("request"))
        self._restart_strategy = str(document["restart_strategy"])
        shown = document["checkpoint_config"]
        self._checkpoint_config = EffectiveCheckpointConfig(**{**shown, "overrides": tuple(shown["overrides"])})
        # Drivers of earlier versions stored none of these.
        self._counts = CheckpointCounts(**document.get("checkpoint_counts", {}))
        latest = document.get("latest_checkpoints", {})
        self._latest_completed = _checkpoint_of(latest.get("completed"))
        self._latest_savepoint = _checkpoint_of(latest.get("savepoint"))
        self._restarts = int(document.get("restarts", 0))

    def overview(self) -> JobOverview:
        return self._overview

    def details(self) -> JobDetails:
        vertices = tuple(self.executions.vertex_details(vertex) for vertex in self.graph.vertices)
        return JobDetails(self._overview, dict(self._timestamps), vertices, self.graph)

    def config_info(self) -> JobConfigInfo:
        parallelism = max(vertex.parallelism for vertex in self.graph.vertices)
        shown = self.configuration.displayed()
        return JobConfigInfo(self._overview.job_id, self.graph.name, self._restart_strategy, parallelism, shown)

    def checkpoint_config(self) -> EffectiveCheckpointConfig:
        return self._checkpoint_config

    def checkpoint_statistics(self) -> CheckpointStatsSnapshot:
        return CheckpointStatsSnapshot(
            self._counts, latest_completed=self._latest_completed, latest_savepoint=self._latest_savepoint
        )

    def metrics(self) -> dict[str, str]:
        """Those that do not change once a job has ended."""
        return {
            "numRestarts": str(self._restarts),
            "numberOfCompletedCheckpoints": str(self._counts.completed),
            "numberOfFailedCheckpoints": str(self._counts.failed),
            "totalNumberOfCheckpoints": str(self._counts.total),
        }

    def exception_history(self, limit: int) -> ExceptionHistory:
        return ExceptionHistory(self._exceptions[:limit], truncated=len(self._exceptions) > limit)

    def result(self) -> ExecutionResult:
        overview = self._overview
        status = self.status if self.status.is_globally_terminal else None
        return ExecutionResult(
            overview.job_id, overview.name, status, overview.start_time_ms, overview.end_time_ms, self._failure
        )


def result_document(  # noqa: PLR0913 -- one parameter for each part of the document
    *,
    job_id: str,
    status: JobStatus,
    graph: JobGraph,
    given: Configuration,
    timestamps: Mapping[JobStatus, int],
    failure: FailureCause | None,
    exceptions: list[dict[str, Any]],
    restart_strategy: str,
    checkpoint_config: EffectiveCheckpointConfig,
    request: RunRequest | None,
    checkpoints: CheckpointStatsSnapshot,
    restarts: int,
) -> dict[str, Any]:
    """The stored form. Checkpoints that are still in progress fail with the job's end."""
    counts = checkpoints.counts
    failed = counts.failed + counts.in_progress
    return {
        "job_id": job_id,
        "status": status.value,
        "graph": graph.to_json(),
        "configuration": given.to_dict(),
        "timestamps": {known.value: time for known, time in timestamps.items()},
        "failure": None if failure is None else asdict(failure),
        "exceptions": exceptions,
        "restart_strategy": restart_strategy,
        "checkpoint_config": asdict(checkpoint_config),
        "request": None if request is None else asdict(request),
        "checkpoint_counts": asdict(replace(counts, in_progress=0, failed=failed)),
        "latest_checkpoints": {
            "completed": _stored(checkpoints.latest_completed),
            "savepoint": _stored(checkpoints.latest_savepoint),
        },
        "restarts": restarts,
    }


_NOT_STORED = frozenset({"vertices"})


def _stored(checkpoint: CheckpointStats | None) -> dict[str, Any] | None:
    """A checkpoint without its vertices."""
    if checkpoint is None:
        return None
    return {item.name: getattr(checkpoint, item.name) for item in fields(checkpoint) if item.name not in _NOT_STORED}


def _checkpoint_of(document: Mapping[str, Any] | None) -> CheckpointStats | None:
    if document is None:
        return None
    status, kind = CheckpointStatsStatus(document["status"]), CheckpointType(document["checkpoint_type"])
    return CheckpointStats(**{**document, "status": status, "checkpoint_type": kind, "vertices": {}})
