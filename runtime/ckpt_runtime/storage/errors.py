"""Errors of the storage package: each names the file or directory. All are OSError, like other file errors."""

from __future__ import annotations

import errno


class StorageError(OSError):
    """Storage refused or failed, and the request had no effect. ``url`` names the file or directory."""

    def __init__(self, message: str, url: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.url = url
        if isinstance(cause, OSError):
            self.errno = cause.errno


class InvalidLocationError(StorageError, ValueError):
    """A path or URL that cannot be used here: relative, of an unknown scheme, or leading out of its directory."""


class NotFoundError(StorageError, FileNotFoundError):
    """There is no such file or directory."""


class AlreadyExistsError(StorageError, FileExistsError):
    """The name to be created already exists; what exists is unchanged."""


class AmbiguousWriteError(StorageError):
    """It is unknown whether the write took effect. Until it is known, nothing that it refers to may be deleted."""


class CorruptFileError(StorageError, ValueError):
    """A file's content differs from the content that was written: truncated, changed, foreign or of a later format."""


class ConflictError(StorageError):
    """Another process changed a document since it was read; the requested change was not made."""


class NotLeaderError(StorageError):
    """This process is not, or no longer, the leader and may not change anything."""


class StorageTimeoutError(AmbiguousWriteError, TimeoutError):
    """Storage has not answered within the deadline. The request may still take effect at any time."""


class PoolExhaustedError(StorageError):
    """A call was not started, because too many of its kind hang or wait."""


_ASKED_FOR = (InvalidLocationError, NotFoundError, AlreadyExistsError, CorruptFileError)
_ASKED_FOR_ERRNO = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
        errno.EROFS, errno.EFBIG,
    }
)  # fmt: skip


def storage_failed(error: StorageError) -> bool:
    """Whether storage caused the error, and not the request itself, so that the same call may succeed later.

    A place that is missing, occupied, unreadable for this user or of the wrong kind is a fault of the request.
    """
    if isinstance(error, _ASKED_FOR) or isinstance(error.__cause__, PermissionError):
        return False
    return error.errno not in _ASKED_FOR_ERRNO
