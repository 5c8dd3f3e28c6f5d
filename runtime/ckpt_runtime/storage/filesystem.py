"""Locations (a path on a file system) and the basic operations that snapshots need on them.

Local paths go through the operating system, everything else through fsspec. Listings are never taken from a cache.
Atomic creation is in ``publish.py``; deletion of whole snapshots, with its safety checks, in
``checkpoint_storage.py``.

A read from an object store whose answer broke off is repeated. The client library alone retries a request that gets no
answer, gets a 5xx status or is throttled, with backoff and by its own settings: two layers that retry the same failures
would multiply the time until the error is reported. No library retries a request whose response body breaks off or
stalls; that is done here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from http.client import IncompleteRead
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from tenacity import retry, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from ckpt_runtime.storage.errors import AlreadyExistsError, InvalidLocationError, NotFoundError, StorageError

logger = logging.getLogger(__name__)
T = TypeVar("T")

ATTEMPTS = 5
_PATIENCE_S = 30
"""No attempt starts later than this after the first one."""

_LONGEST_WAIT_S = 2
_BROKEN_BODIES: Mapping[str, tuple[str, ...]] = {
    "aiohttp": ("ClientPayloadError",),
    "botocore.exceptions": ("IncompleteReadError", "ResponseStreamingError"),
}
"""Error classes by module of the client library; a module is used only if it is loaded."""


def is_broken_body(error: BaseException) -> bool:
    """Whether a response began and was not received in full; an error that the store returned does not count."""
    if getattr(error.__cause__, "response", None) is not None:
        return False
    if isinstance(error, ConnectionError | TimeoutError | IncompleteRead):
        return True
    for module, names in _BROKEN_BODIES.items():
        loaded = sys.modules.get(module)
        if loaded is not None and isinstance(error, tuple(getattr(loaded, name) for name in names)):
            return True
    return False


@retry(
    retry=retry_if_exception(is_broken_body),
    stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(_PATIENCE_S),
    wait=wait_random_exponential(multiplier=0.1, max=_LONGEST_WAIT_S),
    reraise=True,
)
def read_again(read: Callable[[], T]) -> T:
    """The result of a read, which has no effect and may be repeated. Raises the error of the last attempt."""
    return read()


SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hdfs", "webhdfs", "oss")
"""Schemes on which snapshots may be stored; file systems that the process registered with fsspec work as well.

Other schemes that fsspec supports itself are refused, even when their library is loaded.
"""

_VOLATILE = "memory"
_volatile_allowed = False

_S3 = ("s3", "s3a")
_OBJECT_STORES = (*_S3, "gs", "gcs", "abfs", "abfss", "az", "oss")
"""Schemes of stores without directories: a directory exists as long as something lies below its path."""

MAX_URL_LENGTH = 4_096

_UNUSUAL = re.compile(r"[%?#]|[^ -~]")
_ESCAPED = "%?#"
"""Characters with a special meaning in a URL; all others that can be shown stay readable."""

_AS_BYTES = "surrogateescape"
"""How Python represents names of files that are not UTF-8."""
_PRIVATE_DIRECTORY = 0o700
_PRIVATE_FILE = 0o600
_ANY_DIRECTORY = 0o777
_DISCARD_ATTEMPTS = 3
_LOOKS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """A file or directory. ``path`` is absolute in the file system's own form and has no trailing slash."""

    filesystem: Any
    path: str
    scheme: str

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Location):
            return NotImplemented
        return self.path == other.path and same_filesystem(self, other)

    def __hash__(self) -> int:
        return hash((type(self.filesystem), self.path))

    @property
    def url(self) -> str:
        """The form from which :func:`resolve` makes the location again."""
        if self.is_local:
            return f"file://{_UNUSUAL.sub(_escaped, self.path)}"
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether the system calls of the operating system work on :attr:`path`."""
        return isinstance(self.filesystem, LocalFileSystem)

    @property
    def is_object_store(self) -> bool:
        """Whether the store has no directories to make or delete; its paths begin with the name of a bucket."""
        return self.scheme in _OBJECT_STORES

    @property
    def is_s3(self) -> bool:
        """Whether the store has the methods of S3."""
        return self.scheme in _S3

    @property
    def name(self) -> str:
        """The last segment of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> Location:
        """The directory that holds this location."""
        return Location(self.filesystem, self.path.rsplit("/", 1)[0] or "/", self.scheme)

    def real(self) -> Location:
        """The same place with all symbolic links resolved. Blocks."""
        if not self.is_local:
            return self
        return Location(self.filesystem, os.path.realpath(self.path), self.scheme)

    def child(self, *names: str) -> Location:
        """A location below this one. Raises :class:`InvalidLocationError` for a name that is not one plain segment."""
        for name in names:
            if not is_plain_name(name):
                raise InvalidLocationError(f"{name!r} is not a plain file name (below {self.url})", self.url)
        return Location(self.filesystem, "/".join((self.path.rstrip("/"), *names)), self.scheme)

    def contains(self, other: Location) -> bool:
        """Whether ``other`` lies strictly below this directory, judged by the paths alone."""
        below = other.path.startswith(self.path.rstrip("/") + "/")
        return below and same_filesystem(self, other)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    shown = character.isprintable() and character not in _ESCAPED
    return character if shown else quote(character, errors=_AS_BYTES)


