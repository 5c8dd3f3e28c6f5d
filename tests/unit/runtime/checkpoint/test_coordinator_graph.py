"""The graph of a job is replaced between two deployments."""

from __future__ import annotations

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.coordinator import CoordinatorState, UnexpectedEventError
from ckpt_runtime.graph.job_graph import Partitioning
from tests.unit.runtime.checkpoint.checkpoint_driver import Driver, two_vertex_graph

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
