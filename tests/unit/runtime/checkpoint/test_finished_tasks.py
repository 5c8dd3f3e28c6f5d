"""Checkpoints of a job some or all of whose tasks have finished, or have reached the end of their data."""

from __future__ import annotations

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_assignment import assign_states
from ckpt_runtime.checkpoint.statistics import CheckpointCounts
from tests.unit.runtime.checkpoint.checkpoint_driver import Driver


@pytest.mark.row("147.1")
def test_running_tasks_after_finished_ones_are_triggered():
    driver = Driver().run()
    for execution in driver.executions[:2]:
        driver.step(on.SubtaskFinished(execution))
    number = driver.request()
    assert driver.locate(number).tasks == driver.executions[2:]
    for execution in driver.executions[2:]:
        driver.ack(number, execution)
    metadata = driver.one(out.WriteMetadata).checkpoint
    assert metadata.fully_finished_vertices == {"v-source"}
    assert set(metadata.states) == {("v-sink", 0), ("v-sink", 1)}


@pytest.mark.row("147.7")
def test_the_last_checkpoint_says_so_and_covers_the_end_of_all():
    """With checkpoints after the end of a subtask switched off it is what all of them end by."""
    driver = Driver(checkpoints_after_tasks_finish=False).run()
    assert not driver.locate(driver.request()).options.final
    driver.ack_all(1)
    driver.publish(1)
    for execution in driver.executions:
        driver.step(on.EndOfDataReached(execution))
    assert driver.locate(2).options.final
    driver.ack_all(2)
    assert driver.one(out.WriteMetadata).checkpoint.fully_finished_vertices == set()


@pytest.mark.row("147.3")
def test_last_checkpoint_does_not_wait_for_subtasks_that_need_none():
    """They are about to end, unless what sends to them waits itself."""
    driver = Driver().run()
    *sources, one, other = driver.executions
    for execution in (one, other):
        driver.step(on.EndOfDataReached(execution))
    for execution in sources:
        assert driver.step(on.EndOfDataReached(execution, waits=False)) == []
    assert driver.step(on.SubtaskFinished(sources[0])) == []
    driver.step(on.SubtaskFinished(sources[1]))
    assert driver.locate(driver.one(out.InitializeLocation).checkpoint_id).tasks == (one, other)


@pytest.mark.row("147.3")
def test_subtask_that_needs_no_last_checkpoint_waits_for_upstream_subtasks():
    driver = Driver().run()
    *sources, one, other = driver.executions
    for execution in (one, other):
        driver.step(on.EndOfDataReached(execution, waits=False))
    driver.step(on.EndOfDataReached(sources[0]))
    assert driver.step(on.EndOfDataReached(sources[1], waits=False)) == []
    driver.step(on.SubtaskFinished(sources[1]))
    driver.locate(driver.one(out.InitializeLocation).checkpoint_id)


@pytest.mark.row("147.3")
def test_a_job_that_needs_no_last_checkpoint_takes_none():
    driver = Driver().run()
    for execution in driver.executions:
        assert driver.step(on.EndOfDataReached(execution, waits=False)) == []


@pytest.mark.row("147.7")
def test_checkpoints_are_not_triggered_after_the_savepoint_of_a_stop():
    driver = Driver().run()
    driver.step(on.PeriodicTriggerStopped())
    for execution in driver.executions:
        assert driver.step(on.EndOfDataReached(execution)) == []
    driver.step(on.PeriodicTriggerStarted())
    driver.one(out.InitializeLocation)


@pytest.mark.row("147.7")
def test_tasks_finished_before_the_deployment_do_not_switch_checkpoints_off():
    """A job may start from a snapshot in which something had finished, and its sinks wait for a last checkpoint."""
    driver = Driver(checkpoints_after_tasks_finish=False)
    sources = driver.executions[:2]
    driver.run(finished_on_restore=frozenset({"v-source"}), finished=frozenset(sources))
    assert driver.locate(driver.request()).tasks == driver.executions[2:]


def test_request_after_the_end_of_a_task_is_refused_when_such_checkpoints_are_switched_off():
    driver = Driver(checkpoints_after_tasks_finish=False).run()
    driver.steps(on.SubtaskFinished(driver.executions[0]), on.TriggerRequested("r", CheckpointProperties()))
    assert driver.one(out.RequestFailed).reason is Reason.NOT_ALL_REQUIRED_TASKS_RUNNING