Identity = tuple[str | int, ...]
"""Identifies a place; see :func:`identity`."""


def identity(location: Location) -> Identity:
    """Equal for all spellings of one place, despite symbolic links, mounts and options of a store. Blocks."""
    if not location.is_local:
        return (type(location.filesystem).__name__, location.path)
    try:
        found = os.stat(location.path)
    except OSError:
        return ("file", os.path.realpath(location.path))
    return ("inode", found.st_dev, found.st_ino)


def same_filesystem(one: Location, other: Location) -> bool:
    """Whether both lie on one file system, by its kind and options; fsspec makes one object for each thread."""
    first, second = one.filesystem, other.filesystem
    if first is second or type(first) is not type(second):
        return first is second
    arguments = (first.storage_args, first.storage_options)
    return bool(arguments == (second.storage_args, second.storage_options))


def is_plain_name(name: str) -> bool:
    """Whether a text is one path segment that stays in its directory and has no control characters."""
    return bool(name) and name not in (".", "..") and "/" not in name and name.isprintable() and len(name) <= 255


@contextmanager
def memory_allowed() -> Iterator[None]:
    """For tests only: within it ``memory://`` is accepted as a location, whose content ends with the process."""
    global _volatile_allowed
    before, _volatile_allowed = _volatile_allowed, True
    try:
        yield
    finally:
        _volatile_allowed = before


def resolve(url: str | os.PathLike[str]) -> Location:
    """The location of an absolute path or a URL: ``/x``, ``file:/x``, ``file:///x``, ``s3://bucket/x``.

    Raises :class:`InvalidLocationError` naming the URL and what is allowed, and :class:`StorageError` for a store that
    cannot be reached. Does not touch the file system, but the first URL of a scheme loads its library, which may take
    a second.
    """
    text, scheme, path = _parsed(url)
    if scheme is None:
        return Location(LocalFileSystem(), os.path.normpath("/" + path.lstrip("/")), "file")
    return _remote(text, scheme)


def address_of(url: str) -> str:
    """The store that answers for a URL: its scheme with its host or bucket, or ``local paths``.

    Uses only the text, which may be any text; user names and passwords are left out.
    """
    scheme, separator, rest = url.partition(":")
    if not separator or "/" in scheme or scheme.lower() == "file":
        return "local paths"
    return f"{scheme.lower()}://{re.split('[/?#]', rest.lstrip('/'), maxsplit=1)[0].rpartition('@')[2]}"


def check_url(url: str | os.PathLike[str]) -> None:
    """Raises as :func:`resolve` for a text that cannot be a location anywhere; loads nothing."""
    _parsed(url)


