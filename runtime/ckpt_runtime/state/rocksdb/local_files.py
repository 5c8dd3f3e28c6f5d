"""The files of a database, locally and in a snapshot: their kinds, and how they are fetched.

Content is in table files, which never change and are shared between snapshots; a manifest, which changes, lists those
that belong to the database. Snapshots keep no other file: ``CURRENT`` only names the manifest, and the log is off.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ckpt_runtime.checkpoint.state_handles import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.local_copies import LocalCopies
from ckpt_runtime.state.snapshots import SnapshotReader

logger = logging.getLogger(__name__)

R = TypeVar("R")

_TABLE = re.compile(r"[0-9]{6,20}\.sst")
_MANIFEST = re.compile(r"MANIFEST-[0-9]{6,20}")


def is_table(name: str) -> bool:
    """Whether it is the name of a table file."""
    return _TABLE.fullmatch(name) is not None


def is_kept(name: str) -> bool:
    """Whether a snapshot keeps a file of this name."""
    return is_table(name) or _MANIFEST.fullmatch(name) is not None


def tables_of(handle: IncrementalKeyedStateHandle) -> dict[str, StateFile]:
    """The table files of a handle, which may be shared."""
    return {name: file for name, file in handle.files.items() if is_table(name)}


def at_once(threads: int, transfer: Callable[[str], R], names: Collection[str]) -> dict[str, R]:
    """The result of ``transfer`` for each name, with ``threads`` calls at a time.

    After a failure no further call begins, and the error is raised when the running ones have ended.
    """
    if min(threads, len(names)) <= 1:
        return {name: transfer(name) for name in names}
    with ThreadPoolExecutor(min(threads, len(names)), "ckpt-transfer") as pool:
        return dict(zip(names, pool.map(transfer, names), strict=True))


def fetch(
    handle: IncrementalKeyedStateHandle,
    reader: SnapshotReader,
    directory: Path,
    threads: int,
    copies: LocalCopies | None = None,
) -> None:
    """Makes the directory of a database from a snapshot's files, or from valid local copies of them.

    Raises CorruptStateError for files that form no database.
    """
    manifests = [name for name in handle.files if _MANIFEST.fullmatch(name)]
    unknown = [name for name in handle.files if not is_kept(name)]
    if unknown or len(manifests) != 1:
        raise CorruptStateError(f"the files {sorted(handle.files)} are those of no database")
    directory.mkdir()

    def transfer(name: str) -> bool:
        file, path = handle.files[name], str(directory / name)
        copy = copies.path_of(file) if copies is not None and is_table(name) else None
        if copies is not None and copy is not None:
            if reader.take(file, str(copy), path):
                return True
            copies.forget(file)
        reader.fetch(file, path, may_link=is_table(name))
        return False

    taken = at_once(threads, transfer, handle.files)
    if copies is not None:
        local = [handle.files[name].length for name, is_local in taken.items() if is_local]
        counts = (len(local), sum(local), len(taken) - len(local))
        logger.info("restored from %d local files of %d bytes, and %d of the checkpoint", *counts)
    (directory / "CURRENT").write_text(f"{manifests[0]}\n")
