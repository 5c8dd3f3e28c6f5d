"""Messages to workers: who gets which, and what happens when a worker is gone."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster.control_endpoint import Peer
from ckpt_runtime.jobmaster.deployment_planner import SlotPlacement, plan_deployments
from ckpt_runtime.jobmaster.slot_pool import Slot, Worker
from ckpt_runtime.jobmaster.task_gateway import TaskGateway
from ckpt_runtime.network.connections import message_length
from ckpt_runtime.scheduler.deployment import Program

GRAPH = JobGraph("job", (JobVertex("s", (OperatorNode("s", "s", "source"),), 2),), ())
OPTIONS = CheckpointOptions(CheckpointProperties(), "file:///chk-1")
TASKS = tuple(ExecutionId("s", index, 0) for index in range(2))


class Wire:
    """A socket's writing end that keeps what was written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None:
        return

    def messages(self) -> list[dict[str, Any]]:
        found, data = [], self.data
        while data:
            length = message_length(data[:4])
            found.append(orjson.loads(data[4 : 4 + length]))
            data = data[4 + length :]
        return found


def slot(index: int) -> tuple[Slot, Wire]:
    wire = Wire()
    agent = Peer(Wire(), {"role": "agent", "host": "h", "cpus": []})  # type: ignore[arg-type]
    return Slot(f"0-{index}", 0, agent, worker(wire, f"w{index}")), wire


def worker(wire: Wire, worker_id: str) -> Worker:
    return Worker(worker_id, Peer(wire, {"role": "worker", "data_address": ["h", 1]}))  # type: ignore[arg-type]


@pytest.fixture
def both() -> list[tuple[Slot, Wire]]:
    return [slot(0), slot(1)]


@pytest.fixture
def gateway(both: list[tuple[Slot, Wire]]) -> TaskGateway:
    gateway = TaskGateway(b"archive")
    deploy(gateway, both, 7)
    return gateway


def deploy(gateway: TaskGateway, both: list[tuple[Slot, Wire]], number: int) -> None:
    placements = [SlotPlacement(("h", 1)) for _ in both]
    program = Program("p", "m:f", ())
    deployments = plan_deployments("0" * 32, GRAPH, program, placements, deployment=number, attempt=0, restored=None)
    gateway.deploy([slot for slot, _ in both], deployments)


def test_each_worker_gets_its_part_and_the_archive_once(gateway: TaskGateway, both: list[tuple[Slot, Wire]]) -> None:
    deploy(gateway, both, 8)
    for index, (slot_, wire) in enumerate(both):
        first, second = wire.messages()
        assert [task["subtask_index"] for task in first["deployment"]["subtasks"]] == [index]
        assert base64.b64decode(first["archive"]) == b"archive"
        assert "archive" not in second
        assert slot_.worker is not None
        assert slot_.worker.used
    assert gateway.deployment == 8


def test_messages_go_to_the_workers_of_their_tasks(gateway: TaskGateway, both: list[tuple[Slot, Wire]]) -> None:
    assert gateway.trigger(1, 5, OPTIONS, TASKS[:1])
    gateway.complete(1, TASKS)
    gateway.abort(2, -1, TASKS[1:])
    gateway.abort(3, 1, TASKS[1:])
    first, second = (wire.messages()[1:] for _, wire in both)
    assert [message["type"] for message in first] == ["trigger", "complete"]
    assert first[0] == {
        "type": "trigger", "checkpoint_id": 1, "timestamp": 5, "options": OPTIONS.to_json(), "tasks": [["s", 0]],
        "deployment": 7,
    }  # fmt: skip
    assert [message.get("latest_completed") for message in second] == [None, None, 1]
    assert all(message["deployment"] == 7 for message in first + second)


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
    assert [message["type"] for message in both[1][1].messages()[1:]] == ["trigger", "cancel"]


def test_a_lost_slot_hosts_nothing_that_lives(gateway: TaskGateway, both: list[tuple[Slot, Wire]]) -> None:
    both[1][0].lost = True
    assert not gateway.lives(1)
    assert gateway.index_of(both[1][0]) == 1
    assert gateway.index_of(slot(5)[0]) is None
    assert not gateway.lives(9)
    deploy(gateway, both[:1], 8)
    assert gateway.index_of(both[1][0]) is None


def test_before_the_first_deployment_nobody_lives() -> None:
    gateway = TaskGateway(b"")
    assert gateway.deployment == -1
    assert not gateway.cancel(0)
