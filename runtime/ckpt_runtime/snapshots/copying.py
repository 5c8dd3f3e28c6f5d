"""Copies a self-contained snapshot to a new directory, which may be on another file system, and verifies the copy.

The copy is equal, or a savepoint in which sources have other positions.

``_metadata`` is copied last and unchanged: until then there is no snapshot at the target. If a step fails, the files
that were written are deleted.

A conversion makes a savepoint in native or canonical form of any snapshot without data in flight. The keyed state of
each operator and subtask in turn is restored into a state backend, as a task does it, and written again. No operator
requests the states, and a backend writes states that are not requested unchanged into its next snapshot. The state of
one subtask has to fit where its backend keeps it: for the memory backend, into memory.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ANY,
    KeyedHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.snapshots.authoring import discard
from ckpt_runtime.snapshots.keyed_states import rewrite
from ckpt_runtime.snapshots.positions import repositioned, repositions_of
from ckpt_runtime.snapshots.snapshot import (
    Snapshot,
    UnsharedFiles,
    missing_files_as_damage,
    new_directory,
    open_snapshot,
)
from ckpt_runtime.sources import StartPosition
from ckpt_runtime.state.registry import check_name
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, InvalidLocationError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_empty_directory,
    discard_file,
    file_size,
    make_directory,
    read_range,
)
from ckpt_runtime.storage.metadata import METADATA_NAME, has_metadata, read_metadata_bytes, write_metadata
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.savepoint_entry import change_entry, read_entry
from ckpt_runtime.storage.state_files import StateFileWriter, is_relative, locate
from ckpt_runtime.version import VERSION

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_AT_ONCE = 4
_ALWAYS_A_FILE = -1

Progress = Callable[[int, int], None]
"""Called with the number of copied bytes and the number of all bytes."""


@dataclass(frozen=True, slots=True)
class CopiedSnapshot:
    """The location of a copy, and the number and size of its files."""

    location: str
    files: int
    bytes: int


def copy_snapshot(
    source: str | Location, target: Location, progress: Progress = lambda _copied, _total: None
) -> CopiedSnapshot:
    """Copies a snapshot to ``target``, which must not exist. The checksum of each file is verified during the copy.

    Raises :class:`InvalidLocationError` for a snapshot that is not self-contained, :class:`AlreadyExistsError` for an
    existing target, :class:`CorruptFileError` for a damaged file, and the errors of ``open_snapshot``.
    """
    file, metadata = read_metadata_bytes(source)
    snapshot = open_snapshot(file.parent)
    files = own_files(snapshot)
    with new_directory(target, snapshot.directory, partial(_discard, files, target)):
        copy_files(snapshot.directory, files, target, progress)
        publish(target.child(METADATA_NAME), metadata)
    _copy_entry(snapshot.directory, target)
    return CopiedSnapshot(target.url, len(files), sum(file.length for file in files) + len(metadata))


def default_target(source: Location) -> Location:
    """A new directory next to a snapshot, for a copy with other positions."""
    return source.parent.child(f"{source.name}-repositioned-{secrets.token_hex(3)}")


def reposition_snapshot(
    source: str | Location,
    target: Location,
    positions: Mapping[str, StartPosition],
    progress: Progress = lambda _copied, _total: None,
) -> CopiedSnapshot:
    """Writes a savepoint to ``target``: the snapshot with these positions, by uid of the source.

    The target must not exist, unless it holds the result of an equal call. Raises :class:`InvalidLocationError` also
    for positions that the snapshot cannot be given, and otherwise the errors of :func:`copy_snapshot`. A failed call
    leaves no files behind.
    """
    snapshot = open_snapshot(source)
    metadata = repositioned(snapshot.metadata, positions)
    files = own_files(snapshot)
    properties = CheckpointProperties(CheckpointType.SAVEPOINT, metadata.format)
    written = replace(metadata, directory=target.url, properties=properties, written_by=VERSION)
    try:
        with new_directory(target, snapshot.directory, partial(_discard, files, target)):
            copy_files(snapshot.directory, files, target, progress)
            write_metadata(target, written.to_json())
    except AlreadyExistsError:
        if not has_metadata(target) or open_snapshot(target).metadata.to_json() != written.to_json():
            raise
    else:
        _copy_entry(snapshot.directory, target, repositions_of(metadata))
    return CopiedSnapshot(target.url, len(files), sum(file.length for file in files))


def _copy_entry(source: Location, target: Location, positions: dict[str, str] | None = None) -> None:
    """Copies the catalogue entry, if there is one, without the results of verifications and drills.

    The facts about the job hold for the copy, too; the results were obtained on the original.
    """
    try:
        entry = read_entry(source)
        if entry is not None:
            facts = replace(entry, verifications=(), drills=(), disposing=None)
            if positions is not None:
                facts = replace(facts, repositioned=positions)
            change_entry(target, lambda _: facts, lambda: facts)
    except (StorageError, ValueError) as error:
        logger.warning("the copy %s is not recorded in the catalogue: %s", target.url, error)


def own_files(snapshot: Snapshot) -> list[StateFile]:
    """The files of a self-contained snapshot, each once.

    Raises :class:`InvalidLocationError` if it refers to files outside its directory, and :class:`CorruptFileError` if
    two handles describe the same file differently.
    """
    found: dict[str, StateFile] = {}
    outside = []
    for state in snapshot.metadata.states.values():
        for file in state.files():
            if not is_relative(file.path) or file.path == METADATA_NAME:
                outside.append(file.path)
            elif found.setdefault(file.path, file) != file:
                url = locate(snapshot.directory, file.path).url
                raise CorruptFileError(f"{url}: two handles of the snapshot disagree about its content", url)
    if outside:
        raise InvalidLocationError(
            f"{snapshot.directory.url} is not self-contained: {len(outside)} of its files lie elsewhere, the first is "
            f"{outside[0]}; take a savepoint, which is",
            snapshot.directory.url,
        )
    return list(found.values())


def copy_files(directory: Location, files: list[StateFile], target: Location, progress: Progress) -> None:
    """Copies files under the same names, several at once. Raises the first error, as :func:`copy_snapshot`."""
    copied, total = 0, sum(file.length for file in files)
    for parent in sorted({locate(target, file.path).parent for file in files}, key=lambda location: location.path):
        make_directory(parent)
    # An interruption may hit the start of a thread, which the pool then does not know and cannot wait for. Therefore no
    # thread writes before all have been started.
    started, interrupted = threading.Event(), threading.Event()

    def copy(file: StateFile) -> None:
        started.wait()
        if not interrupted.is_set():
            source, copy = locate(directory, file.path), locate(target, file.path)
            with missing_files_as_damage():
                found = file_size(source)
            if found != file.length:
                raise CorruptFileError(f"{source.url}: damaged, it has {found} bytes and not {file.length}", source.url)
            with StateFileWriter(copy.parent, _ALWAYS_A_FILE, name=copy.name) as writer:
                for offset in range(0, max(1, file.length), _CHUNK_BYTES):
                    writer.write(read_range(source, offset, min(_CHUNK_BYTES, file.length - offset)))
                written = writer.finish()
            if written.checksum != file.checksum:
                message = f"{source.url}: damaged, its checksum is {written.checksum} and not {file.checksum}"
                raise CorruptFileError(message, source.url)

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy") as pool:
        try:
            running: dict[Future[None], StateFile] = {pool.submit(copy, file): file for file in files}
            started.set()
            for done in as_completed(running):
                done.result()
                copied += running[done].length
                progress(copied, total)
        finally:
            if not started.is_set():
                interrupted.set()
                started.set()
            pool.shutdown(wait=True, cancel_futures=True)


def _discard(files: list[StateFile], target: Location) -> None:
    copies = [locate(target, file.path) for file in files]
    for copy in copies:
        discard_file(copy)
    parents = {copy.parent for copy in copies} | {target}
    for parent in sorted(parents, key=lambda location: -len(location.path)):
        with suppress(StorageError):
            delete_empty_directory(parent)


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
