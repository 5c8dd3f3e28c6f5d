"""Locations of snapshots in Flink's layout: ``<dir>/<job id>/{chk-<n>,shared,taskowned}`` and savepoint directories.

Makes, finds and deletes snapshots' directories, and never deletes anything else; writes no state.

``_metadata`` is deleted first, so that a half-deleted snapshot no longer counts as one. A checkpoint's directory
belongs to the system and is deleted as a whole. The user may have moved a savepoint to a place with other files, so
only the files of its metadata are deleted, then its entry in the catalogue, and its directories if they are empty then.

A missing file counts as deleted, but only where its parent directory exists: a missing mount hides files that reappear
with it.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from ckpt_runtime.graph.schema import checked
from ckpt_runtime.storage.driver_pools import crash_point
from ckpt_runtime.storage.errors import AlreadyExistsError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    check_bucket,
    check_directory,
    delete_empty_directory,
    delete_file,
    delete_tree,
    exists,
    is_plain_name,
    list_names,
    make_directory,
    naming,
    read_bytes,
    resolve,
)
from ckpt_runtime.storage.metadata import METADATA_NAME, has_metadata
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.savepoint_entry import delete_entry

CHECKPOINT_PREFIX = "chk-"
SAVEPOINT_PREFIX = "savepoint-"
SHARED_NAME = "shared"
TASK_OWNED_NAME = "taskowned"
OWNER_NAME = "owner"

_CHECKPOINT_NAME = re.compile(rf"{CHECKPOINT_PREFIX}([0-9]{{1,19}})")
_SHARED_FILE_NAME = re.compile(rf"{CHECKPOINT_PREFIX}([0-9]{{1,19}})-.+")
_JOB_ID = re.compile(r"[0-9a-f]{32}")
_SAVEPOINT_ATTEMPTS = 10
_MAX_OWNER_BYTES = 16_384


def check_job_id(job_id: str) -> str:
    """Returns the id. Raises :class:`InvalidLocationError` unless it is 32 lower-case hex digits."""
    if not is_job_id(job_id):
        raise InvalidLocationError(f"{job_id!r} is not a job id; allowed: 32 lower-case hex digits", job_id)
    return job_id


def is_job_id(name: str) -> bool:
    """Whether a name is 32 lower-case hex digits."""
    return _JOB_ID.fullmatch(name) is not None


class CheckpointStorage:
    """The checkpoint directory of one job."""

    def __init__(self, directory: str | Location, job_id: str) -> None:
        """``directory`` is ``execution.checkpointing.dir``. Touches nothing. Raises :class:`InvalidLocationError`."""
        base = directory if isinstance(directory, Location) else resolve(directory)
        self.location = base.child(check_job_id(job_id))
        self.shared = self.location.child(SHARED_NAME)
        """Files that several checkpoints may refer to."""
        self.task_owned = self.location.child(TASK_OWNED_NAME)
        """Files that the job manager never deletes."""
        self.owner = self.location.child(OWNER_NAME)
        """The file that names the cluster whose job writes here. The claim ends with the job's clean-up."""

    def checkpoint(self, checkpoint_id: int) -> Location:
        """The directory of one checkpoint, whether it exists or not."""
        return self.location.child(f"{CHECKPOINT_PREFIX}{checkpoint_id}")

    def claim(self, cluster: str | None) -> None:
        """Claims the directory before the first write: clusters that share a directory may have jobs of the same id.

        ``cluster`` is the URL of its high-availability directory; None, for a session without one, only checks.
        The same cluster may claim it again. Raises :class:`AlreadyExistsError` naming the other cluster.
        """
        if cluster is not None:
            with suppress(AlreadyExistsError):
                publish(self.owner, cluster.encode())
        holder = self.holder()
        if holder is not None and holder != cluster:
            message = (
                f"{self.location.url} belongs to the job of this id in the cluster {holder}; choose another job id or "
                f"another execution.checkpointing.dir, or delete {self.owner.url} if that cluster no longer exists"
            )
            raise AlreadyExistsError(message, self.owner.url)

    def holder(self) -> str | None:
        """The cluster whose job writes here, by the URL of its high-availability directory; None if unknown."""
        try:
            return read_bytes(self.owner, _MAX_OWNER_BYTES).decode(errors="replace")
        except NotFoundError:
            return None

    def initialize(self) -> None:
        """Makes the job's directories; they may exist. Raises :class:`StorageError` naming the directory or bucket."""
        # Making directories proves nothing on an object store; a missing bucket is found here.
        check_bucket(self.location)
        make_directory(self.shared)
        make_directory(self.task_owned)

    def initialize_checkpoint(self, checkpoint_id: int) -> Location:
        """Makes a checkpoint's directory. Files of an unfinished attempt in it do no harm: file names are unique.

        Raises :class:`AlreadyExistsError` when a complete checkpoint exists, :class:`StorageError` otherwise, also
        when the job's directory is missing: nothing is written below the mount point of a missing file system.
        """
        directory = self.checkpoint(checkpoint_id)
        make_directory(directory, parents=False)
        if has_metadata(directory):
            raise AlreadyExistsError(f"{directory.url} already holds a complete checkpoint", directory.url)
        return directory

    def list_checkpoints(self) -> list[int]:
        """Ids of all checkpoint directories, complete or not, ascending."""
        matches = (_CHECKPOINT_NAME.fullmatch(name) for name in list_names(self.location))
        return sorted(int(match[1]) for match in matches if match)


