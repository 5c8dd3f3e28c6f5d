"""The session file: where the last started session is, so that later commands find it.

It holds a token and names processes to stop, so it is private to its owner and refused when it is not. All other files
of the session lie beside it, so that two sessions of one user never share one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import msgspec

from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.spark.launch import SessionInfo
from ckpt_runtime.spark.processes import ProcessId

PATH_VARIABLE = "CKPT_SESSION_FILE"
_MAX_BYTES = 64 * 1024


Pid = Annotated[int, msgspec.Meta(gt=1)]
"""Of a process that may be signalled: 1 is init, and what is below stands for groups of processes."""


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where it answers, and its processes: ``pid`` leads their group, ``driver_pid`` is the Python driver.

    The times of their starts tell them from later processes with the same ids; None where a system does not tell.
    """

    rest_url: str
    pid: Pid
    process_started: int | None
    driver_pid: Pid
    driver_started: int | None
    log_file: str
    ready_file: str
    token: str | None = None

    @classmethod
    def of(cls, info: SessionInfo) -> SessionRecord:
        """Of a session that was just started."""
        leader, driver = info.leader, info.driver
        processes = (leader.pid, leader.started, driver.pid, driver.started)
        return cls(info.rest_url, *processes, info.log_file, info.session_file, info.token)

    @property
    def info(self) -> SessionInfo:
        """What its launcher works with."""
        leader = ProcessId(self.pid, self.process_started)
        driver = ProcessId(self.driver_pid, self.driver_started)
        return SessionInfo(self.rest_url, leader, driver, self.log_file, self.ready_file, self.token)

    @property
    def is_alive(self) -> bool:
        """Whether one of its processes still runs: a driver may outlive Spark's JVM, if only for a moment."""
        return self.info.leader.is_alive or self.info.driver.is_alive


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
            return msgspec.json.decode(file.read(_MAX_BYTES), type=SessionRecord)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is no session file: {error}", ExitCode.USAGE) from error


def write_session(path: Path, record: SessionRecord) -> None:
    """Write atomically, readable by the owner alone."""
    write_private(path, msgspec.json.encode(record))


def log_path(path: Path) -> Path:
    """The log of the session that ``path`` remembers: beside it, as all files of a session are."""
    return path.with_name((path.stem if path.suffix == ".json" else path.name) + ".log")


def work_path(path: Path) -> Path:
    """The default directory for uploads and checkpoints of that session."""
    return path.with_name((path.stem if path.suffix == ".json" else path.name) + ".work")
