"""Lists what earlier drivers of a job may have left in its checkpoint directory. Blocking; deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_runtime.checkpoint.events import LeftoversFound
from ckpt_runtime.checkpoint.shared_state_registry import is_shared
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.storage.checkpoint_pointer_store import FIRST_CHECKPOINT_ID
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.filesystem import list_names, resolve


def find_leftovers(storage: CheckpointStorage, ids: range, states: Iterable[SubtaskState]) -> LeftoversFound:
    """``ids`` are those that earlier drivers may have used; ``states`` those of the retained checkpoints.

    A shared file that one of them refers to is not listed, however its path is written. None is when the directory
    holds checkpoints of an earlier job of the same id: whose a shared file is cannot be told then. Raises StorageError.
    """
    if not ids:
        return LeftoversFound(())
    checkpoints = tuple(
        (number, storage.checkpoint(number).url) for number in storage.list_checkpoints() if number in ids
    )
    if ids.start != FIRST_CHECKPOINT_ID:
        return LeftoversFound(checkpoints)
    used = {resolve(file.path).url for state in states for file in state.files() if is_shared(file)}
    found = (storage.shared.child(name).url for name in list_names(storage.shared))
    return LeftoversFound(checkpoints, tuple(url for url in found if url not in used))
