"""Every state of the coordinator with every event: a legal step, or the named error and no change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.coordinator import CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.executions import ExecutionId
from tests.support.driven import checkpoint_events
from tests.unit.runtime.checkpoint.checkpoint_driver import Driver, two_vertex_graph


def created() -> Driver:
    return Driver(interval_ms=1_000)


def writing() -> Driver:
    driver = created().run()
    driver.written()
    return driver


def running() -> Driver:
    driver = created().run()
    driver.trigger()
    return driver


STATES: dict[str, tuple[Callable[[], Driver], CoordinatorState]] = {
    "created": (created, CoordinatorState.CREATED),
    "running": (running, CoordinatorState.RUNNING),
    "writing": (writing, CoordinatorState.RUNNING),
    "restoring": (lambda: writing().steps(on.TasksLeftRunning(), on.RestoreRequested("x")), CoordinatorState.RESTORING),
    "closing": (lambda: writing().steps(on.Shutdown("CANCELED")), CoordinatorState.CLOSING),
    "closed": (lambda: created().steps(on.Shutdown("FINISHED")), CoordinatorState.CLOSED),
    "fenced": (lambda: writing().steps(on.Shutdown("SUSPENDED", fenced=True)), CoordinatorState.CLOSED),
}
EVENTS = checkpoint_events(Driver().executions, two_vertex_graph(parallelism=3))


def snapshot(driver: Driver) -> Any:
    coordinator = driver.coordinator
    return coordinator.state, coordinator.pending_ids, coordinator.retained, coordinator.statistics().counts


def test_the_events_are_complete():
    assert {type(event) for event in EVENTS} == set(on.CoordinatorEvent.__args__)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_event_is_a_legal_step_or_refused_without_a_change_in_every_state(event):
    for build, expected in STATES.values():
        driver = build()
        assert driver.coordinator.state is expected
        before = snapshot(driver)
        try:
            driver.step(event)
        except UnexpectedEventError:
            assert snapshot(driver) == before, expected
            assert driver.step(on.SubtaskFinished(ExecutionId("unknown", 0, 0))) == []
        assert isinstance(driver.coordinator.state, CoordinatorState)


def test_unknown_and_unexpected_events_are_refused_by_state_and_name():
    with pytest.raises(UnexpectedEventError, match=r"MetadataWritten\(checkpoint_id=1\) .* state created"):
        created().step(on.MetadataWritten(1))
    with pytest.raises(UnexpectedEventError):
        created().step("hello")


@pytest.mark.parametrize("event", [on.JobRunning(()), on.JobRunning((*Driver().executions, Driver().executions[0]))])
def test_executions_must_be_those_of_the_graph(event):
    driver = created()
    with pytest.raises(ValueError, match="subtasks"):
        driver.step(event)
    assert driver.coordinator.state is CoordinatorState.CREATED
