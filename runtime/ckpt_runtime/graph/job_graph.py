"""The job graph: the part of a plan that is sent between processes.

Structure only, no user code: the driver schedules it, stores it and shows it; a worker re-runs the pipeline's entry
point, gets the same graph (compared by :attr:`JobGraph.fingerprint`) and takes the operators by their uid.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from msgspec import to_builtins

from ckpt_runtime.configuration.registry import VERTEX_PARALLELISM
from ckpt_runtime.graph.key_groups import DEFAULT_MAX_PARALLELISM
from ckpt_runtime.graph.schema import DocumentError, Parallelism, checked

MAX_SUBTASKS = 100_000
"""Maximum number of subtasks of one job, since the driver keeps them in memory."""


class Partitioning(StrEnum):
    """How a vertex's output is spread over the consumer's subtasks (Flink's ship strategies)."""

    FORWARD = "FORWARD"
    HASH = "HASH"
    REBALANCE = "REBALANCE"
    BROADCAST = "BROADCAST"


_ALIGNED_ONLY = ("range_reader", "committer")
_SINGLE = ("enumerator", "table", "committer")


@dataclass(frozen=True, slots=True)
class OperatorNode:
    """One operator of a chain. ``uid`` identifies its state; ``uid_given`` is false when it was derived.

    ``output_directory`` is where a transactional sink keeps hidden files until their commit; None for other operators.
    ``transaction_timeout_ms`` is the age at which the target of a sink aborts transactions; None for other operators.
    ``alignment_group`` is the group of a source's readers whose watermarks are aligned. It begins with :data:`BATCHES`
    for sources whose batches wait for each other, and operators that notice which are complete. None without alignment.
    ``observation`` is the JSON text of an ``observe``'s :class:`ObserveSpec`, by which the driver computes metrics.
    ``starts_fresh``: it ignores its state in the snapshot of another job.
    """

    uid: str
    name: str
    kind: str
    stateful: bool = False
    uid_given: bool = True
    user_code: bool = False
    output_directory: str | None = None
    transaction_timeout_ms: int | None = None
    alignment_group: str | None = None
    observation: str | None = None
    starts_fresh: bool = False


WATERMARK = "watermark"
"""The kind of operators that determine event time. They keep the time that they have reached, but no rows."""
FILTERED = ".filtered."
"""Separates the uid of a watermark and the name of a query in the uids of the query's own watermark and of the filters
in front of it. Rows have the same columns with and without these operators."""
BATCHES = "$batches of "
"""The prefix of the name of a group of sources whose batches wait for each other; the uid of an operator of their query
follows."""


@dataclass(frozen=True, slots=True)
class JobVertex:
    """Chained operators, head first, that run in one thread per subtask. ``id`` is 32 hex digits."""

    id: str
    operators: tuple[OperatorNode, ...]
    parallelism: Parallelism
    max_parallelism: Parallelism = DEFAULT_MAX_PARALLELISM

    @property
    def name(self) -> str:
        return " -> ".join(operator.name for operator in self.operators)

    @property
    def greatest_parallelism(self) -> int:
        """Upper bound for rescaling: the number of key groups, or 1 for a vertex that must have a single subtask."""
        return 1 if self.operators[0].kind in _SINGLE else self.max_parallelism


@dataclass(frozen=True, slots=True)
class JobEdge:
    """All channels from one vertex to one input gate of another."""

    source: str
    target: str
    partitioning: Partitioning
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobGraph:
    """A checked plan. ``vertices`` are in topological order; the edges into a vertex, in order, are its input gates.

    ``analyses`` holds Spark's answers to the program's requests while it was planned, by the digest of each request, so
    that a worker plans the same program without Spark. ``tables`` are the digests of the program's static tables, whose
    rows are stored with the program's files. ``explained`` has the plans that the program showed by ``explain()``, as
    texts.
    """

    name: str
    vertices: tuple[JobVertex, ...]
    edges: tuple[JobEdge, ...]
    configuration: dict[str, str] = field(default_factory=dict)
    analyses: dict[str, str] = field(default_factory=dict)
    tables: tuple[str, ...] = ()
    explained: tuple[str, ...] = ()

    def vertex(self, vertex_id: str) -> JobVertex:
        return next(vertex for vertex in self.vertices if vertex.id == vertex_id)

    @property
    def fresh_operators(self) -> frozenset[str]:
        """The uids of operators that ignore their state in the snapshot of another job."""
        return frozenset(node.uid for vertex in self.vertices for node in vertex.operators if node.starts_fresh)

    @property
    def output_directories(self) -> dict[str, str]:
        """The output directories of the transactional sinks, by operator uid."""
        nodes = (node for vertex in self.vertices for node in vertex.operators)
        return {node.uid: node.output_directory for node in nodes if node.output_directory is not None}

    @property
    def transaction_timeout_ms(self) -> int | None:
        """The least age at which the target of a sink aborts a transaction; None without such a sink."""
        nodes = [node.transaction_timeout_ms for vertex in self.vertices for node in vertex.operators]
        return min((age for age in nodes if age is not None), default=None)

    @property
    def alignment_groups(self) -> dict[str, list[tuple[str, int]]]:
        """The subtasks whose watermarks are aligned with each other, by the names of their groups."""
        groups: dict[str, list[tuple[str, int]]] = {}
        for vertex in self.vertices:
            if (group := vertex.operators[0].alignment_group) is not None:
                groups.setdefault(group, []).extend((vertex.id, index) for index in range(vertex.parallelism))
        return groups

    @property
    def sinks(self) -> dict[str, str]:
        """The operators of sinks, by uid, each with the uid of the sink that it belongs to: its own, or a committer's
        writers'."""
        found = {node.uid: node.uid for vertex in self.vertices for node in vertex.operators if node.kind == "sink"}
        for vertex in self.vertices:
            if vertex.operators[0].kind == "committer":
                [edge] = self.inputs(vertex.id)
                found[vertex.operators[0].uid] = self.vertex(edge.source).operators[-1].uid
        return found

    def warnings(self, interval_ms: int | None) -> tuple[str, ...]:
        """Returns warnings about probable mistakes; ``interval_ms`` is None for a job without periodic checkpoints."""
        nodes = (node for vertex in self.vertices for node in vertex.operators)
        sinks = [node.name for node in nodes if node.kind == "committer" or node.output_directory is not None]
        if interval_ms is not None or not sinks:
            return ()
        names = ", ".join(map(repr, sinks))
        text = f"no execution.checkpointing.interval is set, and rows of {names} are committed with checkpoints: "
        return (text + "they only become visible with a savepoint, or when the job has FINISHED",)

    def inputs(self, vertex_id: str) -> list[JobEdge]:
        return [edge for edge in self.edges if edge.target == vertex_id]

    def overtakes(self, edge: JobEdge) -> bool:
        """Whether a barrier may overtake data on that edge.

        False for edges to a reader of offset ranges or to a committer: their in-flight data is work that checkpoints
        count (all partitions of a range, all committables of a checkpoint), is small, and must be processed in order.
        """
        return self.vertex(edge.target).operators[0].kind not in _ALIGNED_ONLY

    def outputs(self, vertex_id: str) -> list[JobEdge]:
        return [edge for edge in self.edges if edge.source == vertex_id]

    @property
    def slots(self) -> int:
        """The number of slots that the job needs: with slot sharing, its greatest parallelism."""
        return max(vertex.parallelism for vertex in self.vertices)

    def with_parallelism(self, parallelism: Mapping[str, int]) -> JobGraph:
        """This graph rescaled, by vertex id; its configuration makes workers' plans agree. Checks nothing."""
        vertices = tuple(replace(v, parallelism=parallelism.get(v.id, v.parallelism)) for v in self.vertices)
        rescaled = json.dumps({vertex.id: vertex.parallelism for vertex in vertices})
        configuration = {**self.configuration, VERTEX_PARALLELISM: rescaled}
        return replace(self, vertices=vertices, configuration=configuration)

    @property
    def fingerprint(self) -> str:
        """Equal for two runs of the same deterministic entry point; leaves the configuration and texts out.

        It also leaves out timeouts, groups and observations, which graphs stored by earlier versions lack.
        """
        document = self.to_json()
        del document["configuration"], document["explained"]
        for vertex in document["vertices"]:
            for operator in vertex["operators"]:
                del operator["transaction_timeout_ms"], operator["alignment_group"], operator["observation"]
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    @property
    def plan_fingerprint(self) -> str:
        """As :attr:`fingerprint`, but unchanged by a rescale, which does not change the operators of a plan either."""
        return self.with_parallelism(dict.fromkeys((vertex.id for vertex in self.vertices), 1)).fingerprint

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_builtins(self)
        return document

    @classmethod
    def from_json(cls, document: object) -> JobGraph:
        """Raises :class:`DocumentError` for a wrong structure, and for inconsistent parts."""
        graph = checked(document, cls)
        graph.check()
        return graph

    def check(self) -> None:
        """Raises :class:`DocumentError` for inconsistent parts."""
        ids = [vertex.id for vertex in self.vertices]
        if not ids or len(set(ids)) != len(ids):
            raise DocumentError("the ids of a graph's vertices must be distinct, and there must be at least one vertex")
        if (subtasks := sum(vertex.parallelism for vertex in self.vertices)) > MAX_SUBTASKS:
            raise DocumentError(f"the graph has {subtasks} subtasks; at most {MAX_SUBTASKS} are allowed")
        if any(not vertex.operators for vertex in self.vertices):
            raise DocumentError("a vertex of the graph has no operator")
        if any(end not in ids for edge in self.edges for end in (edge.source, edge.target)):
            raise DocumentError("an edge of the graph leads to a vertex that does not exist")


def vertex_id_of(uid: str) -> str:
    """32 hex digits that depend only on the head operator's uid, so that REST ids survive a resubmission."""
    return hashlib.md5(f"vertex:{uid}".encode(), usedforsecurity=False).hexdigest()
