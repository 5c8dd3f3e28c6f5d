"""Checkpoint statistics, configuration and operations in Flink's JSON shapes. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.checkpoint.statistics import (
    AcknowledgedTotals,
    CheckpointStats,
    CheckpointStatsSnapshot,
    CheckpointStatsStatus,
    StatsSummary,
    SubtaskStats,
    VertexStats,
)
from ckpt_runtime.configuration.checkpoint_settings import CHECKPOINT_SETTINGS
from ckpt_runtime.jobmaster.gateway_values import EffectiveCheckpointConfig, OperationKind, OperationStatus
from ckpt_runtime.rest.shapes.jobs import failure

Json = dict[str, Any]

PERIODIC_OFF = 2**63 - 1
"""The value that Flink shows for the interval if periodic checkpoints are off."""


def retained(checkpoint: CheckpointStats | None) -> Json:
    """Answers a cancellation that retains checkpoints."""
    if checkpoint is None:
        return {"retained-checkpoint": None}
    return {
        "retained-checkpoint": {
            "id": checkpoint.id,
            "external-path": checkpoint.external_path,
            "trigger-timestamp": checkpoint.trigger_timestamp,
        }
    }


def statistics(snapshot: CheckpointStatsSnapshot) -> Json:
    """Answers ``/jobs/:jobid/checkpoints``."""
    restored = snapshot.latest_restored
    return {
        "counts": asdict(snapshot.counts),
        "summary": {item.name: summary(getattr(snapshot.summary, item.name)) for item in fields(snapshot.summary)},
        "latest": {
            "completed": _optional(snapshot.latest_completed),
            "savepoint": _optional(snapshot.latest_savepoint),
            "failed": _optional(snapshot.latest_failed),
            "restored": None if restored is None else asdict(restored),
        },
        "history": [checkpoint(stats, with_tasks=False) for stats in snapshot.history],
    }


def checkpoint(stats: CheckpointStats, *, with_tasks: bool) -> Json:
    """Shows one checkpoint; ``tasks`` is empty in lists, as in Flink."""
    document: Json = {
        "className": stats.class_name,
        "id": stats.id,
        "status": stats.status.value,
        "is_savepoint": stats.is_savepoint,
        "savepointFormat": stats.savepoint_format,
        "incremental": stats.is_incremental,
        "trigger_timestamp": stats.trigger_timestamp,
        **_totals(stats, stats.end_to_end_duration),
        "checkpoint_type": stats.checkpoint_type.value,
        "tasks": {},
    }
    if with_tasks:
        document["tasks"] = {key: _task(vertex, stats) for key, vertex in stats.vertices.items()}
    if stats.timeout_extension:
        document["timeout_extension"] = stats.timeout_extension
    if stats.status is CheckpointStatsStatus.COMPLETED:
        document |= {"external_path": stats.external_path, "discarded": stats.discarded}
    elif stats.status is CheckpointStatsStatus.FAILED:
        document |= {"failure_timestamp": stats.failure_timestamp, "failure_message": stats.failure_message}
    else:
        document["progress_size"] = stats.progress_size
        if stats.deadline_timestamp is not None:
            document["deadline_timestamp"] = stats.deadline_timestamp
    return document


def subtasks(vertex: VertexStats, stats: CheckpointStats) -> Json:
    """Answers ``details/:checkpointid/subtasks/:vertexid``."""
    over = {name: summary(values) for name, values in vertex.summary().items()}
    return {
        **_task(vertex, stats),
        "summary": _measured(over, "checkpoint_duration"),
        "subtasks": [_subtask(index, item, stats) for index, item in enumerate(vertex.subtasks)],
    }


def _measured(values: Mapping[str, Any], durations: str) -> Json:
    """Flink's fields for the measures of a subtask; ``durations`` is the name of the field that varies."""
    return {
        "checkpointed_size": values["checkpointed_size"],
        "state_size": values["state_size"],
        "end_to_end_duration": values["end_to_end_duration"],
        durations: {"sync": values["sync_duration"], "async": values["async_duration"]},
        "alignment": {
            "buffered": values["alignment_buffered"],
            "processed": values["processed_data"],
            "persisted": values["persisted_data"],
            "duration": values["alignment_duration"],
        },
        "start_delay": values["start_delay"],
    }


