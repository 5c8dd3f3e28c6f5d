"""State files of a snapshot: written as streams with a running checksum, verified as a whole before they are read.

Small content never becomes a file. No byte of a file is used before the whole file was verified, once.
"""

from __future__ import annotations

import io
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, BinaryIO, cast
from uuid import uuid4

from fsspec.spec import AbstractBufferedFile

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    discard_file,
    file_size,
    is_plain_name,
    naming,
    open_private,
    open_regular,
    read_range,
    resolve,
)
from ckpt_runtime.storage.publish import RunningChecksum, fsync_directory, is_checksum

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
        self.location = directory.child(name or f"{name_prefix}{uuid4()}{name_suffix}")
        self._threshold = memory_threshold
        self._checksum = RunningChecksum()
        self._held = bytearray()
        self._file: Any = None
        self._ended = False
        self.bytes_written = 0
        self.stream: BinaryIO = cast(BinaryIO, _WriterStream(self))

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends bytes. Raises :class:`StorageError` naming the file; the writer must then be aborted."""
        if self._ended:
            raise ValueError("this state file has been finished or aborted")
        view = memoryview(data).cast("B")
        self._checksum.update(view)
        if self._file is None and self.bytes_written + len(view) <= self._threshold:
            self._held += view
        else:
            with naming("write", self.location):
                if self._file is None:
                    self._file = self._open()
                    if self._held:
                        self._file.write(bytes(self._held))
                        self._held = bytearray()
                self._file.write(view if self.location.is_local else bytes(view))
        self.bytes_written += len(view)
        return len(view)

    def finish(self) -> StateFile:
        """Makes the content durable and returns its handle, with a path relative to the snapshot's directory."""
        if self._ended:
            raise ValueError("this state file has been finished or aborted")
        if self._file is None:
            self._ended = True
            return StateFile("", self.bytes_written, self._checksum.text(), bytes(self._held))
        with naming("write", self.location):
            self._file.flush()
            if self.location.is_local:
                os.fsync(self._file.fileno())
            self._file.close()
            if self.location.is_local:
                self._settle_entry(self.location.parent)
        self._ended = True
        return StateFile(self.location.name, self.bytes_written, self._checksum.text())

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
                if isinstance(self._file, AbstractBufferedFile):
                    # Closing it would upload what was written so far.
                    self._file.discard()
                    self._file.closed = True
                else:
                    self._file.close()
            discard_file(self.location)

    def _open(self) -> Any:
        if self.location.is_local:
            return open(self.location.path, "xb", buffering=_BUFFER_BYTES, opener=open_private)
        return self.location.filesystem.open(self.location.path, "wb")

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


_CHUNK_BYTES = 4 << 20
_KEEP_BYTES = 64 << 20
"""Remote files up to this size stay in memory after verification, which has read them anyway."""


def is_relative(path: str) -> bool:
    """Whether a handle's file belongs to the snapshot and moves with it."""
    return ":" not in path and not path.startswith("/")


def locate(directory: Location, path: str, *, allow_absolute: bool = True) -> Location:
    """The location of a handle's file: a relative path below ``directory``, or an absolute URL.

    Raises :class:`InvalidLocationError` for a relative path that leads out of the directory, and for an absolute one
    in a snapshot that must be self-contained.
    """
    if is_relative(path):
        segments = path.split("/")
        if all(is_plain_name(segment) for segment in segments):
            return directory.child(*segments)
        raise InvalidLocationError(f"{path!r} in {directory.url} does not stay in its directory", directory.url)
    if not allow_absolute:
        raise InvalidLocationError(f"{path!r} in {directory.url} is not relative to the snapshot", directory.url)
    return resolve(path)


