"""Files and directories of a session: readable only by their owner, and never partially written."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

DIRECTORY_MODE = 0o700
FILE_MODE = 0o600
PRIVATE_UMASK = 0o077


def make_private_directory(path: Path) -> None:
    """Create the missing levels of a directory, each private to its owner. Existing levels stay unchanged."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)


def write_private(path: Path, content: str | bytes) -> None:
    """Replace the file atomically, through a draft file with a random name in the same directory."""
    make_private_directory(path.parent)
    descriptor, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise


def append_private(path: Path) -> BinaryIO:
    """Open a log for appending. Raises OSError for a link, which another user may have put there."""
    make_private_directory(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    file = os.fdopen(descriptor, "ab")
    try:
        os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        file.close()
        raise
    return file
