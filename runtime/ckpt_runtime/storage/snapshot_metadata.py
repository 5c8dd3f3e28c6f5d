"""Reads and publishes the ``_metadata`` file of a snapshot: the file whose existence makes a snapshot complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.storage.errors import InvalidLocationError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, exists, is_directory, read_shown, resolve
from ckpt_runtime.storage.metadata import MAX_COMPRESSED_BYTES, decode, encode
from ckpt_runtime.storage.publish import publish

METADATA_NAME = "_metadata"
_MAX_FILE_BYTES = MAX_COMPRESSED_BYTES + 4_096


@dataclass(frozen=True, slots=True)
class SnapshotMetadata:
    """The metadata found. ``directory`` is where the snapshot lies, whatever directory the document itself names."""

    directory: Location
    document: dict[str, Any]
    size: int


def write_metadata(directory: Location, document: Mapping[str, Any]) -> str:
    """Publishes the metadata atomically and returns the snapshot directory's URL; the snapshot is then complete.

    Raises :class:`AlreadyExistsError` when another writer won, :class:`AmbiguousWriteError` when the outcome is
    unknown, :class:`StorageError` when nothing was written, ValueError for a document that is not JSON.
    """
    publish(directory.child(METADATA_NAME), encode(document))
    return directory.url


def read_metadata(url: str | Location) -> SnapshotMetadata:
    """The document of a snapshot, given as its directory or as the ``_metadata`` file in it.

    For callers that need the document itself; the engine reads snapshots with ``snapshots.snapshot.open_snapshot``.

    Raises :class:`InvalidLocationError`, :class:`NotFoundError`, :class:`CorruptFileError`, each naming the file.
    """
    file, data = read_metadata_bytes(url)
    return SnapshotMetadata(file.parent, decode(data, file.url), len(data))


def read_metadata_bytes(url: str | Location) -> tuple[Location, bytes]:
    """The ``_metadata`` file of a snapshot and its bytes, unchecked. Raises as :func:`read_metadata`."""
    given = url if isinstance(url, Location) else resolve(url)
    directory = snapshot_directory(given)
    if directory is given:
        _check_directory(given)
    file = directory.child(METADATA_NAME)
    return file, read_shown(file, _MAX_FILE_BYTES)


def snapshot_directory(given: Location) -> Location:
    """The directory of a snapshot, given as the directory or as the ``_metadata`` file in it."""
    return given.parent if given.name == METADATA_NAME and not is_directory(given) else given


def has_metadata(directory: Location) -> bool:
    """Whether the snapshot in a directory is complete."""
    return exists(directory.child(METADATA_NAME))


def _check_directory(directory: Location) -> None:
    if is_directory(directory):
        if not has_metadata(directory):
            message = f"cannot find checkpoint or savepoint: {directory.url} has no {METADATA_NAME} file"
            raise NotFoundError(message, directory.url)
        return
    if exists(directory):
        raise InvalidLocationError(f"{directory.url} is neither a directory nor a {METADATA_NAME} file", directory.url)
    message = f"cannot find checkpoint or savepoint: there is no file or directory {directory.url}"
    raise NotFoundError(message, directory.url)
