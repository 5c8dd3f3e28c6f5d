"""A directory that a transactional sink writes to: files become pending, then visible, by renaming. Knows no format.

Renaming is atomic on file systems; on object stores it is a copy and a deletion, and committing again after a crash in
between gives the same result. Only files with the sink's own name prefix are ever deleted.
"""

from __future__ import annotations

import io
import os
from typing import Any

from ckpt_runtime.connectors.part_names import PartName, parse_hidden
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import Location, delete_file, exists, list_names, make_directory, naming, resolve


class CommitError(RuntimeError):
    """A pending file could not be made visible. The message names the file and what can be done."""


class PartDirectory:
    """One output directory."""

    def __init__(self, url: str, *, private: bool = False) -> None:
        """Raises ``InvalidLocationError`` for a path that is neither absolute nor a URL.

        Only the owner can access a ``private`` directory on this machine.
        """
        self.location: Location = resolve(url)
        self._private = private

    @property
    def url(self) -> str:
        return self.location.url

    def create(self) -> None:
        make_directory(self.location, private=self._private)

    def open_for_writing(self, name: str) -> Any:
        """A new binary file."""
        file = self.location.child(name)
        with naming("write", file):
            return open(file.path, "wb") if file.is_local else file.filesystem.open(file.path, "wb")

    def open_for_reading(self, name: str) -> Any:
        """An existing binary file."""
        file = self.location.child(name)
        with naming("read", file):
            return file.filesystem.open(file.path, "rb")

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""
        return exists(self.location.child(name))

    def make_pending(self, part: PartName) -> None:
        """In progress -> pending, durable when this returns."""
        self._rename(part.in_progress, self.location.child(part.pending))

    def commit(self, part: PartName, partition: str = "") -> bool | None:
        """Pending -> visible, in a directory below this one if it is a partition's.

        Returns True if this call made it visible, False if it was visible before, and None if it is missing.
        """
        inside = partition.split("/") if partition else []
        visible = self.location.child(*inside, part.visible)
        try:
            if exists(self.location.child(part.pending)):
                if partition:
                    make_directory(visible.parent, private=False)
                self._rename(part.pending, visible)
                return True
        except NotFoundError:
            pass  # another job, started from the same savepoint, has just committed it
        return False if exists(visible) else None

    def delete(self, name: str) -> None:
        """Deletes one file; no error when it is gone."""
        delete_file(self.location.child(name))

    def hidden_parts(self) -> list[PartName]:
        """The in-progress and pending files of all sinks, in name order."""
        parts = (parse_hidden(name) for name in list_names(self.location))
        return [part for part in parts if part is not None]

    def _rename(self, source: str, new: Location) -> None:
        old = self.location.child(source)
        with naming("rename", old):
            if not old.is_local:
                old.filesystem.mv(old.path, new.path)
                return
            os.replace(old.path, new.path)
            for changed in {os.path.dirname(old.path), os.path.dirname(new.path)}:
                directory = os.open(changed, os.O_RDONLY)
                try:
                    os.fsync(directory)
                finally:
                    os.close(directory)


def sync_and_close(file: Any) -> None:
    """Closes a file after its bytes have reached the disk; object stores publish on close."""
    if isinstance(file, io.BufferedWriter):
        file.flush()
        os.fsync(file.fileno())
    file.close()
