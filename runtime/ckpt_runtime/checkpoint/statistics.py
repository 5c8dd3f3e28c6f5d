"""Checkpoint statistics: what each checkpoint did, and summaries over all of them, as Flink's REST API shows them.

Frozen values only. ``statistics_tracker.CheckpointStatsTracker`` collects them; readers take a
:class:`CheckpointStatsSnapshot`, which stays valid while the job continues. All timestamps are wall-clock milliseconds
since the epoch, durations milliseconds, sizes bytes. The statistics never decide anything about a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TypedDict

ABSENT = -1
"""The value that Flink shows for an unknown timestamp or duration."""


class CheckpointStatsStatus(StrEnum):
    """The state of one checkpoint; the lower-case form is the REST ``className``."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


class CheckpointType(StrEnum):
    """The REST ``checkpoint_type``. A checkpoint is unaligned if it turned unaligned in at least one subtask."""

    CHECKPOINT = "CHECKPOINT"
    UNALIGNED_CHECKPOINT = "UNALIGNED_CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    SYNC_SAVEPOINT = "SYNC_SAVEPOINT"


@dataclass(frozen=True, slots=True)
class CheckpointCounts:
    """``total`` includes failures that never got an id; restores count each attempt's restore."""

    restored: int = 0
    total: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class StatsSummary:
    """The summary of one measure. ``avg`` is rounded down; percentiles are NaN when nothing was recorded."""

    min: int = 0
    max: int = 0
    avg: int = 0
    p50: float = float("nan")
    p90: float = float("nan")
    p95: float = float("nan")
    p99: float = float("nan")
    p999: float = float("nan")

    @classmethod
    def of(cls, values: Iterable[int]) -> StatsSummary:
        """Summarises ``values`` (non-negative; negative ones mean "not known" and are left out)."""
        known = sorted(value for value in values if value >= 0)
        if not known:
            return cls()
        return cls(known[0], known[-1], sum(known) // len(known), *percentiles(known))


_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


def percentiles(ordered: Sequence[int]) -> tuple[float, ...]:
    """p50, p90, p95, p99 and p99.9 of ascending values, at least one.

    Linear interpolation at position ``q * (n + 1)``, the estimate that Flink's numbers show.
    """
    found = []
    for quantile in _QUANTILES:
        position = quantile * (len(ordered) + 1)
        whole = int(position)
        if whole < 1:
            found.append(float(ordered[0]))
        elif whole >= len(ordered):
            found.append(float(ordered[-1]))
        else:
            below, above = ordered[whole - 1], ordered[whole]
            found.append(below + (position - whole) * (above - below))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class CheckpointMetrics:
    """What one subtask measured of its snapshot. The worker's message and REST use this same definition.

    ``checkpointed_size`` is what was newly written, including in-flight data; ``persisted_data`` is only the in-flight
    data. ``reused_size`` is keyed state in files of completed checkpoints that the snapshot refers to or has
    duplicated. ``processed_data`` is the data processed during the alignment. ``alignment_duration`` and
    ``start_delay`` are ``-1`` when the subtask did not measure them.
    """

    sync_duration: int = 0
    async_duration: int = 0
    checkpointed_size: int = 0
    reused_size: int = 0
    alignment_buffered: int = 0
    processed_data: int = 0
    persisted_data: int = 0
    alignment_duration: int = 0
    start_delay: int = 0
    unaligned: bool = False


@dataclass(frozen=True, slots=True)
class SubtaskStats:
    """One subtask of one checkpoint: its acknowledgement or, with ``completed`` false, its progress so far.

    ``state_size`` covers everything that the snapshot refers to, including in-flight data.
    """

    index: int
    ack_timestamp: int
    state_size: int
    metrics: CheckpointMetrics
    completed: bool = True

    @property
    def aborted(self) -> bool:
        return not self.completed

    def end_to_end_duration(self, trigger_timestamp: int) -> int:
        """From the checkpoint's trigger to this acknowledgement."""
        return max(0, self.ack_timestamp - trigger_timestamp)


_MEASURES = tuple(item.name for item in fields(CheckpointMetrics) if item.name != "unaligned")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcknowledgedTotals:
    """Totals over the acknowledged subtasks of a whole checkpoint or of one of its vertices."""

    trigger_timestamp: int
    num_subtasks: int
    num_acknowledged_subtasks: int = 0
    latest_ack_timestamp: int = ABSENT
    checkpointed_size: int = 0
    reused_size: int = 0
    state_size: int = 0
    processed_data: int = 0
    persisted_data: int = 0
    alignment_buffered: int = 0

    @property
    def end_to_end_duration(self) -> int:
        """From the trigger to the latest acknowledgement; -1 when there is none."""
        ack = self.latest_ack_timestamp
        return ABSENT if ack == ABSENT else max(0, ack - self.trigger_timestamp)


class AcknowledgedFigures(TypedDict):
    """The fields of :class:`AcknowledgedTotals` that depend on the subtasks."""

    num_acknowledged_subtasks: int
    latest_ack_timestamp: int
    checkpointed_size: int
    reused_size: int
    state_size: int
    processed_data: int
    persisted_data: int
    alignment_buffered: int


def acknowledged_totals(subtasks: Iterable[SubtaskStats | None]) -> AcknowledgedFigures:
    """Adds up the acknowledged subtasks; partial reports of aborted subtasks are left out."""
    acknowledged = [subtask for subtask in subtasks if subtask is not None and subtask.completed]
    return {
        "num_acknowledged_subtasks": len(acknowledged),
        "latest_ack_timestamp": max((subtask.ack_timestamp for subtask in acknowledged), default=ABSENT),
        "checkpointed_size": sum(subtask.metrics.checkpointed_size for subtask in acknowledged),
        "reused_size": sum(subtask.metrics.reused_size for subtask in acknowledged),
        "state_size": sum(subtask.state_size for subtask in acknowledged),
        "processed_data": sum(subtask.metrics.processed_data for subtask in acknowledged),
        "persisted_data": sum(subtask.metrics.persisted_data for subtask in acknowledged),
        "alignment_buffered": sum(subtask.metrics.alignment_buffered for subtask in acknowledged),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class VertexStats(AcknowledgedTotals):
    """One vertex (a "task" in the REST shapes) of one checkpoint.

    ``subtasks`` has one entry per subtask index, None where nothing was reported (REST ``pending_or_failed``).
    """

    vertex_id: str
    subtasks: tuple[SubtaskStats | None, ...]

    @classmethod
    def of(cls, vertex_id: str, trigger_timestamp: int, subtasks: Sequence[SubtaskStats | None]) -> VertexStats:
        return cls(
            vertex_id=vertex_id,
            trigger_timestamp=trigger_timestamp,
            num_subtasks=len(subtasks),
            subtasks=tuple(subtasks),
            **acknowledged_totals(subtasks),
        )

    def summary(self) -> dict[str, StatsSummary]:
        """One summary per measure name, over the acknowledged subtasks."""
        acknowledged = [subtask for subtask in self.subtasks if subtask is not None and subtask.completed]
        durations = (subtask.end_to_end_duration(self.trigger_timestamp) for subtask in acknowledged)
        return {
            "state_size": StatsSummary.of(subtask.state_size for subtask in acknowledged),
            "end_to_end_duration": StatsSummary.of(durations),
            **{name: StatsSummary.of(getattr(item.metrics, name) for item in acknowledged) for name in _MEASURES},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStats(AcknowledgedTotals):
    """One checkpoint or savepoint.

    ``savepoint_format`` is None for checkpoints. ``external_path`` and ``discarded`` are valid once COMPLETED,
    ``failure_timestamp`` and ``failure_message`` once FAILED. ``deadline_timestamp`` is when a pending one would
    expire (None once it ended). The rescue policy has added ``timeout_extension`` ms to its timeout. ``vertices`` keeps
    the job graph's order.
    """

    id: int
    status: CheckpointStatsStatus
    checkpoint_type: CheckpointType
    savepoint_format: str | None
    vertices: Mapping[str, VertexStats]
    external_path: str | None = None
    discarded: bool = False
    failure_timestamp: int | None = None
    failure_message: str | None = None
    deadline_timestamp: int | None = None
    timeout_extension: int = 0

    @property
    def is_savepoint(self) -> bool:
        return self.checkpoint_type in (CheckpointType.SAVEPOINT, CheckpointType.SYNC_SAVEPOINT)

    @property
    def is_incremental(self) -> bool:
        """Whether it reuses files of completed checkpoints; a non-incremental one has written all of its state."""
        return self.reused_size > 0

    @property
    def progress_size(self) -> int:
        """Bytes written and duplicated so far, including by subtasks that have not acknowledged yet."""
        reported = (item.metrics for vertex in self.vertices.values() for item in vertex.subtasks if item is not None)
        return sum(metrics.checkpointed_size + metrics.reused_size for metrics in reported)

    @property
    def class_name(self) -> str:
        """The REST ``className``: ``in_progress``, ``completed`` or ``failed``."""
        return self.status.value.lower()

    @property
    def end_to_end_duration(self) -> int:
        """From the trigger to the failure if it failed, else to the latest acknowledgement; -1 if there is none."""
        end = self.latest_ack_timestamp if self.failure_timestamp is None else self.failure_timestamp
        return ABSENT if end == ABSENT else max(0, end - self.trigger_timestamp)


@dataclass(frozen=True, slots=True)
class RestoredCheckpointStats:
    """The snapshot from which the current attempt (or the last one that restored a snapshot) started."""

    id: int
    restore_timestamp: int
    is_savepoint: bool
    external_path: str | None


@dataclass(frozen=True, slots=True)
class CompletedCheckpointsSummary:
    """Summaries over all completed checkpoints and savepoints of the job."""

    checkpointed_size: StatsSummary = StatsSummary()
    state_size: StatsSummary = StatsSummary()
    end_to_end_duration: StatsSummary = StatsSummary()
    alignment_buffered: StatsSummary = StatsSummary()
    processed_data: StatsSummary = StatsSummary()
    persisted_data: StatsSummary = StatsSummary()


@dataclass(frozen=True, slots=True)
class CheckpointStatsSnapshot:
    """All statistics at one moment. ``history`` is bounded, newest id first; the ``latest_*`` are kept separately."""

    counts: CheckpointCounts = CheckpointCounts()
    summary: CompletedCheckpointsSummary = CompletedCheckpointsSummary()
    history: tuple[CheckpointStats, ...] = ()
    latest_completed: CheckpointStats | None = None
    latest_savepoint: CheckpointStats | None = None
    latest_failed: CheckpointStats | None = None
    latest_restored: RestoredCheckpointStats | None = None

    def checkpoint(self, checkpoint_id: int) -> CheckpointStats | None:
        """The statistics of one id, if still kept."""
        latest = (self.latest_completed, self.latest_savepoint, self.latest_failed)
        for stats in (*self.history, *latest):
            if stats is not None and stats.id == checkpoint_id:
                return stats
        return None