def _parsed(url: str | os.PathLike[str]) -> tuple[str, str | None, str]:
    """The text, its scheme (None for a local path) and the path that is to be checked for parent segments."""
    text = os.fspath(url)
    if not text or len(text) > MAX_URL_LENGTH or not text.isprintable():
        raise _invalid(text, f"an absolute path or URL of at most {MAX_URL_LENGTH} printable characters")
    scheme, separator, _ = text.partition(":")
    if not separator or "/" in scheme:
        return text, None, _local_path(text, text)
    scheme = scheme.lower()
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
            raise _invalid(text, "file:///path without a host, and with %23 for # and %3F for ?")
        return text, None, _local_path(unquote(parts.path, errors=_AS_BYTES), text)
    if "::" in text:
        raise _invalid(text, "a single URL, not a chain of them")
    if not _is_known(scheme):
        raise _invalid(text, f"an absolute path, or a URL of the schemes {', '.join(SCHEMES)}")
    path = text.partition("://")[2]
    _refuse_parent_segments(path, text)
    return text, scheme, path


def _is_known(scheme: str) -> bool:
    if scheme == _VOLATILE:
        return _volatile_allowed
    return scheme in SCHEMES or (scheme in fsspec.registry and scheme not in fsspec.available_protocols())


def _local_path(path: str, text: str) -> str:
    if not path.startswith("/"):
        raise _invalid(text, "an absolute path or a URL")
    _refuse_parent_segments(path, text)
    return path


def _remote(text: str, scheme: str) -> Location:
    # Another process, or another thread with the same object, may write files that a cached listing does not show.
    options = {"use_listings_cache": False} if scheme in _OBJECT_STORES else {}
    try:
        filesystem, path = fsspec.core.url_to_fs(text, **options)
    except (ImportError, ValueError) as error:
        raise InvalidLocationError(f"{text}: {error}", text) from error
    except Exception as error:
        raise StorageError(f"{text}: cannot be reached: {error}", text, error) from error
    # One layer retries: s3fs would repeat, five times, requests that botocore has already given up.
    if "s3" in filesystem.protocol and hasattr(filesystem, "retries"):
        filesystem.retries = 1
    path = path.rstrip("/")
    if not path and scheme in _OBJECT_STORES:
        raise _invalid(text, f"a URL with a bucket, {scheme}://bucket/path")
    return Location(filesystem, path, scheme)


def _refuse_parent_segments(path: str, text: str) -> None:
    if ".." in path.split("/"):
        raise _invalid(text, "a path without '..'")


def _invalid(text: str, allowed: str) -> InvalidLocationError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return InvalidLocationError(f"{shown!r} is not a usable location; allowed: {allowed}", shown)


@contextmanager
def naming(action: str, location: Location) -> Iterator[None]:
    """Turns any error of a file system into a :class:`StorageError` that names the location."""
    try:
        yield
    except StorageError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"cannot {action} {location.url}: there is no such file or directory", location.url
        ) from error
    except FileExistsError as error:
        raise AlreadyExistsError(f"cannot {action} {location.url}: it already exists", location.url) from error
    except Exception as error:
        raise StorageError(f"cannot {action} {location.url}: {reason_of(error)}", location.url, error) from error


