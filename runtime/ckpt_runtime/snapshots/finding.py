"""Finds the snapshots below a directory, whatever job wrote them."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, TASK_OWNED_NAME
from ckpt_runtime.storage.filesystem import Location, is_directory, is_plain_name, list_names
from ckpt_runtime.storage.snapshot_metadata import has_metadata

MAX_DEPTH = 4
_NO_SNAPSHOTS = (SHARED_NAME, TASK_OWNED_NAME)


def find_snapshots(directory: Location, depth: int = MAX_DEPTH) -> Iterator[Location]:
    """Directories with metadata, this one included, in the order of their names; none lies in another.

    ``depth`` says how many levels below are looked at. Raises :class:`StorageError` when a directory cannot be listed.
    """
    if has_metadata(directory):
        yield directory
    elif depth > 0:
        for name in list_names(directory):
            if is_plain_name(name) and name not in _NO_SNAPSHOTS and is_directory(directory.child(name)):
                yield from find_snapshots(directory.child(name), depth - 1)
