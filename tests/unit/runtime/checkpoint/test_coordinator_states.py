"""Every state of the coordinator with every event: a legal step, or the named error and no change."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from tests.unit.runtime.checkpoint.checkpoint_driver import Driver, two_vertex_graph


def created() -> Driver:
    return Driver(interval_ms=1_000)


def running() -> Driver:
    driver = created().run()
    driver.trigger()
    return driver


def writing() -> Driver:
    driver = running()
    driver.ack_all(1)
    return driver


def restoring() -> Driver:
    driver = writing()
    driver.steps(on.TasksLeftRunning(), on.RestoreRequested("x"))
    return driver


def closing() -> Driver:
    driver = writing()
    driver.step(on.Shutdown("CANCELED"))
    return driver


def closed() -> Driver:
    driver = created()
    driver.step(on.Shutdown("FINISHED"))
    return driver


def fenced() -> Driver:
    driver = writing()
    driver.step(on.Shutdown("SUSPENDED", fenced=True))
    return driver


STATES = {
    "created": (created, CoordinatorState.CREATED),
    "running": (running, CoordinatorState.RUNNING),
    "writing": (writing, CoordinatorState.RUNNING),
    "restoring": (restoring, CoordinatorState.RESTORING),
    "closing": (closing, CoordinatorState.CLOSING),
    "closed": (closed, CoordinatorState.CLOSED),
    "fenced": (fenced, CoordinatorState.CLOSED),
}
TASK = ExecutionId("v-source", 0, 0)
EVENTS: tuple[Any, ...] = (
    on.JobRunning(Driver().executions),
    on.TasksLeftRunning(),
    on.SubtaskFinished(TASK),
    on.EndOfDataReached(TASK),
    on.RestoreRequested("y"),
    on.PeriodicTriggerStopped(),
    on.PeriodicTriggerStarted(),
    on.Shutdown("FAILED"),
    on.ConfigurationPatched(CheckpointConfiguration()),
    on.RetentionAsked(),
    on.GraphReplaced(two_vertex_graph(parallelism=3)),
    on.BacklogChanged(processing_backlog=True),
    on.TriggerRequested("r2", CheckpointProperties()),
    on.TimerFired(on.TimerId(on.TimerKind.PERIODIC), 1),
    on.TimerFired(on.TimerId(on.TimerKind.CANCELLER, 1), 0),
    on.TimerFired(on.TimerId(on.TimerKind.FINAL_CHECKPOINT), 0),
    on.LocationReady(1, "dir/1"),
    on.LocationReady(99, "dir/99"),
    on.LocationFailed(1, "m"),
    on.TriggerFailed(1, "m"),
    on.Acknowledged(1, TASK, "dir/1", SubtaskState()),
    on.Declined(1, TASK, Reason.CHECKPOINT_DECLINED),
    on.ProgressReported(1, TASK, on.CheckpointMetrics()),
    on.MetadataWritten(1),
    on.MetadataFailed(1, "m"),
    on.MetadataUnknown(1),
    on.StoreAdded(1),
    on.StoreFailed(1, "m"),
    on.StoreUnknown(1),
    on.StoreRemoved(1),
    on.StoreRemoveFailed(1),
    on.CleanupDone(1),
    on.LeftoversFound(((1, "dir/1"),), ("/shared/x",)),
)


def snapshot(driver: Driver) -> Any:
    coordinator = driver.coordinator
    return coordinator.state, coordinator.pending_ids, coordinator.retained, coordinator.statistics().counts


def test_the_events_are_complete():
    assert {type(event) for event in EVENTS} == set(on.CoordinatorEvent.__args__)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_state_and_event(state, event):
    build, expected = STATES[state]
    driver = build()
    assert driver.coordinator.state is expected
    before = snapshot(driver)
    try:
        driver.step(event)
    except UnexpectedEventError:
        assert snapshot(driver) == before
        assert driver.step(on.SubtaskFinished(ExecutionId("nobody", 0, 0))) == []
    assert isinstance(driver.coordinator.state, CoordinatorState)


def test_the_error_names_state_and_event():
    with pytest.raises(UnexpectedEventError, match=r"MetadataWritten\(checkpoint_id=1\) .* state created"):
        created().step(on.MetadataWritten(1))


def test_unknown_event_is_refused():
    with pytest.raises(UnexpectedEventError):
        created().step("hello")


@pytest.mark.parametrize("event", [on.JobRunning(()), on.JobRunning((*Driver().executions, TASK))])
def test_executions_must_be_those_of_the_graph(event):
    driver = created()
    with pytest.raises(ValueError, match="subtasks"):
        driver.step(event)
    assert driver.coordinator.state is CoordinatorState.CREATED