class StateFileReader:
    """One state file. Thread-safe; :meth:`close` it after use."""

    def __init__(self, directory: Location, file: StateFile) -> None:
        """Touches nothing yet. Raises :class:`InvalidLocationError`, and :class:`CorruptFileError` for a bad handle."""
        self._file = file
        self._location = None if file.inline is not None else locate(directory, file.path)
        self.url = f"{directory.url} (inline state)" if self._location is None else self._location.url
        if not is_checksum(file.checksum) or isinstance(file.length, bool) or file.length < 0:
            raise CorruptFileError(f"{self.url}: the handle has no usable length and checksum", self.url)
        self._lock = threading.Lock()
        self._verified = False
        self._content: bytes | None = file.inline
        self._descriptor = -1

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Bytes of the verified file. Raises :class:`CorruptFileError` naming the file, or storage errors."""
        self.verify()
        self.check_range(offset, length)
        if self._content is not None:
            return memoryview(self._content)[offset : offset + length]
        return self._read_stored(offset, length)

    def check_range(self, offset: int, length: int) -> None:
        """Raises :class:`CorruptFileError` unless the file contains these bytes."""
        if offset < 0 or length < 0 or offset + length > self._file.length:
            message = f"{self.url}: bytes {offset} to {offset + length} of {self._file.length} were asked for"
            raise CorruptFileError(message, self.url)

    def copy_to(self, target: BinaryIO) -> None:
        """Writes the whole file, reading it once. Raises as :meth:`verify`; the written bytes are then invalid."""
        with self._lock:
            self._check_content(target)

    def link_to(self, path: str) -> bool:
        """Makes a verified hard link, a new local file that must not be written to; False when no link is possible.

        The file at ``path`` stays verified, even if the name of the stored file is removed. Raises as :meth:`verify`,
        and then leaves nothing there.
        """
        if self._location is None or not self._location.is_local:
            return False
        try:
            os.link(self._location.path, path, follow_symlinks=False)
        except OSError:  # another file system, no rights, no such file: reading it raises the proper error, if any
            return False
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                os.unlink(path)
                return False
            with self._lock, naming("read", self._location):
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                # The link is opened, not the stored name, which may belong to another file by now.
                self._descriptor, self._verified = open_regular(path), False
            self.verify()
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(path)
            raise
        return True

    def verify(self) -> None:
        """Compares length and checksum of the whole file with its handle; only the first call reads the file."""
        with self._lock:
            if not self._verified:
                self._check_content()

    def _check_content(self, target: BinaryIO | None = None) -> None:
        """Reads the whole file, and writes it to ``target`` if given."""
        self._verify_length()
        checksum = RunningChecksum()
        for chunk in self._chunks(is_kept=target is None):
            checksum.update(chunk)
            if target is not None:
                target.write(chunk)
        if checksum.text() != self._file.checksum:
            message = f"{self.url}: damaged, its checksum is {checksum.text()} and not {self._file.checksum}"
            raise CorruptFileError(message, self.url)
        self._verified = True

    def close(self) -> None:
        """Closes the file and drops the content kept in memory."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
            self._content = self._file.inline

    def _verify_length(self) -> None:
        if self._content is not None:
            found = len(self._content)
        else:
            assert self._location is not None
            if self._location.is_local and self._descriptor < 0:
                with naming("read", self._location):
                    self._descriptor = open_regular(self._location.path)
            found = file_size(self._location) if self._descriptor < 0 else os.fstat(self._descriptor).st_size
        if found != self._file.length:
            message = f"{self.url}: damaged, it has {found} bytes and not {self._file.length}"
            raise CorruptFileError(message, self.url)

    def _chunks(self, *, is_kept: bool) -> Iterator[bytes]:
        if is_kept and self._content is None and self._descriptor < 0 and self._file.length <= _KEEP_BYTES:
            self._content = self._read_stored(0, self._file.length)
        if self._content is not None:
            yield self._content
            return
        for offset in range(0, self._file.length, _CHUNK_BYTES):
            yield self._read_stored(offset, min(_CHUNK_BYTES, self._file.length - offset))

    def _read_stored(self, offset: int, length: int) -> bytes:
        assert self._location is not None
        data = read_range(self._location, offset, length, self._descriptor)
        if len(data) != length:
            self._verify_length()  # a file that became shorter is damaged; a short answer alone proves nothing
            raise StorageError(f"{self.url}: storage gave {len(data)} of {length} bytes", self.url)
        return data
