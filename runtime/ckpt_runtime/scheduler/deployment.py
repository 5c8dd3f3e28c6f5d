"""What the driver tells a worker to run: one deployment of one slot. Values only, with types for the wire.

Every channel of a deployment has one index, the same on both ends; with the deployment's number it is the wire id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.checkpoint.state_handles import ChannelStateStream, OperatorSubtaskState
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class InputChannelDescriptor:
    """A receiving end: its wire index and the gate (job edge into the vertex) it belongs to."""

    index: int
    input_index: int
    local: bool


@dataclass(frozen=True, slots=True)
class OutputChannelDescriptor:
    """A sending end: its wire index and the consumer's worker; ``address`` is None inside one worker."""

    index: int
    address: Address | None


@dataclass(frozen=True, slots=True)
class OutputDescriptor:
    """All channels of one job edge that one subtask writes to, in the order of the consumer's subtasks."""

    partitioning: Partitioning
    keys: tuple[str, ...]
    max_parallelism: int
    channels: tuple[OutputChannelDescriptor, ...]


@dataclass(frozen=True, slots=True)
class SubtaskDescriptor:
    """One subtask. ``state`` is what the restored snapshot assigns to it, by operator uid.

    ``in_flight`` has to be processed, in this order, before anything that its channels deliver; ``edge`` of a stream is
    its input gate.
    """

    vertex_id: str
    subtask_index: int
    inputs: tuple[InputChannelDescriptor, ...]
    outputs: tuple[OutputDescriptor, ...]
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
class Deployment:
    """Everything that one worker runs of one attempt of a job.

    Without ``snapshot_owned`` the files of the restored snapshot stay the user's: no new one may refer to them.
    ``sinks`` are the transactional ones, by operator uid.
    """

    job_id: str
    deployment: int
    attempt: int
    graph: JobGraph
    program: Program
    subtasks: tuple[SubtaskDescriptor, ...]
    restored_checkpoint_id: int | None = None
    snapshot_directory: str = ""
    snapshot_owned: bool = True
    pin_cpu: int | None = None
    sinks: dict[str, SinkLineage] = field(default_factory=dict)
