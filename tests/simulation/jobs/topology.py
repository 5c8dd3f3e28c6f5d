"""Shapes of simulated jobs: which operators, how they are chained and connected, and what the sink must get."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning, vertex_id_of
from ckpt_runtime.graph.specs import MapInArrowSpec, OperatorSpec, ProcessSpec, SourceSpec
from tests.simulation.jobs.rows import SCHEMA, SOURCE_BITS, Row, SourceRows, counted, flat_mapped, joined, windowed

KEYED = ("count", "window", "join")


@dataclass(frozen=True, slots=True)
class Vertex:
    """Chained operators by kind, head first. Vertices of one ``group`` have the same parallelism (FORWARD edges)."""

    name: str
    operators: tuple[str, ...]
    group: int
    source: int = 0
    cost_ms: float = 0.0
    aligned_only: bool = False

    def uid(self, kind: str) -> str:
        return f"{kind}-{self.name}"


@dataclass(frozen=True, slots=True)
class Topology:
    """``edges`` are (source vertex, target vertex, partitioning) by name; ``sources`` has the rows of each source."""

    vertices: tuple[Vertex, ...]
    edges: tuple[tuple[str, str, Partitioning], ...]
    sources: tuple[SourceRows, ...]
    max_parallelism: int

    @property
    def groups(self) -> int:
        return 1 + max(vertex.group for vertex in self.vertices)

    @property
    def names(self) -> dict[str, str]:
        """Vertex ids by name."""
        return {vertex.name: vertex_id_of(vertex.name) for vertex in self.vertices}

    def plan(self, parallelism: tuple[int, ...], configuration: dict[str, str]) -> CompiledPlan:
        """``parallelism`` by group. The specs only say whether an operator is keyed."""
        ids = self.names
        vertices = tuple(
            JobVertex(
                ids[vertex.name],
                tuple(_node(vertex, kind) for kind in vertex.operators),
                parallelism[vertex.group],
                self.max_parallelism,
            )
            for vertex in self.vertices
        )
        edges = tuple(
            JobEdge(ids[source], ids[target], kind, ("key",) if kind is Partitioning.HASH else ())
            for source, target, kind in self.edges
        )
        uids = [(vertex.uid(kind), kind) for vertex in self.vertices for kind in vertex.operators]
        return CompiledPlan(
            JobGraph("simulated", vertices, edges, configuration),
            {uid: _spec(kind) for uid, kind in uids},
            {uid: SCHEMA for uid, kind in uids if kind != "source"},
            {uid: SCHEMA for uid, kind in uids if kind != "sink"},
        )

    def ordered(self, name: str, gate: int) -> bool:
        """Whether rows of one split and key reach that input in their order, as long as nothing is rescaled."""
        edges = [edge for edge in self.edges if edge[1] == name]
        source, _, partitioning = edges[gate]
        return partitioning is not Partitioning.REBALANCE and self._emits_in_order(source)

    def _emits_in_order(self, name: str) -> bool:
        vertex = next(vertex for vertex in self.vertices if vertex.name == name)
        if "join" in vertex.operators or "window" in vertex.operators:
            return False
        gates = sum(edge[1] == name for edge in self.edges)
        return all(self.ordered(name, gate) for gate in range(gates))

    def pointwise(self, name: str, gate: int) -> bool:
        """Whether rows on their way to that input pass an edge on which a new parallelism does not keep their order."""
        source, _, partitioning = [edge for edge in self.edges if edge[1] == name][gate]
        gates = sum(edge[1] == source for edge in self.edges)
        return partitioning is Partitioning.FORWARD or any(self.pointwise(source, number) for number in range(gates))

    def expected(self) -> Counter[tuple[int, int, int]]:
        """What the sink must hold at the end, as :func:`counted`, values left out behind a counter."""
        flows = {}
        for rows in self.sources:
            mid = self._has("flatmap", rows.source)
            flows[rows.source] = [out for row in rows.all() for out in (flat_mapped(row) if mid else [row])]
        kinds = {kind for vertex in self.vertices for kind in vertex.operators}
        everything = [row for flow in flows.values() for row in flow]
        if "join" in kinds:
            return counted(joined(flows[0], flows[1]))
        if "window" in kinds:
            return counted(windowed(everything))
        if "enrich" in kinds:
            everything = flows[0]
        if "count" not in kinds:
            return counted(everything)
        # Which row of a key gets which count depends on the order between inputs; each count comes once.
        counts: Counter[int] = Counter()
        result: Counter[tuple[int, int, int]] = Counter()
        for identity, key, _, _ in everything:
            counts[key] += 1
            result[identity, key, 0] += 1
            result[-1, key, counts[key]] += 1
        return result

    def _has(self, kind: str, source: int) -> bool:
        return any(kind in vertex.operators and vertex.source == source for vertex in self.vertices)


def observed(rows: list[Row], *, counts: bool) -> Counter[tuple[int, int, int]]:
    """The sink's content in the form of :meth:`Topology.expected`."""
    if not counts:
        return counted(rows)
    result: Counter[tuple[int, int, int]] = Counter()
    for identity, key, _, value in rows:
        result[identity, key, 0] += 1
        result[-1, key, value] += 1
    return result


