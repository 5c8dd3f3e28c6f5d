"""Fills the contract's structs about checkpoints and savepoints from the engine's values. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from ckpt_runtime.checkpoint.statistics import (
    AcknowledgedTotals,
    CheckpointStats,
    CheckpointStatsSnapshot,
    CheckpointStatsStatus,
    StatsSummary,
    SubtaskStats,
    VertexStats,
)
from ckpt_runtime.contract import checkpoints as contract
from ckpt_runtime.contract.jobs import COMPLETED, IN_PROGRESS
from ckpt_runtime.contract.spelling import read
from ckpt_runtime.jobmaster.gateway_values import OperationKind, OperationStatus
from ckpt_runtime.rest.job_answers import failure
from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
from ckpt_runtime.storage.savepoint_entry import Mark


def retained(checkpoint: CheckpointStats | None) -> contract.CanceledJob:
    """Answers a cancellation that retains checkpoints."""
    if checkpoint is None:
        return contract.CanceledJob(None)
    return contract.CanceledJob(
        contract.RetainedCheckpoint(checkpoint.id, checkpoint.external_path, checkpoint.trigger_timestamp)
    )


def statistics(snapshot: CheckpointStatsSnapshot) -> contract.CheckpointStatistics:
    """All statistics of a job at one moment."""

    def shown(stats: CheckpointStats | None) -> contract.Checkpoint | None:
        return None if stats is None else checkpoint(stats)

    restored = snapshot.latest_restored
    return contract.CheckpointStatistics(
        counts=contract.CheckpointCounts(**asdict(snapshot.counts)),
        summary={item.name: summary(getattr(snapshot.summary, item.name)) for item in fields(snapshot.summary)},
        latest=contract.LatestCheckpoints(
            shown(snapshot.latest_completed),
            shown(snapshot.latest_savepoint),
            shown(snapshot.latest_failed),
            None if restored is None else read(asdict(restored), contract.RestoredCheckpoint),
        ),
        history=tuple(checkpoint(stats) for stats in snapshot.history),
    )


def checkpoint(stats: CheckpointStats, *, with_tasks: bool = False) -> contract.Checkpoint:
    """One checkpoint; ``tasks`` is empty in lists, as in Flink."""
    of_status: dict[str, Any] = {}
    match stats.status:
        case CheckpointStatsStatus.COMPLETED:
            of_status = {"external_path": stats.external_path, "discarded": stats.discarded}
        case CheckpointStatsStatus.FAILED:
            of_status = {"failed_at_ms": stats.failure_timestamp, "failure_message": stats.failure_message}
        case CheckpointStatsStatus.IN_PROGRESS:
            of_status = {"progress_size": stats.progress_size, "deadline_ms": stats.deadline_timestamp}
    return contract.Checkpoint(
        class_name=stats.class_name,
        id=stats.id,
        status=stats.status,
        is_savepoint=stats.is_savepoint,
        savepoint_format=stats.savepoint_format,
        incremental=stats.is_incremental,
        triggered_at_ms=stats.trigger_timestamp,
        **_totals(stats, stats.end_to_end_duration),
        kind=stats.checkpoint_type,
        tasks={key: _task(vertex, stats) for key, vertex in stats.vertices.items()} if with_tasks else {},
        timeout_extension_ms=stats.timeout_extension,
        **of_status,
    )


def _totals(totals: AcknowledgedTotals, duration: int) -> dict[str, Any]:
    return {
        "latest_ack_ms": totals.latest_ack_timestamp,
        "checkpointed_size": totals.checkpointed_size,
        "reused_size": totals.reused_size,
        "state_size": totals.state_size,
        "duration_ms": duration,
        "alignment_buffered": totals.alignment_buffered,
        "processed_data": totals.processed_data,
        "persisted_data": totals.persisted_data,
        "num_subtasks": totals.num_subtasks,
        "num_acknowledged": totals.num_acknowledged_subtasks,
    }


def _task(vertex: VertexStats, stats: CheckpointStats) -> contract.TaskCheckpoint:
    return contract.TaskCheckpoint(id=stats.id, status=stats.status, **_totals(vertex, vertex.end_to_end_duration))


def vertex_checkpoint(vertex: VertexStats, stats: CheckpointStats) -> contract.VertexCheckpoint:
    """One vertex of a checkpoint with its subtasks."""
    over = {name: summary(values) for name, values in vertex.summary().items()}
    return contract.VertexCheckpoint(
        id=stats.id,
        status=stats.status,
        **_totals(vertex, vertex.end_to_end_duration),
        summary=contract.SubtaskSummary(
            checkpointed_size=over["checkpointed_size"],
            state_size=over["state_size"],
            duration_ms=over["end_to_end_duration"],
            checkpoint_duration=contract.PhaseSummaries(over["sync_duration"], over["async_duration"]),
            alignment=contract.AlignmentSummaries(**_alignment(over)),
            start_delay=over["start_delay"],
        ),
        subtasks=tuple(_subtask(index, item, stats) for index, item in enumerate(vertex.subtasks)),
    )


def _alignment(measures: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "buffered": measures["alignment_buffered"],
        "processed": measures["processed_data"],
        "persisted": measures["persisted_data"],
        "duration": measures["alignment_duration"],
    }


def _subtask(
    index: int, subtask: SubtaskStats | None, stats: CheckpointStats
) -> contract.CompletedSubtask | contract.PendingSubtask:
    if subtask is None or (subtask.aborted and stats.status is CheckpointStatsStatus.IN_PROGRESS):
        return contract.PendingSubtask(index)
    metrics = subtask.metrics
    return contract.CompletedSubtask(
        index=index,
        ack_timestamp=subtask.ack_timestamp,
        checkpointed_size=metrics.checkpointed_size,
        state_size=subtask.state_size,
        duration_ms=subtask.end_to_end_duration(stats.trigger_timestamp),
        checkpoint=contract.Phases(metrics.sync_duration, metrics.async_duration),
        alignment=contract.Alignment(**_alignment(asdict(metrics))),
        start_delay=metrics.start_delay,
        unaligned_checkpoint=metrics.unaligned,
        aborted=subtask.aborted,
    )


def summary(values: StatsSummary) -> contract.Summary:
    """NaN percentiles are the string ``"NaN"``."""
    shown: dict[str, Any] = {name: "NaN" if math.isnan(value) else value for name, value in asdict(values).items()}
    return contract.Summary(**shown)


def operation(kind: OperationKind, status: OperationStatus) -> contract.OperationStatus:
    """Answers a poll. A failed operation is also COMPLETED; checkpoints spell the cause in camel case."""
    if not status.completed:
        return contract.OperationStatus(IN_PROGRESS)
    cause = None if status.failure is None else failure(status.failure)
    is_checkpoint = kind is OperationKind.CHECKPOINT
    outcome = contract.OperationOutcome(
        location=status.location,
        checkpoint_id=status.checkpoint_id,
        checkpoint_failure=cause if is_checkpoint else None,
        savepoint_failure=None if is_checkpoint else cause,
    )
    return contract.OperationStatus(COMPLETED, outcome)


# --- the savepoint catalogue


def savepoint(found: CataloguedSavepoint) -> contract.Savepoint:
    """One savepoint; of one that cannot be read only location and problem are known."""
    entry = found.entry
    if entry is None:
        return contract.UnreadableSavepoint(location=found.location, good=found.is_good, problem=found.problem)
    verifications, drills = tuple(map(_mark, entry.verifications)), tuple(map(_mark, entry.drills))
    return contract.Savepoint(
        location=found.location,
        good=found.is_good,
        problem=found.problem,
        job_id=entry.job_id,
        job_name=entry.job_name,
        lineage=entry.lineage_id,
        program=entry.program,
        configuration_version=entry.configuration_version,
        savepoint_id=entry.savepoint_id,
        taken_by=entry.taken_by,
        cluster=entry.cluster,
        trigger_timestamp=entry.triggered_at_ms,
        completion_timestamp=entry.completed_at_ms,
        duration_ms=entry.duration_ms,
        size=entry.bytes,
        files=entry.files,
        format=entry.format,
        state_backend=entry.state_backend,
        written_by=entry.written_by,
        verified=verifications[-1] if verifications else None,
        drilled=drills[-1] if drills else None,
        verifications=verifications,
        drills=drills,
    )


def _mark(mark: Mark) -> contract.SavepointMark:
    return contract.SavepointMark(
        timestamp=mark.at_ms, passed=mark.passed, by=mark.by, detail=mark.detail, duration_ms=mark.duration_ms
    )
