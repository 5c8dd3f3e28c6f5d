"""Opens a snapshot by its path: its metadata, its state, and verification that all of its files are intact.

The files at a path are untrusted. Metadata that is not small is therefore first parsed in a process with limits, and
every fault in it raises the same kind of error. All functions block: calls for paths that users name belong in the
thread pool for such paths.

A few kilobytes can be forged so that they unpack to a document of many millions of values. Text of up to
``HARMLESS_TEXT_BYTES`` is harmless with any content, so small metadata needs no such process.

State backends read and write files here outside of a job. Each file is verified before it is used for a restore, and
the files of a failed write are deleted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateStream,
    CompletedCheckpoint,
    KeyedHandle,
    KeyedStateHandle,
    OperatorSubtaskState,
    OtherVersionError,
    StateFile,
    is_shared,
)
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.processes.limited_process import LimitedProcessError, ProcessLimits, run_limited, serve
from ckpt_runtime.storage.channel_state import ChannelStateReader
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, SnapshotDisposal, is_job_id
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import (
    Location,
    check_directory,
    delete_empty_directory,
    identity,
    is_directory,
    list_names,
    make_directory,
    resolve,
)
from ckpt_runtime.storage.metadata import decode, has_metadata, read_metadata_bytes, text_length
from ckpt_runtime.storage.state_files import DEFAULT_MEMORY_THRESHOLD, StateFileReader, StateFileWriter, is_relative

_LARGE_AND_FOREIGN = threading.Lock()
_DAMAGE = (CorruptFileError, NotFoundError, InvalidLocationError)
"""Errors that prove that a snapshot is damaged. With any other StorageError, this cannot be determined now."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault that prevents a restore. ``state`` describes the affected state, ``reason`` names the file."""

    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A complete snapshot in the ``directory`` where it was found, which need not be the one it was written to."""

    directory: Location
    metadata: CompletedCheckpoint

    def states(self, uid: str) -> Iterator[OperatorSubtaskState]:
        """The states of one operator, ordered by subtask."""
        for key in sorted(self.metadata.states):
            operators = self.metadata.states[key].operators
            if uid in operators:
                yield operators[uid]

    def open(self, file: StateFile) -> StateFileReader:
        """A reader of a state file, which verifies the file first. Raises the reader's errors; close it after use."""
        return StateFileReader(self.directory, file)

    def open_stream(self, stream: ChannelStateStream) -> ChannelStateReader:
        """A reader of in-flight data, which verifies each element. Raises the reader's errors; close it after use."""
        return ChannelStateReader(self.directory, stream, foreign=True)

    def verify(self) -> list[Problem]:
        """Reads all files of the snapshot and returns the problems; an empty list means that no file is damaged.

        A missing file counts as damaged. Raises :class:`StorageError` while storage is unavailable, which does not
        prove damage.
        """
        found = []
        for (vertex, subtask), state in sorted(self.metadata.states.items()):
            where = f"subtask {subtask} of vertex {vertex!r}"
            checks = [
                (f"{where}, operator {uid!r}", partial(self._verify_keyed, handle, file))
                for uid, operator in state.operators.items()
                for handle in operator.keyed
                for file in handle.state_files()
            ]
            checks += [
                (f"{where}, in-flight data", partial(self._verify_stream, stream))
                for stream in (*state.inputs, *state.outputs)
            ]
            for what, check in checks:
                try:
                    check()
                except _DAMAGE as error:
                    found.append(Problem(what, str(error)))
        return found

    def disposal(self) -> SnapshotDisposal:
        """The request to delete it with its own files, without shared ones. Raises InvalidLocationError."""
        files = (file.path for state in self.metadata.states.values() for file in state.files())
        return SnapshotDisposal.of(self.directory, sorted({path for path in files if path and is_relative(path)}))

    def _verify_keyed(self, handle: KeyedHandle, file: StateFile) -> None:
        sections = handle.sections if isinstance(handle, KeyedStateHandle) else ()
        with closing(self.open(file)) as reader:
            reader.verify()
            for _, offset, length in (entry for section in sections for entry in section.key_group_offsets):
                reader.check_range(offset, length)

    def _verify_stream(self, stream: ChannelStateStream) -> None:
        with closing(self.open_stream(stream)) as reader:
            while reader.read() is not None:
                pass


