"""Converts any snapshot without in-flight data to a savepoint in native or canonical form. Needs no job.

The keyed state of each operator and subtask in turn is restored into a state backend, as a task does it, and written
again. No operator requests the states, and a backend writes states that are not requested unchanged into its next
snapshot. The state of one subtask has to fit where its backend keeps it: for the memory backend, into memory.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from ckpt_runtime.checkpoint.completed_checkpoint import ANY, VertexDescriptor
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.checkpoint.state_handles import KeyedHandle, OperatorSubtaskState, SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.snapshots.authoring import discard
from ckpt_runtime.snapshots.keyed_states import rewrite
from ckpt_runtime.snapshots.snapshot import (
    Snapshot,
    UnsharedFiles,
    missing_files_as_damage,
    new_directory,
    open_snapshot,
)
from ckpt_runtime.state.registry import check_name
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.version import VERSION

Progress = Callable[[int, int], None]
"""Called with the number of converted subtasks and the number of all subtasks."""


@dataclass(frozen=True, slots=True)
class ConvertedSnapshot:
    """The location of the result, and the number and size of its files besides the metadata."""

    location: str
    files: int
    bytes: int


def convert_snapshot(
    source: str | Location,
    target: Location,
    savepoint_format: SavepointFormat,
    backend: str,
    progress: Progress = lambda _converted, _total: None,
) -> ConvertedSnapshot:
    """Writes a savepoint to ``target``, which must not exist. A native savepoint is written for ``backend``.

    Raises :class:`InvalidLocationError` for a snapshot that cannot be converted to this form,
    :class:`AlreadyExistsError` for an existing target, and StateError or StorageError for unreadable state. A failed
    conversion leaves no files behind.
    """
    snapshot = open_snapshot(source)
    backend = _backend_for(snapshot, savepoint_format, backend)
    prefix = f"{secrets.token_hex(4)}-"
    properties = CheckpointProperties(CheckpointType.SAVEPOINT, savepoint_format)
    conversion = _Conversion(snapshot, UnsharedFiles(target, prefix), backend, properties)
    with new_directory(target, snapshot.directory, partial(discard, target, prefix)):
        with missing_files_as_damage():
            states = conversion.states(progress)
        converted = replace(
            snapshot.metadata, directory=target.url, properties=properties, states=states, written_by=VERSION
        )
        write_metadata(target, converted.to_json())
    files = conversion.files.finished
    return ConvertedSnapshot(target.url, len(files), sum(file.length for file in files))


def _backend_for(snapshot: Snapshot, savepoint_format: SavepointFormat, backend: str) -> str:
    """The backend that reads and writes the state.

    Raises the errors of :func:`convert_snapshot`, and UnsupportedBackendError.
    """
    url, written_by = snapshot.directory.url, snapshot.metadata.state_backend
    if any(state.has_channel_state for state in snapshot.metadata.states.values()):
        raise InvalidLocationError(
            f"{url} is an unaligned checkpoint with in-flight data, which a savepoint cannot contain; restore a job "
            "from it and take a savepoint",
            url,
        )
    if savepoint_format is SavepointFormat.NATIVE and written_by not in (ANY, backend):
        raise InvalidLocationError(
            f"{url} has the native form of the state backend {written_by!r}, not of {backend!r}; convert it to the "
            "canonical form first",
            url,
        )
    used = backend if written_by == ANY else written_by
    check_name(used)
    return used


@dataclass(frozen=True, slots=True)
class _Conversion:
    snapshot: Snapshot
    files: UnsharedFiles
    backend: str
    properties: CheckpointProperties

    def states(self, progress: Progress) -> Mapping[SubtaskKey, SubtaskState]:
        """All states, converted."""
        metadata = self.snapshot.metadata
        subtasks = [(vertex, index) for vertex in metadata.vertices for index in range(vertex.parallelism)]
        converted: dict[SubtaskKey, SubtaskState] = {}
        for done, (vertex, index) in enumerate(subtasks, 1):
            known = metadata.states.get((vertex.id, index), SubtaskState())
            lists = {uid: operator.lists for uid, operator in known.operators.items()}
            keyed = {uid: self._keyed(uid, vertex, index) for uid in vertex.operator_uids}
            operators = {
                uid: OperatorSubtaskState(keyed[uid], lists.get(uid, ()))
                for uid in vertex.operator_uids
                if keyed[uid] or uid in lists
            }
            if operators or (vertex.id, index) in metadata.states:
                files = (file for handles in keyed.values() for handle in handles for file in handle.state_files())
                converted[vertex.id, index] = SubtaskState(operators, sum(file.length for file in files))
            progress(done, len(subtasks))
        return converted

    def _keyed(self, uid: str, vertex: VertexDescriptor, subtask: int) -> tuple[KeyedHandle, ...]:
        owned = key_group_range(vertex.max_parallelism, vertex.parallelism, subtask)
        states = self.snapshot.states(uid)
        handles = [h for state in states for h in state.keyed if len(h.key_groups.intersection(owned))]
        if not handles:
            return ()
        operator = (uid, owned, vertex.max_parallelism)
        return tuple(rewrite(self.snapshot, self.backend, operator, handles, self.properties, self.files))
