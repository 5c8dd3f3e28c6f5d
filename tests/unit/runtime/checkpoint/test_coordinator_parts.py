"""The parts of the coordinator, each by itself: pending ones, schedule, retention, restore, failures, triggering."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.completion import (
    ABORTED_REMEMBERED,
    CheckpointFailures,
    Completion,
    PendingCheckpoint,
    PendingCheckpoints,
    PendingState,
    TriggerRequest,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention, SettingsInForce
from ckpt_runtime.checkpoint.coordinator import Restoring
from ckpt_runtime.checkpoint.executions import ExecutionId, ExecutionView
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention, UnexpectedAnswerError
from ckpt_runtime.checkpoint.schedule import FINAL_CHECKPOINT_RETRY_MS, CheckpointSchedule
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter, Triggering
from tests.support.instants import later
from tests.unit.runtime.checkpoint.checkpoint_driver import SAVEPOINT, SYNC_SAVEPOINT, state_with_file, two_vertex_graph

PLAIN = CheckpointProperties()
NOW = Instant(1_000, 1_700_000_000_000)
GRAPH = two_vertex_graph(parallelism=1)
SOURCE, SINK = ExecutionId("v-source", 0, 0), ExecutionId("v-sink", 0, 0)


def completed(number, properties=PLAIN, job="job", shared=()):
    states = {("v-source", index): state_with_file(path) for index, path in enumerate(shared)}
    return CompletedCheckpoint(number, job, 0, 0, f"chk-{number}", properties, (), states)


class Parts:
    """Everything that a coordinator is made of, without the coordinator."""

    def __init__(self, recovered=(), **settings):
        configuration = CheckpointConfiguration(**settings)
        self.effects = []
        emit = self.effects.append
        self.stats = CheckpointStatsTracker()
        self.ids = CheckpointIdCounter()
        self.view = ExecutionView(GRAPH)
        self.pending = PendingCheckpoints(self.stats)
        self.in_force = in_force = SettingsInForce(configuration)
        self.schedule = CheckpointSchedule(configuration, None, self.view, emit)
        self.retention = Retention("job", in_force, recovered, self.stats, emit)
        self.failures = CheckpointFailures(
            in_force,
            self.pending,
            self.view,
            self.schedule,
            self.retention,
            self.stats,
            emit,
        )
        self.triggering = Triggering(
            in_force, self.ids, self.pending, self.view, self.schedule, self.retention, self.failures, emit
        )
        self.completion = Completion(
            "job", None, self.pending, self.schedule, self.retention, self.failures, self.stats, emit
        )
        self.restoring = Restoring(self.ids, self.pending, self.retention, self.stats, emit)

    def deploy(self):
        self.view.deployed((SOURCE, SINK), (), frozenset())
        return self

    def add(self, number, properties=PLAIN, state=PendingState.PENDING, **request):
        request = TriggerRequest(f"r{number}", properties, NOW.rel_ms, **request)
        pending = PendingCheckpoint(number, request, self.view.plan(), NOW.abs_ms, NOW.rel_ms, NOW.rel_ms + 600)
        pending.state, pending.directory = state, f"dir/{number}"
        self.pending.add(pending)
        return pending

    def taken(self):
        effects, self.effects[:] = list(self.effects), []
        return effects


class TestPendingCheckpoints:
    def test_the_ids_that_this_driver_has_triggered(self):
        parts = Parts().deploy()
        assert (parts.pending.first_id, parts.pending.last_id) == (None, 0)
        for number in (7, 8):
            parts.pending.completed(_complete(parts.add(number)))
        assert (parts.pending.first_id, parts.pending.last_id, parts.pending.ids) == (7, 8, ())

    def test_aborted_ids_are_bounded(self):
        parts = Parts().deploy()
        for number in range(ABORTED_REMEMBERED + 1):
            parts.pending.aborted(parts.add(number), NOW.abs_ms, "")
        assert not parts.pending.was_aborted(0)
        assert parts.pending.was_aborted(ABORTED_REMEMBERED)

    @pytest.mark.parametrize("state", [PendingState.WRITING, PendingState.STORING])
    def test_checkpoint_is_finalizing_only_while_it_is_stored(self, state):
        parts = Parts().deploy()
        parts.add(1, SAVEPOINT, state)
        assert not parts.pending.is_finalizing
        parts.add(2, SYNC_SAVEPOINT, state)
        assert parts.pending.is_finalizing
        assert parts.pending.abortable() == []

    def test_statistics_hear_of_each(self):
        parts = Parts().deploy()
        first, second = parts.add(1), parts.add(2)
        parts.pending.move_deadline(second, NOW.rel_ms + 900)
        assert parts.stats.snapshot().checkpoint(2).deadline_timestamp == NOW.abs_ms + 900
        parts.pending.completed(_complete(first))
        parts.pending.aborted(second, NOW.abs_ms, "expired")
        assert parts.stats.snapshot().latest_completed.id == 1
        assert parts.stats.snapshot().latest_failed.failure_message == "expired"


def _complete(pending):
    pending.complete("job", None, NOW.abs_ms)
    return pending


class TestSchedule:
    def test_a_tick_is_due_at_its_time_and_of_its_generation(self):
        parts = Parts(interval_ms=100)
        parts.schedule.start(NOW)
        (timer,) = parts.taken()
        assert timer.at_rel_ms == NOW.rel_ms + 100
        assert not parts.schedule.tick(timer.generation - 1, later(NOW, 100))
        assert parts.taken() == []
        assert not parts.schedule.tick(timer.generation, later(NOW, 99)), "too early"
        assert parts.taken() == [timer]
        assert parts.schedule.tick(timer.generation, later(NOW, 100))
        assert parts.taken() == [replace(timer, generation=timer.generation + 1, at_rel_ms=timer.at_rel_ms + 100)]

    def test_settings_that_end_the_ticks(self):
        parts = Parts(interval_ms=100)
        parts.schedule.start(NOW)
        parts.taken()
        parts.schedule.configure(CheckpointConfiguration(), NOW)
        assert parts.taken() == [out.CancelTimer(on.TimerId(on.TimerKind.PERIODIC))]
        assert not parts.schedule.has_tick

    def test_the_last_checkpoint_is_claimed_once_in_a_deployment(self):
        parts = Parts().deploy()
        parts.schedule.start(NOW)
        assert not parts.schedule.claim_final()
        parts.view.end_of_data(SOURCE)
        parts.view.end_of_data(SINK)
        assert parts.schedule.claim_final()
        assert not parts.schedule.claim_final()
        parts.schedule.deployed()
        assert parts.schedule.claim_final()

    def test_the_last_checkpoint_is_tried_again_unless_a_stop_is_under_way(self):
        parts = Parts().deploy()
        parts.schedule.start(NOW)
        parts.view.end_of_data(SOURCE)
        parts.view.finished(SINK)
        parts.schedule.retry_final(NOW)
        (timer,) = parts.taken()
        assert timer.at_rel_ms == NOW.rel_ms + FINAL_CHECKPOINT_RETRY_MS
        assert parts.schedule.final_timer_fired(timer.generation, NOW)
        parts.schedule.stop()
        parts.taken()
        assert not parts.schedule.final_timer_fired(timer.generation, NOW)
        (again,) = parts.taken()
        assert not parts.schedule.final_timer_fired(timer.generation, NOW), "an older generation"
        parts.schedule.undeployed()
        assert not parts.schedule.final_timer_fired(again.generation, NOW)


class TestRetention:
    def test_subsumed_checkpoints_are_deleted_and_shared_files_last(self):
        parts = Parts([RetainedCheckpoint(completed(1, shared=["/s/1"]))])
        parts.retention.add(RetainedCheckpoint(completed(2)))
        assert parts.taken() == [out.RemoveFromStore(1, discards="chk-1")]
        assert parts.retention.directories == ("chk-2", "chk-1")
        parts.retention.on_store_removed(on.StoreRemoved(1), NOW)
        assert parts.taken() == [out.DiscardCheckpoint(completed(1, shared=["/s/1"])), out.DeleteSharedFiles(("/s/1",))]
        assert parts.retention.cleaning == 1
        parts.retention.on_cleanup_done(on.CleanupDone(1), NOW)
        assert parts.retention.cleaning == 0

    def test_files_that_a_savepoint_may_duplicate_are_deleted_after_it_has_ended(self):
        parts = Parts([RetainedCheckpoint(completed(1, shared=["/s/1"]))])
        parts.retention.pin(2)
        parts.retention.pin(3)
        for number in (4, 5):
            parts.retention.add(RetainedCheckpoint(completed(number)))
            parts.retention.on_store_removed(on.StoreRemoved(1 if number == 4 else 4), NOW)
        assert not any(isinstance(effect, out.DeleteSharedFiles) for effect in parts.taken())
        parts.retention.unpin(2)
        parts.retention.unpin(4)
        assert parts.taken() == []
        parts.retention.unpin(3)
        assert parts.taken() == [out.DeleteSharedFiles(("/s/1",))]

    def test_files_of_a_checkpoint_on_its_way_out_stay_for_a_savepoint_that_begins(self):
        """A task hears of the checkpoint that has taken its place behind the barrier of the savepoint, perhaps."""
        parts = Parts([RetainedCheckpoint(completed(1, shared=["/s/1"]))])
        parts.retention.add(RetainedCheckpoint(completed(2)))
        parts.retention.pin(3)
        parts.retention.on_store_removed(on.StoreRemoved(1), NOW)
        assert not any(isinstance(effect, out.DeleteSharedFiles) for effect in parts.taken())
        parts.retention.unpin(3)
        assert parts.taken() == [out.DeleteSharedFiles(("/s/1",))]

    def test_files_unused_before_a_savepoint_began_are_deleted(self):
        parts = Parts([RetainedCheckpoint(completed(2, shared=["/s/2"]))])
        parts.retention.register(on.Acknowledged(1, SINK, "chk-1", state_with_file("/s/aborted")))
        parts.retention.pin(3)
        parts.retention.delete_unused_shared_files()
        assert parts.taken() == [out.DeleteSharedFiles(("/s/aborted",))]

    @pytest.mark.parametrize("fenced", [False, True])
    def test_a_fenced_driver_deletes_nothing_that_was_pinned(self, fenced):
        parts = Parts([RetainedCheckpoint(completed(1, shared=["/s/1"]))])
        parts.retention.pin(2)
        parts.retention.add(RetainedCheckpoint(completed(3)))
        parts.retention.on_store_removed(on.StoreRemoved(1), NOW)
        parts.taken()
        if fenced:
            parts.retention.fence()
        parts.retention.unpin(2)
        assert parts.taken() == ([] if fenced else [out.DeleteSharedFiles(("/s/1",))])

    def test_answers_without_a_request(self):
        retention = Parts().retention
        with pytest.raises(UnexpectedAnswerError):
            retention.on_store_removed(on.StoreRemoved(1), NOW)
        with pytest.raises(UnexpectedAnswerError):
            retention.on_store_remove_failed(on.StoreRemoveFailed(1), NOW)
        with pytest.raises(UnexpectedAnswerError):
            retention.on_cleanup_done(on.CleanupDone(1), NOW)

    def test_a_fenced_driver_touches_no_directory(self):
        parts = Parts()
        parts.retention.fence()
        parts.retention.discard_location(1, "chk-1")
        assert parts.taken() == []
        assert parts.retention.cleaning == 0

    def test_leftovers_are_sought_once_and_then_those_of_killed_workers(self):
        parts = Parts()
        for last_own_id in (0, 0, 5, 5):
            parts.retention.find_leftovers(last_own_id)
        assert parts.taken() == [out.FindLeftovers(), out.FindLeftovers(6)]

    def test_leftovers_are_deleted_with_the_first_checkpoint_but_own_files_stay(self):
        parts = Parts()
        parts.retention.leftovers_found(on.LeftoversFound(((3, "chk-3"), (7, "chk-7")), ("/s/old",)), 7)
        assert parts.taken() == []
        parts.retention.add(RetainedCheckpoint(completed(7)))
        assert parts.taken() == [out.RemoveFromStore(3)]
        parts.retention.on_store_removed(on.StoreRemoved(3), NOW)
        assert parts.taken() == [out.DiscardLocation(3, "chk-3"), out.DeleteSharedFiles(("/s/old",))]

    @pytest.mark.parametrize(
        ("status", "entry", "discarded", "nothing"),
        [
            ("FINISHED", RetainedCheckpoint(completed(1)), True, True),
            ("CANCELED", RetainedCheckpoint(completed(1)), True, True),
            ("FAILED", RetainedCheckpoint(completed(1)), False, False),
            ("CANCELED", RetainedCheckpoint(completed(1, job="another")), False, False),
            ("FINISHED", RetainedCheckpoint(completed(1, job="another")), True, True),
            ("FINISHED", RetainedCheckpoint(completed(1), owned=False), False, True),
        ],
    )
    def test_the_end_of_the_job(self, status, entry, discarded, nothing):
        parts = Parts([entry])
        parts.retention.release(status)
        assert parts.taken() == [out.RemoveFromStore(1, discards="chk-1" if discarded else None)]
        assert parts.retention.keeps_nothing is nothing
        parts.retention.release(status)
        assert parts.taken() == []

    def test_new_settings_count_at_the_end(self):
        parts = Parts([RetainedCheckpoint(completed(1))])
        parts.in_force.settings = CheckpointConfiguration(retention=CheckpointRetention.RETAIN_ON_CANCELLATION)
        parts.retention.release("CANCELED")
        assert parts.taken() == [out.RemoveFromStore(1)]


class TestRestoring:
    def test_restore_waits_for_checkpoints_that_are_being_stored(self):
        parts = Parts([RetainedCheckpoint(completed(1))]).deploy()
        pending = parts.add(2, state=PendingState.STORING)
        parts.restoring.request(on.RestoreRequested("x"))
        parts.restoring.answer_when_known(NOW)
        assert parts.taken() == []
        parts.pending.completed(_complete(pending))
        parts.restoring.answer_when_known(NOW)
        assert parts.taken() == [out.RestoreFrom("x", completed(1))]
        assert not parts.restoring.is_waiting

    def test_a_savepoint_is_stored_first_and_moves_the_ids(self):
        parts = Parts()
        parts.restoring.request(on.RestoreRequested("x", completed(9, SAVEPOINT)))
        parts.restoring.answer_when_known(NOW)
        assert parts.taken() == [out.AddToStore(completed(9, SAVEPOINT), owned=False)]
        assert parts.restoring.is_adding
        assert not parts.restoring.store_added(8), "that of a checkpoint"
        assert parts.restoring.store_unknown(9)
        assert parts.taken() == [out.ResolveStore(completed(9, SAVEPOINT), 1, owned=False)]
        assert parts.restoring.store_added(9)
        parts.restoring.answer_when_known(NOW)
        assert parts.taken() == [out.RestoreFrom("x", completed(9, SAVEPOINT))]
        assert parts.ids.next_id() == 10
        assert not parts.retention.latest_is_owned

    def test_a_savepoint_that_cannot_be_stored(self):
        parts = Parts()
        parts.restoring.request(on.RestoreRequested("x", completed(9, SAVEPOINT)))
        parts.restoring.answer_when_known(NOW)
        parts.taken()
        assert parts.restoring.store_failed(9, "no")
        assert parts.taken() == [out.RestoreFailed("x", "no")]
        assert not parts.restoring.is_waiting

    @pytest.mark.parametrize("fails", [True, False])
    def test_end_of_the_job_waits_only_for_a_pointer_that_is_being_written(self, fails):
        parts = Parts()
        parts.restoring.request(on.RestoreRequested("x", completed(9, SAVEPOINT)))
        parts.restoring.answer_when_known(NOW)
        parts.taken()
        parts.restoring.abandon()
        assert parts.restoring.is_adding
        assert parts.restoring.store_failed(9, "no") if fails else parts.restoring.store_added(9)
        parts.restoring.answer_when_known(NOW)
        assert parts.taken() == []
        assert not parts.restoring.is_adding
        assert len(parts.retention.entries) == (0 if fails else 1)


class TestFailures:
    def test_an_abort_answers_cleans_up_and_fails_the_job_of_a_deployment_only(self):
        parts = Parts().deploy()
        parts.failures.abort(parts.add(1), Reason.CHECKPOINT_EXPIRED, NOW)
        kinds = [type(effect) for effect in parts.taken()]
        assert kinds == [out.RequestFailed, out.CancelTimer, out.DiscardLocation, out.FailJob, out.NotifyAborted]
        pending = parts.add(2)
        parts.view.gone()
        parts.failures.abort(pending, Reason.CHECKPOINT_EXPIRED, NOW)
        assert out.FailJob not in [type(effect) for effect in parts.taken()]

    def test_new_limits_and_deployments(self):
        parts = Parts().deploy()
        parts.in_force.settings = CheckpointConfiguration(tolerable_failed_checkpoints=1)
        for number, fails in ((1, False), (2, True), (3, False)):
            parts.failures.abort(parts.add(number), Reason.CHECKPOINT_EXPIRED, NOW)
            assert (out.FailJob in [type(effect) for effect in parts.taken()]) is fails


class TestTriggering:
    def trigger(self, parts):
        parts.triggering.request(on.TriggerRequested("r", PLAIN), NOW)
        parts.triggering.trigger_queued(NOW)

    def test_directory_that_is_created_too_late_is_removed(self):
        parts = Parts().deploy()
        self.trigger(parts)
        assert parts.triggering.is_locating
        parts.triggering.stop(Reason.CHECKPOINT_COORDINATOR_SUSPEND, NOW)
        assert parts.triggering.is_locating
        parts.taken()
        parts.triggering.on_location_ready(on.LocationReady(1, "chk-1"), NOW)
        assert parts.taken() == [out.DiscardLocation(1, "chk-1")]
        assert not parts.triggering.is_locating

    def test_requests_wait_in_the_queue_until_there_is_room(self):
        parts = Parts().deploy()
        self.trigger(parts)
        self.trigger(parts)
        assert parts.pending.ids == (1,)
        parts.failures.abort(parts.pending.get(1), Reason.CHECKPOINT_DECLINED_TASK_CLOSING, NOW)
        parts.triggering.trigger_queued(NOW)
        assert parts.pending.ids == (2,)

    def test_trigger_is_refused_while_no_task_runs(self):
        parts = Parts()
        self.trigger(parts)
        assert parts.taken()[0].reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING
        assert parts.stats.snapshot().counts.failed == 1
