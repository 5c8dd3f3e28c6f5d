"""Copies a self-contained snapshot to a new directory, which may be on another file system, and verifies the copy.

The copy is equal, or a savepoint in which sources have other positions.

``_metadata`` is copied last and unchanged: until then there is no snapshot at the target. If a step fails, the files
that were written are deleted.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.snapshots.positions import repositioned, repositions_of
from ckpt_runtime.snapshots.snapshot import Snapshot, missing_files_as_damage, new_directory, open_snapshot
from ckpt_runtime.sources import StartPosition
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    CorruptFileError,
    InvalidLocationError,
    StorageError,
)
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
    """A new directory beside a snapshot, for one with other positions."""
    return source.parent.child(f"{source.name}-repositioned-{secrets.token_hex(3)}")


def reposition_snapshot(
    source: str | Location,
    target: Location,
    positions: Mapping[str, StartPosition],
    progress: Progress = lambda _copied, _total: None,
) -> CopiedSnapshot:
    """Writes a savepoint to ``target``: the snapshot with these positions, by uid of the source.

    The target must not exist, unless it holds what an equal call has written. Raises :class:`InvalidLocationError` also
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

    Raises :class:`InvalidLocationError` if it refers to files elsewhere, and :class:`CorruptFileError` if two handles
    describe the same file differently.
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
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy") as pool:
        running: dict[Future[None], StateFile] = {pool.submit(_copy, directory, file, target): file for file in files}
        try:
            for done in as_completed(running):
                done.result()
                copied += running[done].length
                progress(copied, total)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _copy(directory: Location, file: StateFile, target: Location) -> None:
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


def _discard(files: list[StateFile], target: Location) -> None:
    copies = [locate(target, file.path) for file in files]
    for copy in copies:
        discard_file(copy)
    parents = {copy.parent for copy in copies} | {target}
    for parent in sorted(parents, key=lambda location: -len(location.path)):
        with suppress(StorageError):
            delete_empty_directory(parent)