def reason_of(error: Exception) -> str:
    """The text of a file system error, without its number; that of an object store has the store's code."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, Mapping) else None
    return f"{code}: {text}" if code and str(code) not in text else text


def exists(location: Location) -> bool:
    """Whether a file or directory is there now."""
    with naming("look for", location):
        if location.is_local:
            # A dangling link counts as existing: creating a file with its name would fail.
            return os.path.lexists(location.path)
        # fsspec caches listings, and other processes write here too.
        location.filesystem.invalidate_cache(location.parent.path)
        return bool(location.filesystem.exists(location.path))


def is_directory(location: Location) -> bool:
    """Whether a directory is there now; on object stores, whether anything lies below the path."""
    with naming("look for", location):
        if location.is_local:
            return os.path.isdir(location.path)
        location.filesystem.invalidate_cache(location.path)
        return bool(location.filesystem.isdir(location.path))


def file_size(location: Location) -> int:
    """Bytes of a file. Raises :class:`NotFoundError`."""
    with naming("read", location):
        if location.is_local:
            return os.stat(location.path).st_size
        return int(location.filesystem.size(location.path))


def modification_time_s(location: Location) -> float:
    """When a file was written last, in seconds since the epoch. Raises :class:`NotFoundError`."""
    with naming("look at", location):
        if location.is_local:
            return os.stat(location.path).st_mtime
        return float(location.filesystem.modified(location.path).timestamp())


def read_bytes(location: Location, limit: int) -> bytes:
    """A whole file. Raises :class:`StorageError` when it is larger than ``limit`` bytes."""
    data = read_beginning(location, limit + 1)
    if len(data) > limit:
        size = file_size(location)
        too_large = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        message = f"cannot read {location.url}: {size} bytes are more than the {limit} allowed"
        raise StorageError(message, location.url, too_large)
    return data


def read_shown(location: Location, limit: int) -> bytes:
    """Like :func:`read_bytes`, for callers that delete or lose something if the file does not exist.

    A store may fail to find an existing file for a moment. So :class:`NotFoundError` is raised only if a second lookup
    does not find the file either.
    """
    for _ in range(_LOOKS):
        try:
            return read_bytes(location, limit)
        except NotFoundError:
            if not exists(location):
                raise
    raise StorageError(f"{location.url} is there and cannot be read: the store does not find it", location.url)


def read_beginning(location: Location, length: int) -> bytes:
    """At most ``length`` first bytes, in one read: all from one version of a file that is replaced meanwhile."""
    with naming("read", location):
        if location.is_local:
            with opened_regular(location.path) as descriptor:
                return read_descriptor(descriptor, 0, min(length, os.fstat(descriptor).st_size))
        try:
            return _read_remotely(location, 0, length)
        except Exception as error:
            # Over HTTP no range of an empty file can be requested.
            if _may_lack_ranges(location, error) and location.filesystem.size(location.path) == 0:
                return b""
            raise


def _may_lack_ranges(location: Location, error: Exception) -> bool:
    """Whether the range may have been refused, by the error number of s3fs; errors of other stores have less detail."""
    kinds = (errno.EINVAL,) if location.scheme in _S3 else (errno.EINVAL, None)
    return location.is_object_store and getattr(error, "errno", None) in kinds


def read_range(location: Location, offset: int, length: int, descriptor: int = -1) -> bytes:
    """``length`` bytes from ``offset``, fewer at the file's end; from the open local file if ``descriptor`` is one."""
    if length == 0:
        return b""
    with naming("read", location):
        if descriptor >= 0:
            return read_descriptor(descriptor, offset, length)
        if location.is_local:
            with opened_regular(location.path) as opened:
                return read_descriptor(opened, offset, length)
        return _read_remotely(location, offset, length)


def _read_remotely(location: Location, offset: int, length: int) -> bytes:
    return read_again(lambda: bytes(location.filesystem.cat_file(location.path, start=offset, end=offset + length)))


def open_regular(path: str) -> int:
    """A descriptor to read a local file with; the caller closes it.

    Raises OSError unless it is a regular file. Opening a FIFO would wait for a writer, and reading a device could block
    for ever; so it is opened without waiting, and the type is checked on the open descriptor.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'something else')}, and only files are read")


_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


@contextmanager
def opened_regular(path: str) -> Iterator[int]:
    """Like :func:`open_regular`, but closes the descriptor at the end of the ``with`` block."""
    descriptor = open_regular(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_descriptor(descriptor: int, offset: int, length: int) -> bytes:
    """``length`` bytes from ``offset`` of an open local file, fewer at its end; safe to call from several threads."""
    parts: list[bytes] = []
    while length > 0:
        # pread does not change the descriptor's position, so threads may share it. Linux moves 2 GiB at most in one
        # call.
        part = os.pread(descriptor, min(length, 1 << 30), offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def list_names(directory: Location) -> list[str]:
    """Names of the files and directories in a directory, sorted; none when it does not exist.

    Files that a crashed writer left under a temporary name are not listed.
    """
    with naming("list", directory):
        try:
            if directory.is_local:
                names = os.listdir(directory.path)
            else:
                directory.filesystem.invalidate_cache(directory.path)
                entries = directory.filesystem.ls(directory.path, detail=False)
                names = [
                    entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry.rstrip("/") != directory.path
                ]
        except FileNotFoundError:
            return []
    return sorted(name for name in names if not is_temporary_name(name))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in a listing: where it is, its bytes, and when it was written last, in ms since the epoch."""

    location: Location
    size: int
    modified_ms: int


