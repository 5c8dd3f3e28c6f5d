"""Messages to workers: who gets which, and what happens when a worker is gone."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, WorkerPeer
from ckpt_runtime.jobmaster.slots import Slot, Worker
from ckpt_runtime.jobmaster.task_gateway import SlotPlacement, TaskGateway, plan_deployments
from ckpt_runtime.network.agent_messages import ProcessIdentity, RegisterAgent, RegisterWorker
from ckpt_runtime.network.connections import MalformedMessageError, message_length
from ckpt_runtime.network.control_messages import (
    TO_WORKER,
    CancelDeployment,
    EndOfDataReport,
    SnapshotProgress,
    SubtaskMeasures,
    TriggerCheckpoint,
    WorkerHeartbeat,
)
from ckpt_runtime.scheduler.deployment import JobDescriptor, Program

GRAPH = JobGraph("job", (JobVertex("s", (OperatorNode("s", "s", "source"),), 2),), ())
OPTIONS = CheckpointOptions(CheckpointProperties(), "file:///chk-1")
NOWHERE = ProcessIdentity("", 1, 0)
TASKS = tuple(ExecutionId("s", index, 0) for index in range(2))


class Wire:
    """A socket's writing end that keeps what was written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        return

    def messages(self) -> list[Any]:
        found, data = [], self.data
        while data:
            length = message_length(data[:4])
            found.append(TO_WORKER.decode(data[4 : 4 + length]))
            data = data[4 + length :]
        return found


def slot(index: int) -> tuple[Slot, Wire]:
    wire = Wire()
    agent = AgentPeer(Wire(), RegisterAgent(f"0-{index}", "h", (), NOWHERE))  # type: ignore[arg-type]
    return Slot(agent, worker(wire, f"w{index}")), wire


def worker(wire: Wire, worker_id: str) -> Worker:
    return Worker(WorkerPeer(wire, RegisterWorker("0-0", worker_id, ("h", 1), NOWHERE, "")))  # type: ignore[arg-type]


@pytest.fixture
def both() -> list[tuple[Slot, Wire]]:
    return [slot(0), slot(1)]


@pytest.fixture
def gateway(both: list[tuple[Slot, Wire]]) -> TaskGateway:
    gateway = TaskGateway(b"archive")
    deploy(gateway, both, 7)
    return gateway


def deploy(gateway: TaskGateway, both: list[tuple[Slot, Wire]], number: int, graph: JobGraph = GRAPH) -> None:
    placements = [SlotPlacement(("h", 1)) for _ in both]
    job = JobDescriptor("0" * 32, graph, Program("p", "m:f", ()))
    deployments = plan_deployments(graph, placements, deployment=number, attempt=0, restored=None)
    gateway.deploy([slot for slot, _ in both], job, deployments)


def test_each_worker_gets_its_part_and_the_archive_and_an_unchanged_graph_once(
    gateway: TaskGateway, both: list[tuple[Slot, Wire]]
) -> None:
    deploy(gateway, both, 8)
    rescaled = GRAPH.with_parallelism({"s": 3})
    deploy(gateway, both, 9, rescaled)
    for index, (slot_, wire) in enumerate(both):
        first, second, third = wire.messages()
        assert [task.subtask_index for task in first.deployment.subtasks] == [index]
        assert [message.archive for message in (first, second, third)] == [b"archive", None, None]
        assert first.job.graph == GRAPH
        assert second.job is None
        assert third.job.graph == rescaled
        assert slot_.worker is not None
        assert slot_.worker.used
    assert gateway.deployment == 9


def test_a_worker_that_was_replaced_gets_nothing_of_the_old_deployment(
    gateway: TaskGateway, both: list[tuple[Slot, Wire]]
) -> None:
    fresh = Wire()
    both[0][0].worker = worker(fresh, "w9")
    assert not gateway.lives(0)
    assert gateway.lives(1)
    assert not gateway.trigger(1, 0, OPTIONS, TASKS)
    assert not gateway.cancel(0)
    assert gateway.cancel(1)
    assert fresh.messages() == []
    assert [type(message) for message in both[1][1].messages()[1:]] == [TriggerCheckpoint, CancelDeployment]


def test_a_lost_slot_hosts_nothing_that_lives(gateway: TaskGateway, both: list[tuple[Slot, Wire]]) -> None:
    both[1][0].lost = True
    assert not gateway.lives(1)
    assert gateway.index_of(both[1][0]) == 1
    assert gateway.index_of(slot(5)[0]) is None
    assert not gateway.lives(9)
    deploy(gateway, both[:1], 8)
    assert gateway.index_of(both[1][0]) is None


def test_a_worker_is_heard_for_its_own_subtasks_of_the_present_deployment(
    gateway: TaskGateway, both: list[tuple[Slot, Wire]]
) -> None:
    (first, _), (second, _) = both
    measures = SubtaskMeasures("s", 0, *[0] * 6, *[0.0] * 3)
    assert gateway.sender_of(first, EndOfDataReport(7, "s", 0)) == 0
    assert gateway.sender_of(second, WorkerHeartbeat(7)) == 1
    assert gateway.sender_of(first, WorkerHeartbeat(7, (measures,))) == 0
    assert gateway.sender_of(first, EndOfDataReport(6, "gone", 9)) is None
    assert gateway.sender_of(slot(3)[0], EndOfDataReport(7, "s", 0)) is None
    with pytest.raises(MalformedMessageError, match="EndOfDataReport of a worker names subtask 0 of vertex 's'"):
        gateway.sender_of(second, EndOfDataReport(7, "s", 0))
    with pytest.raises(MalformedMessageError, match="WorkerHeartbeat of a worker names subtask 0 of vertex 's'"):
        gateway.sender_of(second, WorkerHeartbeat(7, (measures,)))
    progress = SnapshotProgress("s", 0, 1, 2, 3)
    assert gateway.sender_of(first, WorkerHeartbeat(7, (), (progress,))) == 0
    with pytest.raises(MalformedMessageError, match="WorkerHeartbeat of a worker names subtask 0 of vertex 's'"):
        gateway.sender_of(second, WorkerHeartbeat(7, (), (progress,)))
