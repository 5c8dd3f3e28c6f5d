"""The files of a database, locally and in a snapshot: which there are, and how they come back.

Content lies in table files, which never change and are shared between snapshots; a manifest, which changes, says which
belong to the database. Nothing else is kept: ``CURRENT`` names the manifest only, and the log is off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from ckpt_runtime.checkpoint.state_handles import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.snapshots import SnapshotReader

R = TypeVar("R")

_TABLE = re.compile(r"[0-9]{6,20}\.sst")
_MANIFEST = re.compile(r"MANIFEST-[0-9]{6,20}")


def is_table(name: str) -> bool:
    """Whether it is a file of entries."""
    return _TABLE.fullmatch(name) is not None


def is_kept(name: str) -> bool:
    """Whether a snapshot keeps it."""
    return is_table(name) or _MANIFEST.fullmatch(name) is not None


def tables_of(handle: IncrementalKeyedStateHandle) -> dict[str, StateFile]:
    """The files that may be shared."""
    return {name: file for name, file in handle.files.items() if is_table(name)}


def at_once(threads: int, transfer: Callable[[str], R], names: Collection[str]) -> dict[str, R]:
    """What ``transfer`` gives for each name, so many at the same time.

    When one fails no other begins, and the error comes when those that had begun have ended.
    """
    if min(threads, len(names)) <= 1:
        return {name: transfer(name) for name in names}
    with ThreadPoolExecutor(min(threads, len(names)), "ckpt-transfer") as pool:
        return dict(zip(names, pool.map(transfer, names), strict=True))


def fetch(handle: IncrementalKeyedStateHandle, reader: SnapshotReader, directory: Path, threads: int) -> None:
    """Makes the directory of a database out of a snapshot's files. Raises CorruptStateError for those of none."""
    manifests = [name for name in handle.files if _MANIFEST.fullmatch(name)]
    unknown = [name for name in handle.files if not is_kept(name)]
    if unknown or len(manifests) != 1:
        raise CorruptStateError(f"the files {sorted(handle.files)} are those of no database")
    directory.mkdir()

    def transfer(name: str) -> None:
        reader.fetch(handle.files[name], str(directory / name), may_link=is_table(name))

    at_once(threads, transfer, handle.files)
    (directory / "CURRENT").write_text(f"{manifests[0]}\n")
