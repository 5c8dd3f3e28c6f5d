"""Limits the size of the session's output file. Several processes write to it, in local mode user code as well.

The writers (the JVM, and the processes whose output it passes on) hold the file open for appending, so renaming it
would not redirect them. Its last part is copied to ``<file>.1`` and the file is truncated; the next line is written at
its beginning. Lines written between the two steps are lost. A file that is not open for appending stays untouched.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_runtime.configuration.cluster_options import LoggingOptions
from ckpt_runtime.configuration.configuration import Configuration

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_PRIVATE = 0o600


@contextmanager
def rotated_output(configuration: Configuration) -> Iterator[None]:
    """Rotate the log of this process during the block, if its output goes to a file."""
    file = output_file()
    if file is None:
        yield
        return
    max_bytes, max_files = configuration.get(LoggingOptions.MAX_SIZE), configuration.get(LoggingOptions.MAX_FILES)
    ended = threading.Event()

    def look_after() -> None:
        while not ended.wait(CHECK_INTERVAL_S):
            try:
                rotate(file, max_bytes, max_files)
            except OSError as error:
                logger.warning("the log %s cannot be rotated: %s", file, error)

    thread = threading.Thread(target=look_after, name="log-rotation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def output_file(pid: int | None = None) -> Path | None:
    """The file to which this process or its parent appends: spark-submit's JVM writes the output of its program.

    None for a terminal, a pipe, or a file that is not open for appending only.
    """
    for process in (os.getpid(), os.getppid()) if pid is None else (pid,):
        for descriptor in (2, 1):
            file = _appended_file(process, descriptor)
            if file is not None:
                return file
    return None


def _appended_file(pid: int, descriptor: int) -> Path | None:
    """The file behind a descriptor if it is open for appending. Linux only; other systems lack the directory."""
    try:
        file = Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        is_same = os.path.samestat(file.stat(), Path(f"/proc/{pid}/fd/{descriptor}").stat())
        information = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
        flags = int(information.partition("flags:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return None
    return file if is_same and stat.S_ISREG(file.stat().st_mode) and flags & os.O_APPEND else None


def rotate(file: Path, max_bytes: int, max_files: int) -> bool:
    """Rotate the file if it is larger than ``max_bytes``; returns whether it was.

    Raises OSError; the file then stays unchanged.
    """
    if file.stat().st_size <= max_bytes:
        return False
    draft = file.with_name(f".{file.name}.rotating")
    draft.unlink(missing_ok=True)
    try:
        with file.open("rb") as whole, open(draft, "xb", opener=_private) as last:
            whole.seek(-max_bytes, os.SEEK_END)
            # Includes what is written during the copy, but only up to a limit: the writer may be faster than the copy.
            last.write(whole.read(2 * max_bytes))
        # Truncated right after the copy: lines written between both steps are lost.
        os.truncate(file, 0)
        for number in range(max_files, 1, -1):
            older = _numbered(file, number - 1)
            if older.exists():
                older.replace(_numbered(file, number))
        draft.replace(_numbered(file, 1))
    finally:
        draft.unlink(missing_ok=True)
    return True


def _numbered(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, _PRIVATE)
