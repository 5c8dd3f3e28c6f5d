"""Finds and removes hidden files of transactional sinks, for a clean-up after all processes were killed. Blocking."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.connectors.part_directory import PartDirectory
from ckpt_runtime.connectors.part_names import PartName
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import exists, file_size, modification_time_s


@dataclass(frozen=True, slots=True)
class HiddenFile:
    """One file. ``modified_s`` is in seconds since the epoch, ``size`` in bytes."""

    part: PartName
    size: int
    modified_s: float


def find_hidden_files(url: str) -> list[HiddenFile]:
    """Lists hidden files in name order, without files that vanish meanwhile.

    Raises NotFoundError when there is no such directory, InvalidLocationError, or StorageError.
    """
    directory = PartDirectory(url)
    if not exists(directory.location):
        raise NotFoundError(f"cannot list {url}: the directory does not exist", url)
    found = []
    for part in directory.hidden_parts():
        file = directory.location.child(part.hidden)
        try:
            found.append(HiddenFile(part, file_size(file), modification_time_s(file)))
        except NotFoundError:
            continue
    return found


def remove_hidden_file(url: str, file: HiddenFile) -> None:
    """Removes the file; a missing file is not an error. Raises StorageError."""
    PartDirectory(url).delete(file.part.hidden)
