"""Collects checkpoint statistics while a job runs: counts, a bounded history, the latest ones, and summaries.

The coordinator reports every step; :meth:`CheckpointStatsTracker.snapshot` freezes the current state. The tracker
survives restarts of the job under one leader, keeps at most ``history_size`` ended checkpoints, and never decides
anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.state_handles import SubtaskState, is_shared
from ckpt_runtime.checkpoint.statistics import (
    CheckpointCounts,
    CheckpointMetrics,
    CheckpointStats,
    CheckpointStatsSnapshot,
    CheckpointStatsStatus,
    CheckpointType,
    CompletedCheckpointsSummary,
    RestoredCheckpointStats,
    StatsSummary,
    SubtaskStats,
    VertexStats,
    acknowledged_totals,
    percentiles,
)

DEFAULT_HISTORY_SIZE = 10
SUMMARY_WINDOW = 10_000
"""Percentiles cover this many of the latest completed checkpoints; minimum, maximum and average cover all."""

_MEASURES = tuple(measure.name for measure in fields(CompletedCheckpointsSummary))


@dataclass(slots=True)
class _Measure:
    """One measure over all completed checkpoints."""

    low: int = 0
    high: int = 0
    total: int = 0
    count: int = 0
    window: deque[int] = field(default_factory=lambda: deque(maxlen=SUMMARY_WINDOW))

    def add(self, value: int) -> None:
        # -1 means that the value was not measured.
        value = max(0, value)
        self.low = value if self.count == 0 else min(self.low, value)
        self.high = max(self.high, value)
        self.total += value
        self.count += 1
        self.window.append(value)

    def summary(self) -> StatsSummary:
        if self.count == 0:
            return StatsSummary()
        return StatsSummary(self.low, self.high, self.total // self.count, *percentiles(sorted(self.window)))


@dataclass(slots=True)
class _Running:
    """A checkpoint in progress, still changing."""

    id: int
    checkpoint_type: CheckpointType
    savepoint_format: str | None
    trigger_timestamp: int
    vertices: dict[str, list[SubtaskStats | None]]
    deadline_timestamp: int | None = None
    timeout_extension: int = 0

    def freeze(self, status: CheckpointStatsStatus) -> CheckpointStats:
        """Freezes the entry. As in Flink, one acknowledgement with ``unaligned`` makes the checkpoint unaligned."""
        reported = [stats for subtasks in self.vertices.values() for stats in subtasks]
        turned = any(stats is not None and stats.completed and stats.metrics.unaligned for stats in reported)
        unaligned = turned and self.checkpoint_type is CheckpointType.CHECKPOINT
        return CheckpointStats(
            id=self.id,
            status=status,
            checkpoint_type=CheckpointType.UNALIGNED_CHECKPOINT if unaligned else self.checkpoint_type,
            savepoint_format=self.savepoint_format,
            trigger_timestamp=self.trigger_timestamp,
            vertices={
                vertex_id: VertexStats.of(vertex_id, self.trigger_timestamp, subtasks)
                for vertex_id, subtasks in self.vertices.items()
            },
            num_subtasks=len(reported),
            deadline_timestamp=self.deadline_timestamp if status is CheckpointStatsStatus.IN_PROGRESS else None,
            timeout_extension=self.timeout_extension,
            **acknowledged_totals(reported),
        )


def _recovered_subtask(index: int, at: int, state: SubtaskState, own: str) -> SubtaskStats:
    """``own`` is the name prefix of the shared files that were written for the checkpoint itself."""
    keyed = (
        file for operator in state.operators.values() for handle in operator.keyed for file in handle.state_files()
    )
    reused = sum(file.length for file in keyed if is_shared(file) and not file.path.rpartition("/")[2].startswith(own))
    metrics = CheckpointMetrics(
        checkpointed_size=max(0, state.bytes - reused),
        reused_size=reused,
        persisted_data=state.in_flight_bytes,
        alignment_duration=-1,
        start_delay=-1,
        unaligned=state.has_channel_state,
    )
    return SubtaskStats(index, at, state.bytes, metrics)


def _recovered(checkpoint: CompletedCheckpoint) -> CheckpointStats:
    """Statistics from a checkpoint's metadata: its sizes; the completion time serves as every acknowledgement's.

    Files of earlier checkpoints are recognised by their names. Subtasks with in-flight data count as unaligned.
    """
    at = checkpoint.completion_timestamp
    vertices: dict[str, list[SubtaskStats | None]] = {}
    for vertex in checkpoint.vertices:
        states = [checkpoint.states.get((vertex.id, index)) for index in range(vertex.parallelism)]
        vertices[vertex.id] = [
            None if state is None else _recovered_subtask(index, at, state, f"chk-{checkpoint.id}-")
            for index, state in enumerate(states)
        ]
    properties = checkpoint.properties
    known = _Running(
        checkpoint.id,
        properties.type,
        properties.savepoint_format,
        checkpoint.timestamp,
        vertices,
    )
    return replace(known.freeze(CheckpointStatsStatus.COMPLETED), external_path=checkpoint.directory)


class CheckpointStatsTracker:
    """One job's statistics. Reports about ids that are not in progress (late ones) are ignored.

    ``on_change`` is called for each checkpoint when it is triggered, without its subtasks, and when it has ended.
    """

    def __init__(
        self, history_size: int = DEFAULT_HISTORY_SIZE, on_change: Callable[[CheckpointStats], None] | None = None
    ) -> None:
        if history_size < 0:
            raise ValueError(f"history_size must be >= 0, is {history_size}")
        self._on_change = on_change
        self._counts = CheckpointCounts()
        self._running: dict[int, _Running] = {}
        self._history: deque[CheckpointStats] = deque(maxlen=history_size)
        self._measures = {name: _Measure() for name in _MEASURES}
        self._latest_completed: CheckpointStats | None = None
        self._latest_savepoint: CheckpointStats | None = None
        self._latest_failed: CheckpointStats | None = None
        self._latest_restored: RestoredCheckpointStats | None = None
        self._summary = CompletedCheckpointsSummary()
        self._summary_is_stale = False
        self._snapshot: CheckpointStatsSnapshot | None = CheckpointStatsSnapshot()

    def report_pending(
        self,
        checkpoint_id: int,
        trigger_timestamp: int,
        checkpoint_type: CheckpointType,
        savepoint_format: str | None,
        parallelism: Mapping[str, int],
        deadline_timestamp: int,
    ) -> None:
        """A checkpoint got its id. ``parallelism`` maps each vertex id to the number of subtasks to wait for."""
        vertices: dict[str, list[SubtaskStats | None]] = {
            vertex_id: [None] * subtasks for vertex_id, subtasks in parallelism.items()
        }
        self._running[checkpoint_id] = _Running(
            checkpoint_id, checkpoint_type, savepoint_format, trigger_timestamp, vertices, deadline_timestamp
        )
        self._count(total=1, in_progress=1)
        if self._on_change is not None:
            bare = _Running(checkpoint_id, checkpoint_type, savepoint_format, trigger_timestamp, {}, deadline_timestamp)
            self._on_change(bare.freeze(CheckpointStatsStatus.IN_PROGRESS))

    def report_subtask(self, checkpoint_id: int, vertex_id: str, stats: SubtaskStats) -> None:
        """A subtask acknowledged or (``completed`` false) reported its progress."""
        running = self._running.get(checkpoint_id)
        if running is not None:
            running.vertices[vertex_id][stats.index] = stats
            self._snapshot = None

    def report_deadline(self, checkpoint_id: int, deadline_timestamp: int) -> None:
        """The timeout of a pending checkpoint changed (FLIP-571)."""
        running = self._running.get(checkpoint_id)
        if running is not None:
            running.deadline_timestamp = deadline_timestamp
            self._snapshot = None

    def report_extension(self, checkpoint_id: int, timeout_extension: int) -> None:
        """Reports the total number of ms that the rescue policy has added to the timeout."""
        running = self._running.get(checkpoint_id)
        if running is not None:
            running.timeout_extension = timeout_extension
            self._snapshot = None

    def report_completed(self, checkpoint_id: int, external_path: str) -> None:
        running = self._running.pop(checkpoint_id, None)
        if running is None:
            return
        stats = replace(running.freeze(CheckpointStatsStatus.COMPLETED), external_path=external_path)
        self._show_completed(stats)
        for name, measure in self._measures.items():
            measure.add(getattr(stats, name))
        self._summary_is_stale = True
        self._count(in_progress=-1, completed=1)
        if self._on_change is not None:
            self._on_change(stats)

    def report_recovered(self, checkpoint: CompletedCheckpoint) -> None:
        """Adds a checkpoint that completed under an earlier leader: shown, but not counted or summarised."""
        self._show_completed(_recovered(checkpoint))
        self._snapshot = None

    def _show_completed(self, stats: CheckpointStats) -> None:
        self._history.append(stats)
        if stats.is_savepoint:
            self._latest_savepoint = stats
        else:
            self._latest_completed = stats

    def report_discarded(self, checkpoint_id: int) -> None:
        """A completed checkpoint was subsumed and its files are being deleted."""

        def marked(stats: CheckpointStats) -> CheckpointStats:
            return replace(stats, discarded=True) if stats.id == checkpoint_id else stats

        self._history = deque(map(marked, self._history), maxlen=self._history.maxlen)
        if self._latest_completed is not None:
            self._latest_completed = marked(self._latest_completed)
        self._snapshot = None

    def report_failed(self, checkpoint_id: int, failure_timestamp: int, message: str) -> None:
        running = self._running.pop(checkpoint_id, None)
        if running is None:
            return
        stats = replace(
            running.freeze(CheckpointStatsStatus.FAILED), failure_timestamp=failure_timestamp, failure_message=message
        )
        self._history.append(stats)
        self._latest_failed = stats
        self._count(in_progress=-1, failed=1)
        if self._on_change is not None:
            self._on_change(stats)

    def report_withdrawn(self, checkpoint_id: int) -> None:
        """A checkpoint ended without a result and without a failure: it is neither shown nor counted from then on."""
        if self._running.pop(checkpoint_id, None) is not None:
            self._count(total=-1, in_progress=-1)

    def report_failed_without_id(self) -> None:
        """A trigger failed before it got an id: it counts, but has no entry."""
        self._count(total=1, failed=1)

    def report_restored(
        self, checkpoint_id: int, restore_timestamp: int, is_savepoint: bool, external_path: str | None
    ) -> None:
        self._latest_restored = RestoredCheckpointStats(checkpoint_id, restore_timestamp, is_savepoint, external_path)
        self._count(restored=1)

    def snapshot(self) -> CheckpointStatsSnapshot:
        """The current state, frozen; returns the same object until something is reported."""
        if self._snapshot is None:
            self._snapshot = CheckpointStatsSnapshot(
                counts=self._counts,
                summary=self._summarise(),
                history=self._newest_first(),
                latest_completed=self._latest_completed,
                latest_savepoint=self._latest_savepoint,
                latest_failed=self._latest_failed,
                latest_restored=self._latest_restored,
            )
        return self._snapshot

    def _summarise(self) -> CompletedCheckpointsSummary:
        if self._summary_is_stale:
            summaries = {name: measure.summary() for name, measure in self._measures.items()}
            self._summary = CompletedCheckpointsSummary(**summaries)
            self._summary_is_stale = False
        return self._summary

    def _newest_first(self) -> tuple[CheckpointStats, ...]:
        """Pending checkpoints are always shown; ended ones fill the rest of the history's size."""
        pending = [running.freeze(CheckpointStatsStatus.IN_PROGRESS) for running in self._running.values()]
        room = max(0, (self._history.maxlen or 0) - len(pending))
        ended = sorted(self._history, key=lambda stats: stats.id, reverse=True)[:room]
        return tuple(sorted([*pending, *ended], key=lambda stats: stats.id, reverse=True))

    def _count(self, **changes: int) -> None:
        counts = {name: getattr(self._counts, name) + change for name, change in changes.items()}
        self._counts = replace(self._counts, **counts)
        self._snapshot = None