def open_snapshot(path: str | Location, *, own: bool = False) -> Snapshot:
    """Opens the snapshot in a directory; ``path`` is the directory or the ``_metadata`` file in it.

    ``own``: the calling job has written it, so that it need not be parsed in a separate process first.
    Raises :class:`InvalidLocationError`, :class:`NotFoundError`, or :class:`CorruptFileError` for invalid metadata;
    each names the file. Raises another :class:`StorageError` while storage is unavailable.
    """
    file, data = read_metadata_bytes(path)
    if own or text_length(data, file.url) <= HARMLESS_TEXT_BYTES:
        return Snapshot(file.parent, parse_metadata(data, file.url, file.parent.url))
    # One at a time, because a parsed document takes many times the memory of its text.
    with _LARGE_AND_FOREIGN:
        try_metadata(data, file.url)
        return Snapshot(file.parent, parse_metadata(data, file.url, file.parent.url))


def open_in_place(path: str | Location) -> Snapshot:
    """Like :func:`open_snapshot`, for a job that starts from the snapshot.

    Raises InvalidLocationError for a moved or copied checkpoint that shares files: it would refer to files outside its
    directory, which their job deletes when it no longer needs them.
    """
    snapshot = open_snapshot(path)
    metadata = snapshot.metadata
    shared = sorted({file.path for state in metadata.states.values() for file in state.files() if is_shared(file)})
    written_to = resolve(metadata.written_to or metadata.directory)
    if shared and identity(written_to) != identity(snapshot.directory):
        raise InvalidLocationError(
            f"{snapshot.directory.url} is a moved or copied checkpoint, written to {written_to.url}; {len(shared)} of "
            f"its files are elsewhere, the first is {shared[0]}. Restore it from {written_to.url}, or take a "
            "savepoint, which may be moved and copied",
            snapshot.directory.url,
        )
    return snapshot


def newest_checkpoint(directory: str) -> str | None:
    """The URL of the checkpoint that was triggered last among those of the jobs whose checkpoints are in a directory.

    Looks at each job's last complete checkpoint, not at savepoints. Raises StorageError.
    """
    try:
        names = list_names(resolve(directory).real())
    except NotFoundError:
        return None
    found = []
    for job_id in filter(is_job_id, names):
        storage = CheckpointStorage(resolve(directory).real(), job_id)
        complete = (storage.checkpoint(number) for number in reversed(storage.list_checkpoints()))
        last = next(filter(has_metadata, complete), None)
        if last is not None:
            metadata = open_in_place(last).metadata
            found.append((metadata.timestamp, metadata.id, metadata.directory))
    return max(found)[2] if found else None


def disposal_of(url: str, *, claimed: bool = False) -> SnapshotDisposal:
    """The request to delete a snapshot that a user names. Deletes nothing. Raises the errors of :func:`open_snapshot`.

    ``claimed``: a job has claimed it and itself deletes, one by one, the files that later increments may refer to.
    If even the parent directory is missing, the storage counts as unavailable, not the snapshot as deleted.
    """
    location = resolve(url)
    try:
        found = open_snapshot(location)
        return (replace(found, metadata=found.metadata.claimed()) if claimed else found).disposal()
    except NotFoundError:
        check_directory(location.parent)
        raise


HARMLESS_TEXT_BYTES = 1 << 20
LIMITS = ProcessLimits(time_s=30.0, memory_bytes=512 << 20, answer_bytes=64 << 10)
_MAX_MESSAGE_CHARS = 8_000


def parse_metadata(data: bytes, name: str, directory: str) -> CompletedCheckpoint:
    """The checkpoint in ``directory`` whose metadata is ``data``. Errors refer to the metadata as ``name``.

    Raises :class:`CorruptFileError` for invalid metadata of any kind.
    """
    document = decode(data, name)
    try:
        return CompletedCheckpoint.from_json(document, directory)
    except OtherVersionError as error:
        raise CorruptFileError(f"{name} cannot be read: {error}", name) from error
    except DocumentError as error:
        raise CorruptFileError(f"{name} is damaged or foreign: its content has another shape: {error}", name) from error


def try_metadata(data: bytes, name: str) -> None:
    """Parses the metadata in a process with limits. Blocks. Raises :class:`CorruptFileError` if this fails."""
    try:
        answer = json.loads(run_limited(__name__, json.dumps(name).encode() + b"\n" + data, LIMITS))
    except LimitedProcessError as error:
        message = f"{name} is damaged or foreign: it cannot be read within the limits: {error}"
        raise CorruptFileError(message, name) from error
    if answer is not None:
        raise CorruptFileError(answer, name)


def _answer(request: bytes) -> bytes:
    name, _, data = request.partition(b"\n")
    try:
        parse_metadata(data, json.loads(name), "")
    except CorruptFileError as error:
        return json.dumps(str(error)[:_MAX_MESSAGE_CHARS]).encode()
    return b"null"


