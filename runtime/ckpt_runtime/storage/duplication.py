"""Duplicates state files into the directory of a savepoint, by the fastest means that the file systems offer.

A reflink shares blocks until one side is written. A hard link shares the file itself, and so any damage to it. Neither
moves data. A copy within an object store moves nothing through this machine. Otherwise the file is read and written,
which also verifies the checksum. Sources are never changed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from enum import StrEnum
from uuid import uuid4

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import (
    Location,
    discard_file,
    file_size,
    naming,
    open_private,
    opened_regular,
    read_descriptor,
    read_range,
    same_filesystem,
)
from ckpt_runtime.storage.publish import RunningChecksum
from ckpt_runtime.storage.state_files import StateFileWriter

_FICLONE = 0x40049409
_CHUNK_BYTES = 4 << 20
_OWN_NAMES = 3
"""Maximum number of links that the engine makes of a table file: in the database, a snapshot being written, storage."""
NO_SUCH_MEANS = frozenset(
    {
        errno.EXDEV,
        errno.EOPNOTSUPP,
        errno.ENOTTY,
        errno.EINVAL,
        errno.ENOSYS,
        errno.EPERM,
        errno.EACCES,
        errno.EMLINK,
        errno.ETXTBSY,
    }
)
"""Error numbers that mean that a file system cannot link or share, not that the file has a problem."""


class Means(StrEnum):
    """How a file was duplicated."""

    REFLINK = "reflink"
    HARD_LINK = "hard link"
    SERVER_SIDE_COPY = "server-side copy"
    COPY = "copy"


class Duplicator:
    """Makes files in one directory; a means that was refused is not tried again. ``copies_only``: no shared blocks."""

    def __init__(self, directory: Location, *, copies_only: bool) -> None:
        self._directory = directory
        self._links: list[tuple[Means, Callable[[Location, Location], None]]] = []
        if directory.is_local and not copies_only:
            hard_link = (Means.HARD_LINK, lambda source, target: _hard_link(source.path, target))
            self._links = [(Means.REFLINK, _reflink), hard_link]

    def duplicate(self, source: Location, file: StateFile) -> tuple[StateFile, Means]:
        """Makes a file with the content that ``file`` describes, which lies at ``source``; its path is relative.

        The caller has to make the directory's new entries durable. Raises :class:`StorageError`, and then leaves
        nothing behind; :class:`CorruptFileError` means that the source is damaged.
        """
        target = self._directory.child(str(uuid4()))
        for means, link in tuple(self._links) if source.is_local else ():
            with naming("duplicate", source):
                try:
                    link(source, target)
                except OSError as error:
                    if error.errno not in NO_SUCH_MEANS:
                        raise
                    # A new list: other threads may be iterating over the old one.
                    self._links = [known for known in self._links if known[0] is not means]
                    continue
            return _checked(target, file, source), means
        if source.is_object_store and same_filesystem(source, target):
            try:
                with naming("duplicate", source):
                    source.filesystem.cp_file(source.path, target.path)
            except BaseException:
                # A copy exists even if the answer to its request was lost.
                discard_file(target)
                raise
            return _checked(target, file, source), Means.SERVER_SIDE_COPY
        return self._copied(source, file), Means.COPY

    def _copied(self, source: Location, file: StateFile) -> StateFile:
        _check_length(file_size(source), file, source)
        with StateFileWriter(self._directory, memory_threshold=-1) as writer:
            with naming("read", source):
                for chunk in _chunks(source, file.length):
                    writer.write(chunk)
            copy = writer.finish()
        if copy.checksum != file.checksum:
            discard_file(writer.location)
            message = f"{source.url}: damaged, its checksum is {copy.checksum} and not {file.checksum}"
            raise CorruptFileError(message, source.url)
        return copy


def linked_state_file(path: str, target: Location) -> StateFile:
    """Links a local file that no longer changes under a second name; the handle's path is relative.

    Only its owner can access it from now on, unless it has further names. Its content is durable; the caller has to
    make its directory entry durable. Raises :class:`StorageError`, with one of :data:`NO_SUCH_MEANS` when no link is
    possible, and then leaves nothing behind.
    """
    with naming("write", target):
        _hard_link(path, target)
        try:
            with opened_regular(target.path) as descriptor:
                found, checksum = os.fstat(descriptor), RunningChecksum()
                if found.st_nlink <= _OWN_NAMES:
                    os.fchmod(descriptor, stat.S_IRUSR | stat.S_IWUSR)
                for offset in range(0, found.st_size, _CHUNK_BYTES):
                    checksum.update(read_descriptor(descriptor, offset, _CHUNK_BYTES))
                os.fsync(descriptor)
        except BaseException:
            discard_file(target)
            raise
    return StateFile(target.name, found.st_size, checksum.text())


def _checked(target: Location, file: StateFile, source: Location) -> StateFile:
    try:
        _check_length(file_size(target), file, source)
    except BaseException:
        discard_file(target)
        raise
    return StateFile(target.name, file.length, file.checksum)


def _check_length(found: int, file: StateFile, source: Location) -> None:
    if found != file.length:
        message = f"{source.url}: damaged, it has {found} bytes and not {file.length}"
        raise CorruptFileError(message, source.url)


def _reflink(source: Location, target: Location) -> None:
    with opened_regular(source.path) as descriptor:
        try:
            with open(target.path, "xb", opener=open_private) as file:
                fcntl.ioctl(file.fileno(), _FICLONE, descriptor)
                # The blocks are on disk, but the file that refers to them is not yet.
                os.fsync(file.fileno())
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(target.path)
            raise


def _hard_link_of(source: Location, target: Location) -> None:
    _hard_link(source.path, target)


def _hard_link(path: str, target: Location) -> None:
    # The file is linked first and checked afterwards: a file that is checked first may be replaced before it is linked.
    os.link(path, target.path, follow_symlinks=False)
    if not stat.S_ISREG(os.lstat(target.path).st_mode):
        os.unlink(target.path)
        raise OSError(errno.EINVAL, "it is not a regular file, and only files are linked")


def _chunks(source: Location, length: int) -> Iterator[bytes]:
    with ExitStack() as opened:
        descriptor = opened.enter_context(opened_regular(source.path)) if source.is_local else -1
        for offset in range(0, length, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, length - offset)
            yield read_descriptor(descriptor, offset, size) if source.is_local else read_range(source, offset, size)
