"""The deployment that the driver sends to a worker: one deployment of one slot. Values only, with wire types.

With slot sharing, slot ``i`` hosts subtask ``i`` of every vertex. A deployment does not list its channels, whose number
grows with the square of the parallelism: worker and peer number them from the graph alone (:func:`input_channels`,
:func:`output_channels`). Every channel of a deployment has one index, the same on both ends; together with the
deployment's number, it is the wire id.

A job's graph, configuration and version are one value, :class:`JobPlan`, which is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream, CompletedCheckpoint, OperatorSubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, Partitioning

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class SubtaskDescriptor:
    """One subtask. ``state`` is the restored state assigned to it, by operator uid.

    ``in_flight`` data is processed, in this order, before anything that the channels deliver; ``edge`` of a stream is
    its input gate.
    """

    vertex_id: str
    subtask_index: int
    state: dict[str, OperatorSubtaskState] = field(default_factory=dict)
    finished: bool = False
    in_flight: tuple[ChannelStateStream, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """How to run the pipeline's entry point again: archive directory, ``module:function`` and its arguments."""

    directory: str
    entry: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JobDescriptor:
    """The data that all deployments of a job share until its graph changes."""

    job_id: str
    graph: JobGraph
    program: Program


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything one worker runs for one attempt of a job, in addition to the :class:`JobDescriptor`.

    ``addresses`` are the data addresses of the workers in slots 0, 1, ..., as far as the subtasks send to them. If not
    ``snapshot_owned``, the user keeps the restored snapshot's files: no new snapshot may refer to them. ``sinks`` are
    the transactional ones among the worker's operators, by operator uid.
    """

    deployment: int
    attempt: int
    subtasks: tuple[SubtaskDescriptor, ...]
    addresses: tuple[Address, ...] = ()
    restored_checkpoint_id: int | None = None
    snapshot_directory: str = ""
    snapshot_owned: bool = True
    pin_cpu: int | None = None
    sinks: dict[str, SinkLineage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Channel:
    """One end of a channel: its index, and the subtask at the other end."""

    index: int
    peer: int


def input_channels(graph: JobGraph, vertex_id: str, subtask: int) -> list[tuple[JobEdge, list[Channel]]]:
    """The input gates of a subtask, each with its edge and its channels in the order of the producing subtasks."""
    return [
        (edge, [Channel(first + peer * consumers + subtask, peer) for peer in _peers(edge, subtask, producers)])
        for edge, first, producers, consumers in _numbered(graph)
        if edge.target == vertex_id
    ]


def output_channels(graph: JobGraph, vertex_id: str, subtask: int) -> list[tuple[JobEdge, list[Channel]]]:
    """The outputs of a subtask, each with its edge and its channels in the order of the consuming subtasks."""
    return [
        (edge, [Channel(first + subtask * consumers + peer, peer) for peer in _peers(edge, subtask, consumers)])
        for edge, first, _, consumers in _numbered(graph)
        if edge.source == vertex_id
    ]


def _numbered(graph: JobGraph) -> Iterator[tuple[JobEdge, int, int, int]]:
    """Each edge with its first channel's index, producers and consumers. Equal edges are numbered separately."""
    first = 0
    for edge in graph.edges:
        producers, consumers = graph.vertex(edge.source).parallelism, graph.vertex(edge.target).parallelism
        yield edge, first, producers, consumers
        first += producers * consumers


def _peers(edge: JobEdge, subtask: int, parallelism: int) -> Iterable[int]:
    return (subtask,) if edge.partitioning is Partitioning.FORWARD else range(parallelism)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """``configuration`` is the job's ``own`` over the cluster's. Like the checkpoint ``settings`` in it, it does not
    include FLIP-571's overrides.

    A new job starts from ``savepoint``, in ``restore_mode``.
    """

    graph: JobGraph
    configuration: Configuration
    settings: CheckpointConfiguration
    savepoint: CompletedCheckpoint | None = None
    restore_mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM
    allow_non_restored_state: bool = False
    own: OwnConfiguration = field(default_factory=OwnConfiguration)
