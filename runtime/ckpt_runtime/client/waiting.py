"""When to ask again and when to stop asking: the part of waiting that both clients share.

Pure apart from the monotonic clock; the clients do the asking and the sleeping.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ckpt_runtime.client.errors import JobEnded, OperationFailed, Unreachable, WaitTimeout
from ckpt_runtime.client.models import TERMINAL_STATES, OperationStatus

FIRST_DELAY_S = 0.02
UNREACHABLE_GRACE_S = 30.0


class PollSchedule:
    """Delays that double from 20 ms up to the poll interval, until the deadline.

    ``timeout_s`` None waits without an end. A server that cannot be reached is asked again for 30 s in a row, so that
    a wait survives a new driver; after that, or at the deadline, its error is raised.
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
        self._unreachable_since: float | None = None

    def next_delay(self) -> float:
        """How long to sleep before asking again. Raises :class:`WaitTimeout` when the deadline has passed."""
        delay, self._delay_s = self._delay_s, min(self._delay_s * 2, self._interval_s)
        if self._timeout_s is None:
            return delay
        left = self._start + self._timeout_s - self._clock()
        if left <= 0:
            raise WaitTimeout(self._what, self._timeout_s)
        return min(delay, left)

    def reached(self) -> None:
        """The server answered."""
        self._unreachable_since = None

    def not_reached(self, error: Unreachable) -> None:
        """It did not. Raises ``error`` when that has lasted too long."""
        now = self._clock()
        if self._unreachable_since is None:
            self._unreachable_since = now
        expired = self._timeout_s is not None and now >= self._start + self._timeout_s
        if expired or now - self._unreachable_since >= UNREACHABLE_GRACE_S:
            raise error


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
