"""How both clients wait: what is sent again while a server is away, and when a poll is due.

Pure apart from the monotonic clock; the clients do the sending and the sleeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tenacity import RetryCallState, retry_if_exception, stop_after_attempt, stop_after_delay, stop_all
from tenacity.wait import wait_random_exponential

from ckpt_runtime.client.errors import (
    CkptClientError,
    JobEnded,
    NotFound,
    OperationFailed,
    WaitTimeout,
    is_outcome_unknown,
    is_passing,
)
from ckpt_runtime.client.models import TERMINAL_STATES, OperationStatus
from ckpt_runtime.client.requests import Call

T = TypeVar("T")

DEFAULT_PATIENCE_S = 1.0
"""How long a request is repeated while the server is away, when nothing else is said."""
POLL_PATIENCE_S = 30.0
"""How long one poll of a wait is repeated, so that the wait survives a new driver."""
FIRST_DELAY_S = 0.02
_MAX_PAUSE_S = 2.0


def retry_options(patience_s: float) -> dict[str, Any]:
    """Tenacity's, for one request: twice at least, and for so long; with 0 once. The last error is raised."""
    return {
        "stop": stop_all(stop_after_attempt(2 if patience_s > 0 else 1), stop_after_delay(patience_s)),
        "wait": wait_random_exponential(multiplier=0.1, max=_MAX_PAUSE_S),
        "retry": retry_if_exception(is_passing),
        "retry_error_callback": _last_error,
    }


def _last_error(state: RetryCallState) -> Any:
    """The last attempt's own exception instead of tenacity's."""
    assert state.outcome is not None
    return state.outcome.result()


@dataclass
class Attempts(Generic[T]):
    """The attempts of one call. ``lost`` once an attempt may have been carried out without an answer."""

    call: Call[T]
    lost: bool = False

    def next(self) -> Generator[Call[T], T, T]:
        """The requests of one attempt; the outcome of a lost one is looked up where the call says how."""
        lookup: Call[T] | None = self.call.lookup
        if self.lost and lookup is not None:
            try:
                answer = yield lookup
            except NotFound:
                pass  # it never arrived, or is still on its way
            else:
                return answer
        try:
            answer = yield self.call
        except CkptClientError as error:
            self.lost = self.lost or is_outcome_unknown(error)
            if not self.lost or lookup is None or is_passing(error):
                raise
            try:
                answer = yield lookup  # refused, perhaps as the repetition of one that has arrived
            except NotFound:
                raise error from None
        return answer


class PollSchedule:
    """Delays that double from 20 ms up to the poll interval, until the deadline.

    ``timeout_s`` None waits without an end.
    """

    def __init__(
        self,
        what: str,
        timeout_s: float | None,
        poll_interval_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if poll_interval_s <= 0:
            raise ValueError(f"poll_interval_s: {poll_interval_s!r} is not acceptable, it must be > 0")
        if timeout_s is not None and timeout_s < 0:
            raise ValueError(f"timeout_s: {timeout_s!r} is not acceptable, it must be >= 0 or None")
        self._what = what
        self._timeout_s = timeout_s
        self._interval_s = poll_interval_s
        self._clock = clock
        self._start = clock()
        self._delay_s = min(FIRST_DELAY_S, poll_interval_s)

    def next_delay(self) -> float:
        """How long to sleep before asking again. Raises :class:`WaitTimeout` when the deadline has passed."""
        delay, self._delay_s = self._delay_s, min(self._delay_s * 2, self._interval_s)
        if self._timeout_s is None:
            return delay
        left = self._start + self._timeout_s - self._clock()
        if left <= 0:
            raise WaitTimeout(self._what, self._timeout_s)
        return min(delay, left)

    @property
    def patience_s(self) -> float:
        """How long the next poll may be repeated while the server is away."""
        if self._timeout_s is None:
            return POLL_PATIENCE_S
        return min(POLL_PATIENCE_S, max(0.0, self._start + self._timeout_s - self._clock()))


def settled(status: OperationStatus) -> OperationStatus | None:
    """The status when the operation is done, None while it runs. Raises :class:`OperationFailed`."""
    if not status.done:
        return None
    if status.failure is not None:
        raise OperationFailed(status.failure.exception, status.failure.message, status.failure.stack_trace)
    return status


def arrived(job_id: str, state: str, wanted: Collection[str]) -> str | None:
    """The state when it is wanted, None to go on. Raises :class:`JobEnded` in another terminal state."""
    if state in wanted:
        return state
    if state in TERMINAL_STATES:
        raise JobEnded(job_id, state)
    return None
