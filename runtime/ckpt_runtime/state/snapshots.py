"""The interface between a keyed state backend and the task for snapshots: new files, frozen states, stored files.

The task manages names, places, checksums and sizes of files. A backend opens as many files as it needs, private or
shared ones, and gets a handle for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from ckpt_runtime.checkpoint.state_handles import KeyedHandle, StateFile


class SnapshotFile(AbstractContextManager["SnapshotFile"], Protocol):
    """A new file of a snapshot. As a context manager it is discarded unless it was finished."""

    stream: BinaryIO

    def finish(self) -> StateFile:
        """Makes the content durable. Small content is stored inside the returned handle instead of a file."""


class SnapshotFiles(Protocol):
    """Opens the new files of one snapshot, from any thread; a file is used by one. Raises the storage's OSError."""

    def private(self, suffix: str = "") -> SnapshotFile:
        """A file that is deleted with this snapshot. With a suffix it is for other tools, and never inside a handle."""

    def shared(self) -> SnapshotFile:
        """A file that later checkpoints may refer to. In a savepoint, which shares no files, it is a private one."""

    def shared_from(self, path: Path) -> StateFile:
        """Stores the content of a local file that no longer changes, as a file like one of :meth:`shared`.

        The result may be a hard link of the local file: writing to the local file would damage the snapshot.
        """

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """A savepoint's own copies of files of completed checkpoints, by the same names; several are made at once.

        A file that could not be duplicated is missing from the result, and the caller has to write it.
        """


class KeyedSnapshot(Protocol):
    """The asynchronous part of a snapshot. Its state does not change while the operator continues to process."""

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Writes all states and returns their handles; runs in a pool thread. Without states the result is empty.

        The files that the task opened for it are deleted when this raises, or when the snapshot is no longer needed.
        """

    def release(self) -> None:
        """Releases the frozen view; called once after ``write`` or instead of it, from any thread."""


class SnapshotReader(Protocol):
    """Reads the files of a restored snapshot, each verified as a whole before any byte of it is used.

    Raises StorageError; the caller distinguishes a damaged file from a missing one.
    """

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        """A part of a file."""

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        """Writes the whole file to a new local file. Several threads may fetch at once.

        With ``may_link`` the local file may be a hard link of the stored file, and must not be written to.
        """

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        """Makes ``path`` a hard link of ``copy``, a local file with the expected content; False if the content differs.

        In that case there is no file at ``path``. The snapshot itself is not read.
        """
