"""A completed checkpoint or savepoint: the content of its metadata. Immutable, with a JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_runtime.checkpoint.documents import check_checkpoint
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.graph.job_graph import JobEdge, JobVertex, Partitioning


@dataclass(frozen=True, slots=True)
class VertexDescriptor:
    """What a snapshot remembers of one vertex: ``operator_uids`` head first."""

    id: str
    name: str
    operator_uids: tuple[str, ...]
    parallelism: int
    max_parallelism: int

    @classmethod
    def of(cls, vertex: JobVertex) -> VertexDescriptor:
        uids = tuple(operator.uid for operator in vertex.operators)
        return cls(vertex.id, vertex.name, uids, vertex.parallelism, vertex.max_parallelism)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "name": self.name,
            "operator_uids": list(self.operator_uids),
            "parallelism": self.parallelism,
            "max_parallelism": self.max_parallelism,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> VertexDescriptor:
        return cls(
            document["id"],
            document["name"],
            tuple(document["operator_uids"]),
            document["parallelism"],
            document["max_parallelism"],
        )


@dataclass(frozen=True, slots=True)
class EdgeDescriptor:
    """What a snapshot remembers of one edge: in-flight data can only be given to the same edge again."""

    source: str
    target: str
    partitioning: Partitioning
    keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, edge: JobEdge) -> EdgeDescriptor:
        return cls(edge.source, edge.target, edge.partitioning, edge.keys)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "partitioning": self.partitioning.value,
            "keys": list(self.keys),
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> EdgeDescriptor:
        partitioning = Partitioning(document["partitioning"])
        return cls(document["source"], document["target"], partitioning, tuple(document["keys"]))


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """``timestamp`` is the trigger time that travelled in the barriers, ``completion_timestamp`` when it was finalised.

    ``directory`` is the external path; paths in ``states`` are relative to it unless absolute. A subtask is in
    ``states`` or in ``finished`` (its operators had finished, FLIP-147). It is in both when it had finished and the
    barrier overtook data in its channels; its state is that in-flight data alone then, without operators. ``edges`` are
    those of the job, in its order; none in snapshots from before there was in-flight data.
    """

    id: int
    job_id: str
    timestamp: int
    completion_timestamp: int
    directory: str
    properties: CheckpointProperties
    vertices: tuple[VertexDescriptor, ...]
    states: Mapping[SubtaskKey, SubtaskState] = field(default_factory=dict)
    finished: frozenset[SubtaskKey] = frozenset()
    edges: tuple[EdgeDescriptor, ...] = ()

    @property
    def is_savepoint(self) -> bool:
        return self.properties.is_savepoint

    @property
    def state_size(self) -> int:
        return sum(state.bytes for state in self.states.values())

    @property
    def fully_finished_vertices(self) -> frozenset[str]:
        """Ids of vertices all of whose subtasks had finished."""
        return frozenset(
            vertex.id
            for vertex in self.vertices
            if all((vertex.id, subtask) in self.finished for subtask in range(vertex.parallelism))
        )

    def moved_to(self, directory: str) -> CompletedCheckpoint:
        """The same snapshot, found in another directory."""
        return replace(self, directory=directory)

    def to_json(self) -> dict[str, Any]:
        """Deterministic: subtasks in the order of vertex id and index."""
        return {
            "id": self.id,
            "job_id": self.job_id,
            "timestamp": self.timestamp,
            "completion_timestamp": self.completion_timestamp,
            "directory": self.directory,
            "properties": self.properties.to_json(),
            "vertices": [vertex.to_json() for vertex in self.vertices],
            "edges": [edge.to_json() for edge in self.edges],
            "states": [
                {"vertex": vertex, "subtask": subtask, "state": self.states[vertex, subtask].to_json()}
                for vertex, subtask in sorted(self.states)
            ],
            "finished": [[vertex, subtask] for vertex, subtask in sorted(self.finished)],
        }

    @classmethod
    def from_json(cls, document: dict[str, Any], directory: str | None = None) -> CompletedCheckpoint:
        """``directory`` is where the metadata was found; it replaces the recorded one (snapshots can be moved).

        Raises :class:`DocumentError` on a document of another shape.
        """
        states = check_checkpoint(document)
        return cls(
            id=document["id"],
            job_id=document["job_id"],
            timestamp=document["timestamp"],
            completion_timestamp=document["completion_timestamp"],
            directory=document["directory"] if directory is None else directory,
            properties=CheckpointProperties.from_json(document["properties"]),
            vertices=tuple(VertexDescriptor.from_json(vertex) for vertex in document["vertices"]),
            states=states,
            finished=frozenset((vertex, subtask) for vertex, subtask in document["finished"]),
            edges=tuple(EdgeDescriptor.from_json(edge) for edge in document.get("edges", [])),
        )
