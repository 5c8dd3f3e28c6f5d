"""The session file: where the last started session is, so that later commands find it.

It holds a token and names a process to stop, so it is private to its owner and refused when it is not.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ckpt_runtime.cli.exit_codes import CommandError, ExitCode

PATH_VARIABLE = "CKPT_SESSION_FILE"
_MAX_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """``process_started`` tells the process from a later one with the same id; None where that is unknown."""

    rest_url: str
    pid: int
    log_file: str
    ready_file: str
    token: str | None = None
    process_started: str | None = None


def state_directory() -> Path:
    """Where the command line keeps its files: ``$XDG_STATE_HOME/ckpt`` or ``~/.local/state/ckpt``."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ckpt"


def session_path() -> Path:
    """``$CKPT_SESSION_FILE``, or ``session.json`` in the state directory."""
    given = os.environ.get(PATH_VARIABLE)
    return Path(given) if given else state_directory() / "session.json"


def read_session(path: Path) -> SessionRecord | None:
    """The record, or None when there is no file. Raises :class:`CommandError` for one that cannot be trusted."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise CommandError(f"{path} is not private to you; remove it or chmod 600 it", ExitCode.USAGE)
            document = json.loads(file.read(_MAX_BYTES))
        _check_types(document)
        record = SessionRecord(**document)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CommandError(f"{path} is no session file: {error}", ExitCode.USAGE) from error
    return record


def _check_types(document: Mapping[str, Any]) -> None:
    text = all(isinstance(document.get(name), str) for name in ("rest_url", "log_file", "ready_file"))
    pid = document.get("pid")
    if not text or type(pid) is not int or pid <= 1:
        raise TypeError("rest_url, pid, log_file or ready_file is missing or of the wrong type")


def write_session(path: Path, record: SessionRecord) -> None:
    """Write atomically, readable by the owner alone."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(record), file)
    os.replace(draft, path)


def process_started(pid: int) -> str | None:
    """When a process started, in the kernel's own unit; None when it is gone or cannot be asked."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None


def is_same_process(record: SessionRecord) -> bool:
    """False when the process is gone, or its id belongs to another one by now."""
    if record.process_started is not None:
        return process_started(record.pid) == record.process_started
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False
    return True
