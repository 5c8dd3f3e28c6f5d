"""Drives a real coordinator by hand: a manual clock, short names for events, and the effects of each step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    EdgeDescriptor,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from tests.support.driven import Driven, later

SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL)
NATIVE = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.NATIVE)
SYNC_SAVEPOINT = CheckpointProperties(CheckpointType.SYNC_SAVEPOINT, SavepointFormat.CANONICAL)
START_REL, START_ABS = 1_000, 1_700_000_000_000


def vertex(name: str, parallelism: int, *more: str, kind: str = "map", max_parallelism: int = 128) -> JobVertex:
    head = OperatorNode(uid=name, name=name, kind=kind)
    rest = tuple(OperatorNode(uid=uid, name=uid, kind="map") for uid in more)
    return JobVertex(id=f"v-{name}", operators=(head, *rest), parallelism=parallelism, max_parallelism=max_parallelism)


def two_vertex_graph(partitioning: Partitioning = Partitioning.HASH, parallelism: int = 2) -> JobGraph:
    source, sink = vertex("source", parallelism, kind="source"), vertex("sink", parallelism)
    return JobGraph("job", (source, sink), (JobEdge(source.id, sink.id, partitioning),))


def state_with_file(path: str, size: int = 10) -> SubtaskState:
    handle = KeyedStateHandle(KeyGroupRange(0, 127), StateFile(path, size, "crc:1"), ())
    return SubtaskState({"source": OperatorSubtaskState(keyed=(handle,))}, size)


def checkpoint_of(
    graph: JobGraph,
    states: dict[tuple[str, int], SubtaskState],
    finished: Iterable[SubtaskKey] = (),
    number: int = 1,
    directory: str = "dir",
) -> CompletedCheckpoint:
    """A checkpoint of the graph's vertices and edges with these states."""
    vertices = tuple(VertexDescriptor.of(entry) for entry in graph.vertices)
    edges = tuple(EdgeDescriptor.of(edge) for edge in graph.edges)
    plain = CheckpointProperties()
    return CompletedCheckpoint(number, "job", 0, 0, directory, plain, vertices, states, frozenset(finished), edges)


class Driver(Driven):
    """A coordinator."""

    def __init__(self, graph: JobGraph | None = None, **settings: Any) -> None:
        self.graph = two_vertex_graph() if graph is None else graph
        arguments = {name: settings.pop(name) for name in ("recovered", "first_delay_ms", "ids") if name in settings}
        self.coordinator = CheckpointCoordinator("job", self.graph, CheckpointConfiguration(**settings), **arguments)
        super().__init__(self.coordinator.handle, Instant(START_REL, START_ABS))
        self.attempt = 0

    @property
    def executions(self) -> tuple[ExecutionId, ...]:
        return tuple(
            ExecutionId(vertex.id, index, self.attempt)
            for vertex in self.graph.vertices
            for index in range(vertex.parallelism)
        )

    def run(self, **event: Any) -> Driver:
        return self.steps(on.JobRunning(self.executions, **event))

    def request(self, request_id: str = "r", properties: CheckpointProperties | None = None, after_ms: int = 0) -> int:
        """Requests a checkpoint that triggers at once; returns its id."""
        self.step(on.TriggerRequested(request_id, properties or CheckpointProperties(), "sp"), after_ms)
        return self.one(out.InitializeLocation).checkpoint_id

    def locate(self, checkpoint_id: int) -> out.TriggerSources:
        self.step(on.LocationReady(checkpoint_id, f"dir/{checkpoint_id}"))
        return self.one(out.TriggerSources)

    def ack(self, checkpoint_id: int, execution: ExecutionId, after_ms: int = 0, **more: Any) -> list[out.Effect]:
        event = {"state": SubtaskState({}, 5), "directory": f"dir/{checkpoint_id}", **more}
        return self.step(on.Acknowledged(checkpoint_id, execution, **event), after_ms)

    def ack_all(self, checkpoint_id: int) -> list[out.Effect]:
        for execution in self.executions:
            self.ack(checkpoint_id, execution)
        return self.last

    def trigger(self, request_id: str = "r", properties: CheckpointProperties | None = None) -> int:
        """Up to the trigger messages."""
        checkpoint_id = self.request(request_id, properties)
        self.locate(checkpoint_id)
        return checkpoint_id

    def complete(self, request_id: str = "r", properties: CheckpointProperties | None = None) -> int:
        """A whole checkpoint, its clean-up included."""
        checkpoint_id = self.trigger(request_id, properties)
        self.ack_all(checkpoint_id)
        self.publish(checkpoint_id)
        return checkpoint_id

    def written(self, request_id: str = "r", properties: CheckpointProperties | None = None) -> CompletedCheckpoint:
        """A checkpoint up to the order to write its metadata, which is returned."""
        self.ack_all(self.trigger(request_id, properties))
        return self.one(out.WriteMetadata).checkpoint

    def publish(self, checkpoint_id: int) -> list[out.Effect]:
        effects = self.step(on.MetadataWritten(checkpoint_id))
        if self.of(out.AddToStore):
            effects = self.step(on.StoreAdded(checkpoint_id))
            for removed in self.of(out.RemoveFromStore):
                self.step(on.StoreRemoved(removed.checkpoint_id))
                if self.of(out.DiscardCheckpoint):
                    self.step(on.CleanupDone(removed.checkpoint_id))
        self.last = effects
        return effects

    @property
    def deleted(self) -> list[tuple[str, ...]]:
        """All shared files that were to be deleted."""
        return [effect.paths for effect in self.trace if isinstance(effect, out.DeleteSharedFiles)]

    def fire(self, effect: out.ScheduleTimer) -> list[out.Effect]:
        """Lets the time of a scheduled timer come."""
        self.now = later(self.now, max(0, effect.at_rel_ms - self.now.rel_ms))
        return self.step(on.TimerFired(effect.timer, effect.generation))

    def timer(self, kind: on.TimerKind) -> out.ScheduleTimer:
        """The timer of a kind that was scheduled last."""
        found = [e for e in self.trace if isinstance(e, out.ScheduleTimer) and e.timer.kind is kind]
        return found[-1]
