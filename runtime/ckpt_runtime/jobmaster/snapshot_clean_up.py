"""Deletes what the coordinator gives up and what an ended job leaves in its directory; lists what earlier drivers left.

Blocking; raises StorageError. Calling again after an error goes on; what is gone is fine, but while storage is away
nothing counts as gone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.events import LeftoversFound
from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.checkpoint_pointer_store import FIRST_CHECKPOINT_ID
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, shared_file_checkpoint, shared_file_owner
from ckpt_runtime.storage.claims import read_claim
from ckpt_runtime.storage.disposal import (
    delete_checkpoint,
    delete_job_directory,
    delete_state_file,
    release_job_directory,
)
from ckpt_runtime.storage.filesystem import check_directory, delete_file, delete_tree, list_names, resolve
from ckpt_runtime.storage.snapshot_metadata import METADATA_NAME, has_metadata
from ckpt_runtime.storage.state_file_reader import locate


def delete_file_of(directory: str, path: str) -> None:
    """A state file as a checkpoint in ``directory`` names it."""
    owner = resolve(directory)
    check_directory(owner.parent)
    delete_state_file(owner, locate(owner, path))


def delete_location(directory: str) -> None:
    """An earlier driver may have left a whole checkpoint: half deleted, it must not look like one."""
    location = resolve(directory)
    check_directory(location.parent)
    delete_file(location.child(METADATA_NAME))
    delete_tree(location)


def delete_shared_file(storage: CheckpointStorage, path: str) -> None:
    """Also one that a claimed snapshot of another job has brought along: it has become this job's."""
    file, own = resolve(path), storage.location
    owner = own if own.contains(file) else shared_file_owner(file)
    check_directory(own if own.contains(file) else owner.parent)
    delete_state_file(owner, file)


@dataclass(slots=True)
class JobCleanUp:
    """Deletes what aborted checkpoints left behind while storage failed, or all; then the directory, if empty.

    What lay in it before the job's first checkpoint ``first_id`` stays, and so does what has another name than the job
    gives. Of the job's own those below ``first_kept`` go: an earlier driver may have died while it deleted one.
    ``directory_known``: this driver has seen the job's directory, so that its storage is away when it is missing; an
    earlier driver may have deleted it.
    """

    storage: CheckpointStorage
    first_id: int
    keeps_nothing: bool
    directory_known: bool = False
    first_kept: int = FIRST_CHECKPOINT_ID

    def __call__(self) -> None:
        check_directory(self.storage.location if self.directory_known else self.storage.location.parent)
        first_kept = sys.maxsize if self.keeps_nothing else self.first_kept
        _delete_checkpoints(self.storage, range(self.first_id, first_kept))
        _delete_shared_files(self.storage, self.first_id, keeps_nothing=self.keeps_nothing)
        release_job_directory(self.storage)
        self.directory_known = False  # from here on it may be gone by this very attempt
        delete_job_directory(self.storage)


def _delete_checkpoints(storage: CheckpointStorage, ids: range) -> None:
    """Those of ``ids``, and those that are not complete."""
    for checkpoint_id in storage.list_checkpoints():
        if checkpoint_id in ids or not has_metadata(storage.checkpoint(checkpoint_id)):
            delete_checkpoint(storage, checkpoint_id)


def _delete_shared_files(storage: CheckpointStorage, first_id: int, *, keeps_nothing: bool) -> None:
    if keeps_nothing and first_id == FIRST_CHECKPOINT_ID and read_claim(storage.location) is None:
        delete_tree(storage.shared)
        delete_tree(storage.task_owned)
    else:
        _delete_unused_shared_files(storage, range(first_id, sys.maxsize))


def _delete_unused_shared_files(storage: CheckpointStorage, ids: range) -> None:
    """What was written for checkpoints of ``ids`` and none of those that are left refers to.

    Another job may have claimed one of them and replaced it since: then files that it refers to no more are that job's.
    """
    if not find_unused_shared_files(storage, ids, ()):
        return
    states: list[SubtaskState] = []
    for checkpoint_id in storage.list_checkpoints():
        if checkpoint_id in ids:
            states += open_snapshot(storage.checkpoint(checkpoint_id), own=True).metadata.states.values()
    if read_claim(storage.location) is not None:  # looked for last: a claim of what was read is harmless
        return
    for url in find_unused_shared_files(storage, ids, states):
        delete_shared_file(storage, url)


def find_leftovers(storage: CheckpointStorage, ids: range, states: Iterable[SubtaskState]) -> LeftoversFound:
    """``ids`` are those that earlier drivers may have used; ``states`` those of the retained checkpoints.

    Raises StorageError.
    """
    if not ids:
        return LeftoversFound(())
    check_directory(storage.location)
    checkpoints = tuple(
        (number, storage.checkpoint(number).url) for number in storage.list_checkpoints() if number in ids
    )
    return LeftoversFound(checkpoints, find_unused_shared_files(storage, ids, states))


def find_unused_shared_files(storage: CheckpointStorage, ids: range, states: Iterable[SubtaskState]) -> tuple[str, ...]:
    """URLs of shared files that were written for checkpoints of ``ids`` and that no state refers to, sorted.

    However its path is written, a file that is referred to is not listed; nor is one that has not the name which the
    job gives. Raises StorageError.
    """
    used = {resolve(file.path).url for state in states for file in state.files() if is_shared(file)}
    found = []
    for name in list_names(storage.shared):
        checkpoint_id = shared_file_checkpoint(name)
        if checkpoint_id is not None and checkpoint_id in ids:
            found.append(storage.shared.child(name).url)
    return tuple(url for url in found if url not in used)
