"""What the driver tells a worker to run: one deployment of one slot, as plain data with a JSON form.

Every channel of a deployment has one index, the same on both ends; with the deployment's number it is the wire id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import convert, to_builtins

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
    sinks: Mapping[str, SinkLineage] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "deployment": self.deployment,
            "attempt": self.attempt,
            "graph": self.graph.to_json(),
            "program": [self.program.directory, self.program.entry, list(self.program.arguments)],
            "subtasks": [_subtask_to_json(subtask) for subtask in self.subtasks],
            "restored_checkpoint_id": self.restored_checkpoint_id,
            "snapshot_directory": self.snapshot_directory,
            "snapshot_owned": self.snapshot_owned,
            "pin_cpu": self.pin_cpu,
            "sinks": {uid: [s.sink_id, list(s.ended_jobs), s.savepoint_id] for uid, s in self.sinks.items()},
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Deployment:
        directory, entry, arguments = document["program"]
        return cls(
            job_id=document["job_id"],
            deployment=document["deployment"],
            attempt=document["attempt"],
            graph=JobGraph.from_json(document["graph"]),
            program=Program(directory, entry, tuple(arguments)),
            subtasks=tuple(_subtask_from_json(subtask) for subtask in document["subtasks"]),
            restored_checkpoint_id=document["restored_checkpoint_id"],
            snapshot_directory=document["snapshot_directory"],
            snapshot_owned=document["snapshot_owned"],
            pin_cpu=document["pin_cpu"],
            sinks={uid: SinkLineage(sink, tuple(jobs), last) for uid, (sink, jobs, last) in document["sinks"].items()},
        )


def _subtask_to_json(subtask: SubtaskDescriptor) -> dict[str, Any]:
    return {
        "vertex_id": subtask.vertex_id,
        "subtask_index": subtask.subtask_index,
        "inputs": [[channel.index, channel.input_index, channel.local] for channel in subtask.inputs],
        "outputs": [
            {
                "partitioning": output.partitioning.value,
                "keys": list(output.keys),
                "max_parallelism": output.max_parallelism,
                "channels": [[channel.index, channel.address] for channel in output.channels],
            }
            for output in subtask.outputs
        ],
        "state": {uid: to_builtins(state) for uid, state in subtask.state.items()},
        "finished": subtask.finished,
        "in_flight": [to_builtins(stream) for stream in subtask.in_flight],
    }


def _subtask_from_json(document: dict[str, Any]) -> SubtaskDescriptor:
    return SubtaskDescriptor(
        vertex_id=document["vertex_id"],
        subtask_index=document["subtask_index"],
        inputs=tuple(InputChannelDescriptor(*channel) for channel in document["inputs"]),
        outputs=tuple(
            OutputDescriptor(
                Partitioning(output["partitioning"]),
                tuple(output["keys"]),
                output["max_parallelism"],
                tuple(
                    OutputChannelDescriptor(index, None if address is None else (address[0], address[1]))
                    for index, address in output["channels"]
                ),
            )
            for output in document["outputs"]
        ),
        state={uid: convert(state, OperatorSubtaskState) for uid, state in document["state"].items()},
        finished=document["finished"],
        in_flight=tuple(convert(stream, ChannelStateStream) for stream in document["in_flight"]),
    )
