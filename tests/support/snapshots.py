"""Small snapshots of one vertex with one stateful operator, written without a job."""

from __future__ import annotations

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, VertexDescriptor
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import (
    KeyedSection,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.snapshot_metadata import write_metadata
from ckpt_runtime.storage.state_file_writer import StateFileWriter

JOB = "0123456789abcdef" * 2
VERTEX, UID = "vertex", "counts"


def completed(directory: Location, *states: SubtaskState) -> CompletedCheckpoint:
    """The metadata of a snapshot with these states, by subtask."""
    vertices = (VertexDescriptor(VERTEX, "counts", (UID,), max(1, len(states)), 128),)
    by_subtask = {(VERTEX, subtask): state for subtask, state in enumerate(states)}
    return CompletedCheckpoint(1, JOB, 1, 2, directory.url, CheckpointProperties(), vertices, by_subtask)


def keyed(*files: StateFile) -> SubtaskState:
    """The state of a subtask that lies in these files, 5 bytes of each."""
    section = KeyedSection("count", {}, ((0, 0, 5),))
    handles = tuple(KeyedStateHandle(KeyGroupRange(0, 127), file, (section,)) for file in files)
    return SubtaskState({UID: OperatorSubtaskState(handles)}, sum(file.length for file in files))


def write_file(directory: Location, content: bytes = b"state", threshold: int = 0) -> StateFile:
    """A state file, or inline content up to the threshold."""
    with StateFileWriter(directory, threshold) as writer:
        writer.write(content)
        return writer.finish()


def write_snapshot(directory: Location, *files: StateFile) -> CompletedCheckpoint:
    """Publishes a snapshot of one subtask that refers to these files, and to one of its own."""
    checkpoint = completed(directory, keyed(write_file(directory), *files))
    write_metadata(directory, checkpoint.to_json())
    return checkpoint
