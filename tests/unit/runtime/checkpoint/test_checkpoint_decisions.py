"""The small decision makers of the coordinator: queue, plan, failure count, store, registry, cleaner, ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    FileGivenUpError,
    SharedStateConflictError,
    SharedStateRegistry,
    SubtaskState,
)
from ckpt_runtime.checkpoint.completion import CheckpointFailureManager, TriggerRequest
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, SettingsInForce
from ckpt_runtime.checkpoint.executions import ExecutionId, calculate_plan
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention
from ckpt_runtime.checkpoint.statistics import CheckpointStatsTracker
from ckpt_runtime.checkpoint.triggering import (
    CAPACITY,
    CheckpointIdCounter,
    CheckpointRequestDecider,
    Load,
    RequestVerdict,
)
from ckpt_runtime.graph.job_graph import Partitioning
from tests.unit.runtime.checkpoint.checkpoint_driver import SAVEPOINT, SYNC_SAVEPOINT, state_with_file, two_vertex_graph

PLAIN = CheckpointProperties()
IDLE = Load(triggering=False, cleaning=0, pending=0, max_concurrent=1, pause_ends_at=0)


def in_force(**settings):
    return SettingsInForce(CheckpointConfiguration(**settings))


def request(sequence, properties=PLAIN, at=0, **more):
    return TriggerRequest(str(sequence), properties, at, sequence, **more)


class TestRequestDecider:
    def test_order(self):
        decider = CheckpointRequestDecider()
        for entry in (
            request(1, periodic=True),
            request(2, at=5),
            request(3, at=1),
            request(4, SAVEPOINT, at=7),
            request(5, SAVEPOINT, at=6),
        ):
            assert decider.offer(entry) is None
        order = [decider.next(IDLE, 0)[1].sequence for _ in range(5)]
        assert order == [5, 4, 3, 2, 1]
        assert decider.next(IDLE, 0) == (RequestVerdict.WAIT, None)

    @pytest.mark.parametrize(
        "load",
        [
            Load(triggering=True, cleaning=0, pending=0, max_concurrent=1, pause_ends_at=0),
            Load(triggering=False, cleaning=2, pending=0, max_concurrent=1, pause_ends_at=0),
            Load(triggering=False, cleaning=0, pending=1, max_concurrent=1, pause_ends_at=0),
        ],
    )
    def test_waits(self, load):
        decider = CheckpointRequestDecider()
        decider.offer(request(1))
        assert decider.next(load, 0) == (RequestVerdict.WAIT, None)
        assert decider.queue

    @pytest.mark.row("76.9")
    def test_savepoint_starts_among_pending_checkpoints_unless_these_may_be_unaligned(self):
        busy = replace(IDLE, pending=1)
        decider = CheckpointRequestDecider()
        decider.offer(request(1, SAVEPOINT))
        assert decider.next(replace(busy, savepoints_wait=True), 0) == (RequestVerdict.WAIT, None)
        assert decider.next(busy, 0)[0] is RequestVerdict.GO

    def test_minimum_pause_applies_to_periodic_checkpoints_only(self):
        load = Load(triggering=False, cleaning=0, pending=0, max_concurrent=1, pause_ends_at=10)
        decider = CheckpointRequestDecider()
        decider.offer(request(1, periodic=True))
        assert decider.next(load, 9)[0] is RequestVerdict.TOO_EARLY
        decider.offer(request(2))
        assert decider.next(load, 9)[0] is RequestVerdict.GO

    def test_capacity(self):
        decider = CheckpointRequestDecider()
        for number in range(CAPACITY - 1):
            decider.offer(request(number))
        tick = request(CAPACITY, periodic=True)
        assert decider.offer(tick) is None
        assert decider.offer(request(CAPACITY + 1)) is tick
        refused = request(CAPACITY + 2, SAVEPOINT)
        assert decider.offer(refused) is refused
        assert len(decider.drain()) == CAPACITY
        assert not decider.queue

    def test_at_most_one_periodic_request_waits(self):
        decider = CheckpointRequestDecider()
        assert decider.offer(request(1, periodic=True)) is None
        assert decider.offer(request(2, periodic=True)).sequence == 2
        decider.drop_periodic()
        assert not decider.queue


@pytest.mark.row("147.1")
class TestPlan:
    def plan(self, partitioning, finished):
        graph = two_vertex_graph(partitioning)
        executions = {
            (vertex.id, index): ExecutionId(vertex.id, index, 0)
            for vertex in graph.vertices
            for index in range(vertex.parallelism)
        }
        plan = calculate_plan(graph, executions, frozenset(finished))
        return [task.key for task in plan.to_trigger], [task.key for task in plan.to_wait_for]

    SOURCE, SINK = ("v-source", 0), ("v-sink", 0)

    def test_plan_triggers_tasks_whose_predecessors_have_all_finished(self):
        assert self.plan(Partitioning.HASH, [self.SOURCE])[0] == [("v-source", 1)]
        assert self.plan(Partitioning.FORWARD, [self.SOURCE])[0] == [("v-source", 1), self.SINK]


class TestFailureManager:
    def test_success_resets_and_older_ids_no_longer_count(self):
        manager = CheckpointFailureManager(in_force(tolerable_failed_checkpoints=0))
        manager.on_success(5)
        assert not manager.on_failure(Reason.CHECKPOINT_EXPIRED, PLAIN, 4)
        assert manager.on_failure(Reason.CHECKPOINT_EXPIRED, PLAIN, 6)

    def test_failures_are_counted_over_deployments_until_a_checkpoint_completes(self):
        manager = CheckpointFailureManager(in_force(tolerable_failed_checkpoints=0))
        for number in (1, 2):
            assert manager.on_failure(Reason.IO_EXCEPTION, PLAIN, number)
            manager.on_restart()
            assert manager.failed_jobs == number
        assert manager.on_failure(Reason.CHECKPOINT_DECLINED_TASK_NOT_READY, SYNC_SAVEPOINT, 3, task_level=True)
        assert manager.failed_jobs == 2
        manager.on_success(4)
        assert manager.failed_jobs == 0

    def test_an_id_counts_once_and_failures_without_id_always(self):
        manager = CheckpointFailureManager(in_force(tolerable_failed_checkpoints=1))
        assert not manager.on_failure(Reason.CHECKPOINT_EXPIRED, PLAIN, 1)
        assert not manager.on_failure(Reason.CHECKPOINT_EXPIRED, PLAIN, 1)
        assert manager.on_failure(Reason.IO_EXCEPTION, PLAIN)

    def test_counted_reasons(self):
        assert {reason.name for reason in Reason if reason.is_counted} == {
            "IO_EXCEPTION",
            "CHECKPOINT_ASYNC_EXCEPTION",
            "CHECKPOINT_DECLINED",
            "CHECKPOINT_EXPIRED",
            "FINALIZE_CHECKPOINT_FAILURE",
        }

    def test_failures_of_savepoints_and_of_an_earlier_attempt_count_only_when_a_running_task_says_so(self):
        manager = CheckpointFailureManager(in_force(tolerable_failed_checkpoints=0))
        assert not manager.on_failure(Reason.CHECKPOINT_EXPIRED, SAVEPOINT, 1)
        assert manager.on_failure(Reason.CHECKPOINT_DECLINED, SAVEPOINT, 2, task_level=True)
        gone = {"task_level": True, "attempt_is_running": False}
        assert not manager.on_failure(Reason.CHECKPOINT_DECLINED, PLAIN, 1, **gone)
        assert not manager.on_failure(Reason.CHECKPOINT_DECLINED_TASK_NOT_READY, SYNC_SAVEPOINT, 2, **gone)


def completed(number, properties=PLAIN):
    return CompletedCheckpoint(number, "job", 0, 0, f"chk-{number}", properties, ())


def test_retained_checkpoints_have_rising_ids():
    retention = Retention("job", in_force(), [RetainedCheckpoint(completed(5))], CheckpointStatsTracker(), [].append)
    with pytest.raises(ValueError, match="5"):
        retention.add(RetainedCheckpoint(completed(5)))


class TestRegistry:
    def test_a_file_lives_as_long_as_its_last_user(self):
        registry = SharedStateRegistry()
        registry.register(1, state_with_file("s3://b/x"))
        registry.register(2, state_with_file("s3://b/x"))
        registry.register(2, state_with_file("s3://b/y"))
        assert registry.unregister_unused(2) == ()
        assert registry.unregister_unused(3) == ("s3://b/x", "s3://b/y")
        assert len(registry) == 0

    def test_an_older_checkpoint_that_is_acknowledged_last_does_not_make_the_file_older(self) -> None:
        registry = SharedStateRegistry()
        registry.register(2, state_with_file("s3://b/x"))
        registry.register(1, state_with_file("s3://b/x"))
        assert registry.unregister_unused(2) == ()

    def test_private_files_and_files_of_others_are_never_deleted(self):
        registry = SharedStateRegistry()
        registry.register(1, state_with_file("private"))
        assert len(registry) == 0
        registry = SharedStateRegistry()
        registry.register_all(1, [state_with_file("/s/x")], deletable=False)
        assert registry.unregister_unused(9) == ()
        assert len(registry) == 0

    def test_checkpoint_that_refers_to_files_of_others_is_refused(self):
        registry = SharedStateRegistry()
        registry.register_all(1, [state_with_file("/s/x")], deletable=False)
        with pytest.raises(SharedStateConflictError, match="/s/x belongs to"):
            registry.register(2, state_with_file("/s/x"))
        registry.unregister_unused(9)
        with pytest.raises(SharedStateConflictError, match="/s/x was already released"):
            registry.register(10, state_with_file("/s/x"))

    def test_a_file_that_was_given_up_is_refused_and_the_others_are_kept_in_mind(self):
        registry = SharedStateRegistry()
        registry.register(1, state_with_file("/s/x"))
        assert registry.unregister_unused(2) == ("/s/x",)
        mixed = SubtaskState(
            {"a": state_with_file("/s/x").operators["source"], "b": state_with_file("/s/new").operators["source"]}
        )
        with pytest.raises(FileGivenUpError, match="/s/x was already released"):
            registry.register(2, mixed)
        assert registry.unregister_all() == ("/s/new",)

    def test_another_file_under_a_known_path_is_an_error(self):
        registry = SharedStateRegistry()
        registry.register(1, state_with_file("/s/x", 1))
        with pytest.raises(SharedStateConflictError, match="/s/x"):
            registry.register(2, state_with_file("/s/x", 2))

    def test_abandoned_file_does_not_excuse_the_conflict_of_another_file(self):
        registry = SharedStateRegistry()
        registry.register(1, state_with_file("/s/x"))
        registry.unregister_unused(2)
        registry.register(2, state_with_file("/s/y", 1))
        both = SubtaskState({name: state_with_file(f"/s/{name}", 2).operators["source"] for name in "xy"})
        with pytest.raises(SharedStateConflictError, match="/s/x was already released.*/s/y: registered") as refused:
            registry.register(3, both)
        assert not isinstance(refused.value, FileGivenUpError)


def test_ids():
    ids = CheckpointIdCounter()
    assert [ids.next_id(), ids.next_id()] == [1, 2]
    ids.advance_to(10)
    ids.advance_to(4)
    assert ids.next_id() == 10
