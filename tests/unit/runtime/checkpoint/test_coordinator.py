"""The coordinator's happy path, acknowledgements, aborts, savepoints, subsumption, unknown writes, restore and end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    EdgeDescriptor,
)
from ckpt_runtime.checkpoint.completion import ABORTED_REMEMBERED
from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.checkpoint.coordinator import CoordinatorState
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from tests.unit.runtime.checkpoint.checkpoint_driver import NATIVE, SAVEPOINT, SYNC_SAVEPOINT, Driver, state_with_file

PERIODIC, CANCELLER = on.TimerKind.PERIODIC, on.TimerKind.CANCELLER


def test_checkpoint_proceeds_from_request_to_notification():
    driver = Driver().run()
    checkpoint_id = driver.request()
    assert checkpoint_id == 1
    trigger = driver.locate(checkpoint_id)
    assert [task.vertex_id for task in trigger.tasks] == ["v-source", "v-source"]
    assert trigger.timestamp == driver.now.abs_ms
    assert trigger.options.directory == "dir/1"
    for execution in driver.executions[:-1]:
        assert driver.ack(checkpoint_id, execution) == []
    driver.ack(checkpoint_id, driver.executions[-1])
    metadata = driver.one(out.WriteMetadata).checkpoint
    assert metadata.directory == "dir/1"
    assert sorted(metadata.states) == sorted(execution.key for execution in driver.executions)
    driver.step(on.MetadataWritten(1))
    assert driver.one(out.AddToStore).checkpoint == metadata
    driver.step(on.StoreAdded(1))
    assert driver.last == [
        out.RequestCompleted("r", 1, "dir/1"),
        out.NotifyComplete(1, trigger.timestamp, driver.executions),
    ]
    assert driver.coordinator.latest_checkpoint == metadata
    assert driver.coordinator.statistics().counts.completed == 1


def test_metadata_survives_json_with_its_edges_which_older_metadata_does_not_have():
    driver = Driver().run()
    metadata = driver.written()
    (edge,) = driver.graph.edges
    assert metadata.edges == (EdgeDescriptor(edge.source, edge.target, edge.partitioning, edge.keys),)
    document = metadata.to_json()
    assert CompletedCheckpoint.from_json(document) == metadata
    assert CompletedCheckpoint.from_json(document, "elsewhere") == replace(metadata, directory="elsewhere")
    del document["edges"]
    assert CompletedCheckpoint.from_json(document) == replace(metadata, edges=())


def test_trigger_names_the_directory_of_shared_files():
    driver = Driver().run()
    driver.request()
    driver.step(on.LocationReady(1, "dir/1", "shared"))
    assert driver.one(out.TriggerSources).options.shared_directory == "shared"


def test_requests_without_running_tasks_fail():
    driver = Driver()
    driver.step(on.TriggerRequested("r", CheckpointProperties()))
    assert driver.one(out.RequestFailed).reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING


class TestAcknowledgements:
    def test_repeated_or_late_acknowledgement_discards_nothing(self):
        driver = Driver().run()
        driver.trigger()
        driver.ack(1, driver.executions[0], state=state_with_file("a"))
        assert driver.ack(1, driver.executions[0], state=state_with_file("a")) == []
        driver = Driver().run()
        for properties in (CheckpointProperties(), SAVEPOINT):
            checkpoint_id = driver.complete(properties=properties)
            assert driver.ack(checkpoint_id, driver.executions[0], state=state_with_file("a")) == []
        driver = Driver().run()
        driver.trigger()
        assert driver.ack(1, ExecutionId("v-source", 0, 7)) == []

    @pytest.mark.parametrize(
        ("attempt", "directory", "aborted"),
        [(7, "dir/1", False), (0, "dir/old", False), (0, "dir/1", True)],
        ids=["of another attempt", "from another directory", "that comes late"],
    )
    def test_the_state_of_an_acknowledgement_that_does_not_count_is_discarded(self, attempt, directory, aborted):
        driver = Driver().run()
        driver.trigger()
        if aborted:
            driver.step(on.Declined(1, driver.executions[1], Reason.CHECKPOINT_DECLINED_TASK_NOT_READY))
        state = state_with_file("a")
        driver.ack(1, ExecutionId("v-source", 0, attempt), state=state, directory=directory)
        assert driver.last == [out.DiscardState(1, directory, state)]

    def test_a_shared_file_that_changed_aborts(self):
        driver = Driver(tolerable_failed_checkpoints=1).run()
        driver.trigger()
        driver.ack(1, driver.executions[0], state=state_with_file("/shared/x", 10))
        driver.ack(1, driver.executions[1], state=state_with_file("/shared/x", 11))
        assert driver.one(out.NotifyAborted).checkpoint_id == 1


class TestAborts:
    def test_order_of_effects(self):
        driver = Driver().run()
        driver.trigger()
        driver.step(on.Declined(1, driver.executions[2], Reason.CHECKPOINT_DECLINED, "why"))
        kinds = [type(effect) for effect in driver.last]
        assert kinds == [out.RequestFailed, out.CancelTimer, out.DiscardLocation, out.FailJob, out.NotifyAborted]
        assert driver.one(out.RequestFailed).message == "Checkpoint was declined. why"
        assert driver.one(out.NotifyAborted).latest_completed == -1
        assert driver.coordinator.statistics().latest_failed.id == 1

    def test_abort_names_the_latest_completed_checkpoint(self):
        driver = Driver(tolerable_failed_checkpoints=5).run()
        driver.complete()
        driver.trigger()
        driver.step(on.Declined(2, driver.executions[2], Reason.CHECKPOINT_DECLINED))
        assert driver.one(out.NotifyAborted).latest_completed == 1
        assert driver.of(out.FailJob) == []

    def test_location_failure(self):
        driver = Driver().run()
        driver.request()
        driver.step(on.LocationFailed(1, "disk full"))
        failed = driver.one(out.RequestFailed)
        assert failed.reason is Reason.IO_EXCEPTION
        assert not failed.reached_tasks
        assert driver.of(out.NotifyAborted) == []
        assert driver.one(out.FailJob).reason is Reason.IO_EXCEPTION
        assert driver.one(out.FailJob).times == 1

    def test_location_that_comes_too_late_is_removed(self):
        driver = Driver(tolerable_failed_checkpoints=1).run()
        driver.request()
        driver.fire(driver.timer(CANCELLER))
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED
        driver.step(on.LocationReady(1, "dir/1"))
        assert driver.last == [out.DiscardLocation(1, "dir/1")]

    def test_undelivered_trigger_is_not_counted(self):
        driver = Driver().run()
        driver.trigger()
        driver.step(on.TriggerFailed(1, "no route"))
        assert driver.one(out.RequestFailed).reason is Reason.TRIGGER_CHECKPOINT_FAILURE
        assert driver.of(out.FailJob) == []

    def test_leaving_running_aborts_pending_and_queued(self):
        driver = Driver().run()
        driver.trigger("first")
        driver.steps(on.TriggerRequested("second", CheckpointProperties()), on.TasksLeftRunning())
        failed = {effect.request_id: effect.reason for effect in driver.of(out.RequestFailed)}
        assert failed == dict.fromkeys(["first", "second"], Reason.CHECKPOINT_COORDINATOR_SUSPEND)
        assert driver.coordinator.pending_ids == ()

    def test_aborted_checkpoints_are_remembered_in_bounded_number(self):
        driver = Driver(tolerable_failed_checkpoints=10**6).run()
        for checkpoint_id in range(1, ABORTED_REMEMBERED + 2):
            driver.trigger()
            driver.step(on.Declined(checkpoint_id, driver.executions[0], Reason.CHECKPOINT_DECLINED))
            driver.step(on.CleanupDone(checkpoint_id))
        late = state_with_file("late")
        assert driver.ack(1, driver.executions[0], state=late) == []
        assert driver.ack(2, driver.executions[0], state=late) == [out.DiscardState(2, "dir/2", late)]

    def test_a_decline_of_an_unknown_task_is_ignored(self):
        driver = Driver().run()
        driver.trigger()
        assert driver.step(on.Declined(1, ExecutionId("v-sink", 0, 9), Reason.CHECKPOINT_DECLINED)) == []

    def test_expiry_at_the_deadline_and_not_before(self):
        driver = Driver(timeout_ms=500).run()
        driver.trigger()
        timer = driver.timer(CANCELLER)
        assert timer.at_rel_ms == driver.now.rel_ms + 500
        driver.step(on.TimerFired(timer.timer, timer.generation), after_ms=499)
        assert driver.last == [timer]
        driver.step(on.TimerFired(timer.timer, timer.generation), after_ms=1)
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED


class TestSavepoints:
    def test_a_plain_savepoint_sends_no_notification_and_enters_no_store(self):
        driver = Driver(max_concurrent=2).run()
        older = driver.trigger("older")
        savepoint = driver.trigger("sp", SAVEPOINT)
        driver.ack_all(savepoint)
        driver.step(on.MetadataWritten(savepoint))
        assert driver.last == [out.RequestCompleted("sp", savepoint, f"dir/{savepoint}")]
        assert driver.coordinator.pending_ids == (older,)
        assert driver.coordinator.latest_checkpoint is None
        assert driver.coordinator.statistics().latest_savepoint.id == savepoint

    def test_savepoint_waits_for_others_only_while_unaligned_checkpoints_are_on(self):
        driver = Driver(max_concurrent=1).run()
        driver.trigger("checkpoint")
        assert driver.request("sp", SAVEPOINT) == 2
        driver = Driver(unaligned_enabled=True).run()
        driver.trigger("checkpoint")
        assert driver.step(on.TriggerRequested("sp", SAVEPOINT)) == []
        driver.step(on.ConfigurationPatched(replace(driver.coordinator.configuration, unaligned_enabled=False)))
        assert driver.one(out.InitializeLocation).properties.is_savepoint, "what holds now counts"

    @pytest.mark.row("76.8")
    def test_several_unaligned_checkpoints_are_triggered_at_once(self):
        driver = Driver(unaligned_enabled=True, max_concurrent=3).run()
        assert [driver.trigger(name) for name in ("first", "second", "third")] == [1, 2, 3]
        assert driver.coordinator.pending_ids == (1, 2, 3)
        assert driver.step(on.TriggerRequested("fourth", CheckpointProperties())) == []
        driver.ack_all(2)
        driver.publish(2)
        assert driver.coordinator.latest_checkpoint.id == 2
        assert 1 not in driver.coordinator.pending_ids, "subsumed"

    @pytest.mark.row("76.1")
    def test_a_changed_policy_holds_from_the_next_checkpoint_on(self):
        driver = Driver(max_concurrent=9).run()

        def options(properties=None):
            number = driver.request("r", properties)
            found = driver.locate(number).options
            return (found.unaligned, found.aligned_timeout_ms, found.max_inflight_data_bytes)

        def patch(**changes):
            driver.step(on.ConfigurationPatched(replace(driver.coordinator.configuration, **changes)))

        assert options() == (False, 0, None)
        patch(unaligned_enabled=True)
        assert options() == (True, 0, None)
        patch(aligned_timeout_ms=700, max_inflight_data_bytes=4096)
        assert options() == (True, 700, 4096)
        assert options(SAVEPOINT) == (False, 0, None)
        patch(unaligned_enabled=False)
        assert options()[0] is False

    def test_target_directory_is_passed_on(self):
        driver = Driver().run()
        driver.step(on.TriggerRequested("sp", SAVEPOINT, "s3://x"))
        assert driver.one(out.InitializeLocation).target_directory == "s3://x"

    def test_a_newer_checkpoint_subsumes_checkpoints_but_not_savepoints(self):
        driver = Driver(max_concurrent=3).run()
        driver.trigger("older")
        driver.trigger("sp", SAVEPOINT)
        driver.written("newer")
        driver.publish(3)
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_SUBSUMED
        assert driver.one(out.RequestFailed).request_id == "older"
        assert driver.coordinator.pending_ids == (2,)

    def test_a_synchronous_savepoint_subsumes_and_notifies(self):
        driver = Driver(max_concurrent=2).run()
        driver.trigger("older")
        driver.written("stop", SYNC_SAVEPOINT)
        driver.step(on.MetadataWritten(2))
        assert driver.of(out.NotifyComplete) == []
        assert not driver.one(out.AddToStore).owned
        driver.step(on.StoreUnknown(2, "no answer"))
        assert not driver.one(out.ResolveStore).owned
        driver.step(on.StoreAdded(2))
        assert driver.one(out.RequestFailed).request_id == "older"
        assert driver.one(out.NotifyComplete).checkpoint_id == 2
        assert driver.coordinator.latest_checkpoint is not None
        assert driver.coordinator.latest_checkpoint.id == 2

    def test_the_savepoint_of_a_stop_stays_when_the_job_has_ended(self):
        driver = Driver().run()
        driver.complete()
        driver.written("stop", SYNC_SAVEPOINT)
        driver.publish(2)
        driver.step(on.Shutdown("FINISHED", False))
        assert driver.one(out.RemoveFromStore).checkpoint_id == 2
        driver.step(on.StoreRemoved(2))
        assert driver.of(out.DiscardCheckpoint) == []

    def test_a_declined_synchronous_savepoint_fails_the_job(self):
        driver = Driver(tolerable_failed_checkpoints=9).run()
        driver.trigger("stop", SYNC_SAVEPOINT)
        driver.step(on.Declined(1, driver.executions[0], Reason.CHECKPOINT_DECLINED_TASK_NOT_READY))
        assert driver.one(out.RequestFailed).reached_tasks
        assert driver.one(out.FailJob).reason is Reason.CHECKPOINT_DECLINED_TASK_NOT_READY
        assert driver.one(out.FailJob).times == 0

    def test_a_savepoint_does_not_delay_the_publishing_of_a_checkpoint(self):
        driver = Driver(max_concurrent=2).run()
        driver.trigger("sp", SAVEPOINT)
        driver.trigger("cp")
        driver.ack_all(1)
        driver.ack_all(2)
        assert driver.one(out.WriteMetadata).checkpoint.id == 2


class TestRetention:
    def test_only_retained_checkpoints_stay_and_pointers_are_removed_first(self):
        driver = Driver(retained=2).run()
        driver.complete()
        driver.complete()
        driver.written()
        driver.steps(on.MetadataWritten(3), on.StoreAdded(3))
        directory = driver.coordinator.statistics().checkpoint(1).external_path
        assert driver.one(out.RemoveFromStore) == out.RemoveFromStore(1, 0, directory)
        assert driver.of(out.DiscardCheckpoint) == []
        driver.step(on.StoreRemoveFailed(1))
        assert driver.last == [out.RemoveFromStore(1, 1, directory)]
        driver.step(on.StoreRemoved(1))
        assert driver.one(out.DiscardCheckpoint).checkpoint.id == 1
        assert driver.step(on.CleanupDone(1)) == []
        assert [entry.checkpoint.id for entry in driver.coordinator.retained] == [2, 3]
        history = {stats.id: stats.discarded for stats in driver.coordinator.statistics().history}
        assert history == {1: True, 2: False, 3: False}

    def test_snapshots_that_a_restore_may_need_are_known_until_their_pointers_are_removed(self):
        driver = Driver().run()
        driver.complete()
        driver.trigger()
        assert driver.coordinator.referenced == ("dir/1", "dir/2")
        driver.ack_all(2)
        driver.steps(on.MetadataWritten(2), on.StoreAdded(2))
        assert driver.coordinator.referenced == ("dir/2", "dir/1")
        driver.step(on.StoreRemoved(1))
        assert driver.coordinator.referenced == ("dir/2",)

    def test_cleaning_holds_back_triggers(self):
        driver = Driver(max_concurrent=1, tolerable_failed_checkpoints=9).run()
        for _ in range(2):
            number = driver.trigger()
            driver.step(on.Declined(number, driver.executions[0], Reason.CHECKPOINT_DECLINED))
        assert driver.step(on.TriggerRequested("r", CheckpointProperties())) == []
        driver.step(on.CleanupDone(1))
        assert driver.one(out.InitializeLocation).checkpoint_id == 3

    def test_shared_files_are_deleted_with_their_last_checkpoint(self):
        driver = Driver().run()
        for number, path in ((1, "/s/1"), (2, "/s/1"), (3, "/s/2")):
            driver.trigger()
            for execution in driver.executions:
                driver.ack(number, execution, state=state_with_file(path))
            driver.publish(number)
        deleted = driver.deleted
        assert deleted == [("/s/1",)]

    @pytest.mark.row("203.12")
    @pytest.mark.parametrize("ends", ["completed", "declined", "expired"])
    def test_shared_files_outlast_the_savepoint_that_may_duplicate_them(self, ends):
        driver = Driver(incremental=True, max_concurrent=2).run()
        self.complete_with(driver, "/s/1")
        savepoint = driver.trigger("sp", NATIVE)
        self.complete_with(driver, "/s/2")
        assert not driver.deleted
        match ends:
            case "completed":
                driver.ack_all(savepoint)
                driver.step(on.MetadataWritten(savepoint))
            case "declined":
                driver.step(on.Declined(savepoint, driver.executions[0], Reason.CHECKPOINT_DECLINED))
            case "expired":
                (timer,) = [
                    effect
                    for effect in driver.trace
                    if isinstance(effect, out.ScheduleTimer) and effect.timer.checkpoint_id == savepoint
                ]
                driver.step(on.TimerFired(timer.timer, timer.generation), after_ms=600_000)
        assert driver.one(out.DeleteSharedFiles).paths == ("/s/1",)

    @pytest.mark.parametrize(
        ("incremental", "properties"),
        [(False, NATIVE), (True, SAVEPOINT), (True, CheckpointProperties())],
        ids=["not incremental", "canonical", "a checkpoint"],
    )
    def test_savepoint_that_duplicates_nothing_keeps_no_file(self, incremental, properties):
        driver = Driver(incremental=incremental, max_concurrent=2).run()
        self.complete_with(driver, "/s/1")
        driver.trigger("other", properties)
        self.complete_with(driver, "/s/2")
        deleted = driver.deleted
        assert deleted == [("/s/1",)]

    def complete_with(self, driver, path):
        number = driver.trigger()
        for execution in driver.executions:
            driver.ack(number, execution, state=state_with_file(path))
        driver.publish(number)

    def test_increment_whose_base_a_full_checkpoint_has_replaced_does_not_fail_the_job(self):
        driver = Driver(incremental=True, tolerable_failed_checkpoints=0).run()
        self.complete_with(driver, "/s/1")
        self.complete_with(driver, "/s/full")
        number = driver.trigger()
        driver.ack(number, driver.executions[0], state=state_with_file("/s/1"))
        failed = driver.one(out.RequestFailed)
        assert failed.reason is Reason.CHECKPOINT_BASE_REPLACED
        assert "/s/1 was already released" in failed.message
        assert driver.of(out.FailJob) == []

    def test_different_file_at_a_known_path_fails_the_job(self):
        driver = Driver(incremental=True, tolerable_failed_checkpoints=0).run()
        self.complete_with(driver, "/s/1")
        number = driver.trigger()
        driver.ack(number, driver.executions[0], state=state_with_file("/s/1", 11))
        assert driver.one(out.FailJob).reason is Reason.CHECKPOINT_ASYNC_EXCEPTION

    @pytest.mark.parametrize(
        ("status", "retention", "kept"),
        [
            ("FINISHED", CheckpointRetention.RETAIN_ON_CANCELLATION, False),
            ("CANCELED", CheckpointRetention.RETAIN_ON_CANCELLATION, True),
            ("CANCELED", CheckpointRetention.DELETE_ON_CANCELLATION, False),
            ("FAILED", CheckpointRetention.DELETE_ON_CANCELLATION, True),
            ("FAILED", CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS, False),
        ],
    )
    def test_end_of_the_job(self, status, retention, kept):
        driver = Driver(retention=retention).run()
        driver.complete()
        driver.step(on.Shutdown(status))
        assert driver.one(out.RemoveFromStore).checkpoint_id == 1
        driver.step(on.StoreRemoved(1))
        assert bool(driver.of(out.DiscardCheckpoint)) is not kept
        if not kept:
            driver.step(on.CleanupDone(1))
        assert driver.of(out.ShutdownComplete)
        assert driver.coordinator.state is CoordinatorState.CLOSED

    @pytest.mark.parametrize("status", ["FINISHED", "CANCELED", "FAILED"])
    def test_checkpoint_from_which_the_next_run_continues_outlives_each_end_of_the_job(self, status):
        driver = Driver(continue_in="/state", retention=CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS).run()
        driver.complete()
        driver.steps(on.Shutdown(status), on.StoreRemoved(1))
        assert not driver.of(out.DiscardCheckpoint)

    @pytest.mark.parametrize("status", ["FINISHED", "CANCELED", "FAILED"])
    def test_only_the_newest_of_several_checkpoints_waits_for_the_next_run(self, status):
        driver = Driver(continue_in="/state", retained=2).run()
        for _ in range(2):
            driver.complete()
        driver.step(on.Shutdown(status))
        deleted = []
        for number in (1, 2):
            driver.step(on.StoreRemoved(number))
            deleted += [each.checkpoint.id for each in driver.of(out.DiscardCheckpoint)]
        assert deleted == [1]

    def test_checkpoint_to_retain_outlives_a_cancellation_after_later_changes_of_settings(self):
        driver = Driver(retention=CheckpointRetention.DELETE_ON_CANCELLATION).run()
        driver.complete()
        driver.step(on.RetentionAsked())
        settings = replace(driver.coordinator.configuration, retention=CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS)
        driver.steps(on.ConfigurationPatched(settings), on.Shutdown("CANCELED"), on.StoreRemoved(1))
        assert driver.of(out.DiscardCheckpoint) == []
        assert driver.of(out.ShutdownComplete)

    def test_a_suspended_job_keeps_everything(self):
        driver = Driver().run()
        driver.complete()
        driver.step(on.Shutdown("SUSPENDED"))
        assert driver.of(out.RemoveFromStore) == []
        assert driver.of(out.ShutdownComplete)

    def test_a_fenced_driver_touches_nothing(self):
        driver = Driver().run()
        driver.written()
        driver.step(on.Shutdown("SUSPENDED", fenced=True))
        assert {type(effect) for effect in driver.last} == {out.CancelTimer, out.RequestFailed, out.ShutdownComplete}
        for event in (on.MetadataWritten(1), on.LocationReady(2, "dir/2"), on.CleanupDone(1)):
            assert driver.step(event) == []
        driver.step(on.TriggerRequested("late", CheckpointProperties()))
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_COORDINATOR_SHUTDOWN

    def test_a_fenced_driver_does_not_even_discard_aborted_checkpoints(self):
        driver = Driver().run()
        driver.trigger()
        driver.step(on.Shutdown("SUSPENDED", fenced=True))
        assert driver.of(out.DiscardLocation) == []


class TestUnknownOutcomes:
    def test_an_unknown_pointer_is_read_again_until_it_answers(self):
        driver = Driver(timeout_ms=100, max_concurrent=2).run()
        driver.written()
        driver.step(on.MetadataWritten(1))
        driver.step(on.StoreUnknown(1), after_ms=1_000)
        assert driver.one(out.ResolveStore).attempt == 1
        driver.step(on.StoreUnknown(1))
        assert driver.one(out.ResolveStore).attempt == 2
        driver.trigger("next")
        driver.ack_all(2)
        assert driver.last == []  # nothing is added while the fate of the first is open
        driver.step(on.StoreAdded(1))
        assert driver.of(out.NotifyComplete)
        assert driver.one(out.WriteMetadata).checkpoint.id == 2

    def test_a_pointer_that_certainly_failed_is_cleaned_and_counted(self):
        driver = Driver().run()
        driver.written()
        driver.steps(on.MetadataWritten(1), on.StoreUnknown(1))
        assert driver.of(out.DiscardLocation) == []
        driver.step(on.StoreFailed(1, "gone"))
        assert driver.one(out.RequestFailed).reason is Reason.FINALIZE_CHECKPOINT_FAILURE
        assert driver.of(out.DiscardLocation)
        assert driver.of(out.FailJob)

    def test_unknown_metadata(self):
        driver = Driver().run()
        driver.written()
        driver.step(on.MetadataUnknown(1))
        assert driver.one(out.ResolveMetadata).attempt == 1
        driver.step(on.MetadataFailed(1, "absent"))
        assert driver.of(out.DiscardLocation)

    def test_finalizing_checkpoint_ends_only_with_the_answer_of_storage(self):
        driver = Driver(timeout_ms=100).run()
        driver.trigger()
        timer = driver.timer(CANCELLER)
        driver.ack_all(1)
        assert driver.step(on.TimerFired(timer.timer, timer.generation), after_ms=1_000) == []
        assert driver.step(on.Declined(1, driver.executions[0], Reason.CHECKPOINT_DECLINED)) == []
        driver.step(on.TasksLeftRunning())
        assert driver.coordinator.pending_ids == (1,)


class TestRestore:
    def test_a_fresh_job(self):
        driver = Driver()
        driver.step(on.RestoreRequested("x"))
        assert driver.last == [out.FindLeftovers(), out.RestoreFrom("x", None)]

    def test_restore_waits_for_the_checkpoint_that_is_being_written(self):
        driver = Driver().run()
        driver.written()
        driver.step(on.TasksLeftRunning())
        assert driver.step(on.RestoreRequested("x")) == [out.FindLeftovers()]
        driver.steps(on.MetadataWritten(1), on.StoreAdded(1))
        assert driver.one(out.RestoreFrom).checkpoint.id == 1
        assert driver.coordinator.statistics().latest_restored.id == 1
        driver.attempt += 1
        driver.run()
        assert driver.request() == 2

    def test_a_later_request_replaces_an_open_one(self):
        driver = Driver().run()
        driver.written()
        driver.steps(on.TasksLeftRunning(), on.RestoreRequested("x"), on.RestoreRequested("y"))
        driver.step(on.MetadataFailed(1, "no"))
        assert driver.one(out.RestoreFrom) == out.RestoreFrom("y", None)

    def a_savepoint(self):
        driver = Driver().run()
        return driver.written(properties=SAVEPOINT)

    @pytest.mark.parametrize("mode", list(RecoveryClaimMode))
    def test_start_from_a_savepoint(self, mode):
        savepoint = self.a_savepoint()
        driver = Driver()
        driver.step(on.RestoreRequested("x", savepoint, mode))
        assert driver.last == [out.FindLeftovers(), out.AddToStore(savepoint, mode is RecoveryClaimMode.CLAIM)]
        driver.steps(on.StoreUnknown(1), on.StoreAdded(1))
        assert driver.last == [out.RestoreFrom("x", savepoint)]
        driver.run()
        assert driver.request() == 2
        trigger = driver.locate(2)
        assert trigger.options.properties.full is (mode is RecoveryClaimMode.NO_CLAIM)
        driver.ack_all(2)
        driver.steps(on.MetadataWritten(2), on.StoreAdded(2))
        assert driver.one(out.RemoveFromStore).checkpoint_id == 1
        driver.step(on.StoreRemoved(1))
        assert bool(driver.of(out.DiscardCheckpoint)) is (mode is RecoveryClaimMode.CLAIM)

    @pytest.mark.parametrize(("status", "discarded"), [("FINISHED", True), ("FAILED", False), ("CANCELED", False)])
    def test_a_claimed_snapshot_outlives_a_job_that_never_replaced_it(self, status, discarded):
        savepoint = replace(self.a_savepoint(), job_id="another")
        driver = Driver(retention=CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS)
        driver.steps(on.RestoreRequested("x", savepoint, RecoveryClaimMode.CLAIM), on.StoreAdded(1))
        driver.steps(on.Shutdown(status), on.StoreRemoved(1))
        assert bool(driver.of(out.DiscardCheckpoint)) is discarded

    def test_a_savepoint_that_cannot_be_recorded(self):
        driver = Driver()
        driver.steps(on.RestoreRequested("x", self.a_savepoint()), on.StoreFailed(1, "no"))
        assert driver.last == [out.RestoreFailed("x", "no")]
        assert driver.coordinator.state is CoordinatorState.CREATED

    @pytest.mark.parametrize("stored", [True, False])
    def test_the_end_of_the_job_waits_for_the_pointer_of_its_savepoint(self, stored):
        driver = Driver()
        driver.steps(on.RestoreRequested("x", self.a_savepoint()), on.Shutdown("SUSPENDED"))
        assert not driver.of(out.ShutdownComplete)
        driver.step(on.StoreAdded(1) if stored else on.StoreFailed(1, "no"))
        assert driver.last == [out.ShutdownComplete()]
        assert len(driver.coordinator.retained) == stored

    def test_recovered_checkpoints_beat_the_savepoint_and_move_the_counter(self):
        driver = Driver().run()
        checkpoint = driver.written()
        recovered = Driver(recovered=[RetainedCheckpoint(checkpoint)])
        recovered.step(on.RestoreRequested("x", self.a_savepoint()))
        assert recovered.one(out.RestoreFrom) == out.RestoreFrom("x", checkpoint)
        recovered.run()
        assert recovered.request() == 2


class TestConcurrency:
    def test_older_checkpoints_are_published_first_and_ids_rise(self):
        driver = Driver(max_concurrent=3).run()
        for number in (1, 2, 3):
            driver.trigger(str(number))
        driver.ack_all(3)
        driver.ack_all(1)
        driver.ack_all(2)
        driver.publish(3)
        reasons = {effect.request_id: effect.reason for effect in driver.of(out.RequestFailed)}
        assert reasons == dict.fromkeys(["1", "2"], Reason.CHECKPOINT_SUBSUMED)
        assert driver.coordinator.latest_checkpoint.id == 3

    def test_one_trigger_cycle_at_a_time(self):
        driver = Driver(max_concurrent=2).run()
        driver.request("first")
        assert driver.step(on.TriggerRequested("second", CheckpointProperties())) == []
        driver.locate(1)
        assert driver.one(out.InitializeLocation).checkpoint_id == 2


def test_shutdown_waits_for_the_write_in_flight():
    driver = Driver().run()
    driver.written()
    driver.step(on.Shutdown("CANCELED"))
    assert driver.of(out.ShutdownComplete) == []
    assert driver.coordinator.state is CoordinatorState.CLOSING
    driver.steps(on.MetadataWritten(1), on.StoreAdded(1), on.StoreRemoved(1), on.CleanupDone(1))
    assert driver.of(out.ShutdownComplete)


@pytest.mark.row("571.9")
def test_progress_is_shown():
    driver = Driver().run()
    driver.trigger()
    driver.step(on.ProgressReported(1, driver.executions[0], on.CheckpointMetrics(checkpointed_size=7)))
    driver.ack(1, driver.executions[1], metrics=on.CheckpointMetrics(sync_duration=3))
    stats = driver.coordinator.statistics().checkpoint(1)
    first, second = stats.vertices["v-source"].subtasks
    assert (first.aborted, first.metrics.checkpointed_size) == (True, 7)
    assert (second.completed, second.metrics.sync_duration, stats.num_acknowledged_subtasks) == (True, 3, 1)
    assert stats.deadline_timestamp == stats.trigger_timestamp + 600_000
