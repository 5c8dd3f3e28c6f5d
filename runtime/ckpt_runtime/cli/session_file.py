"""The session file: it says where the last started session is, so that later commands find it.

It contains a token and the processes to stop, so it is private to its owner and refused if it is not. All other files
of the session lie beside it, so that two sessions of one user never share a file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec

from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.spark.launch import SessionInfo

PATH_VARIABLE = "CKPT_SESSION_FILE"
_MAX_BYTES = 64 * 1024


def session_path() -> Path:
    """``$CKPT_SESSION_FILE``, or ``ckpt/session.json`` in ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    if given := os.environ.get(PATH_VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ckpt" / "session.json"


def read_session(path: Path) -> SessionInfo | None:
    """The session in the file; None without a file. Raises :class:`CommandError` for a file that cannot be trusted."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise CommandError(f"{path} is not private to you; remove it or chmod 600 it", ExitCode.USAGE)
            return msgspec.json.decode(file.read(_MAX_BYTES), type=SessionInfo)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is no session file: {error}", ExitCode.USAGE) from error


def write_session(path: Path, info: SessionInfo) -> None:
    """Write the file atomically, readable only by its owner."""
    write_private(path, msgspec.json.encode(info))


def path_beside(path: Path, suffix: str) -> Path:
    """The path of another file of the session, such as its log or default working directory, beside ``path``."""
    return path.with_name((path.stem if path.suffix == ".json" else path.name) + suffix)
