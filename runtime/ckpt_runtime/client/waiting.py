"""The logic of waits, without I/O: which request comes next, when it is repeated, and when a wait ends.

A wait is a generator of :data:`Steps`. It yields calls to send and pauses to make, receives each call's answer or
error, and returns the awaited result. ``CkptClient.run`` carries out the steps by blocking, ``AsyncCkptClient.run`` by
awaiting; so the command line, operators, sensors and triggers all wait in the same way. Nothing here sends or sleeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception
from tenacity.wait import wait_random_exponential

from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import (
    CkptClientError,
    JobEnded,
    NotFound,
    OperationFailed,
    WaitTimeout,
    is_outcome_unknown,
    is_passing,
)
from ckpt_runtime.client.models import RETAINS, TERMINAL_STATES, Bounds, JobDetails, OperationStatus
from ckpt_runtime.client.requests import Call, OperationKind

T = TypeVar("T")

DEFAULT_PATIENCE_S = 1.0
"""How long a request is repeated by default while the server is away."""
POLL_PATIENCE_S = 30.0
"""How long one poll of a wait is repeated, so that the wait survives the start of a new driver."""
DEFAULT_POLL_INTERVAL_S = 1.0
FIRST_DELAY_S = 0.02
_REQUEST_BACKOFF = wait_random_exponential(multiplier=0.1, max=2.0)


@dataclass(frozen=True, slots=True)
class Pause:
    """A step that sleeps instead of sending a call."""

    seconds: float


Steps: TypeAlias = Generator[Call[Any] | Pause, Any, T]


class Deadline:
    """The moment at which a wait ends; None: the wait has no deadline.

    The caller supplies the clock: a monotonic one within a process, the wall clock if processes share the deadline.
    """

    def __init__(self, at: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._at = at
        self._clock = clock

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """A deadline this many seconds from now; None: no deadline."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return math.inf if self._at is None else max(0.0, self._at - self._clock())


def whole(seconds: float) -> Iterable[float]:
    """A pause that is slept in one piece, without progress reports."""
    return (seconds,)


