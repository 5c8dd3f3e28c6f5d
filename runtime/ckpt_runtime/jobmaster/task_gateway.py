"""The job master's side of communication with workers: what each slot runs, and the messages in both directions.

With slot sharing, slot ``i`` hosts subtask ``i`` of every vertex. A deployment is planned on the driver's event loop.
Planning therefore takes time in proportion to the number of subtasks, not of channels, which the workers set up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, Partitioning
from ckpt_runtime.jobmaster.job_host import Cancellable, JobHost
from ckpt_runtime.jobmaster.slots import LOSS_GRACE_S, Slot, Worker
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.control_messages import (
    AlignSources,
    CancelDeployment,
    DeploymentMessage,
    DeploySubtasks,
    LimitSources,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    TaskMessage,
    TriggerCheckpoint,
    WorkerHeartbeat,
)
from ckpt_runtime.scheduler.core_events import RestoredState
from ckpt_runtime.scheduler.deployment import Address, Deployment, JobDescriptor, SubtaskDescriptor
from ckpt_runtime.scheduler.job_events import FailureInfo


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of the deployment that one worker was given."""

    slot: Slot
    worker: Worker
    tasks: frozenset[SubtaskKey]

    @property
    def lives(self) -> bool:
        return not self.slot.lost and self.slot.worker is self.worker


class TaskGateway:
    """One deployment at a time: slot ``i`` runs subtask ``i`` of every vertex."""

    def __init__(self, archive: bytes) -> None:
        self.archive = archive
        self._job: JobDescriptor | None = None
        self._sent_job: set[str] = set()
        self._sent_archive: set[str] = set()
        self._parts: list[_Part] = []
        self._indexes: dict[Slot, int] = {}
        self.deployment = -1

    def close(self) -> None:
        """Drops the archive, since nothing more is deployed."""
        self.archive = b""

    def deploy(self, slots: Sequence[Slot], job: JobDescriptor, deployments: Sequence[Deployment]) -> None:
        """Sends each worker its part. Every slot must have a worker."""
        self.deployment = deployments[0].deployment
        self._parts = []
        self._indexes = {slot: index for index, slot in enumerate(slots)}
        if job != self._job:
            self._job = job
            self._sent_job.clear()
        for slot, deployment in zip(slots, deployments, strict=True):
            worker = slot.worker
            assert worker is not None
            worker.used = True
            # Sent once to each process: they may be large, and an in-place restart should take milliseconds.
            worker_id = worker.worker_id
            sent_job = None if worker_id in self._sent_job else job
            archive = None if worker_id in self._sent_archive else self.archive
            self._sent_job.add(worker_id)
            self._sent_archive.add(worker_id)
            worker.peer.send(DeploySubtasks(deployment, sent_job, archive))
            tasks = frozenset((task.vertex_id, task.subtask_index) for task in deployment.subtasks)
            self._parts.append(_Part(slot, worker, tasks))

    def lives(self, subtask: int) -> bool:
        """Whether the worker that got the subtask is still there."""
        return subtask < len(self._parts) and self._parts[subtask].lives

    def note_failure(self, subtask: int) -> None:
        """Counts a failure of a subtask in the worker."""
        if self.lives(subtask):
            self._parts[subtask].worker.failures += 1

    def index_of(self, slot: Slot) -> int | None:
        """The subtask index that the slot hosts in this deployment."""
        return self._indexes.get(slot)

    def sender_of(self, slot: Slot, message: DeploymentMessage) -> int | None:
        """The subtask index of the message's sender; None when it belongs to an earlier deployment or a lost worker.

        Raises MalformedMessageError when the message names a subtask that the worker was not given.
        """
        index = self.index_of(slot)
        # Messages of the previous deployment may still arrive, from the same process.
        if message.deployment != self.deployment or index is None or not self.lives(index):
            return None
        named: list[SubtaskKey] = []
        if isinstance(message, TaskMessage):
            named = [(message.vertex_id, message.subtask)]
        elif isinstance(message, WorkerHeartbeat):
            named = [(task.vertex_id, task.subtask) for task in message.tasks]
            named += [(snapshot.vertex_id, snapshot.subtask) for snapshot in message.snapshots]
        for vertex_id, subtask in named:
            if (vertex_id, subtask) not in self._parts[index].tasks:
                raise MalformedMessageError(
                    f"the message {type(message).__name__} of a worker names subtask {subtask} of vertex "
                    f"{vertex_id[:100]!r}, which was not deployed to it"
                )
        return index

    def cancel(self, subtask: int) -> bool:
        """Asks one worker to end its part; False if it was lost."""
        return self._send(subtask, CancelDeployment(self.deployment))

    def trigger(
        self, checkpoint_id: int, timestamp: int, options: CheckpointOptions, tasks: Iterable[ExecutionId]
    ) -> bool:
        """Triggers the checkpoint; returns False when a trigger could not be delivered."""
        return self._send_by_slot(
            TriggerCheckpoint(self.deployment, (), checkpoint_id, timestamp, options), _keys(tasks)
        )

    def complete(self, checkpoint_id: int, tasks: Iterable[ExecutionId]) -> None:
        self._send_by_slot(NotifyCheckpointComplete(self.deployment, (), checkpoint_id), _keys(tasks))

    def abort(self, checkpoint_id: int, latest_completed: int, tasks: Iterable[ExecutionId]) -> None:
        latest = None if latest_completed < 0 else latest_completed
        self._send_by_slot(NotifyCheckpointAborted(self.deployment, (), checkpoint_id, latest), _keys(tasks))

    def align(self, minimum: int, tasks: Iterable[SubtaskKey]) -> None:
        self._send_by_slot(AlignSources(self.deployment, (), minimum), tasks)

    def limit(self, rates: Mapping[str, str], graph: JobGraph) -> None:
        """Sends new rates to the sources of the deployment."""
        heads = [
            (vertex.id, vertex.parallelism) for vertex in graph.vertices if vertex.operators[0].kind == "range_reader"
        ]
        tasks = [(vertex_id, index) for vertex_id, parallelism in heads for index in range(parallelism)]
        self._send_by_slot(LimitSources(self.deployment, (), {uid: float(rate) for uid, rate in rates.items()}), tasks)

    def _send_by_slot(
        self,
        message: TriggerCheckpoint | NotifyCheckpointComplete | NotifyCheckpointAborted | AlignSources | LimitSources,
        tasks: Iterable[SubtaskKey],
    ) -> bool:
        by_slot: dict[int, list[SubtaskKey]] = {}
        for task in tasks:
            by_slot.setdefault(task[1], []).append(task)
        # A list, not a generator: all() must not stop sending at the first lost worker.
        delivered = [
            self._send(subtask, msgspec.structs.replace(message, tasks=tuple(addressed)))
            for subtask, addressed in by_slot.items()
        ]
        return all(delivered)

    def _send(
        self,
        subtask: int,
        message: CancelDeployment
        | TriggerCheckpoint
        | NotifyCheckpointComplete
        | NotifyCheckpointAborted
        | AlignSources
        | LimitSources,
    ) -> bool:
        if not self.lives(subtask):
            return False
        self._parts[subtask].worker.peer.send(message)
        return True


