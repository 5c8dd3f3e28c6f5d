"""Waiting for a condition until there is a verdict or a deadline has passed, in a worker or in the triggerer.

The conditions make all decisions, and :mod:`ckpt_runtime.client.waiting` decides how often to ask. A job manager
that cannot answer is asked again with growing pauses until the deadline; every other error is passed on. Meanwhile
the task's log shows where the wait stands.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from tenacity import RetryCallState
from tenacity.wait import wait_exponential

from airflow_provider_ckpt.advice import REFUSED_TOKEN, TROUBLE, UNREACHABLE, is_refused_token
from airflow_provider_ckpt.conditions.base import Condition, Poll, Status, Verdict
from airflow_provider_ckpt.conditions.progress import Log, Progress
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptApiError, CkptClientError, Unreachable, is_passing
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import Deadline, Pause, Steps, persistent, poll

T = TypeVar("T")

MAX_PAUSE_SECONDS = 30.0
_JITTER = 0.2
_LAST_LOOK_SECONDS = 2.0
"""A wait that has reached its deadline looks once more; that look may take this long."""


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


def look_and_tell(condition: Condition, progress: Progress) -> Poll:
    """Polls once, then logs a line if one is due; a condition may make requests of its own for that line."""
    verdict = yield from condition.poll()
    if verdict is None and progress.is_due(condition.standing):
        standing = condition.standing
        progress.say(standing, (yield from _detail(condition)))
    return verdict


def _detail(condition: Condition) -> Generator[Call[Any], Any, str]:
    try:
        return (yield from condition.detail())
    except CkptClientError:
        return ""  # the next poll meets what that is


def poll_until_stable(condition: Condition, progress: Progress, pause: float) -> Steps[Verdict | None]:
    """As :func:`look_and_tell`, and again after ``pause`` seconds for as long as something only seems to be missing."""
    while True:
        verdict = yield from look_and_tell(condition, progress)
        if not condition.absence.in_doubt:
            return verdict
        yield Pause(pause)


class Runner(Protocol):
    """Carries out the steps of a wait: a client, or what many waits have in common."""

    async def run(self, steps: Steps[T]) -> T: ...


@runtime_checkable
class Alarm(Runner, Protocol):
    """A runner that knows when a look is useful: a pause ends once it is ``called``."""

    @property
    def called(self) -> bool: ...

    def looking(self) -> None:
        """A look begins."""

    def pace(self) -> float:
        """Seconds until the next look, unless it is called."""

    def silence(self) -> float:
        """Seconds between two lines in the log that say the same."""


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
        self._alarm: Alarm | None = None
        self._condition = condition
        self._deadline = Deadline(deadline, wall)
        self._interval = interval
        self._progress = Progress(log, condition.subject, monotonic)
        self._trouble: CkptClientError | None = None

    def in_a_worker(self, client: CkptClient) -> Verdict:
        """Block until the end of the wait."""
        return client.run(self._steps())

    async def in_the_triggerer(self, runner: Runner) -> Verdict:
        """Await the end of the wait; a request that hangs cannot outlive the deadline either."""
        if isinstance(runner, Alarm):
            self._alarm, self._progress.interval = runner, runner.silence
        limit = self._deadline.left + _LAST_LOOK_SECONDS
        try:
            async with asyncio.timeout(None if math.isinf(limit) else limit):
                return await runner.run(self._steps())
        except TimeoutError:
            return self._over()

    def _pauses(self, seconds: float) -> Iterator[float]:
        for part in self._progress.pauses(seconds):
            if self._alarm is not None and self._alarm.called:
                return
            yield part

    def _intervals(self) -> Iterator[float]:
        while True:
            yield max(_jittered(self._interval) if self._alarm is None else self._alarm.pace(), 0.0)

    def _steps(self) -> Steps[Verdict]:
        try:
            found = yield from poll(self._look, self._deadline, self._intervals(), self._pauses)
        except CkptClientError as error:
            if not is_waited_out(error):
                facts = {REFUSED_TOKEN: True} if is_refused_token(error) else {}
                return Verdict(Status.REFUSED, str(error), facts)
            self._away(error)
            found = None
        return found or self._over()

    def _look(self) -> Steps[Verdict | None]:
        return persistent(
            self._look_once,
            self._deadline,
            passing=is_waited_out,
            backoff=Backoff(self._interval, self._deadline),
            on_away=self._away,
            pauses=self._pauses,
        )

    def _look_once(self) -> Poll:
        if self._alarm is not None:
            self._alarm.looking()
        verdict = yield from look_and_tell(self._condition, self._progress)
        self._trouble = None
        return verdict

    def _away(self, error: CkptClientError) -> None:
        self._trouble = error
        self._progress.away(error)

    def _over(self) -> Verdict:
        message = f"{self._condition.subject}: not reached before the task's deadline ({self._condition.standing})"
        if self._trouble is None:
            return Verdict(Status.TIMEOUT, message)
        facts = {TROUBLE: str(self._trouble), UNREACHABLE: isinstance(self._trouble, Unreachable)}
        return Verdict(Status.TIMEOUT, f"{message}; last trouble: {self._trouble}", facts)