def summary(values: StatsSummary) -> Json:
    """Shows a summary; NaN percentiles are the string ``"NaN"``."""
    return {name: "NaN" if math.isnan(value) else value for name, value in asdict(values).items()}


def _optional(stats: CheckpointStats | None) -> Json | None:
    return None if stats is None else checkpoint(stats, with_tasks=False)


def _totals(totals: AcknowledgedTotals, duration: int) -> Json:
    return {
        "latest_ack_timestamp": totals.latest_ack_timestamp,
        "checkpointed_size": totals.checkpointed_size,
        "reused_size": totals.reused_size,
        "state_size": totals.state_size,
        "end_to_end_duration": duration,
        "alignment_buffered": totals.alignment_buffered,
        "processed_data": totals.processed_data,
        "persisted_data": totals.persisted_data,
        "num_subtasks": totals.num_subtasks,
        "num_acknowledged_subtasks": totals.num_acknowledged_subtasks,
    }


def _task(vertex: VertexStats, stats: CheckpointStats) -> Json:
    return {"id": stats.id, "status": stats.status.value, **_totals(vertex, vertex.end_to_end_duration)}


def _subtask(index: int, subtask: SubtaskStats | None, stats: CheckpointStats) -> Json:
    if subtask is None or (subtask.aborted and stats.status is CheckpointStatsStatus.IN_PROGRESS):
        return {"className": "pending", "index": index, "status": "pending_or_failed"}
    values = {
        **asdict(subtask.metrics),
        "state_size": subtask.state_size,
        "end_to_end_duration": subtask.end_to_end_duration(stats.trigger_timestamp),
    }
    return {
        "className": "completed",
        "index": index,
        "ack_timestamp": subtask.ack_timestamp,
        **_measured(values, "checkpoint"),
        "unaligned_checkpoint": subtask.metrics.unaligned,
        "aborted": subtask.aborted,
        "status": "completed",
    }


def config(effective: EffectiveCheckpointConfig) -> Json:
    """Shows Flink's fields, then ``max_inflight_data_bytes`` and ``overrides`` (FLIP-571)."""
    settings = effective.settings
    shown = {item.shown_as: getattr(settings, item.field) for item in CHECKPOINT_SETTINGS if item.shown_as is not None}
    names = {item.field: item.patched_as for item in CHECKPOINT_SETTINGS}
    return {
        "mode": "exactly_once" if effective.exactly_once else "at_least_once",
        **shown,
        "interval": PERIODIC_OFF if settings.interval_ms is None else settings.interval_ms,
        "externalization": {
            "enabled": settings.retention is not CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS,
            "delete_on_cancellation": settings.retention is not CheckpointRetention.RETAIN_ON_CANCELLATION,
        },
        "state_backend": effective.state_backend,
        "checkpoint_storage": effective.checkpoint_storage,
        "state_changelog_enabled": False,
        "changelog_periodic_materialization_interval": 0,
        "changelog_storage": "none",
        "overrides": [names[field] for field in effective.overrides],
    }


def operation(kind: OperationKind, status: OperationStatus) -> Json:
    """Answers a poll. A failed operation is also COMPLETED; checkpoints spell the cause in camel case."""
    if not status.completed:
        return {"status": {"id": "IN_PROGRESS"}, "operation": None}
    if status.failure is not None:
        key = "failureCause" if kind is OperationKind.CHECKPOINT else "failure-cause"
        outcome: Json = {key: failure(status.failure)}
    elif kind is OperationKind.CHECKPOINT:
        outcome = {"checkpointId": status.checkpoint_id}
    elif kind is OperationKind.SAVEPOINT:
        outcome = {"location": status.location}
    else:
        outcome = {}
    return {"status": {"id": "COMPLETED"}, "operation": outcome}
