"""Deletes snapshots, and never anything else.

``_metadata`` is deleted first, so that a half-deleted snapshot no longer counts as one. A checkpoint's directory
belongs to the system and is deleted as a whole. The user may have moved a savepoint to a place with other files, so
only the files of its metadata are deleted, then its entry in the catalogue, and its directories if they are empty then.

A missing file counts as deleted, but only where its parent directory exists: a missing mount hides files that come back
with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ckpt_runtime.graph.schema import checked
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.crash_points import crash_point
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import (
    Location,
    check_directory,
    delete_empty_directory,
    delete_file,
    delete_tree,
    exists,
    is_plain_name,
    resolve,
)
from ckpt_runtime.storage.metadata import METADATA_NAME
from ckpt_runtime.storage.savepoint_entry import delete_entry


def delete_checkpoint(storage: CheckpointStorage, checkpoint_id: int) -> None:
    """Deletes a checkpoint's directory with everything in it, but no shared files. A missing directory is fine.

    Raises :class:`StorageError` naming what could not be deleted; calling again continues.
    """
    directory = storage.checkpoint(checkpoint_id)
    check_directory(directory.parent)
    if exists(directory):
        delete_file(directory.child(METADATA_NAME))
        crash_point("checkpoint-half-deleted")
        delete_tree(directory)
        crash_point("checkpoint-deleted")


def release_job_directory(storage: CheckpointStorage) -> None:
    """Ends the cluster's ownership of the files that an ended job left."""
    delete_file(storage.owner)


def delete_job_directory(storage: CheckpointStorage) -> bool:
    """Deletes a job's checkpoint directory if only empty directories are left in it; returns whether it is gone."""
    for directory in (storage.shared, storage.task_owned):
        delete_empty_directory(directory)
    return delete_empty_directory(storage.location)


def delete_state_file(owner: Location, file: Location) -> None:
    """Deletes one state file.

    Raises :class:`InvalidLocationError`, and touches nothing, if it does not lie below ``owner``.
    """
    if not owner.contains(file):
        raise InvalidLocationError(f"{file.url} is not below {owner.url} and is not deleted", file.url)
    delete_file(file)


class _StoredDisposal(Struct):
    directory: str
    files: list[str]


@dataclass(frozen=True, slots=True)
class SnapshotDisposal:
    """A checked request to delete one snapshot. It lists the files, so that it works after the metadata is deleted."""

    directory: Location
    files: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, directory: Location, paths: Iterable[str]) -> SnapshotDisposal:
        """The request to delete the snapshot in ``directory`` with the files at these relative paths.

        Raises :class:`InvalidLocationError` for a path that leads out of it.
        """
        files = tuple(_checked_segments(path, directory) for path in paths)
        for segments in files:
            _check_real_path(directory, directory.child(*segments))
        return cls(directory, files)

    @classmethod
    def from_json(cls, document: object) -> SnapshotDisposal:
        """The inverse of :meth:`to_json`. Raises InvalidLocationError; :class:`DocumentError` for another shape."""
        stored = checked(document, _StoredDisposal)
        return cls.of(resolve(stored.directory), stored.files)

    def to_json(self) -> dict[str, Any]:
        return {"directory": self.directory.url, "files": ["/".join(segments) for segments in self.files]}

    def execute(self, then: Callable[[], None] | None = None) -> None:
        """Deletes the snapshot. After a :class:`StorageError` calling again continues; missing files are fine.

        ``then`` is called when the files are gone, and deletes whatever belongs to them.
        """
        directory = self.directory
        check_directory(directory.parent)
        delete_file(directory.child(METADATA_NAME))
        parents: set[Location] = set()
        for segments in self.files:
            delete_file(directory.child(*segments))
            parents.update(directory.child(*segments[:depth]) for depth in range(1, len(segments)))
        if then is not None:
            then()
        # The catalogue's entry is deleted after the files: until then it shows that the disposal is unfinished.
        delete_entry(directory)
        # Deepest first: a directory is empty only after its subdirectories are gone.
        for parent in sorted(parents, key=lambda location: -len(location.path)):
            delete_empty_directory(parent)
        delete_empty_directory(directory)


def _checked_segments(path: str, directory: Location) -> tuple[str, ...]:
    segments = tuple(path.split("/"))
    if not all(is_plain_name(segment) for segment in segments):
        raise InvalidLocationError(f"{path!r} in {directory.url} leads out of its directory", directory.url)
    return segments


def _check_real_path(directory: Location, file: Location) -> None:
    """Refuses a file that a symbolic link puts outside the directory; the file itself may be a link."""
    if not file.is_local:
        return
    root = os.path.realpath(directory.path)
    if os.path.commonpath((root, os.path.realpath(os.path.dirname(file.path)))) != root:
        raise InvalidLocationError(f"{file.url} leads out of {directory.url} by a symbolic link", file.url)
