"""Conditions, and the wait until there is a verdict or a deadline has passed.

A condition polls the remote side once and judges the answer; it neither sleeps nor reads a clock. The same one
serves an operator in its worker, a poking sensor and the triggerer. A wait polls it repeatedly, with growing pauses,
also while the job manager does not answer; every other error ends the wait. The task's log shows its progress.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from itertools import repeat
from typing import Any, Protocol, TypeAlias, TypeVar

from msgspec import json
from tenacity import RetryCallState
from tenacity.wait import wait_exponential

from airflow_provider_ckpt.advice import REFUSED_TOKEN, TROUBLE, UNREACHABLE, is_refused_token
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, Unreachable, is_passing
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import Deadline, persistent, poll

POLL = "poll"
"""The event type that a condition gets repeatedly where there is no stream of events."""

Json: TypeAlias = dict[str, Any]


class Log(Protocol):
    """The part of a task's or trigger's logger that is needed here; ``args`` fill in ``text`` by ``%``."""

    def info(self, text: Any, /, *args: Any) -> Any: ...

    def warning(self, text: Any, /, *args: Any) -> Any: ...

    def error(self, text: Any, /, *args: Any) -> Any: ...


class KilledTask(Protocol):
    """The actions available to a condition when its waiting task is killed in the triggerer."""

    @property
    def log(self) -> Log: ...

    async def is_given_up(self) -> bool:
        """Whether no other try continues with what this one has started."""

    async def cancel(self, job_id: str, name: str) -> None:
        """Cancel a job, and log what became of it."""


class Status(StrEnum):
    """How a wait ended. The first three are a condition's verdicts, the others come from the wait that polls."""

    DONE = "done"
    FAILED = "failed"
    MISSING = "missing"
    TIMEOUT = "timeout"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The end of a wait: plain JSON values, since a trigger's event carries it. ``trace`` is the remote side's report
    of a failure."""

    status: Status
    message: str = ""
    result: Json = field(default_factory=dict)
    trace: str = ""

    @property
    def refuses_token(self) -> bool:
        """Whether the wait has ended because the job manager refused its token."""
        return bool(self.result.get(REFUSED_TOKEN))


class MissingPolicy:
    """Counts consecutive answers "not found": a proxy, or a driver that recovers its jobs, may give single ones."""

    LIMIT = 3

    def __init__(self) -> None:
        self._times = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the last answer was "not found" and is not confirmed yet."""
        return 0 < self._times < self.LIMIT

    def seen(self) -> None:
        """Record that the object was found."""
        self._times = 0

    def missing(self, message: str) -> Verdict | None:
        """Record that the object was not found; returns a verdict once this has happened often enough in a row."""
        self._times += 1
        return Verdict(Status.MISSING, message) if self._times >= self.LIMIT else None


@dataclass(eq=False)
class Condition(ABC):
    """A condition that a task can wait for. Instances may remember the results of earlier polls.

    A subclass is a dataclass, whose fields are JSON values or what msgspec makes of them: so a trigger carries it.
    ``standing`` describes in a few words the result of the last poll that was not a verdict.
    """

    def __post_init__(self) -> None:
        self.absence = MissingPolicy()
        self.standing = "not there yet"

    def to_json(self) -> Json:
        """The class and its fields, from which an equal condition is made in another process."""
        given = {item.name: getattr(self, item.name) for item in fields(self)}
        return {"type": type(self).__name__, **json.decode(json.encode(given))}

    @property
    def job(self) -> str | None:
        """The job whose events can cause another poll; None if no event does."""
        return None

    def concerns(self, event: StreamedEvent) -> bool:
        """Whether an event of that job is a reason for another poll."""
        return True

    @abstractmethod
    async def poll(self, client: AsyncCalls) -> Verdict | None:
        """Poll the remote side once; None means "not yet"."""

    async def detail(self, client: AsyncCalls) -> str:
        """Details of the standing, for the log; called when a line is due, and may fail."""
        return ""

    @property
    @abstractmethod
    def subject(self) -> str:
        """The awaited object or event, as a noun phrase for messages."""

    def left_over(self) -> str:
        """What happens to the remote side when the waiting task is killed; empty if nothing was begun there."""
        return ""

    async def on_kill(self, task: KilledTask) -> None:
        """Called in the triggerer when the waiting task is killed."""
        if self.left_over():
            task.log.warning("The task was killed; %s.", self.left_over())


