"""Small snapshots of one vertex with one stateful operator, written without a job."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from tempfile import mkdtemp

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    KeyedSection,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.snapshot import Snapshot, UnsharedFiles, open_snapshot
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.hashing import hash_columns, key_groups_of
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.storage.filesystem import Location, make_directory
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.state_files import StateFileWriter

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


def write_keyed_state(backend: str, directory: Location, ranges: Sequence[KeyGroupRange]) -> Snapshot:
    """A checkpoint of a backend with a value, a list and a timer for each of a hundred keys, in one part per range."""
    key, value = pa.schema([("id", pa.int64())]), pa.schema([("v", pa.int64())])
    make_directory(directory)
    states = []
    for owned in ranges:
        parameters = BackendParameters(UID, owned, 128, partial(mkdtemp, dir=directory.parent.path))
        with closing(create_backend(backend, parameters)) as opened:
            values, lists = opened.value_state("v", key, value), opened.list_state("l", key, value)
            timers = opened.timers("t", key)
            numbers = pa.record_batch({"id": pa.array(range(100), pa.int64())})
            for number, group in enumerate(key_groups_of(hash_columns(numbers, ["id"]), 128).tolist()):
                if group in owned:
                    values.put((number,), (number * 10,))
                    lists.append((number,), [(1,), (0,)])
                    timers.register((number,), number)
            handles = tuple(opened.snapshot(1, CheckpointProperties()).write(UnsharedFiles(directory)))
            states.append(SubtaskState({UID: OperatorSubtaskState(handles)}))
    write_metadata(directory, completed(directory, *states).to_json())
    return open_snapshot(directory)


def write_snapshot(directory: Location, *files: StateFile) -> CompletedCheckpoint:
    """Publishes a snapshot of one subtask that refers to these files, and to one of its own."""
    checkpoint = completed(directory, keyed(write_file(directory), *files))
    write_metadata(directory, checkpoint.to_json())
    return checkpoint
