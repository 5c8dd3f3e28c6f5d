"""Statistics: figures as Flink's REST shows them (the numbers of a measured cluster), history, latest, summaries."""

from __future__ import annotations

import math

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.checkpoint.statistics import (
    CheckpointMetrics,
    CheckpointStatsStatus,
    CheckpointStatsTracker,
    StatsSummary,
    SubtaskStats,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange

CHECKPOINT, SAVEPOINT = CheckpointType.CHECKPOINT, CheckpointType.SAVEPOINT


def ack(index, at, size=0, completed=True, **more):
    metrics = CheckpointMetrics(sync_duration=1, async_duration=2, checkpointed_size=size, **more)
    return SubtaskStats(index, at, size, metrics, completed)


def pending(tracker, number, kind=CHECKPOINT, at=1_000, parallelism=None):
    tracker.report_pending(number, at, kind, None, parallelism or {"a": 2, "b": 1}, at + 600)


def test_summaries_interpolate_as_measured():
    assert StatsSummary.of([18_563, 22_422]) == StatsSummary(
        18_563, 22_422, 20_492, 20_492.5, 22_422.0, 22_422.0, 22_422.0, 22_422.0
    )
    assert StatsSummary.of([7]).p999 == 7.0
    assert StatsSummary.of(range(1, 100)).p50 == 50.0
    empty = StatsSummary.of([-1])
    assert (empty.min, empty.max, empty.avg) == (0, 0, 0)
    assert math.isnan(empty.p50)


def test_a_pending_checkpoint_is_in_progress_until_its_deadline():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    (stats,) = tracker.snapshot().history
    assert stats.status is CheckpointStatsStatus.IN_PROGRESS
    assert stats.class_name == "in_progress"
    assert (stats.latest_ack_timestamp, stats.end_to_end_duration, stats.num_subtasks) == (-1, -1, 3)
    assert stats.deadline_timestamp == 1_600
    tracker.report_deadline(1, 9_000)
    assert tracker.snapshot().history[0].deadline_timestamp == 9_000


def test_a_completed_checkpoint_and_its_vertices():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    tracker.report_subtask(1, "a", ack(0, 1_020, 10, processed_data=5))
    tracker.report_subtask(1, "a", ack(1, 1_087, 20))
    tracker.report_subtask(1, "b", ack(0, 1_050, 3))
    tracker.report_completed(1, "file:/x/chk-1")
    snapshot = tracker.snapshot()
    stats = snapshot.latest_completed
    assert stats is snapshot.checkpoint(1)
    assert (stats.end_to_end_duration, stats.checkpointed_size, stats.processed_data) == (87, 33, 5)
    assert (stats.external_path, stats.discarded, stats.is_savepoint) == ("file:/x/chk-1", False, False)
    assert stats.deadline_timestamp is None
    vertex = stats.vertices["a"]
    assert (vertex.num_subtasks, vertex.num_acknowledged_subtasks, vertex.state_size) == (2, 2, 30)
    summary = vertex.summary()
    assert (summary["end_to_end_duration"].min, summary["end_to_end_duration"].max) == (20, 87)
    assert summary["async_duration"].avg == 2
    assert snapshot.summary.end_to_end_duration.max == 87
    assert snapshot.summary.persisted_data.p50 == 0.0


@pytest.mark.row("76.1")
def test_a_checkpoint_is_an_unaligned_one_when_a_subtask_says_so():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    tracker.report_subtask(1, "a", ack(0, 1_020, 10))
    tracker.report_subtask(1, "a", ack(1, 1_030, 10, unaligned=True, completed=False))
    assert tracker.snapshot().checkpoint(1).checkpoint_type is CHECKPOINT
    tracker.report_subtask(1, "a", ack(1, 1_087, 120, processed_data=5, persisted_data=100, unaligned=True))
    assert tracker.snapshot().checkpoint(1).checkpoint_type is CheckpointType.UNALIGNED_CHECKPOINT
    tracker.report_subtask(1, "b", ack(0, 1_050, 3, persisted_data=1))
    tracker.report_completed(1, "file:/x/chk-1")
    stats = tracker.snapshot().latest_completed
    assert (stats.checkpoint_type, stats.is_savepoint) == (CheckpointType.UNALIGNED_CHECKPOINT, False)
    assert (stats.processed_data, stats.persisted_data, stats.checkpointed_size) == (5, 101, 133)
    assert stats.vertices["a"].persisted_data == 100
    assert tracker.snapshot().summary.persisted_data.max == 101
    pending(tracker, 2, SAVEPOINT)
    tracker.report_subtask(2, "a", ack(0, 1_020, 10, unaligned=True))
    assert tracker.snapshot().checkpoint(2).checkpoint_type is SAVEPOINT


@pytest.mark.row("76.3")
def test_checkpoint_of_an_earlier_leader_shows_its_in_flight_data():
    vertex = VertexDescriptor("a", "A", ("a",), 2, 128)
    stream = ChannelStateStream(0, 1, "", (ChannelStateSegment(StateFile("/s/x", 9, "crc:1"), 2, 7),))
    states = {("a", 0): SubtaskState(bytes=12, inputs=(stream,)), ("a", 1): SubtaskState(bytes=5)}
    tracker = CheckpointStatsTracker()
    tracker.report_recovered(CompletedCheckpoint(3, "job", 1, 2, "dir", CheckpointProperties(), (vertex,), states))
    stats = tracker.snapshot().latest_completed
    assert (stats.id, stats.checkpoint_type) == (3, CheckpointType.UNALIGNED_CHECKPOINT)
    assert (stats.persisted_data, stats.state_size) == (7, 17)
    assert [subtask.metrics.unaligned for subtask in stats.vertices["a"].subtasks] == [True, False]


@pytest.mark.row("203.11")
def test_checkpoint_of_an_earlier_leader_shows_whether_it_reuses_files():
    vertex = VertexDescriptor("a", "A", ("a",), 1, 128)
    groups = KeyGroupRange(0, 127)
    files = {"1.sst": StateFile("/s/chk-3-x", 7, "crc:1"), "2.sst": StateFile("/s/chk-30-y", 5, "crc:1")}
    own = dict(list(files.items())[:1])
    for named, is_incremental, sizes in ((files, True, (7, 5)), (own, False, (7, 0))):
        keyed = IncrementalKeyedStateHandle(groups, "rocksdb", named)
        states = {("a", 0): SubtaskState({"a": OperatorSubtaskState((keyed,))}, sum(sizes))}
        tracker = CheckpointStatsTracker()
        tracker.report_recovered(CompletedCheckpoint(3, "job", 1, 2, "dir", CheckpointProperties(), (vertex,), states))
        stats = tracker.snapshot().latest_completed
        assert stats.is_incremental is is_incremental
        assert (stats.checkpointed_size, stats.reused_size) == sizes


def test_a_failed_checkpoint_keeps_what_had_been_acknowledged():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    tracker.report_subtask(1, "a", ack(0, 1_101, 530))
    tracker.report_subtask(1, "b", ack(0, 1_200, 9, completed=False))
    tracker.report_failed(1, 1_244, "suspended")
    stats = tracker.snapshot().latest_failed
    assert (stats.end_to_end_duration, stats.latest_ack_timestamp, stats.num_acknowledged_subtasks) == (244, 1_101, 1)
    assert (stats.failure_timestamp, stats.failure_message) == (1_244, "suspended")
    assert stats.vertices["b"].end_to_end_duration == -1
    assert stats.vertices["b"].subtasks[0].aborted


def test_counts_follow_the_ends_of_checkpoints():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    pending(tracker, 2)
    pending(tracker, 3)
    tracker.report_completed(1, "p")
    tracker.report_failed(2, 0, "m")
    tracker.report_failed_without_id()
    tracker.report_restored(1, 5, is_savepoint=False, external_path="p")
    counts = tracker.snapshot().counts
    assert (counts.total, counts.in_progress, counts.completed, counts.failed, counts.restored) == (4, 1, 1, 2, 1)
    assert tracker.snapshot().latest_restored.restore_timestamp == 5


def test_late_reports_change_nothing():
    tracker = CheckpointStatsTracker()
    before = tracker.snapshot()
    tracker.report_completed(9, "p")
    tracker.report_failed(9, 0, "m")
    tracker.report_subtask(9, "a", ack(0, 1))
    tracker.report_deadline(9, 1)
    assert tracker.snapshot() is before


def test_history_is_bounded_and_newest_first_and_the_latest_outlive_it():
    tracker = CheckpointStatsTracker(history_size=3)
    pending(tracker, 1, SAVEPOINT)
    tracker.report_completed(1, "sp")
    for number in range(2, 8):
        pending(tracker, number)
        tracker.report_completed(number, "p")
    pending(tracker, 8)
    snapshot = tracker.snapshot()
    assert [stats.id for stats in snapshot.history] == [8, 7, 6]
    assert snapshot.checkpoint(1).is_savepoint
    assert snapshot.checkpoint(2) is None
    assert snapshot.latest_completed.id == 7


def test_a_discarded_checkpoint_is_marked_wherever_it_is_shown():
    tracker = CheckpointStatsTracker()
    for number in (1, 2):
        pending(tracker, number)
        tracker.report_completed(number, "p")
    tracker.report_discarded(1)
    assert {stats.id: stats.discarded for stats in tracker.snapshot().history} == {1: True, 2: False}
    tracker.report_discarded(2)
    assert tracker.snapshot().latest_completed.discarded


def test_a_snapshot_stays_as_it_was():
    tracker = CheckpointStatsTracker()
    pending(tracker, 1)
    before = tracker.snapshot()
    tracker.report_subtask(1, "a", ack(0, 1_001, 4))
    assert before.history[0].state_size == 0
    assert tracker.snapshot().history[0].state_size == 4
    assert tracker.snapshot() is tracker.snapshot()


def test_a_history_of_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="-1"):
        CheckpointStatsTracker(-1)