def moment(epoch_ms: int) -> str:
    """A point in time for people; an invalid number is shown unchanged."""
    try:
        return datetime.fromtimestamp(epoch_ms / 1000, UTC).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{epoch_ms} ms"


T = TypeVar("T")

INTERVAL_SECONDS = 30.0
"""Between two log lines that say the same. A request to a session that hangs takes up to half a minute by default,
during which nothing is logged."""
MAX_PAUSE_SECONDS = 30.0
_JITTER = 0.2
LAST_LOOK_SECONDS = 2.0
"""A wait that has reached its deadline polls once more; that poll may take this many seconds."""


class Progress:
    """The log lines of one wait: one at once when the standing changes, and else two a minute.

    ``standing`` decides whether a line is a new one, ``detail`` is worth adding to it. There are fewer lines if many
    tasks wait in one process, see ``interval``.
    """

    def __init__(self, log: Log, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._subject = subject
        self._clock = clock
        self.interval: Callable[[], float] = lambda: INTERVAL_SECONDS
        self._standing: str | None = None
        self._line = ""
        self._looked_at = self._said_at = clock()

    def is_due(self, standing: str) -> bool:
        """Whether a line about the last poll is due."""
        self._looked_at = self._clock()
        return standing != self._standing or self._looked_at - self._said_at >= self.interval()

    def say(self, standing: str, detail: str = "") -> None:
        """Write a line now."""
        self._standing = standing
        self._line = f"{standing}; {detail}" if detail else standing
        self._said_at = self._looked_at = self._clock()
        self._log.info("Waiting for %s: %s", self._subject, self._line)

    def away(self, error: Exception) -> None:
        """Report, if a line is due, a request that was not answered or served; the error's text does not make it a new
        line."""
        standing = "the session is away" if isinstance(error, Unreachable) else "the session does not serve now"
        if self.is_due(standing):
            self.say(standing, str(error))

    def pauses(self, seconds: float) -> Iterator[float]:
        """The pause between two polls in parts, each to be slept; the last line is repeated between them."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            yield min(left, max(self._said_at + self.interval() - self._clock(), 0.0))
            if self._clock() - self._said_at >= self.interval():
                self._said_at = self._clock()
                age = self._said_at - self._looked_at
                self._log.info("Waiting for %s: %s (seen %.0f s ago)", self._subject, self._line, age)


class Backoff:
    """Pauses between failures: they double from the interval on, with jitter, and never lead beyond the deadline."""

    def __init__(self, interval: float, deadline: Deadline) -> None:
        self._pause = wait_exponential(multiplier=max(interval, 0.1), max=MAX_PAUSE_SECONDS)
        self._deadline = deadline

    def __call__(self, state: RetryCallState) -> float:
        return min(jittered(self._pause(state)), self._deadline.left)


def jittered(pause: float) -> float:
    """The pause with jitter, so that tasks that begin to wait at the same moment do not poll at the same moments
    forever."""
    return pause * random.uniform(1 - _JITTER, 1 + _JITTER)


def is_waited_out(error: BaseException) -> bool:
    """True for every error of the server: a wait has its own deadline, and Flink answers 500 to passing errors too."""
    return is_passing(error) or (isinstance(error, CkptApiError) and error.status >= 500)


async def look_once(condition: Condition, client: AsyncCalls, progress: Progress) -> Verdict | None:
    """Poll once, then log a line if one is due; a condition may make requests of its own for that line."""
    verdict = await condition.poll(client)
    if verdict is None and progress.is_due(condition.standing):
        standing = condition.standing
        try:
            detail = await condition.detail(client)
        except CkptClientError:
            detail = ""  # the next poll meets the same error
        progress.say(standing, detail)
    return verdict


async def poll_until_stable(
    condition: Condition, client: AsyncCalls, progress: Progress, pause: float
) -> Verdict | None:
    """As :func:`look_once`, repeated after ``pause`` seconds while a "not found" is not confirmed."""
    while True:
        verdict = await look_once(condition, client, progress)
        if not condition.absence.in_doubt:
            return verdict
        await asyncio.sleep(pause)


class Once(AsyncCalls):
    """The polls of one wait: it sends each call once, at any retry timeout, because a wait repeats its polls itself.

    A wait at a hub has polls that know when another one is useful.
    """

    def __init__(self, client: AsyncCalls, interval: float = 0.0) -> None:
        self._client = client
        self.interval = interval

    @property
    def called(self) -> bool:
        """Whether there is a reason to poll before the pause ends."""
        return False

    async def settled(self) -> None:
        """Wait until it is known what wakes this wait; at most a few seconds."""

    def begins(self) -> None:
        """Marks the beginning of a poll: later events are reasons for the next poll."""

    def pace(self) -> float:
        """Seconds until the next poll, unless it is called."""
        return jittered(self.interval)

    async def rest(self, seconds: float) -> None:
        """Wait until it is called or ``seconds`` have passed."""
        await asyncio.sleep(seconds)

    def repeat_interval(self) -> float:
        """Seconds between two equal lines in the log."""
        return INTERVAL_SECONDS

    async def execute(self, call: Call[T], *, retry_timeout_s: float | None = None) -> T:
        return await self._client.execute(call, retry_timeout_s=0)


class Wait:
    """One wait for a condition until ``deadline``, seconds since the epoch by the clock ``wall``; ``None``: never."""

    def __init__(
        self,
        condition: Condition,
        deadline: float | None,
        interval: float,
        log: Log,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._condition = condition
        self._deadline = Deadline(deadline, wall)
        self._interval = interval
        self._progress = Progress(log, condition.subject, monotonic)
        self._trouble: CkptClientError | None = None

    async def until_verdict(self, client: AsyncCalls) -> Verdict:
        """Wait to the end; a request that hangs cannot outlive the deadline either.

        ``client`` is a member of a hub, or any other client, which is polled at the wait's own interval.
        """
        polls = client if isinstance(client, Once) else Once(client, self._interval)
        self._progress.interval = polls.repeat_interval
        await polls.settled()
        limit = self._deadline.left + LAST_LOOK_SECONDS
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                return await self._polled(polls)
        except TimeoutError:
            return self._over()

    async def _polled(self, polls: Once) -> Verdict:
        async def look() -> Verdict | None:
            polls.begins()
            verdict = await look_once(self._condition, polls, self._progress)
            self._trouble = None
            return verdict

        async def sleep(seconds: float) -> None:
            for part in self._progress.pauses(seconds):
                if polls.called:
                    return
                await polls.rest(part)

        async def poll_with_retries() -> Verdict | None:
            return await persistent(
                look,
                self._deadline,
                passing=is_waited_out,
                backoff=Backoff(self._interval, self._deadline),
                on_away=self._away,
                sleep=sleep,
            )

        try:
            intervals = (max(polls.pace(), 0.0) for _ in repeat(None))
            found = await poll(poll_with_retries, self._deadline, intervals, sleep)
        except CkptClientError as error:
            if not is_waited_out(error):
                facts = {REFUSED_TOKEN: True} if is_refused_token(error) else {}
                return Verdict(Status.REFUSED, str(error), facts)
            self._away(error)
            found = None
        return found or self._over()

    def _away(self, error: CkptClientError) -> None:
        self._trouble = error
        self._progress.away(error)

    def _over(self) -> Verdict:
        message = f"{self._condition.subject}: not reached before the task's deadline ({self._condition.standing})"
        if self._trouble is None:
            return Verdict(Status.TIMEOUT, message)
        facts = {TROUBLE: str(self._trouble), UNREACHABLE: isinstance(self._trouble, Unreachable)}
        return Verdict(Status.TIMEOUT, f"{message}; the latest problem: {self._trouble}", facts)
