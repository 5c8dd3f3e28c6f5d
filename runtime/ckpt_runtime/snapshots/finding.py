"""Finds the snapshots below a directory, whatever job wrote them."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterator

from ckpt_runtime.storage.checkpoint_storage import SHARED_NAME, TASK_OWNED_NAME
from ckpt_runtime.storage.errors import InvalidLocationError, StorageError
from ckpt_runtime.storage.filesystem import Location, is_directory, is_plain_name, list_names
from ckpt_runtime.storage.savepoint_entry import CATALOGUE_NAME
from ckpt_runtime.storage.snapshot_metadata import METADATA_NAME

MAX_DEPTH = 4
MAX_DIRECTORIES = 20_000
NOT_ALLOWED = (errno.EACCES, errno.EPERM)
_PASSED_OVER = (*NOT_ALLOWED, errno.EINVAL, errno.ELOOP, errno.ENOTDIR, errno.ESRCH)
"""What says that a directory is no place for savepoints, and not that its storage is away."""
_NO_SNAPSHOTS = (SHARED_NAME, TASK_OWNED_NAME)


def find_places(
    directory: Location, depth: int = MAX_DEPTH, at_most: int | None = MAX_DIRECTORIES
) -> Iterator[Location]:
    """Directories with metadata, or that only an entry of the catalogue is left in, in the order of their names.

    This one is included; none lies in another. ``depth`` says how many levels below are looked at. What lies below and
    may not, or cannot, be listed is passed over. Raises :class:`StorageError` when this one cannot be listed, and
    :class:`InvalidLocationError` when it would have to look into more than ``at_most`` directories.
    """
    waiting = [(directory, depth)]
    for seen in itertools.count(1):
        if not waiting:
            return
        if at_most is not None and seen > at_most:
            message = (
                f"there are more than {at_most} directories below {directory.url}; name one nearer to the savepoints"
            )
            raise InvalidLocationError(message, directory.url)
        found, levels = waiting.pop()
        try:
            names = list_names(found)
        except StorageError as error:
            if found is directory or error.errno not in _PASSED_OVER:
                raise
            continue
        if METADATA_NAME in names or CATALOGUE_NAME in names:
            yield found
        elif levels > 0:
            inner = [name for name in names if is_plain_name(name) and name not in _NO_SNAPSHOTS]
            waiting += [(found.child(name), levels - 1) for name in reversed(inner) if is_directory(found.child(name))]
