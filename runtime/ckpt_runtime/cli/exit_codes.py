"""Exit codes of the command line, and which error leads to which code. Scripts may rely on them (docs/cli.md)."""

from __future__ import annotations

from enum import IntEnum

from ckpt_runtime.client.errors import (
    BadRequest,
    CkptApiError,
    CkptClientError,
    Conflict,
    JobEnded,
    NotFound,
    OperationFailed,
    Unauthorized,
    Unreachable,
    WaitTimeout,
)
from ckpt_runtime.client.leader import LeaderUnproven


class ExitCode(IntEnum):
    """The exit codes, which are never renumbered."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAUTHORIZED = 6
    TIMEOUT = 7
    SERVER_ERROR = 8
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """An expected failure of a command: one line for the user, and its exit code."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[CkptClientError], ExitCode], ...] = (
    (Unreachable, ExitCode.UNREACHABLE),
    (NotFound, ExitCode.NOT_FOUND),
    (Conflict, ExitCode.CONFLICT),
    (Unauthorized, ExitCode.UNAUTHORIZED),
    (LeaderUnproven, ExitCode.UNAUTHORIZED),
    (BadRequest, ExitCode.USAGE),
    (CkptApiError, ExitCode.SERVER_ERROR),
    (OperationFailed, ExitCode.FAILED),
    (JobEnded, ExitCode.FAILED),
    (WaitTimeout, ExitCode.TIMEOUT),
)


def code_of(error: Exception) -> ExitCode:
    """The exit code of an expected failure; client errors without a code of their own are due to the user's input."""
    if isinstance(error, CommandError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.USAGE)