def list_entries(directory: Location) -> tuple[list[FileEntry], list[Location]]:
    """The files and the directories in a directory, sorted by name; none when it does not exist."""
    with naming("list", directory):
        try:
            if not directory.is_local:
                directory.filesystem.invalidate_cache(directory.path)
            found = directory.filesystem.ls(directory.path, detail=True)
        except FileNotFoundError:
            return [], []
    files: list[FileEntry] = []
    directories: list[Location] = []
    for entry in sorted(found, key=lambda entry: str(entry["name"])):
        path = str(entry["name"]).rstrip("/")
        if path == directory.path:
            continue
        location = Location(directory.filesystem, path, directory.scheme)
        if entry["type"] == "directory":
            directories.append(location)
        elif entry["type"] == "file":
            files.append(FileEntry(location, int(entry["size"] or 0), _modified_ms(entry)))
    return files, directories


def file_entry(location: Location) -> FileEntry | None:
    """A file as a listing has it; None when there is no file."""
    with naming("look for", location):
        try:
            if not location.is_local:
                location.filesystem.invalidate_cache(location.parent.path)
            entry = location.filesystem.info(location.path)
        except FileNotFoundError:
            return None
    if entry["type"] != "file":
        return None
    return FileEntry(location, int(entry["size"] or 0), _modified_ms(entry))


def _modified_ms(entry: dict[str, Any]) -> int:
    """The time of the last write in a listing, under any name that a file system gives to this field."""
    for key in ("mtime", "LastModified", "last_modified", "modified", "updated", "created"):
        value = entry.get(key)
        if isinstance(value, int | float):
            return int(value * 1000)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1000)
        if isinstance(value, str):
            return int(datetime.fromisoformat(value).timestamp() * 1000)
    return 0


def move_file(source: Location, target: Location) -> None:
    """Moves a file within a file system, and makes the directories above the target."""
    with naming("move", source):
        source.filesystem.makedirs(target.parent.path, exist_ok=True)
        source.filesystem.mv(source.path, target.path)


def upload_file(source: Location, target: Location) -> None:
    """Moves a local file to another file system, where it becomes visible as a whole. An existing file of that name is
    replaced."""
    place = target if target.is_object_store else target.parent.child(f".{target.name}.tmp")
    with naming("write", target):
        target.filesystem.makedirs(target.parent.path, exist_ok=True)
        target.filesystem.put_file(source.path, place.path)
        if place is not target:
            target.filesystem.mv(place.path, target.path)
    delete_file(source)


def is_temporary_name(name: str) -> bool:
    """Whether a name is that of a file that its writer has not published yet."""
    return name.startswith(".") and name.endswith(".tmp")


def open_private(path: str, flags: int) -> int:
    """An opener: only the owner can access a new local file, under any umask."""
    return os.open(path, flags, _PRIVATE_FILE)


def check_directory(directory: Location) -> None:
    """Raises :class:`StorageError` when a directory that must exist does not.

    Its storage is then unavailable, so nothing below it can be assumed deleted. Object stores have no directories.
    """
    if not directory.is_object_store and not is_directory(directory):
        message = f"the directory {directory.url} is not there: its storage is away, or it was deleted by hand"
        raise StorageError(message, directory.url)


