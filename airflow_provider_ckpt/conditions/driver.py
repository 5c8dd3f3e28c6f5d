"""Performing a condition's requests with a client, once or until a deadline.

The two ``poll_once`` functions differ only in the ``await``; everything that decides is in the conditions. Transport
errors and a job manager that is starting are waited out with growing pauses, everything else is passed on.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import TypeVar

from airflow_provider_ckpt.conditions.base import Condition, Status, Verdict
from ckpt_runtime.client import AsyncCkptClient, CkptApiError, CkptClient, CkptClientError, Unreachable
from ckpt_runtime.client.requests import Call

T = TypeVar("T")

MAX_PAUSE_SECONDS = 30.0
_PASSING_STATUSES = (408, 425, 429)
_JITTER = 0.2
_LAST_LOOK_SECONDS = 2.0
"""A wait that is due looks once more; this long may that take."""


class Pacing:
    """How long to pause between polls: the interval after an answer, doubling pauses after failures, with jitter."""

    def __init__(self, interval: float) -> None:
        self._interval = max(interval, 0.0)
        self._failures = 0

    def after_answer(self) -> float:
        """Seconds to pause after the job manager answered."""
        self._failures = 0
        return self._jittered(self._interval)

    def after_failure(self) -> float:
        """Seconds to pause after it could not be reached."""
        pause = min(max(self._interval, 0.1) * 2**self._failures, MAX_PAUSE_SECONDS)
        self._failures = min(self._failures + 1, 16)
        return self._jittered(pause)

    @staticmethod
    def _jittered(pause: float) -> float:
        return pause * random.uniform(1 - _JITTER, 1 + _JITTER)


def is_passing(error: CkptClientError) -> bool:
    """Whether trying again later may help: no answer, overload, a driver that starts or is not the leader."""
    if isinstance(error, CkptApiError):
        return error.status >= 500 or error.status in _PASSING_STATUSES
    return isinstance(error, Unreachable)


def poll_once(condition: Condition, client: CkptClient) -> Verdict | None:
    """One look with the synchronous client."""
    steps = condition.poll()
    try:
        call = next(steps)
        while True:
            try:
                answer = client.execute(call)
            except CkptClientError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        verdict: Verdict | None = end.value
        return verdict


async def apoll_once(condition: Condition, client: AsyncCkptClient) -> Verdict | None:
    """One look with the asynchronous client."""
    steps = condition.poll()
    try:
        call = next(steps)
        while True:
            try:
                answer = await client.execute(call)
            except CkptClientError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        verdict: Verdict | None = end.value
        return verdict


class _Wait:
    """What both waiting loops decide after each look: the verdict, or how many seconds to pause."""

    def __init__(self, condition: Condition, deadline: float, pacing: Pacing) -> None:
        self._subject = condition.subject
        self._deadline = deadline
        self._pacing = pacing
        self._trouble = ""

    def after(self, verdict: Verdict | None) -> Verdict | float:
        self._trouble = ""
        return verdict if verdict is not None else self._pause(self._pacing.after_answer())

    def after_error(self, error: CkptClientError) -> Verdict | float:
        if not is_passing(error):
            return Verdict(Status.REFUSED, str(error))
        self._trouble = f"; last trouble: {error}"
        return self._pause(self._pacing.after_failure())

    def over(self) -> Verdict:
        message = f"{self._subject}: not reached before the task's deadline{self._trouble}"
        return Verdict(Status.TIMEOUT, message)

    def _pause(self, wanted: float) -> Verdict | float:
        remaining = self._deadline - time.time()
        return self.over() if remaining <= 0 else min(wanted, remaining)


def wait(condition: Condition, client: CkptClient, deadline: float, pacing: Pacing) -> Verdict:
    """Poll until there is a verdict, or ``deadline`` (seconds since the epoch) has passed."""
    waiting = _Wait(condition, deadline, pacing)
    while True:
        try:
            outcome = waiting.after(poll_once(condition, client))
        except CkptClientError as error:
            outcome = waiting.after_error(error)
        if isinstance(outcome, Verdict):
            return outcome
        time.sleep(outcome)


async def await_verdict(condition: Condition, client: AsyncCkptClient, deadline: float, pacing: Pacing) -> Verdict:
    """As :func:`wait`; a request that hangs cannot outlive the deadline either."""
    waiting = _Wait(condition, deadline, pacing)
    try:
        async with asyncio.timeout(max(deadline - time.time(), 0.0) + _LAST_LOOK_SECONDS):
            while True:
                try:
                    outcome = waiting.after(await apoll_once(condition, client))
                except CkptClientError as error:
                    outcome = waiting.after_error(error)
                if isinstance(outcome, Verdict):
                    return outcome
                await asyncio.sleep(outcome)
    except TimeoutError:
        return waiting.over()


def insist(client: CkptClient, call: Call[T], deadline: float, pacing: Pacing) -> T:
    """Perform one idempotent request, again while the trouble is a passing one and the deadline has not passed.

    :raises CkptClientError: the last trouble, or at once one that does not pass.
    """
    while True:
        try:
            return client.execute(call)
        except CkptClientError as error:
            remaining = deadline - time.time()
            if not is_passing(error) or remaining <= 0:
                raise
            time.sleep(min(pacing.after_failure(), remaining))
