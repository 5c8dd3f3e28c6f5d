"""What passes from driver to driver and graph to graph: ids, leftovers, the savepoint of a stop, the end of a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.checkpoint.coordinator import CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter, CheckpointIdUnavailableError
from ckpt_runtime.graph.job_graph import Partitioning
from tests.unit.runtime.checkpoint.checkpoint_driver import (
    SAVEPOINT,
    SYNC_SAVEPOINT,
    Driver,
    state_with_file,
    two_vertex_graph,
)

FINAL = on.TimerKind.FINAL_CHECKPOINT


class Stubborn(CheckpointIdCounter):
    """Gives no id while ``closed``."""

    closed = True

    def next_id(self) -> int:
        if self.closed:
            raise CheckpointIdUnavailableError("no connection")
        return super().next_id()


class TestIds:
    def test_request_without_a_checkpoint_id_fails_and_counts_each_time(self):
        driver = Driver(ids=Stubborn(), tolerable_failed_checkpoints=1).run()
        driver.step(on.TriggerRequested("a", CheckpointProperties()))
        failed = driver.one(out.RequestFailed)
        assert (failed.reason, failed.checkpoint_id) == (Reason.IO_EXCEPTION, None)
        assert "no connection" in failed.message
        assert not driver.of(out.FailJob)
        driver.step(on.TriggerRequested("b", CheckpointProperties()))
        assert driver.one(out.FailJob).reason is Reason.IO_EXCEPTION

    def test_savepoint_without_an_id_does_not_count_and_a_later_request_may_succeed(self):
        driver = Driver(ids=Stubborn()).run()
        driver.step(on.TriggerRequested("a", SAVEPOINT))
        assert driver.one(out.RequestFailed)
        assert not driver.of(out.FailJob)
        ids = Stubborn()
        driver = Driver(ids=ids, tolerable_failed_checkpoints=1).run()
        driver.step(on.TriggerRequested("a", CheckpointProperties()))
        ids.closed = False
        assert driver.request() == 1


class TestLeftovers:
    def started(self, **settings: object) -> Driver:
        driver = Driver(ids=CheckpointIdCounter(7), **settings)
        driver.step(on.RestoreRequested("x"))
        assert driver.of(out.FindLeftovers)
        return driver

    def test_inherited_checkpoints_are_deleted_after_the_first_own_one_with_pointers_first(self):
        driver = self.started()
        driver.step(on.LeftoversFound(((3, "dir/3"), (5, "dir/5")), ("/s/old",)))
        driver.run()
        driver.written()
        driver.steps(on.MetadataWritten(7), on.StoreAdded(7))
        assert [effect.checkpoint_id for effect in driver.of(out.RemoveFromStore)] == [3, 5]
        assert not driver.of(out.DeleteSharedFiles)
        driver.step(on.StoreRemoved(3))
        assert driver.last == [out.DiscardLocation(3, "dir/3")]
        driver.step(on.StoreRemoved(5))
        assert driver.last == [out.DiscardLocation(5, "dir/5"), out.DeleteSharedFiles(("/s/old",))]

    def test_retained_checkpoints_and_their_files_stay(self):
        before = Driver().run()
        before.trigger()
        before.ack_all(1)
        checkpoint = before.one(out.WriteMetadata).checkpoint
        driver = Driver(recovered=[RetainedCheckpoint(checkpoint)], retained=2)
        driver.steps(on.RestoreRequested("x"), on.LeftoversFound(((1, "dir/1"),)))
        driver.run()
        driver.complete()
        assert not driver.of(out.RemoveFromStore)

    def test_checkpoint_retained_at_the_end_is_not_a_leftover_although_it_is_found_late(self):
        before = Driver().run()
        before.trigger()
        before.ack_all(1)
        checkpoint = before.one(out.WriteMetadata).checkpoint
        retention = CheckpointRetention.RETAIN_ON_CANCELLATION
        driver = Driver(recovered=[RetainedCheckpoint(checkpoint)], retention=retention)
        driver.step(on.RestoreRequested("x"))
        driver.run()
        driver.step(on.Shutdown("CANCELED"))
        assert [removal.discards for removal in driver.of(out.RemoveFromStore)] == [None]
        driver.steps(on.LeftoversFound(((1, checkpoint.directory),)), on.StoreRemoved(1))
        assert not [e for e in driver.trace if isinstance(e, out.DiscardLocation | out.DiscardCheckpoint)]
        assert driver.of(out.ShutdownComplete)

    def test_leftovers_of_earlier_drivers_are_searched_once(self):
        driver = self.started()
        driver.step(on.RestoreRequested("y"))
        assert not driver.of(out.FindLeftovers)

    def test_shared_files_of_killed_workers_are_deleted_with_the_next_checkpoint(self):
        driver = self.started().run()
        driver.trigger()
        driver.steps(on.TasksLeftRunning(), on.RestoreRequested("y"))
        assert driver.one(out.FindLeftovers).below == 8
        driver.step(on.RestoreRequested("z"))
        assert not driver.of(out.FindLeftovers)
        driver.step(on.LeftoversFound((), ("/s/chk-7-x",)))
        driver.run()
        driver.complete()
        assert ("/s/chk-7-x",) in driver.deleted

    def test_files_of_a_checkpoint_that_outlives_the_job_are_none_when_the_answer_comes_after_the_end(self):
        driver = self.started(retention=CheckpointRetention.RETAIN_ON_CANCELLATION).run()
        driver.trigger()
        for execution in driver.executions:
            driver.ack(7, execution, state=state_with_file("/s/chk-7-used"))
        driver.publish(7)
        driver.steps(on.TasksLeftRunning(), on.RestoreRequested("y"))
        assert driver.one(out.FindLeftovers).below == 8
        driver.step(on.Shutdown("CANCELED"))
        assert driver.one(out.RemoveFromStore).discards is None
        driver.steps(on.LeftoversFound((), ("/s/chk-7-used", "/s/chk-7-unused")), on.StoreRemoved(7))
        assert driver.one(out.DeleteSharedFiles).paths == ("/s/chk-7-unused",)

    def test_own_checkpoints_are_none(self):
        driver = self.started().run()
        driver.trigger()
        driver.step(on.LeftoversFound(((3, "dir/3"), (7, "dir/7")), ("/s/of-3",)))
        driver.ack_all(7)
        driver.steps(on.MetadataWritten(7), on.StoreAdded(7))
        assert driver.one(out.RemoveFromStore).checkpoint_id == 3
        driver.step(on.StoreRemoved(3))
        assert driver.last == [out.DiscardLocation(3, "dir/3"), out.DeleteSharedFiles(("/s/of-3",))]


class TestStop:
    def test_the_savepoint_has_a_pointer_before_anything_is_committed(self):
        driver = Driver().run()
        driver.complete()
        driver.written("stop", SYNC_SAVEPOINT)
        driver.step(on.MetadataWritten(2))
        assert not driver.of(out.NotifyComplete)
        driver.step(on.StoreUnknown(2))
        assert not driver.one(out.ResolveStore).owned
        driver.step(on.StoreAdded(2))
        assert driver.one(out.NotifyComplete).checkpoint_id == 2
        assert driver.coordinator.retained[-1].owned is False

    def test_savepoint_of_a_stop_is_never_deleted(self):
        driver = Driver().run()
        driver.written("stop", SYNC_SAVEPOINT)
        driver.steps(on.MetadataWritten(1), on.StoreAdded(1), on.Shutdown("FINISHED"))
        assert driver.one(out.RemoveFromStore).checkpoint_id == 1
        driver.step(on.StoreRemoved(1))
        assert driver.last == [out.ShutdownComplete(keeps_nothing=True)]


class TestEnd:
    def test_settings_that_come_too_late_change_nothing(self):
        driver = Driver().run()
        driver.step(on.Shutdown("CANCELED"))
        before = driver.coordinator.configuration
        assert driver.step(on.ConfigurationPatched(replace(before, timeout_ms=5_000))) == []
        assert driver.coordinator.configuration == before

    def test_leadership_may_be_lost_while_closing(self):
        driver = Driver().run()
        driver.written()
        driver.step(on.Shutdown("CANCELED"))
        assert driver.coordinator.state is CoordinatorState.CLOSING
        with pytest.raises(UnexpectedEventError):
            driver.step(on.Shutdown("CANCELED"))
        assert driver.step(on.Shutdown("SUSPENDED", fenced=True))[-1] == out.ShutdownComplete()
        assert driver.step(on.StoreAdded(1)) == []
        assert driver.step(on.TasksLeftRunning()) == []

    def test_a_directory_in_the_making_is_awaited_and_removed(self):
        driver = Driver().run()
        driver.request()
        driver.step(on.Shutdown("CANCELED"))
        assert not driver.of(out.ShutdownComplete)
        driver.step(on.LocationReady(1, "dir/1"))
        assert driver.last == [out.DiscardLocation(1, "dir/1")]
        driver.step(on.CleanupDone(1))
        assert driver.of(out.ShutdownComplete)

    @pytest.mark.parametrize("retention", list(CheckpointRetention))
    def test_shared_files_end_with_a_job_that_keeps_nothing(self, retention):
        driver = Driver(retention=retention).run()
        driver.trigger()
        for execution in driver.executions:
            driver.ack(1, execution, state=state_with_file(f"/s/{execution.vertex_id}-{execution.subtask}"))
        driver.publish(1)
        driver.steps(on.Shutdown("CANCELED"), on.StoreRemoved(1))
        keeps = retention is CheckpointRetention.RETAIN_ON_CANCELLATION
        assert bool(driver.of(out.DeleteSharedFiles)) is not keeps


class TestLastCheckpoint:
    """FLIP-147: without a period it would never be triggered again."""

    def at_end_of_data(self, driver: Driver) -> None:
        for execution in driver.executions:
            driver.step(on.EndOfDataReached(execution))

    def test_queued_last_checkpoint_is_triggered_after_a_stop_fails(self):
        driver = Driver(max_concurrent=1).run()
        driver.trigger("user")
        self.at_end_of_data(driver)
        driver.step(on.PeriodicTriggerStopped())
        timer = driver.timer(FINAL)
        driver.fire(timer)
        again = driver.timer(FINAL)
        assert again.generation > timer.generation
        driver.step(on.PeriodicTriggerStarted())
        driver.fire(again)
        assert driver.of(out.InitializeLocation)

    def test_sources_ended_by_a_stop_wait_only_for_its_savepoint(self):
        """In any other checkpoint they would count as finished, though they have rows left."""
        driver = Driver().run()
        driver.step(on.PeriodicTriggerStopped())
        driver.trigger("stop", SYNC_SAVEPOINT)
        self.at_end_of_data(driver)
        assert not [e for e in driver.trace if isinstance(e, out.InitializeLocation) and e.checkpoint_id > 1]
        for properties in (CheckpointProperties(), SAVEPOINT):
            driver.step(on.TriggerRequested("user", properties, "sp"))
            assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_COORDINATOR_SUSPEND
            assert not driver.of(out.InitializeLocation)

    def test_last_checkpoint_that_failed_under_a_removed_interval_is_repeated(self):
        driver = Driver(interval_ms=60_000).run()
        self.at_end_of_data(driver)
        driver.step(on.LocationFailed(1, "no"))
        assert not [e for e in driver.trace if isinstance(e, out.ScheduleTimer) and e.timer.kind is FINAL]
        driver.step(on.ConfigurationPatched(replace(driver.coordinator.configuration, interval_ms=None)))
        driver.fire(driver.timer(FINAL))
        assert driver.one(out.InitializeLocation).checkpoint_id == 2


WIDE = two_vertex_graph(Partitioning.REBALANCE, parallelism=3)


def replace_graph(driver: Driver) -> None:
    driver.step(on.GraphReplaced(WIDE))
    driver.graph = WIDE
    driver.attempt += 1


def parallelisms(checkpoint) -> list[int]:
    return [vertex.parallelism for vertex in checkpoint.vertices]


def test_next_deployment_uses_the_new_graph():
    driver = Driver().run()
    driver.complete()
    driver.steps(on.TasksLeftRunning(), on.RestoreRequested("x"))
    replace_graph(driver)
    driver.run()
    assert driver.complete() == 2
    latest = driver.coordinator.latest_checkpoint
    assert parallelisms(latest) == [3, 3]
    assert [edge.partitioning for edge in latest.edges] == [Partitioning.REBALANCE]
    assert driver.coordinator.statistics().checkpoint(2).num_subtasks == 6


def test_executions_of_the_old_graph_are_refused():
    driver = Driver()
    old = driver.executions
    replace_graph(driver)
    with pytest.raises(ValueError, match="subtasks"):
        driver.step(on.JobRunning(old))


def test_checkpoint_in_progress_completes_with_the_graph_that_it_was_triggered_on():
    driver = Driver().run()
    driver.written()
    driver.steps(on.TasksLeftRunning(), on.RestoreRequested("x"))
    assert driver.coordinator.state is CoordinatorState.RESTORING
    replace_graph(driver)
    driver.step(on.MetadataUnknown(1))
    assert parallelisms(driver.one(out.ResolveMetadata).checkpoint) == [2, 2]
    driver.steps(on.MetadataWritten(1), on.StoreAdded(1))
    assert parallelisms(driver.one(out.RestoreFrom).checkpoint) == [2, 2]
    driver.run()
    driver.complete()
    assert parallelisms(driver.coordinator.latest_checkpoint) == [3, 3]


def test_a_late_acknowledgement_of_the_old_graph_changes_nothing():
    driver = Driver().run()
    driver.trigger()
    executions = driver.executions
    driver.step(on.TasksLeftRunning())
    replace_graph(driver)
    driver.run()
    before = driver.coordinator.statistics()
    assert driver.ack(1, executions[0]) == []
    assert driver.coordinator.statistics() == before


@pytest.mark.parametrize("end", [None, on.Shutdown("CANCELED")])
def test_not_while_a_deployment_runs_nor_after_the_end(end):
    driver = Driver().run()
    if end is not None:
        driver.step(end)
    with pytest.raises(UnexpectedEventError):
        driver.step(on.GraphReplaced(WIDE))
