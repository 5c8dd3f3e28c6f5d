"""Keeps the file small that the session's output goes to, whoever writes it: user code in local mode writes there too.

The writers (the JVM, and whatever it passes on) hold the file open for appending, so that it cannot be renamed away
from them. Its last part is copied to ``<file>.1`` and the file is cut to nothing; the next line lands at its beginning.
What is written between the two steps is lost. A file that is not open for appending is left alone.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.logging_options import LoggingOptions

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
_PRIVATE = 0o600


@contextmanager
def rotated_output(configuration: Configuration) -> Iterator[None]:
    """Looks after the log of this process meanwhile, if its output goes to a file."""
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
    """The file that the output of this process is appended to, by itself or by its parent: spark-submit's JVM passes
    on what its Python program writes. None for a terminal, a pipe, or a file that is not only appended to.
    """
    for process in (os.getpid(), os.getppid()) if pid is None else (pid,):
        for descriptor in (2, 1):
            file = _appended_file(process, descriptor)
            if file is not None:
                return file
    return None


def _appended_file(pid: int, descriptor: int) -> Path | None:
    """Linux only; elsewhere there is no such directory."""
    try:
        file = Path(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        is_same = os.path.samestat(file.stat(), Path(f"/proc/{pid}/fd/{descriptor}").stat())
        information = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
        flags = int(information.partition("flags:")[2].split()[0], 8)
    except (OSError, IndexError, ValueError):
        return None
    return file if is_same and stat.S_ISREG(file.stat().st_mode) and flags & os.O_APPEND else None


def rotate(file: Path, max_bytes: int, max_files: int) -> bool:
    """Whether the file had grown beyond ``max_bytes``. Raises OSError; the file stays as it is then."""
    if file.stat().st_size <= max_bytes:
        return False
    draft = file.with_name(f".{file.name}.rotating")
    draft.unlink(missing_ok=True)
    try:
        with file.open("rb") as whole, open(draft, "xb", opener=_private) as last:
            whole.seek(-max_bytes, os.SEEK_END)
            # With what is written meanwhile, but not for ever behind a writer that is faster.
            last.write(whole.read(2 * max_bytes))
        # Cut as soon as it is copied: what is written between both steps is lost.
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
