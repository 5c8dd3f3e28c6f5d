"""Waits: when a request is repeated, how often a wait polls, and when it ends.

The command line, operators, sensors and triggers all wait with these coroutines. The clock of a deadline and the pause
between two polls are arguments, so tests can replace them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception
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
from ckpt_runtime.client.requests import Call, OperationKind
from ckpt_runtime.contract.checkpoints import OperationStatus
from ckpt_runtime.contract.configuration import Bounds
from ckpt_runtime.contract.jobs import RETAINS, TERMINAL_STATES

T = TypeVar("T")

DEFAULT_RETRY_TIMEOUT_S = 1.0
"""How long a request is repeated by default while the server is unavailable."""
POLL_PATIENCE_S = 30.0
"""How long one poll of a wait is repeated, so that the wait survives the start of a new driver."""
DEFAULT_POLL_INTERVAL_S = 1.0
FIRST_DELAY_S = 0.02
_REQUEST_BACKOFF = wait_random_exponential(multiplier=0.1, max=2.0)


class Caller(Protocol):
    """The executor of a call, such as :class:`ckpt_runtime.client.clients.AsyncCkptClient`."""

    async def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T: ...


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which a wait ends; None: the wait has no deadline.

    The caller supplies the clock: a monotonic one within a process, the wall clock if processes share the deadline.
    """

    at: float | None
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        """A deadline this many seconds from now; None: no deadline."""
        return cls(None if seconds is None else time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline; 0 once it has passed."""
        return math.inf if self.at is None else max(0.0, self.at - self.clock())


async def persistent(
    attempt: Callable[[], Awaitable[T]],
    retry_timeout: Deadline,
    *,
    passing: Callable[[BaseException], bool] = is_passing,
    backoff: Callable[[RetryCallState], float] = _REQUEST_BACKOFF,
    attempts: int = 1,
    on_away: Callable[[CkptClientError], None] | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T:
    """Repeat the attempt after a transient error, at least ``attempts`` times and until ``retry_timeout`` is over.

    ``on_away`` is called with the error before each pause. The last error is raised.
    """

    def report(state: RetryCallState) -> None:
        error = None if state.outcome is None else state.outcome.exception()
        if on_away is not None and isinstance(error, CkptClientError):
            on_away(error)

    retrying = AsyncRetrying(
        retry=retry_if_exception(passing),
        stop=lambda state: state.attempt_number >= attempts and retry_timeout.left <= 0,
        wait=backoff,
        before_sleep=report,
        sleep=sleep,
        reraise=True,
    )
    async for trial in retrying:
        with trial:
            return await attempt()
    raise AssertionError("tenacity ends with an attempt's result or its error")


async def poll(
    look: Callable[[], Awaitable[T | None]],
    deadline: Deadline,
    delays: Iterator[float],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> T | None:
    """Call ``look`` until it finds something; None if the deadline comes first. The last call is at the deadline."""
    while True:
        found = await look()
        left = deadline.left
        if found is not None or left <= 0:
            return found
        await sleep(min(next(delays), left))


async def watch(
    look: Callable[[float], Awaitable[T | None]], what: str, timeout_s: float | None, poll_interval_s: float
) -> T:
    """Call ``look`` at growing intervals, with the time for which to repeat its requests. Raises :class:`WaitTimeout`.

    With ``timeout_s`` None, the wait has no time limit.
    """
    if poll_interval_s <= 0:
        raise ValueError(f"poll_interval_s: {poll_interval_s!r} is not acceptable, it must be > 0")
    if timeout_s is not None and timeout_s < 0:
        raise ValueError(f"timeout_s: {timeout_s!r} is not acceptable, it must be >= 0 or None")
    deadline = Deadline.after(timeout_s)
    found = await poll(lambda: look(min(POLL_PATIENCE_S, deadline.left)), deadline, growing_delays(poll_interval_s))
    if found is None:
        raise WaitTimeout(what, timeout_s or 0.0)
    return found


def growing_delays(most: float) -> Iterator[float]:
    """Yield delays that double from 20 ms to ``most``: short operations are polled often, long ones rarely."""
    delay = min(FIRST_DELAY_S, most)
    while True:
        yield delay
        delay = min(delay * 2, most)


async def until_final(client: Caller, job_id: str) -> None:
    """Wait until the checkpoint statistics of an ended job include its last snapshot.

    Flink answers with a cached copy that may be as old as its refresh interval, so that the last checkpoint or the
    savepoint of a stop may be missing. A job restored from an older snapshot would write committed output again.
    """
    config = await client.execute(requests.dashboard_config())
    if RETAINS in config.get("features", {}):  # a session never answers with an old copy
        return
    interval_ms = int(config.get("refresh-interval", 0))
    for _ in range(3):
        # How long, in milliseconds, Flink may still answer with a copy made before the job's end. The job details may
        # be such a copy, too.
        left_ms = interval_ms
        try:
            details = await client.execute(requests.job_details(job_id))
        except NotFound:
            pass
        else:
            left_ms -= details.now_ms - details.end_time_ms if details.state in TERMINAL_STATES else 0
        if left_ms <= 0:
            return
        await asyncio.sleep(left_ms / 1000)


async def wait_for_operation(
    client: Caller,
    kind: OperationKind,
    trigger_id: str,
    job_id: str | None = None,
    *,
    timeout_s: float | None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
    on_wait: Callable[[], None] | None = None,
) -> OperationStatus:
    """Poll until the operation is done. Raises :class:`OperationFailed`, :class:`WaitTimeout`.

    ``on_wait`` is called in a thread after each poll that finds the operation not done; it may use a blocking client.
    """
    call = requests.operation_status(kind, trigger_id, job_id)

    async def look(retry_timeout_s: float) -> OperationStatus | None:
        status = await client.execute(call, retry_timeout_s=retry_timeout_s)
        if status.failure is not None:
            raise OperationFailed(status.failure.exception, status.failure.message, status.failure.stack_trace)
        if not status.done and on_wait is not None:
            await asyncio.to_thread(on_wait)
        return status if status.done else None

    return await watch(look, f"The {kind} operation {trigger_id}", timeout_s, poll_interval_s)


async def rescale(
    client: Caller, job_id: str, parallelism: Mapping[str, int | Bounds], *, timeout_s: float | None = None
) -> None:
    """Rescale all vertices, given by id, to these parallelisms, or to within (lower, upper) bounds.

    Returns when the new parallelism is stored and being deployed. A rescale may take longer than one request: after a
    lost answer, the repeated request joins the rescale in progress. Raises :class:`Conflict` with the reason if the job
    keeps running unchanged.
    """
    call = requests.update_resource_requirements(job_id, parallelism)
    await persistent(
        lambda: client.execute(call, retry_timeout_s=DEFAULT_RETRY_TIMEOUT_S),
        Deadline.after(timeout_s),
        passing=is_outcome_unknown,
    )


async def wait_for_state(
    client: Caller,
    job_id: str,
    states: Collection[str],
    *,
    timeout_s: float | None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
) -> str:
    """Poll until the job is in one of ``states``. Raises :class:`JobEnded`, :class:`WaitTimeout`."""

    async def look(retry_timeout_s: float) -> str | None:
        state = await client.execute(requests.job_status(job_id), retry_timeout_s=retry_timeout_s)
        if state not in states and state in TERMINAL_STATES:
            raise JobEnded(job_id, state)
        return state if state in states else None

    return await watch(look, f"Job {job_id} being {' or '.join(sorted(states))}", timeout_s, poll_interval_s)


async def wait_for_config(
    client: Caller,
    job_id: str,
    version: int,
    *,
    timeout_s: float | None = None,
    poll_interval_s: float = DEFAULT_POLL_INTERVAL_S,
) -> None:
    """Poll until the job runs with that version of its configuration, or a later one.

    Raises :class:`JobEnded`, :class:`WaitTimeout`.
    """

    async def look(retry_timeout_s: float) -> bool | None:
        state = await client.execute(requests.job_status(job_id), retry_timeout_s=retry_timeout_s)
        if state in TERMINAL_STATES:
            raise JobEnded(job_id, state)
        found = await client.execute(requests.job_config(job_id), retry_timeout_s=retry_timeout_s)
        # None continues the wait; False would count as found.
        return (state == "RUNNING" and (found.running_version or 0) >= version) or None

    await watch(look, f"Job {job_id} running with version {version}", timeout_s, poll_interval_s)
