"""The errors of calls of the REST API, as exceptions that a caller can tell apart."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.contract.jobs import root_cause_line

UNKNOWN_JOB = "FlinkJobNotFoundException"
"""The exception that Flink names in answers with status 500 and in failed operations if the job does not exist."""


class CkptClientError(Exception):
    """Base of all errors that the client raises on purpose."""


class Unreachable(CkptClientError):
    """No answer: connection refused, reset, timed out, name unknown.

    ``sent``: whether the request may have arrived; without a connection it has not.
    """

    def __init__(self, url: str, reason: str, *, sent: bool = True) -> None:
        super().__init__(f"{url} cannot be reached: {reason}")
        self.url = url
        self.reason = reason
        self.sent = sent


class CkptApiError(CkptClientError):
    """An answer with an error status. ``errors`` are the server's texts; the message summarises them."""

    def __init__(self, status: int, errors: Sequence[str]) -> None:
        lines = [line for line in map(root_cause_line, errors) if line]
        telling = [line for line in lines if line != "Internal server error."]
        super().__init__("; ".join(telling or lines) or f"HTTP status {status}")
        self.status = status
        self.errors = tuple(errors)


class BadRequest(CkptApiError):
    """400 and other 4xx without a class of their own: the request cannot succeed as it is."""


class Unauthorized(CkptApiError):
    """401 or 403: no valid token, or this server does not answer such callers."""


class NotFound(CkptApiError):
    """404: no such job, checkpoint, operation or path."""


class NotServed(CkptApiError):
    """The server does not know this call: it is Flink and the call is this project's own, or it is an older version."""


class Conflict(CkptApiError):
    """409: the present state of the job forbids it."""


class UnexpectedAnswer(CkptApiError):
    """The answer is not what this call returns; probably no job manager listens there."""


class OperationFailed(CkptClientError):
    """An asynchronous operation ended in failure. ``exception`` is the remote class, ``stack_trace`` its whole text."""

    def __init__(self, exception: str, message: str, stack_trace: str) -> None:
        super().__init__(message)
        self.exception = exception
        self.stack_trace = stack_trace


class JobEnded(CkptClientError):
    """The job reached a terminal state which is not among those waited for."""

    def __init__(self, job_id: str, state: str) -> None:
        super().__init__(f"Job {job_id} ended as {state}")
        self.job_id = job_id
        self.state = state


class WaitTimeout(CkptClientError):
    """The deadline of a wait passed; the awaited operation continues."""

    def __init__(self, what: str, timeout_s: float) -> None:
        super().__init__(f"{what} did not happen within {timeout_s:g} s")
        self.timeout_s = timeout_s


def error_for(status: int, errors: Sequence[str]) -> CkptApiError:
    """Return the exception for an error status."""
    if status in (401, 403):
        return Unauthorized(status, errors)
    if status == 404 or (status >= 500 and any(UNKNOWN_JOB in root_cause_line(error) for error in errors)):
        return NotFound(status, errors)
    if status == 409:
        return Conflict(status, errors)
    return BadRequest(status, errors) if 400 <= status < 500 else CkptApiError(status, errors)


_PASSING_STATUSES = frozenset({408, 425, 429, 502, 503, 504})
_UNKNOWN_OUTCOMES = frozenset({408, 502, 504})


def is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed later: no answer, overload, a driver that starts or does not lead."""
    if isinstance(error, CkptApiError):
        return error.status in _PASSING_STATUSES
    return isinstance(error, Unreachable)


def is_outcome_unknown(error: BaseException) -> bool:
    """Whether the request may have been executed although its answer was lost."""
    if isinstance(error, CkptApiError):
        return error.status in _UNKNOWN_OUTCOMES
    return isinstance(error, Unreachable) and error.sent
