"""What a keyed state backend and the task say to each other about snapshots: new files, frozen states, stored files.

Names, places, checksums and sizes of files are the task's affair. A backend opens as many files as it wants, private
or shared ones, and gets a handle for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from ckpt_runtime.checkpoint.state_handles import KeyedHandle, StateFile


class SnapshotFile(AbstractContextManager["SnapshotFile"], Protocol):
    """A new file of a snapshot. As a context manager it gives itself up unless it was finished."""

    stream: BinaryIO

    def finish(self) -> StateFile:
        """Makes the content durable. Small content comes back inside the handle, and is no file."""


class SnapshotFiles(Protocol):
    """Opens the new files of one snapshot, for any threads; a file is one's. Raises OSError as the storage does."""

    def private(self, suffix: str = "") -> SnapshotFile:
        """A file that goes with this snapshot. With a suffix it is for other tools, and never inside a handle."""

    def shared(self) -> SnapshotFile:
        """A file that later checkpoints may refer to. In a savepoint, which shares nothing, it is a private one."""

    def shared_from(self, path: Path) -> StateFile:
        """The content of a local file that never changes any more, as a file like one of :meth:`shared`.

        It may be a hard link of the local file: what is written to that one would damage the snapshot.
        """

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """A savepoint's own copies of files of completed checkpoints, by the same names, several made at once.

        What could not be duplicated is missing, and is to be written anew.
        """


class KeyedSnapshot(Protocol):
    """The asynchronous part of a snapshot. The state in it does not change while the operator goes on."""

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Writes all states, and returns where they lie; runs in a pool thread. Nothing is returned for no state.

        What the task opened for it is deleted when this raises, or when nobody waits for the snapshot any more.
        """

    def release(self) -> None:
        """Gives up the frozen view; called once after ``write`` or instead of it, from any thread."""


class SnapshotReader(Protocol):
    """Reads the files of a restored snapshot, each verified as a whole before any byte of it is used.

    Raises StorageError: damage and absence are told apart by the caller.
    """

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        """A part of a file."""

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        """All of it, as a new local file. Several threads may fetch at once.

        With ``may_link`` it may be a hard link of the stored file, and must not be written to.
        """

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        """As a hard link of ``copy``, a local file that should have the same content: False when it has not.

        Nothing lies at ``path`` then, and nothing of the snapshot was read.
        """
