"""Turns a job graph, its slots and the restored state into one deployment per worker. Pure.

With slot sharing, slot ``i`` hosts subtask ``i`` of every vertex. Channels are numbered in the order of edges,
producing subtasks and consuming subtasks, so both ends of a channel know it by the same index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, Partitioning
from ckpt_runtime.scheduler.core_events import RestoredState
from ckpt_runtime.scheduler.deployment import (
    Address,
    Deployment,
    InputChannelDescriptor,
    OutputChannelDescriptor,
    OutputDescriptor,
    Program,
    SubtaskDescriptor,
)


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where slot ``i`` of a job is: its worker's data address, and the core to bind the worker to (None: unbound)."""

    address: Address
    pin_cpu: int | None = None


@dataclass(frozen=True, slots=True)
class _Channel:
    index: int
    source: SubtaskKey
    target: SubtaskKey


def plan_deployments(
    job_id: str,
    graph: JobGraph,
    program: Program,
    slots: Sequence[SlotPlacement],
    *,
    deployment: int,
    attempt: int,
    restored: RestoredState | None,
    sinks: Mapping[str, SinkLineage] = MappingProxyType({}),
) -> list[Deployment]:
    """One deployment per slot, in slot order."""
    links = _links(graph)
    return [
        Deployment(
            job_id=job_id,
            deployment=deployment,
            attempt=attempt,
            graph=graph,
            program=program,
            subtasks=tuple(
                _subtask(graph, (vertex.id, slot), slots, links, restored)
                for vertex in graph.vertices
                if slot < vertex.parallelism
            ),
            restored_checkpoint_id=None if restored is None else restored.checkpoint_id,
            snapshot_directory="" if restored is None else restored.directory,
            snapshot_owned=restored is None or restored.owned,
            pin_cpu=placement.pin_cpu,
            sinks=dict(sinks),
        )
        for slot, placement in enumerate(slots)
    ]


def _links(graph: JobGraph) -> list[tuple[JobEdge, list[_Channel]]]:
    """Each edge with its channels, in the graph's order. Equal edges (a stream united with itself) stay apart."""
    first = 0
    links = []
    for edge in graph.edges:
        links.append((edge, _channels(graph, edge, first)))
        first += graph.vertex(edge.source).parallelism * graph.vertex(edge.target).parallelism
    return links


def _channels(graph: JobGraph, edge: JobEdge, first: int) -> list[_Channel]:
    producers = graph.vertex(edge.source).parallelism
    consumers = graph.vertex(edge.target).parallelism
    return [
        _Channel(first + producer * consumers + consumer, (edge.source, producer), (edge.target, consumer))
        for producer in range(producers)
        for consumer in range(consumers)
        if edge.partitioning is not Partitioning.FORWARD or producer == consumer
    ]


def _subtask(
    graph: JobGraph,
    key: SubtaskKey,
    slots: Sequence[SlotPlacement],
    links: Sequence[tuple[JobEdge, list[_Channel]]],
    restored: RestoredState | None,
) -> SubtaskDescriptor:
    vertex_id, index = key
    incoming = [channels for edge, channels in links if edge.target == vertex_id]
    inputs = [
        InputChannelDescriptor(channel.index, gate, channel.source[1] == index)
        for gate, channels in enumerate(incoming)
        for channel in channels
        if channel.target == key
    ]
    outputs = [
        OutputDescriptor(
            edge.partitioning,
            edge.keys,
            graph.vertex(edge.target).max_parallelism,
            tuple(
                OutputChannelDescriptor(
                    channel.index, None if channel.target[1] == index else slots[channel.target[1]].address
                )
                for channel in channels
                if channel.source == key
            ),
        )
        for edge, channels in links
        if edge.source == vertex_id
    ]
    state = {} if restored is None else dict(restored.states.get(key, {}))
    finished = restored is not None and vertex_id in restored.finished_vertices
    in_flight = () if restored is None else restored.in_flight.get(key, ())
    return SubtaskDescriptor(vertex_id, index, tuple(inputs), tuple(outputs), state, finished, in_flight)
