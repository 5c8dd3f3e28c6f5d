"""Atomic creation and replacement of small files: readers see all of a file or nothing, at every moment.

Locally: a temporary file in the same directory, fsync, a hard link to the final name (which fails if it exists), fsync
of the directory. Elsewhere: one conditional put. Reading back settles whether a failed remote write took effect.

The checksum of stored bytes is XXH3 with 128 bits, written as ``xxh3-128:<32 hex digits>``. It finds damage
(truncation, flipped bits, swapped files) at memory speed; it does not protect against forgery. :func:`to_json_text`
makes the text of documents, and refuses what JSON cannot hold.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any
from uuid import uuid4

import orjson
import xxhash
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_runtime.storage.errors import AlreadyExistsError, AmbiguousWriteError, InvalidLocationError, StorageError
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_file,
    make_directory,
    naming,
    open_private,
    read_beginning,
    reason_of,
)

_STRICT = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
_MEMORY_LOCK = threading.Lock()
"""fsspec's memory file system checks and creates in two steps."""

_DEFINITE = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, NotImplementedError, TypeError)
"""Errors after which a remote write certainly had no effect."""

_CONFLICT = 409
_PRECONDITION_FAILED = 412
# 408, 425 and 429 mean that the server was busy, not that the write had no effect.
_REFUSALS = (*(status for status in range(400, 500) if status not in (408, 425, 429)), 501)
"""Answers of HTTP servers with the same meaning."""

_CONTENDED_ATTEMPTS = 20


def publish(location: Location, data: bytes, *, private: bool = True) -> None:
    """Creates a file with this content, atomically and durably; exactly one of several writers wins.

    Only the owner can read a ``private`` file on this machine.

    Raises :class:`AlreadyExistsError` when the file exists, :class:`AmbiguousWriteError` when it is unknown whether
    the write took effect, :class:`StorageError` when it had none.
    """
    if location.is_local:
        _publish_locally(location, data, partial(os.link, follow_symlinks=False), private=private)
    else:
        _put(location, data, create=True)


def replace(location: Location, data: bytes) -> None:
    """Creates or replaces a file, atomically and durably. Raises as :func:`publish`, except that the file may exist."""
    if location.is_local:
        _publish_locally(location, data, os.replace)
    else:
        _put(location, data, create=False)


def check_exclusive_creation(directory: Location) -> None:
    """Tests whether :func:`publish` in a directory, which is made if need be, never replaces an existing file.

    A store that first checks and then writes would pass the test, so its fsspec class is checked as well: one that does
    not implement ``pipe_file`` itself has no conditional put. Raises :class:`InvalidLocationError` for such a store,
    :class:`StorageError` for a directory that cannot be used.
    """
    lacking = f"{directory.url} cannot be used: its store cannot create a file only if it is absent"
    filesystem = directory.filesystem
    if not directory.is_local and getattr(filesystem.pipe_file, "__func__", None) is AbstractFileSystem.pipe_file:
        raise InvalidLocationError(f"{lacking} (no conditional put in {type(filesystem).__name__})", directory.url)
    make_directory(directory)
    trial = directory.child(f"trial-{uuid4().hex}")
    try:
        publish(trial, b"first")
        publish(trial, b"second")
    except AlreadyExistsError:
        return
    except StorageError as error:
        if error.errno == errno.ENOSYS:
            raise InvalidLocationError(f"{lacking} ({error})", directory.url) from error
        raise
    finally:
        with suppress(StorageError):
            delete_file(trial)
    raise InvalidLocationError(f"{lacking} (a conditional put replaced a file)", directory.url)