def main() -> None:
    """The process's entry point."""
    serve(_answer)


if __name__ == "__main__":
    main()


logger = logging.getLogger(__name__)


@contextmanager
def missing_files_as_damage() -> Iterator[None]:
    """Turns NotFoundError into :class:`CorruptFileError`, for files that an opened snapshot refers to."""
    try:
        yield
    except NotFoundError as error:
        raise CorruptFileError(f"{error.url}: the file is missing", error.url) from error


class StoredFiles:
    """The :class:`~ckpt_runtime.state.backend.SnapshotReader` of the snapshot in ``directory`` (URL).

    Each file is opened and verified once. Only :meth:`fetch` may be called by several threads; close it after use. With
    ``copies_only``, fetched files share no block on disk with the snapshot.
    """

    def __init__(self, directory: str, *, copies_only: bool = False) -> None:
        self._directory = resolve(directory)
        self._copies_only = copies_only
        self._open: dict[StateFile, StateFileReader] = {}

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        reader = self._open.get(file)
        if reader is None:
            reader = self._open[file] = StateFileReader(self._directory, file)
        return reader.read(offset, length)

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        with closing(StateFileReader(self._directory, file)) as reader:
            if may_link and not self._copies_only and reader.link_to(path):
                return
            with open(path, "xb") as target:
                try:
                    reader.copy_to(target)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(path)
                    raise

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        try:
            directory, name = os.path.split(copy)
            with closing(StateFileReader(resolve(directory), structs.replace(file, path=name))) as local:
                return local.link_to(path)
        except StorageError as error:
            logger.warning("cannot use the local copy of %s, the file is read from the snapshot: %s", file.path, error)
            return False

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


_ALWAYS_A_FILE = -1


@contextmanager
def new_directory(target: Location, source: Location, discard: Callable[[], None]) -> Iterator[None]:
    """Creates the directory of a snapshot that is derived from the one in ``source``; use it in a ``with`` block.

    If the block fails, ``discard`` is called to delete the files, and the new directory and the parents that were
    created for it are deleted as far as they are empty. Nothing is deleted if the metadata may have been written.
    Raises :class:`AlreadyExistsError`, and the errors of :func:`check_outside`.
    """
    check_outside(target, source)
    made = _missing(target)
    try:
        make_directory(target, exist_ok=False)
        yield
    except (AlreadyExistsError, AmbiguousWriteError):
        raise
    except BaseException:
        discard()
        with suppress(StorageError):
            for directory in made:
                delete_empty_directory(directory)
        raise


def check_outside(target: Location, source: Location) -> None:
    """Raises :class:`InvalidLocationError` for a target inside the source snapshot, where no tool would find it."""
    if source.real().contains(target.real()):
        raise InvalidLocationError(f"{target.url} is inside the snapshot {source.url}", target.url)


def _missing(target: Location) -> list[Location]:
    """The directory and its parents that do not exist, innermost first."""
    missing: list[Location] = []
    directory = target
    while not (directory.is_object_store or directory == directory.parent or is_directory(directory)):
        missing.append(directory)
        directory = directory.parent
    return missing


class UnsharedFiles:
    """The :class:`~ckpt_runtime.state.backend.SnapshotFiles` of a snapshot in ``directory`` without shared files.

    The names of all files begin with ``prefix``. ``finished`` lists the files, without content stored in handles.
    """

    def __init__(self, directory: Location, prefix: str = "") -> None:
        self.finished: list[StateFile] = []
        self._directory = directory
        self._prefix = prefix

    def private(self, suffix: str = "") -> StateFileWriter:
        return _NewFile(self, self._directory, self._prefix, suffix)

    def shared(self) -> StateFileWriter:
        return self.private()

    def shared_from(self, path: Path) -> StateFile:
        with self.shared() as file, path.open("rb") as source:
            shutil.copyfileobj(source, file.stream)
            return file.finish()

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """Duplicates none, so that the backend writes all of them again."""
        return {}


class _NewFile(StateFileWriter):
    def __init__(self, files: UnsharedFiles, directory: Location, prefix: str, suffix: str) -> None:
        threshold = _ALWAYS_A_FILE if suffix else DEFAULT_MEMORY_THRESHOLD
        super().__init__(directory, threshold, name_prefix=prefix, name_suffix=suffix)
        self._files = files

    def finish(self) -> StateFile:
        file = super().finish()
        if file.inline is None:
            self._files.finished.append(file)
        return file
