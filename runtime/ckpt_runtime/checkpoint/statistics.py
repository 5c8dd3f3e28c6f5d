"""Checkpoint statistics: what each checkpoint did, and summaries over all of them, as Flink's REST API shows them.

Readers take a :class:`CheckpointStatsSnapshot`, which stays valid while the job continues. All timestamps are
wall-clock milliseconds since the epoch, durations milliseconds, sizes bytes. The statistics never decide anything about
a checkpoint.

The coordinator reports every step to a :class:`CheckpointStatsTracker`, whose ``snapshot`` freezes the current state.
The tracker survives restarts of the job under one leader, keeps at most ``history_size`` ended checkpoints, and never
decides anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import TypedDict

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState, is_shared
from ckpt_runtime.checkpoint.properties import CheckpointType

ABSENT = -1
"""The value that Flink shows for an unknown timestamp or duration."""


class CheckpointStatsStatus(StrEnum):
    """The state of one checkpoint; the lower-case form is the REST ``className``."""

    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"


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


class SubtaskTotals(TypedDict):
    """The fields of :class:`AcknowledgedTotals` that are summed over subtasks."""

    num_acknowledged_subtasks: int
    latest_ack_timestamp: int
    checkpointed_size: int
    reused_size: int
    state_size: int
    processed_data: int
    persisted_data: int
    alignment_buffered: int


def acknowledged_totals(subtasks: Iterable[SubtaskStats | None]) -> SubtaskTotals:
    """Sums over the acknowledged subtasks; partial reports of aborted ones are left out."""
    acknowledged = [subtask for subtask in subtasks if subtask is not None and subtask.completed]
    metrics = [subtask.metrics for subtask in acknowledged]
    return {
        "num_acknowledged_subtasks": len(acknowledged),
        "latest_ack_timestamp": max((subtask.ack_timestamp for subtask in acknowledged), default=ABSENT),
        "checkpointed_size": sum(measured.checkpointed_size for measured in metrics),
        "reused_size": sum(measured.reused_size for measured in metrics),
        "state_size": sum(subtask.state_size for subtask in acknowledged),
        "processed_data": sum(measured.processed_data for measured in metrics),
        "persisted_data": sum(measured.persisted_data for measured in metrics),
        "alignment_buffered": sum(measured.alignment_buffered for measured in metrics),
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


DEFAULT_HISTORY_SIZE = 10
SUMMARY_WINDOW = 10_000
"""Percentiles cover this many of the latest completed checkpoints; minimum, maximum and average cover all."""

_SUMMARISED = tuple(measure.name for measure in fields(CompletedCheckpointsSummary))


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
        self._measures = {name: _Measure() for name in _SUMMARISED}
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
        # The completion time serves as every acknowledgement's. Files of earlier checkpoints are recognised by their
        # names; subtasks with in-flight data count as unaligned.
        at = checkpoint.completion_timestamp
        vertices: dict[str, list[SubtaskStats | None]] = {}
        for vertex in checkpoint.vertices:
            states = [checkpoint.states.get((vertex.id, index)) for index in range(vertex.parallelism)]
            vertices[vertex.id] = [
                None if state is None else _recovered_subtask(index, at, state, f"chk-{checkpoint.id}-")
                for index, state in enumerate(states)
            ]
        properties = checkpoint.properties
        known = _Running(checkpoint.id, properties.type, properties.savepoint_format, checkpoint.timestamp, vertices)
        self._show_completed(replace(known.freeze(CheckpointStatsStatus.COMPLETED), external_path=checkpoint.directory))
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
            if self._summary_is_stale:
                summaries = {name: measure.summary() for name, measure in self._measures.items()}
                self._summary = CompletedCheckpointsSummary(**summaries)
                self._summary_is_stale = False
            # Pending checkpoints are always shown; ended ones fill the rest of the history's size.
            pending = [running.freeze(CheckpointStatsStatus.IN_PROGRESS) for running in self._running.values()]
            room = max(0, (self._history.maxlen or 0) - len(pending))
            ended = sorted(self._history, key=lambda stats: stats.id, reverse=True)[:room]
            self._snapshot = CheckpointStatsSnapshot(
                counts=self._counts,
                summary=self._summary,
                history=tuple(sorted([*pending, *ended], key=lambda stats: stats.id, reverse=True)),
                latest_completed=self._latest_completed,
                latest_savepoint=self._latest_savepoint,
                latest_failed=self._latest_failed,
                latest_restored=self._latest_restored,
            )
        return self._snapshot

    def _count(self, **changes: int) -> None:
        counts = {name: getattr(self._counts, name) + change for name, change in changes.items()}
        self._counts = replace(self._counts, **counts)
        self._snapshot = None