def initialize_savepoint(
    target: str | Location,
    job_id: str,
    token: Callable[[], str] = lambda: secrets.token_hex(6),
    announce: Callable[[Location], None] = lambda _: None,
) -> Location:
    """Makes a new, empty directory ``<target>/savepoint-<6 digits of the job id>-<12 hex digits>``.

    ``announce`` is called before a directory is made, and may raise to prevent it.

    Raises :class:`InvalidLocationError` for an unusable target and :class:`StorageError` when no directory could be
    made in ten attempts.
    """
    base = target if isinstance(target, Location) else resolve(target)
    prefix = f"{SAVEPOINT_PREFIX}{check_job_id(job_id)[:6]}-"
    for _ in range(_SAVEPOINT_ATTEMPTS):
        directory = base.child(prefix + token())
        announce(directory)
        try:
            with naming("create savepoint directory", directory):
                make_directory(directory, exist_ok=False)
        except AlreadyExistsError:
            continue
        return directory
    raise StorageError(f"cannot create a savepoint directory in {base.url}: all names tried exist", base.url)


def is_savepoint_of(directory: Location, job_id: str) -> bool:
    """Whether the directory has a name that :func:`initialize_savepoint` gives to savepoints of this job."""
    return re.fullmatch(rf"{SAVEPOINT_PREFIX}{check_job_id(job_id)[:6]}-[0-9a-f]{{12}}", directory.name) is not None


def shared_file_checkpoint(name: str) -> int | None:
    """The id of the checkpoint for which a shared file was written, taken from its name; None for foreign files."""
    match = _SHARED_FILE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def shared_file_owner(file: Location) -> Location:
    """The job directory that contains a shared file, judged by its path alone.

    Raises :class:`InvalidLocationError` unless it has the name and place of a job's shared file.
    """
    directory = file.parent
    owner = directory.parent
    if shared_file_checkpoint(file.name) is None or directory.name != SHARED_NAME or not is_job_id(owner.name):
        raise InvalidLocationError(f"{file.url} does not lie where a job's shared files do", file.url)
    return owner


def is_checkpoint_name(name: str) -> bool:
    """Whether a directory name is one that :class:`CheckpointStorage` gives to checkpoints."""
    return _CHECKPOINT_NAME.fullmatch(name) is not None


def delete_checkpoint(storage: CheckpointStorage, checkpoint_id: int) -> None:
    """Deletes a checkpoint's directory with everything in it, but no shared files. A missing directory is not an error.

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
        """Deletes the snapshot. A call after a :class:`StorageError` continues the deletion; missing files are not an
        error.

        ``then`` is called when the files are deleted, and deletes everything that belongs to them.
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
        # Deepest first: a directory is empty only after its subdirectories are deleted.
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