def make_directory(directory: Location, *, exist_ok: bool = True, parents: bool = True, private: bool = True) -> None:
    """Makes a directory and its ``parents``. On object stores only checks that nothing exists, unless ``exist_ok``.

    Only the owner can access new local directories, because state contains users' rows; with ``private`` False the
    umask decides. A bucket is never made. Without ``parents``, raises :class:`StorageError` naming a missing parent:
    nothing may be written below the mount point of a file system that is not mounted.
    """
    if not parents:
        check_directory(directory.parent)
    with naming("create", directory):
        if directory.is_local:
            mode = _PRIVATE_DIRECTORY if private else _ANY_DIRECTORY
            if parents:
                _make_parents(directory.path, mode)
            try:
                os.mkdir(directory.path, mode)
            except FileExistsError:
                if not exist_ok or not os.path.isdir(directory.path):
                    raise
            return
        if not exist_ok and exists(directory):
            raise FileExistsError(directory.path)
        if not directory.is_object_store:
            directory.filesystem.makedirs(directory.path, exist_ok=True)


def _make_parents(path: str, mode: int) -> None:
    missing: list[str] = []
    parent = os.path.dirname(path)
    # Not os.makedirs: it applies the mode to the last directory only, and parents contain users' rows as well.
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        # Another process may make the same directory.
        with suppress(FileExistsError):
            os.mkdir(directory, mode)


def check_bucket(location: Location) -> None:
    """Raises :class:`StorageError` when the bucket of an object store cannot be reached; other stores have none."""
    if location.is_object_store:
        bucket = Location(location.filesystem, location.path.partition("/")[0], location.scheme)
        with naming("use", bucket):
            bucket.filesystem.info(bucket.path)


def delete_file(location: Location) -> None:
    """Deletes a file if it exists, and verifies the deletion."""
    with naming("delete", location):
        if location.is_local:
            with suppress(FileNotFoundError):
                os.unlink(location.path)
            return
        with suppress(FileNotFoundError):
            location.filesystem.rm_file(location.path)
        if not location.is_object_store and exists(location):  # on object stores the answer is reliable
            raise StorageError(f"cannot delete {location.url}: it is still there", location.url)


def discard_file(location: Location) -> None:
    """Deletes the file that a failed write may have left, as far as that is possible.

    It is tried more than once, because nothing else refers to the file.
    """
    for attempt in range(1, _DISCARD_ATTEMPTS + 1):
        try:
            delete_file(location)
        except StorageError as error:
            if attempt == _DISCARD_ATTEMPTS:
                logger.warning("a file that was given up stays: %s", error)
        else:
            return


def delete_tree(directory: Location) -> None:
    """Deletes a directory and everything in it, never what symbolic links in it point to; makes sure it is gone."""
    with naming("delete", directory):
        if directory.is_local:
            # The job did not make what a link points to.
            if os.path.islink(directory.path):
                raise StorageError(f"cannot delete {directory.url}: it is a symbolic link", directory.url)
            with suppress(FileNotFoundError):
                shutil.rmtree(directory.path)
        elif directory.is_object_store and "/" not in directory.path:
            raise StorageError(f"cannot delete {directory.url}: it is a whole bucket", directory.url)
        elif exists(directory):
            with suppress(FileNotFoundError):
                directory.filesystem.rm(directory.path, recursive=True)
        if exists(directory):
            raise StorageError(f"cannot delete {directory.url}: it is still there", directory.url)


def delete_empty_directory(directory: Location) -> bool:
    """Deletes a directory if it is empty; returns whether it is gone. Object stores have none to delete."""
    with naming("delete", directory):
        if list_names(directory):
            return False
        if directory.is_local:
            with suppress(FileNotFoundError):
                try:
                    os.rmdir(directory.path)
                except OSError:
                    return False
        elif not directory.is_object_store and is_directory(directory):
            with suppress(Exception):
                directory.filesystem.rmdir(directory.path)
        return True