def _node(vertex: Vertex, kind: str) -> OperatorNode:
    named = "committer" if vertex.aligned_only else kind
    return OperatorNode(vertex.uid(kind), kind, named, stateful=kind in KEYED, user_code=True)


def _spec(kind: str) -> OperatorSpec:
    if kind == "source":
        return SourceSpec("simulated", schema=SCHEMA)
    if kind in KEYED:
        return ProcessSpec(("key",), None, SCHEMA)
    return MapInArrowSpec(lambda batches: batches, SCHEMA)


def random_topology(rng: Random) -> Topology:
    """Two to six vertices: sources, perhaps something between, perhaps a stateful core, a sink."""
    core = rng.choice(
        ("count", "count", "union", "window", "window", "window", "window", "join", "join", "enrich", "enrich", "")
    )
    two = core in ("union", "join", "enrich")
    limit = SOURCE_BITS - 3 if two else 2 * SOURCE_BITS - 4
    keys = rng.choice((2, 4, 8))
    sources = tuple(
        SourceRows(source, rng.randint(4, limit), rng.choice((1, 2, 3, 4)), keys) for source in range(2 if two else 1)
    )
    builder = _Builder(rng)
    ends = [builder.source(rows.source) for rows in sources]
    if not two or rng.random() < 0.3:
        ends[0] = builder.between(ends[0])
    last = builder.core(core, ends)
    builder.sink(last)
    return Topology(tuple(builder.vertices), tuple(builder.edges), sources, rng.choice((3, 5, 8, 128)))


class _Builder:
    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self.vertices: list[Vertex] = []
        self.edges: list[tuple[str, str, Partitioning]] = []
        self._groups = 0

    def _add(self, name: str, operators: tuple[str, ...], group: int | None = None, source: int = 0) -> str:
        if group is None:
            group = self._groups
            self._groups += 1
        cost = self._rng.choice((0.0, 0.0, 0.0, 1.0, 3.0))
        self.vertices.append(Vertex(name, operators, group, source, cost))
        return name

    def _group_of(self, name: str) -> int:
        return next(vertex.group for vertex in self.vertices if vertex.name == name)

    def _chain(self, name: str, kind: str) -> str:
        """Behind the operators of a vertex that exists."""
        for position, known in enumerate(self.vertices):
            if known.name == name:
                operators = (*known.operators, kind)
                self.vertices[position] = Vertex(name, operators, known.group, known.source, known.cost_ms)
        return name

    def _behind(self, end: str, name: str, kind: str, source: int = 0) -> str:
        """Chained, or a vertex of its own."""
        how = self._rng.choice(("chain", Partitioning.FORWARD, Partitioning.REBALANCE, Partitioning.HASH))
        if how == "chain":
            return self._chain(end, kind)
        partitioning = Partitioning(how)
        group = self._group_of(end) if partitioning is Partitioning.FORWARD else None
        self._add(name, (kind,), group, source)
        self.edges.append((end, name, partitioning))
        return name

    def source(self, number: int) -> str:
        return self._add(f"source{number}", ("source",), source=number)

    def between(self, end: str) -> str:
        kind = self._rng.choice(("", "map", "flatmap", "flatmap"))
        return self._behind(end, "between", kind) if kind else end

    def core(self, kind: str, ends: list[str]) -> str:
        if not kind:
            return ends[0]
        operator = "count" if kind == "union" else kind
        self._add("core", (operator,))
        for gate, end in enumerate(ends):
            partitioning = Partitioning.HASH
            if kind == "enrich":
                partitioning = (
                    Partitioning.BROADCAST if gate else self._rng.choice((Partitioning.HASH, Partitioning.REBALANCE))
                )
            self.edges.append((end, "core", partitioning))
        return "core"

    def sink(self, end: str) -> str:
        name = self._behind(end, "sink", "sink")
        if name != end and self._rng.random() < 0.2:
            last = self.vertices[-1]
            self.vertices[-1] = Vertex(last.name, last.operators, last.group, cost_ms=last.cost_ms, aligned_only=True)
        return name