def test_a_task_that_ends_unacknowledged_aborts():
    driver = Driver().run()
    driver.trigger()
    driver.ack(1, driver.executions[0])
    assert driver.step(on.SubtaskFinished(driver.executions[0])) == []
    driver.step(on.SubtaskFinished(driver.executions[1]))
    assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_DECLINED_TASK_CLOSING
    assert driver.of(out.FailJob) == []


@pytest.mark.row("147.1")
def test_periodic_checkpoint_that_misses_the_end_of_a_task_does_not_count_as_failed():
    """Each bounded job would show some, and alerts on failed checkpoints would fire as it ends."""
    driver = Driver(interval_ms=1_000).run()
    driver.fire(driver.timer(on.TimerKind.PERIODIC))
    driver.locate(1)
    driver.step(on.SubtaskFinished(driver.executions[0]))
    assert driver.one(out.NotifyAborted).checkpoint_id == 1
    statistics = driver.coordinator.statistics()
    assert statistics.counts == CheckpointCounts()
    assert statistics.history == ()
    driver.fire(driver.timer(on.TimerKind.PERIODIC))
    driver.locate(2)
    for execution in driver.executions[1:]:
        driver.ack(2, execution)
    driver.publish(2)
    assert driver.coordinator.statistics().counts == CheckpointCounts(total=1, completed=1)


@pytest.mark.row("147.6", "147.7")
def test_union_state_of_a_partly_finished_vertex_is_that_of_the_others():
    """Or the last subtasks of a vertex would wait for a checkpoint that never completes."""
    union = SubtaskState(
        {"source": OperatorSubtaskState(lists=(OperatorListState("u", OperatorStateMode.UNION, (7,)),))}
    )
    driver = Driver().run()
    driver.step(on.SubtaskFinished(driver.executions[0]))
    driver.trigger()
    driver.ack(1, driver.executions[1], state=union)
    driver.ack(1, driver.executions[2])
    driver.ack(1, driver.executions[3])
    checkpoint = driver.one(out.WriteMetadata).checkpoint
    assert set(checkpoint.states) == {("v-source", 1), ("v-sink", 0), ("v-sink", 1)}
    restored = assign_states(checkpoint, driver.graph).subtasks
    assert [restored["v-source", index]["source"].lists[0].items for index in range(2)] == [(7,), (7,)]


@pytest.mark.row("76.3")
def test_in_flight_data_of_a_finished_subtask_is_kept_with_its_marker():
    driver = Driver().run(finished_on_restore=frozenset({"v-source"}))
    driver.trigger()
    file = StateFile("/shared/x", 9, "crc:1")
    stream = ChannelStateStream(0, 1, "schema", (ChannelStateSegment(file, 2, 7),))
    operators = {"source": OperatorSubtaskState()}
    first, *others = driver.executions
    driver.ack(1, first, state=SubtaskState(operators, 11, outputs=(stream,)))
    for execution in others:
        driver.ack(1, execution)
    checkpoint = driver.one(out.WriteMetadata).checkpoint
    assert checkpoint.fully_finished_vertices == {"v-source"}
    assert checkpoint.states[first.key] == SubtaskState(bytes=7, outputs=(stream,))
    assert set(checkpoint.states) == {first.key, ("v-sink", 0), ("v-sink", 1)}
    assert CompletedCheckpoint.from_json(checkpoint.to_json()) == checkpoint
    assert checkpoint.states[first.key].files() == [file]


def test_finished_on_restore_stays_finished():
    driver = Driver().run(finished_on_restore=frozenset({"v-source"}))
    assert driver.written().fully_finished_vertices == {"v-source"}


@pytest.mark.row("147.4")
def test_at_the_end_of_data_a_checkpoint_is_triggered_at_once_and_only_once():
    driver = Driver().run()
    for execution in driver.executions[:-1]:
        assert driver.step(on.EndOfDataReached(execution)) == []
    driver.step(on.EndOfDataReached(driver.executions[-1]))
    number = driver.one(out.InitializeLocation).checkpoint_id
    driver.locate(number)
    driver.ack_all(number)
    driver.publish(number)
    for execution in driver.executions:
        assert driver.step(on.SubtaskFinished(execution)) == []


@pytest.mark.row("147.4")
def test_a_last_checkpoint_that_fails_is_tried_again_when_no_period_is_set():
    driver = Driver(tolerable_failed_checkpoints=1).run()
    for execution in driver.executions:
        driver.step(on.EndOfDataReached(execution))
    driver.locate(1)
    driver.step(on.Declined(1, driver.executions[0], Reason.CHECKPOINT_ASYNC_EXCEPTION))
    driver.fire(driver.timer(on.TimerKind.FINAL_CHECKPOINT))
    assert driver.one(out.InitializeLocation).checkpoint_id == 2