def persistent(
    attempt: Callable[[], Steps[T]],
    patience: Deadline,
    *,
    passing: Callable[[BaseException], bool] = is_passing,
    backoff: Callable[[RetryCallState], float] = _REQUEST_BACKOFF,
    attempts: int = 1,
    on_away: Callable[[CkptClientError], None] | None = None,
    pauses: Callable[[float], Iterable[float]] = whole,
) -> Steps[T]:
    """Repeat the attempt after a passing error, at least ``attempts`` times in all and until ``patience`` is over.

    ``on_away`` is called with the error before each pause; ``pauses`` splits a pause into parts, so that progress can
    be reported in between. The last error is raised.
    """

    def tell(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if on_away is not None and isinstance(error, CkptClientError):
            on_away(error)

    # Tenacity only decides and never sleeps: each of its sleeps becomes a step.
    due: list[float] = []
    retrying = Retrying(
        retry=retry_if_exception(passing),
        stop=lambda state: state.attempt_number >= attempts and patience.left <= 0,
        wait=backoff,
        before_sleep=tell,
        sleep=due.append,
        reraise=True,
    )
    for trial in retrying:
        if due:
            yield from _paused(pauses(due.pop()))
        with trial:
            return (yield from attempt())
    raise AssertionError("tenacity ends with an attempt's result or its error")


def poll(
    look: Callable[[], Steps[T | None]],
    deadline: Deadline,
    delays: Iterator[float],
    pauses: Callable[[float], Iterable[float]] = whole,
) -> Steps[T | None]:
    """Call ``look`` until it finds something; None if the deadline comes first. The last call is at the deadline."""
    while True:
        found = yield from look()
        left = deadline.left
        if found is not None or left <= 0:
            return found
        yield from _paused(pauses(min(next(delays), left)))


def _paused(parts: Iterable[float]) -> Steps[None]:
    for seconds in parts:
        yield Pause(seconds)


@dataclass
class _Attempts(Generic[T]):
    """The attempts of one call. ``lost`` is True once an attempt may have been carried out without an answer."""

    call: Call[T]
    lost: bool = False

    def next(self) -> Steps[T]:
        """The requests of one attempt; the outcome of a lost attempt is looked up if the call has a ``lookup``."""
        lookup: Call[T] | None = self.call.lookup
        if self.lost and lookup is not None:
            try:
                answer: T = yield lookup
            except NotFound:
                pass  # the request never arrived, or is still on its way
            else:
                return answer
        try:
            answer = yield self.call
        except CkptClientError as error:
            self.lost = self.lost or is_outcome_unknown(error)
            if not self.lost or lookup is None or is_passing(error):
                raise
            try:
                answer = yield lookup  # refused, perhaps because an earlier attempt arrived
            except NotFound:
                raise error from None
        return answer


def retry(call: Call[T], patience_s: float, on_away: Callable[[CkptClientError], None] | None = None) -> Steps[T]:
    """Repeat one call for ``patience_s`` while the server is away: at least two attempts, or exactly one with 0."""
    attempts = 2 if patience_s > 0 else 1
    return persistent(_Attempts(call).next, Deadline.after(patience_s), attempts=attempts, on_away=on_away)


def watch(
    look: Callable[[float], Steps[T | None]], what: str, timeout_s: float | None, poll_interval_s: float
) -> Steps[T]:
    """Call ``look`` at growing intervals, with the time for which to repeat its requests. Raises :class:`WaitTimeout`.

    With ``timeout_s`` None, the wait has no time limit.
    """
    if poll_interval_s <= 0:
        raise ValueError(f"poll_interval_s: {poll_interval_s!r} is not acceptable, it must be > 0")
    if timeout_s is not None and timeout_s < 0:
        raise ValueError(f"timeout_s: {timeout_s!r} is not acceptable, it must be >= 0 or None")
    deadline = Deadline.after(timeout_s)
    delays = growing_delays(poll_interval_s)
    found = yield from poll(lambda: look(min(POLL_PATIENCE_S, deadline.left)), deadline, delays)
    if found is None:
        raise WaitTimeout(what, timeout_s or 0.0)
    return found


def until_final(job_id: str) -> Steps[None]:
    """Wait until the checkpoint statistics of a job that has ended show its end.

    Flink answers with a cached copy that may be as old as its refresh interval, and from which the last checkpoint or
    the stop's savepoint may be missing. A job restored from that copy's latest snapshot would write again what has been
    committed since.
    """
    config: Mapping[str, Any] = yield requests.dashboard_config()
    if RETAINS in config.get("features", {}):  # a session never answers with an old copy
        return
    interval_ms = int(config.get("refresh-interval", 0))
    for _ in range(3):
        left_ms: int = yield from _still_old(job_id, interval_ms)
        if left_ms <= 0:
            return
        yield Pause(left_ms / 1000)


def _still_old(job_id: str, interval_ms: int) -> Steps[int]:
    """For how many more milliseconds copies may predate the end; the job details may be such a copy themselves."""
    try:
        details: JobDetails = yield requests.job_details(job_id)
    except NotFound:
        return interval_ms
    has_ended = details.state in TERMINAL_STATES
    return interval_ms - (details.now_ms - details.end_time_ms if has_ended else 0)


def growing_delays(most: float) -> Iterator[float]:
    """Yield delays that double from 20 ms to ``most``: short operations are polled often, long ones seldom."""
    delay = min(FIRST_DELAY_S, most)
    while True:
        yield delay
        delay = min(delay * 2, most)


def wait_for_operation(
    kind: OperationKind,
    trigger_id: str,
    job_id: str | None = None,
    *,
    timeout_s: float | None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    on_wait: Callable[[], None] | None = None,
) -> Steps[OperationStatus]:
    """Poll until the operation is done. Raises :class:`OperationFailed`, :class:`WaitTimeout`.

    ``on_wait`` is called after each poll that finds the operation not done.
    """
    call = requests.operation_status(kind, trigger_id, job_id)

    def look(patience_s: float) -> Steps[OperationStatus | None]:
        status = yield from retry(call, patience_s)
        if status.failure is not None:
            raise OperationFailed(status.failure.exception, status.failure.message, status.failure.stack_trace)
        if not status.done and on_wait is not None:
            on_wait()
        return status if status.done else None

    return watch(look, f"The {kind} operation {trigger_id}", timeout_s, poll_interval_s)


def rescale(job_id: str, parallelism: Mapping[str, int | Bounds], *, timeout_s: float | None = None) -> Steps[None]:
    """Rescale all vertices, given by id, to these parallelisms, or to within (lower, upper) bounds.

    Returns when the new parallelism is stored and being deployed. A rescale may take longer than one request: after a
    lost answer, the repeated request joins the rescale in progress. Raises :class:`Conflict` with the reason if the job
    keeps running unchanged.
    """
    call = requests.update_resource_requirements(job_id, parallelism)
    deadline = Deadline.after(timeout_s)
    yield from persistent(lambda: retry(call, DEFAULT_PATIENCE_S), deadline, passing=is_outcome_unknown)


def wait_for_state(
    job_id: str,
    states: Collection[str],
    *,
    timeout_s: float | None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
) -> Steps[str]:
    """Poll until the job is in one of ``states``. Raises :class:`JobEnded`, :class:`WaitTimeout`."""

    def look(patience_s: float) -> Steps[str | None]:
        state = yield from retry(requests.job_status(job_id), patience_s)
        if state not in states and state in TERMINAL_STATES:
            raise JobEnded(job_id, state)
        return state if state in states else None

    return watch(look, f"Job {job_id} being {' or '.join(sorted(states))}", timeout_s, poll_interval_s)


def wait_for_config(
    job_id: str,
    version: int,
    *,
    timeout_s: float | None = None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
) -> Steps[None]:
    """Poll until the job runs with that version of its configuration, or a later one.

    Raises :class:`JobEnded`, :class:`WaitTimeout`.
    """

    def look(patience_s: float) -> Steps[bool | None]:
        state = yield from retry(requests.job_status(job_id), patience_s)
        if state in TERMINAL_STATES:
            raise JobEnded(job_id, state)
        found = yield from retry(requests.job_config(job_id), patience_s)
        # None continues the wait; False would count as found.
        return (state == "RUNNING" and (found.running_version or 0) >= version) or None

    yield from watch(look, f"Job {job_id} running with version {version}", timeout_s, poll_interval_s)