def fsync_directory(path: str) -> None:
    """Makes a local directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish_locally(
    location: Location, data: bytes, install: Callable[[str, str], None], *, private: bool = True
) -> None:
    directory = os.path.dirname(location.path)
    temporary = os.path.join(directory, f".{location.name}.{uuid4().hex}.tmp")
    try:
        with naming("write", location):
            with open(temporary, "xb", opener=open_private if private else None) as file:
                file.write(data)
                file.flush()
                # Before it gets its name: otherwise a power failure could leave the name without the content.
                os.fsync(file.fileno())
            install(temporary, location.path)
    finally:
        with suppress(OSError):
            # After a link it is left as a second name; os.replace has already renamed it.
            os.unlink(temporary)
    try:
        fsync_directory(directory)
    except OSError as error:
        message = f"{location.url} is written, but it is unknown whether it would survive a power failure: {error}"
        raise AmbiguousWriteError(message, location.url, error) from error


def _put(location: Location, data: bytes, *, create: bool) -> None:
    for _ in range(_CONTENDED_ATTEMPTS):
        try:
            mode = "create" if create else "overwrite"
            if isinstance(location.filesystem, MemoryFileSystem):
                with _MEMORY_LOCK:
                    location.filesystem.pipe_file(location.path, data, mode=mode)
            else:
                location.filesystem.pipe_file(location.path, data, mode=mode)
        except Exception as error:
            answer = _answer(error)
            if answer is _Answer.CONTENDED:
                continue
            _settle(location, data, error, answer)
        return
    message = f"cannot write {location.url}: others write it all the time"
    raise AmbiguousWriteError(message, location.url)


class _Answer(Enum):
    """The effect of a put, judged by its error."""

    EXISTS = "something is there"
    CONTENDED = "refused because others write the same file at this moment"
    REFUSED = "certainly without effect"
    UNKNOWN = "it may have had its effect, or may still get it"


def _answer(error: Exception) -> _Answer:
    """Judges by the type of the error and, if s3fs kept it, the server's answer to the last of several attempts."""
    response = getattr(error.__cause__, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
    status, retries = metadata.get("HTTPStatusCode", 0), metadata.get("RetryAttempts", 0)
    if isinstance(error, FileExistsError) or status == _PRECONDITION_FAILED:
        return _Answer.EXISTS
    if status == _CONFLICT:
        return _Answer.CONTENDED
    if retries:
        # An attempt before the refused one may have reached the store.
        return _Answer.UNKNOWN
    if isinstance(error, _DEFINITE) or status in _REFUSALS or getattr(error, "errno", None) == errno.ENOSYS:
        return _Answer.REFUSED
    return _Answer.UNKNOWN


def _settle(location: Location, data: bytes, error: Exception, answer: _Answer) -> None:
    """Returns when the put has taken effect despite its error; otherwise raises as :func:`publish`."""
    if answer is _Answer.REFUSED:
        raise StorageError(f"cannot write {location.url}: {reason_of(error)}", location.url, error) from error
    if answer is _Answer.EXISTS and isinstance(location.filesystem, MemoryFileSystem):
        raise _exists_already(location) from error
    # A put whose answer was lost is retried by the client library and then finds its own file.
    found: bytes | None = None
    with suppress(StorageError):
        found = read_beginning(location, len(data) + 1)
    if found == data:
        return
    if answer is _Answer.EXISTS and found is not None:
        raise _exists_already(location) from error
    message = f"it is unknown whether {location.url} was written: {reason_of(error)}"
    raise AmbiguousWriteError(message, location.url, error) from error


def _exists_already(location: Location) -> AlreadyExistsError:
    return AlreadyExistsError(f"cannot write {location.url}: it already exists", location.url)


ALGORITHM = "xxh3-128"
_FORM = re.compile(rf"{ALGORITHM}:[0-9a-f]{{32}}")


class RunningChecksum:
    """The checksum of bytes that arrive piece by piece."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: bytes | memoryview) -> None:
        """Adds the next bytes."""
        self._state.update(data)

    def text(self) -> str:
        """The checksum of everything added so far."""
        return f"{ALGORITHM}:{self._state.hexdigest()}"


def checksum_of(data: bytes | memoryview) -> str:
    """The checksum of one piece."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def is_checksum(text: object) -> bool:
    """Whether a text is a checksum that this version can verify."""
    return isinstance(text, str) and _FORM.fullmatch(text) is not None


def to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """The JSON text of a value made of dicts with text keys, lists, tuples, texts, numbers, booleans and None.

    Raises ValueError for anything else: other types, integers beyond 64 bits, NaN and the infinities, and nesting
    beyond 254 levels.
    """
    try:
        text = parsed_to_json_text(value, sort_keys=sort_keys)
    except TypeError as error:
        raise ValueError(f"only JSON values can be stored: {error}") from error
    # The encoder silently writes NaN and the infinities as null.
    if b"null" in text and _has_non_finite(value):
        raise ValueError("only JSON values can be stored: NaN and the infinities are none")
    return text


def parsed_to_json_text(value: Any, *, sort_keys: bool = False) -> bytes:
    """Like :func:`to_json_text`, but faster and without checks, for a value that was parsed from JSON."""
    return orjson.dumps(value, option=_STRICT | (orjson.OPT_SORT_KEYS if sort_keys else 0))


def _has_non_finite(value: Any) -> bool:
    """Uses the standard library's encoder, which reports them and is faster than a traversal in Python."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return True
    return False
