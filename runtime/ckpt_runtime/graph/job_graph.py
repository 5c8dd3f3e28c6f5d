"""The job graph: the part of a plan that travels.

Structure only, no user code: the driver schedules it, stores it and shows it; a worker re-runs the pipeline's entry
point, gets the same graph (compared by :attr:`JobGraph.fingerprint`) and takes the operators by their uid.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ckpt_runtime.graph.key_groups import DEFAULT_MAX_PARALLELISM


class Partitioning(StrEnum):
    """How a vertex's output is spread over the consumer's subtasks (Flink's ship strategies)."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    BROADCAST = "BROADCAST"


_ALIGNED_ONLY = ("range_reader", "committer")


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One operator of a chain. ``uid`` is what its state is kept under; ``uid_given`` is false when it was derived.

    ``output_directory`` is where a transactional sink hides files until their commit, None for all others.
    """

    uid: str
    name: str
    kind: str
    stateful: bool = False
    uid_given: bool = True
    user_code: bool = False
    output_directory: str | None = None


@dataclass(frozen=True, slots=True)
class JobVertex:
    """Chained operators, head first, that run in one thread per subtask. ``id`` is 32 hex digits."""

    id: str
    operators: tuple[OperatorNode, ...]
    parallelism: int
    max_parallelism: int = DEFAULT_MAX_PARALLELISM

    @property
    def name(self) -> str:
        return " -> ".join(operator.name for operator in self.operators)

    @property
    def is_source(self) -> bool:
        return self.operators[0].kind in ("source", "enumerator")


@dataclass(frozen=True, slots=True)
class JobEdge:
    """All channels from one vertex to one input gate of another."""

    source: str
    target: str
    partitioning: Partitioning
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A checked plan. ``vertices`` are in topological order; the edges into a vertex, in order, are its input gates."""

    name: str
    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]
    configuration: dict[str, str] = field(default_factory=dict)

    def vertex(self, vertex_id: str) -> JobVertex:
        return next(vertex for vertex in self.vertices if vertex.id == vertex_id)

    @property
    def output_directories(self) -> dict[str, str]:
        """Those of the transactional sinks, by operator uid."""
        nodes = (node for vertex in self.vertices for node in vertex.operators)
        return {node.uid: node.output_directory for node in nodes if node.output_directory is not None}

    def inputs(self, vertex_id: str) -> list[JobEdge]:
        return [edge for edge in self.edges if edge.target == vertex_id]

    def overtakes(self, edge: JobEdge) -> bool:
        """Whether a barrier may overtake data on that edge.

        Not to a reader of offset ranges or a committer: what is on its way to them is work that checkpoints count
        (all parts of a range, all committables of a checkpoint), little of it, and meant to be taken in order.
        """
        return self.vertex(edge.target).operators[0].kind not in _ALIGNED_ONLY

    def outputs(self, vertex_id: str) -> list[JobEdge]:
        return [edge for edge in self.edges if edge.source == vertex_id]

    @property
    def slots(self) -> int:
        """Slots that the job needs: with slot sharing, its greatest parallelism."""
        return max(vertex.parallelism for vertex in self.vertices)

    @property
    def fingerprint(self) -> str:
        """Equal for two runs of the same deterministic entry point; leaves the configuration out."""
        document = self.to_json()
        del document["configuration"]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> JobGraph:
        return cls(
            name=document["name"],
            vertices=tuple(
                JobVertex(
                    id=vertex["id"],
                    operators=tuple(OperatorNode(**operator) for operator in vertex["operators"]),
                    parallelism=vertex["parallelism"],
                    max_parallelism=vertex["max_parallelism"],
                )
                for vertex in document["vertices"]
            ),
            edges=tuple(
                JobEdge(
                    source=edge["source"],
                    target=edge["target"],
                    partitioning=Partitioning(edge["partitioning"]),
                    keys=tuple(edge["keys"]),
                )
                for edge in document["edges"]
            ),
            configuration=dict(document["configuration"]),
        )


def vertex_id_of(uid: str) -> str:
    """32 hex digits that depend on the head operator's uid alone, so that REST ids survive a resubmission."""
    return hashlib.md5(f"vertex:{uid}".encode(), usedforsecurity=False).hexdigest()
