"""Writes one state file of a snapshot as a stream, with a running checksum. Small content never becomes a file.

One thread writes; another may read :attr:`StateFileWriter.bytes_written`. Nothing refers to the file before
:meth:`StateFileWriter.finish` returned its handle, and :meth:`StateFileWriter.abort` leaves nothing behind.
"""

from __future__ import annotations

import io
import os
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO, cast
from uuid import uuid4

from fsspec.spec import AbstractBufferedFile

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.checksums import RunningChecksum
from ckpt_runtime.storage.filesystem import Location, discard_file, naming, open_private
from ckpt_runtime.storage.publish import fsync_directory

_BUFFER_BYTES = 1 << 20
DEFAULT_MEMORY_THRESHOLD = 20 << 10


class StateFileWriter:
    """One state file in ``directory``.

    Content up to ``memory_threshold`` bytes is returned inside the handle. The file's name is unique, so that a
    subtask that writes the same checkpoint again never finds its own remains; only copies set ``name``.
    As a context manager it aborts unless it was finished; an error inside propagates, even if the clean-up fails.
    Not thread-safe.
    """

    def __init__(
        self,
        directory: Location,
        memory_threshold: int = DEFAULT_MEMORY_THRESHOLD,
        name_prefix: str = "",
        name_suffix: str = "",
        name: str | None = None,
    ) -> None:
        self._location = directory.child(name or f"{name_prefix}{uuid4()}{name_suffix}")
        self._threshold = memory_threshold
        self._checksum = RunningChecksum()
        self._held = bytearray()
        self._file: Any = None
        self._ended = False
        self.bytes_written = 0
        self.stream: BinaryIO = cast(BinaryIO, _WriterStream(self))

    @property
    def location(self) -> Location:
        """Where the file is, or would be if it became one."""
        return self._location

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes. Raises :class:`StorageError` naming the file; the writer must then be aborted."""
        if self._ended:
            raise ValueError("this state file has been finished or aborted")
        view = memoryview(data).cast("B")
        self._checksum.update(view)
        if self._file is None and self.bytes_written + len(view) <= self._threshold:
            self._held += view
        else:
            with naming("write", self._location):
                self._write_to_file(view)
        self.bytes_written += len(view)
        return len(view)

    def finish(self) -> StateFile:
        """Makes the content durable and returns its handle, with a path relative to the snapshot's directory."""
        if self._ended:
            raise ValueError("this state file has been finished or aborted")
        if self._file is None:
            self._ended = True
            return StateFile("", self.bytes_written, self._checksum.text(), bytes(self._held))
        with naming("write", self._location):
            self._file.flush()
            if self._location.is_local:
                os.fsync(self._file.fileno())
            self._file.close()
            if self._location.is_local:
                self._settle_entry(self._location.parent)
        self._ended = True
        return StateFile(self._location.name, self.bytes_written, self._checksum.text())

    def _settle_entry(self, directory: Location) -> None:
        """Makes the file's name durable; subclasses may have this done for several files at once."""
        fsync_directory(directory.path)

    def abort(self) -> None:
        """Discards the file and deletes what was written; does nothing after :meth:`finish` or a first abort."""
        if self._ended:
            return
        self._ended = True
        self._held = bytearray()
        if self._file is not None:
            with suppress(Exception):
                self._discard()
            discard_file(self._location)

    def _discard(self) -> None:
        if isinstance(self._file, AbstractBufferedFile):
            # Closing it would upload what was written so far.
            self._file.discard()
            self._file.closed = True
        else:
            self._file.close()

    def _write_to_file(self, view: memoryview) -> None:
        if self._file is None:
            self._file = self._open()
            if self._held:
                self._file.write(bytes(self._held))
                self._held = bytearray()
        self._file.write(view if self._location.is_local else bytes(view))

    def _open(self) -> Any:
        if self._location.is_local:
            return open(self._location.path, "xb", buffering=_BUFFER_BYTES, opener=open_private)
        return self._location.filesystem.open(self._location.path, "wb")

    def __enter__(self) -> StateFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()


class _WriterStream(io.RawIOBase):
    """The writer as a file object for Arrow and others. Closing it has no effect; the writer's owner finishes it."""

    def __init__(self, writer: StateFileWriter) -> None:
        self._writer = writer

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._writer.write(data)

    def tell(self) -> int:
        return self._writer.bytes_written
