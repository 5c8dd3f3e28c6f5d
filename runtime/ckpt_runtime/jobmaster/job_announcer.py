"""Publishes one job's events. The job's shell passes it every output and, after each event, its core.

Only this module publishes a job's events and logs its failed checkpoints. It only observes, and never decides or
raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ckpt_runtime.checkpoint.statistics import CheckpointStats, CheckpointStatsStatus
from ckpt_runtime.failure_report import printable
from ckpt_runtime.jobmaster.event_log import EventType
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import OperationKind, OperationStatus
from ckpt_runtime.scheduler.core_events import DeployTasks, JobOutput, RecordFailure
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_effects import StatusChanged
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_plan import JobPlan
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.structured_log import fields

logger = logging.getLogger(__name__)

Publish = Callable[[EventType, str | None, Mapping[str, Any]], None]
_MAX_MESSAGE_CHARS = 1_024

_CHECKPOINT = {
    CheckpointStatsStatus.IN_PROGRESS: EventType.CHECKPOINT_TRIGGERED,
    CheckpointStatsStatus.COMPLETED: EventType.CHECKPOINT_COMPLETED,
    CheckpointStatsStatus.FAILED: EventType.CHECKPOINT_FAILED,
}
_SAVEPOINT = {
    CheckpointStatsStatus.IN_PROGRESS: EventType.SAVEPOINT_TRIGGERED,
    CheckpointStatsStatus.COMPLETED: EventType.SAVEPOINT_COMPLETED,
    CheckpointStatsStatus.FAILED: EventType.SAVEPOINT_FAILED,
}


class JobAnnouncer:
    """The announcer of one job under one driver. With ``publish`` None it publishes nothing."""

    def __init__(self, job_id: str, publish: Publish | None = None) -> None:
        self._job_id = job_id
        self._publish = publish
        self._state: JobState | None = None

    def _tell(self, kind: EventType, **data: Any) -> None:
        if self._publish is not None:
            self._publish(kind, self._job_id, {"jobid": self._job_id, "timestamp": wall_clock_ms(), **data})

    # --- what the core decides

    def told(self, output: JobOutput) -> None:
        """Publishes an output that is already executed, so that REST shows its effect."""
        match output:
            case StatusChanged():
                self._tell(EventType.JOB_STATUS, status=output.status.value, cause=_cause(output.cause))
            case DeployTasks():
                restored = None if output.restored is None else output.restored.checkpoint_id
                self._tell(EventType.DEPLOYMENT, attempt=output.attempt, restored_checkpoint=restored)
            case RecordFailure():
                self._tell(EventType.FAILURE, **_failure(output))

    # --- what has changed in the core

    def begin(self, core: JobCore) -> None:
        """Takes the core's present values as already announced."""
        self._state = core.machine.state
        self._plan, self._overrides = core.accepted_plan, core.overrides

    def looked(self, core: JobCore) -> None:
        """Publishes what has changed in the core after an event."""
        state, self._state = self._state, core.machine.state
        if state is JobState.DEPLOYING and self._state is JobState.RUNNING:
            self._tell(EventType.TASKS_RUNNING, attempt=core.machine.attempt)
        if core.accepted_plan is not self._plan:
            before, self._plan = self._plan, core.accepted_plan
            self._plan_changed(before, self._plan)
        if core.overrides is not self._overrides:
            overrides, self._overrides = self._overrides, core.overrides
            if overrides != self._overrides:
                self._tell(EventType.CHECKPOINT_CONFIGURATION, overrides=self._overrides.request_fields)

    def _plan_changed(self, before: JobPlan, after: JobPlan) -> None:
        if after.own.version != before.own.version:
            note = after.own.notes[-1] if after.own.notes else None
            changed = () if note is None or note.version != after.own.version else note.options
            self._tell(EventType.CONFIGURATION, version=after.own.version, options=list(changed))
        parallelism = _parallelism(after)
        if parallelism != _parallelism(before):
            self._tell(EventType.RESCALE, parallelism=parallelism)

    # --- checkpoints

    def checkpoint(self, stats: CheckpointStats) -> None:
        """Publishes a checkpoint that was triggered or has ended; called by the job's statistics."""
        data: dict[str, Any] = {"id": stats.id, "checkpoint_type": stats.checkpoint_type.value}
        data["trigger_timestamp"] = stats.trigger_timestamp
        if stats.status is CheckpointStatsStatus.COMPLETED:
            data |= {
                "external_path": stats.external_path,
                "end_to_end_duration": stats.end_to_end_duration,
                "state_size": stats.state_size,
                "checkpointed_size": stats.checkpointed_size,
            }
        elif stats.status is CheckpointStatsStatus.FAILED:
            data["failure_message"] = _short(stats.failure_message or "")
            logger.warning(
                "%s %d of job %s failed: %s",
                "savepoint" if stats.is_savepoint else "checkpoint",
                stats.id,
                self._job_id,
                data["failure_message"],
                extra=fields(job_id=self._job_id, checkpoint_id=stats.id),
            )
        self._tell((_SAVEPOINT if stats.is_savepoint else _CHECKPOINT)[stats.status], **data)


def operation_ended(
    publish: Publish, kind: OperationKind, job_id: str | None, trigger_id: str, status: OperationStatus
) -> None:
    """Publishes that a triggered operation has ended and can be polled for its outcome."""
    data: dict[str, Any] = {"jobid": job_id, "timestamp": wall_clock_ms(), "operation": kind.value}
    data |= {"request-id": trigger_id, "status": "COMPLETED" if status.failure is None else "FAILED"}
    if status.failure is not None:
        data["failure_message"] = _short(status.failure.message)
    elif status.location is not None:
        data["location"] = status.location
    elif status.checkpoint_id is not None:
        data["id"] = status.checkpoint_id
    publish(EventType.OPERATION, job_id, data)


def _parallelism(plan: JobPlan) -> dict[str, int]:
    return {vertex.id: vertex.parallelism for vertex in plan.graph.vertices}


def _short(text: str) -> str:
    return printable(text, _MAX_MESSAGE_CHARS)


def _cause(cause: FailureInfo | None) -> dict[str, str] | None:
    return None if cause is None else {"exception": cause.exception, "message": _short(cause.message)}


def _failure(failure: RecordFailure) -> dict[str, Any]:
    execution = failure.execution
    task = None if execution is None else {"vertex": execution.vertex_id, "subtask": execution.subtask}
    return {"cause": _cause(failure.cause), "task": task, "concurrent": failure.concurrent}
