"""Lists what earlier drivers and killed workers of a job may have left in its directory. Blocking; deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_runtime.checkpoint.events import LeftoversFound
from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, shared_file_checkpoint
from ckpt_runtime.storage.filesystem import check_directory, list_names, resolve


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
