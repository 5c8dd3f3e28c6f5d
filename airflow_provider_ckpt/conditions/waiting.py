"""Waiting for a condition until there is a verdict or a deadline has passed, in a worker or in the triggerer.

The conditions make all decisions, and :mod:`ckpt_runtime.client.waiting` decides how often to ask. A job manager
that cannot answer is asked again with growing pauses until the deadline; every other error ends the wait. Meanwhile
the task's log shows where the wait stands.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from tenacity import RetryCallState
from tenacity.wait import wait_exponential

from airflow_provider_ckpt.advice import REFUSED_TOKEN, TROUBLE, UNREACHABLE, is_refused_token
from airflow_provider_ckpt.conditions.base import Condition, Log, Status, Verdict
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, Unreachable, is_passing
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import Deadline, persistent, poll

if TYPE_CHECKING:
    from airflow_provider_ckpt.event_hub import Member

T = TypeVar("T")

INTERVAL_SECONDS = 30.0
"""Between two log lines that say the same. A request to a session that hangs takes up to half a minute by default,
during which nothing is logged."""
MAX_PAUSE_SECONDS = 30.0
_JITTER = 0.2
_LAST_LOOK_SECONDS = 2.0
"""A wait that has reached its deadline looks once more; that look may take this long."""


class Progress:
    """The log lines of one wait: one at once when the standing changes, and else two a minute.

    ``standing`` decides whether a line is a new one, ``detail`` is worth adding to it. The lines come less often where
    many wait in one process, see ``interval``.
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
        """Whether a line about what was just seen is due."""
        self._looked_at = self._clock()
        return standing != self._standing or self._looked_at - self._said_at >= self.interval()

    def say(self, standing: str, detail: str = "") -> None:
        """Write a line now."""
        self._standing = standing
        self._line = f"{standing}; {detail}" if detail else standing
        self._said_at = self._looked_at = self._clock()
        self._log.info("Waiting for %s: %s", self._subject, self._line)

    def away(self, error: Exception) -> None:
        """Report a request that was not answered, or not served, if a line is due.

        The text of the error does not make a line a new one.
        """
        standing = "the session is away" if isinstance(error, Unreachable) else "the session does not serve now"
        if self.is_due(standing):
            self.say(standing, str(error))

    def pauses(self, seconds: float) -> Iterator[float]:
        """The pause between two looks in parts, each to be slept; the last line is repeated between them."""
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
        return min(_jittered(self._pause(state)), self._deadline.left)


def _jittered(pause: float) -> float:
    """Many tasks begin to wait at the same moment; jitter keeps them from asking at the same moments forever."""
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
    """As :func:`look_once`, and again after ``pause`` seconds for as long as something only seems to be missing."""
    while True:
        verdict = await look_once(condition, client, progress)
        if not condition.absence.in_doubt:
            return verdict
        await asyncio.sleep(pause)


class Once(AsyncCalls):
    """Sends each call once, whatever the client's patience: a wait repeats its looks itself."""

    def __init__(self, client: AsyncCalls) -> None:
        self._client = client

    async def execute(self, call: Call[T], *, patience_s: float | None = None) -> T:
        return await self._client.execute(call, patience_s=0)


class Wait:
    """One wait for a condition; ``deadline`` is in seconds since the epoch, ``None``: never.

    ``wall`` is the clock of the deadline, ``monotonic`` that of pauses.
    """

    def __init__(
        self,
        condition: Condition,
        deadline: float | None,
        interval: float,
        log: Log,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member: Member | None = None
        self._condition = condition
        self._deadline = Deadline(deadline, wall)
        self._interval = interval
        self._progress = Progress(log, condition.subject, monotonic)
        self._trouble: CkptClientError | None = None

    async def until_verdict(self, client: AsyncCalls) -> Verdict:
        """Wait to the end; a request that hangs cannot outlive the deadline either."""
        limit = self._deadline.left + _LAST_LOOK_SECONDS
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                return await self._polled(Once(client))
        except TimeoutError:
            return self._over()

    async def at_hub(self, member: Member) -> Verdict:
        """As :meth:`until_verdict`, at a place of the hub, which knows when a look is useful."""
        self._member, self._progress.interval = member, member.silence
        await member.settled()
        return await self.until_verdict(member)

    async def _polled(self, client: AsyncCalls) -> Verdict:
        async def look() -> Verdict | None:
            if self._member is not None:
                self._member.looking()
            verdict = await look_once(self._condition, client, self._progress)
            self._trouble = None
            return verdict

        async def persistent_look() -> Verdict | None:
            return await persistent(
                look,
                self._deadline,
                passing=is_waited_out,
                backoff=Backoff(self._interval, self._deadline),
                on_away=self._away,
                sleep=self._sleep,
            )

        try:
            found = await poll(persistent_look, self._deadline, self._intervals(), self._sleep)
        except CkptClientError as error:
            if not is_waited_out(error):
                facts = {REFUSED_TOKEN: True} if is_refused_token(error) else {}
                return Verdict(Status.REFUSED, str(error), facts)
            self._away(error)
            found = None
        return found or self._over()

    async def _sleep(self, seconds: float) -> None:
        for part in self._progress.pauses(seconds):
            if self._member is None:
                await asyncio.sleep(part)
            elif self._member.called:
                return
            else:
                await self._member.rest(part)

    def _intervals(self) -> Iterator[float]:
        while True:
            yield max(_jittered(self._interval) if self._member is None else self._member.pace(), 0.0)

    def _away(self, error: CkptClientError) -> None:
        self._trouble = error
        self._progress.away(error)

    def _over(self) -> Verdict:
        message = f"{self._condition.subject}: not reached before the task's deadline ({self._condition.standing})"
        if self._trouble is None:
            return Verdict(Status.TIMEOUT, message)
        facts = {TROUBLE: str(self._trouble), UNREACHABLE: isinstance(self._trouble, Unreachable)}
        return Verdict(Status.TIMEOUT, f"{message}; last trouble: {self._trouble}", facts)
