"""Errors of the storage room: each names the file or directory. All are OSError, as file errors are everywhere else."""

from __future__ import annotations

import errno


class StorageError(OSError):
    """Storage refused or failed, and nothing that was asked for is in place. ``url`` names the file or directory."""

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
    """Something exists under the name that was to be created; it is untouched."""


class AmbiguousWriteError(StorageError):
    """It is unknown whether the write took effect. Nothing that it may refer to may be deleted until that is known."""


class CorruptFileError(StorageError, ValueError):
    """A file's content is not what was written: truncated, changed, foreign or of a later format."""


class ConflictError(StorageError):
    """Somebody else changed a document since it was read; the change that was asked for was not made."""


class StorageTimeoutError(AmbiguousWriteError, TimeoutError):
    """Storage has not answered within the deadline. What was asked for may still happen at any time."""


class PoolExhaustedError(StorageError):
    """A call was not begun, because too many of its kind hang or wait."""


_ASKED_FOR = (InvalidLocationError, NotFoundError, AlreadyExistsError, CorruptFileError)
_ASKED_FOR_ERRNO = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP,
        errno.EROFS, errno.EFBIG,
    }
)  # fmt: skip


def storage_failed(error: StorageError) -> bool:
    """Whether storage is to blame, so that the same call may succeed later, and not what was asked of it.

    A place that is missing, occupied, unreadable for this user or of the wrong kind is what was asked for.
    """
    if isinstance(error, _ASKED_FOR) or isinstance(error.__cause__, PermissionError):
        return False
    return error.errno not in _ASKED_FOR_ERRNO