def _keys(tasks: Iterable[ExecutionId]) -> list[SubtaskKey]:
    return [task.key for task in tasks]


GRACE_MS = (LOSS_GRACE_S + 1.0) * 1000
"""Longer than the notice of the loss itself may take; in milliseconds."""


class SecondaryFailures:
    """Holds back failures that another one probably caused: of subtasks that lost the channel to another worker.

    Neighbours notice the end of a worker before the driver knows about it. Their failures are delayed until then, for a
    limited time, so that the first failure of an attempt is its cause. ``deliver`` gets each failure once, in order.
    """

    def __init__(self, host: JobHost, deliver: Callable[[ExecutionId, FailureInfo], None]) -> None:
        self._host = host
        self._deliver = deliver
        self._held: list[tuple[ExecutionId, FailureInfo]] = []
        self._timer: Cancellable | None = None

    def hold(self, executions: Iterable[ExecutionId], cause: FailureInfo) -> None:
        self._held += [(execution, cause) for execution in executions]
        if self._timer is None:
            self._timer = self._host.call_later(GRACE_MS, self.release)

    def release(self) -> None:
        """Delivers the held failures: the cause is known, or the time for it is over."""
        # Taken and cleared before the first is delivered: a delivery may hold others.
        held = list(self._held)
        self.forget()
        for execution, cause in held:
            self._deliver(execution, cause)

    def forget(self) -> None:
        """Drops the held failures."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where slot ``i`` of a job is: its worker's data address, and the core to bind the worker to (None: unbound)."""

    address: Address
    pin_cpu: int | None = None


def plan_deployments(
    graph: JobGraph,
    slots: Sequence[SlotPlacement],
    *,
    deployment: int,
    attempt: int,
    restored: RestoredState | None,
    sinks: Mapping[str, SinkLineage] = MappingProxyType({}),
) -> list[Deployment]:
    """One deployment per slot, in slot order."""
    addresses = tuple(slot.address for slot in slots)
    reached = {vertex.id: _reached_slots(graph, vertex) for vertex in graph.vertices}
    deployments = []
    for slot, placement in enumerate(slots):
        vertices = [vertex for vertex in graph.vertices if slot < vertex.parallelism]
        uids = {operator.uid for vertex in vertices for operator in vertex.operators}
        deployments.append(
            Deployment(
                deployment=deployment,
                attempt=attempt,
                subtasks=tuple(_subtask(vertex, slot, restored) for vertex in vertices),
                addresses=addresses[: max((reached[vertex.id] for vertex in vertices), default=0)],
                restored_checkpoint_id=None if restored is None else restored.checkpoint_id,
                snapshot_directory="" if restored is None else restored.directory,
                snapshot_owned=restored is None or restored.owned,
                pin_cpu=placement.pin_cpu,
                sinks={uid: lineage for uid, lineage in sinks.items() if uid in uids},
            )
        )
    return deployments


def _reached_slots(graph: JobGraph, vertex: JobVertex) -> int:
    """A subtask of the vertex sends to slots with a lower index than this; forwarded rows stay in its own slot."""
    edges = [edge for edge in graph.outputs(vertex.id) if edge.partitioning is not Partitioning.FORWARD]
    return max((graph.vertex(edge.target).parallelism for edge in edges), default=0)


def _subtask(vertex: JobVertex, index: int, restored: RestoredState | None) -> SubtaskDescriptor:
    if restored is None:
        return SubtaskDescriptor(vertex.id, index)
    key = (vertex.id, index)
    finished = vertex.id in restored.finished_vertices
    return SubtaskDescriptor(
        vertex.id, index, dict(restored.states.get(key, {})), finished, restored.in_flight.get(key, ())
    )
