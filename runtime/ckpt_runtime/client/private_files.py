"""Files and directories of a session: for their owner alone, and never half written."""

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
    """Makes what is missing of a directory, each level for its owner alone. Leaves alone what is there."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        directory.mkdir(DIRECTORY_MODE, exist_ok=True)


def write_private(path: Path, content: str | bytes) -> None:
    """Replaces the file at once. The draft beside it has a random name and is created by nobody else."""
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
    """Opens a log for writing at its end. Raises OSError for a link, which somebody else may have put there."""
    make_private_directory(path.parent)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    file = os.fdopen(descriptor, "ab")
    try:
        os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        file.close()
        raise
    return file
