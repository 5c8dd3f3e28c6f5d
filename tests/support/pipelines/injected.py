"""Failures on demand in user code: a test drops a file into a directory, the next call of user code acts on it.

Knows nothing of the engine. Every file but ``slow``, ``held``, ``holds`` and ``process`` is consumed by the one call
that acts on it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


class InjectedError(RuntimeError):
    """What user code raises on demand."""


class UnprintableError(RuntimeError):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no text")


def act(directory: str | None, place: str) -> None:
    """``<place>-raise`` raises, ``-exit`` calls ``sys.exit``, ``-block`` never returns; ``-slow`` takes 50 ms.

    ``-held`` holds user code up as long as the file is there; ``-holds`` shows that it does. ``-unprintable``,
    ``-surrogate`` and ``-huge`` raise what is hard to report; ``-spawn`` starts processes without waiting for them.
    """
    if directory is None or not _is_told(directory, place):
        return
    root = Path(directory)
    if (root / f"{place}-slow").exists():
        time.sleep(0.05)
    while (root / f"{place}-held").exists():
        (root / f"{place}-holds").touch()
        time.sleep(0.01)
    if _consumed(root / f"{place}-raise"):
        raise InjectedError(f"injected in {place}")
    if _consumed(root / f"{place}-unprintable"):
        raise UnprintableError
    if _consumed(root / f"{place}-surrogate"):
        raise InjectedError("half a pair \ud800")
    if _consumed(root / f"{place}-huge"):
        raise InjectedError("x" * 20_000_000)
    if _consumed(root / f"{place}-spawn"):
        _start_detached(root)
    if _consumed(root / f"{place}-exit"):
        sys.exit(3)
    if _consumed(root / f"{place}-block"):
        while True:
            time.sleep(1)


def _start_detached(root: Path) -> None:
    """Leaves ``started-<pid>`` for a child, and for a process in a session of its own whose parent is gone."""
    child = subprocess.Popen(["sleep", "600"])
    script = f"sleep 600 & echo > {root}/started-$!"
    subprocess.run(["setsid", "sh", "-c", script], check=True)
    (root / f"started-{child.pid}").touch()


def leave(directory: str | None, mark: str | None) -> None:
    """``mark-<mark>``: user code runs that was configured so."""
    if directory is not None and mark is not None:
        (Path(directory) / f"mark-{mark}").touch()


def sign_in(directory: str | None) -> None:
    """Leaves ``process-<pid>``: this process runs the job."""
    if directory is not None:
        (Path(directory) / f"process-{os.getpid()}").touch()


def _is_told(directory: str, place: str) -> bool:
    """One look for all: user code asks for every key of every batch, and nearly always there is nothing."""
    try:
        return any(name.startswith(f"{place}-") for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False


def _consumed(file: Path) -> bool:
    try:
        file.unlink()
    except FileNotFoundError:
        return False
    return True
