"""Turns a job graph, its slots and the restored state into one deployment per worker. Pure.

With slot sharing, slot ``i`` hosts subtask ``i`` of every vertex. The driver's event loop runs this, so it takes time
in proportion to the number of subtasks; the workers set up the channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, Partitioning
from ckpt_runtime.scheduler.core_events import RestoredState
from ckpt_runtime.scheduler.deployment import Address, Deployment, SubtaskDescriptor


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
