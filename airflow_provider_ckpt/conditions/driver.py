"""Polling a condition until there is a verdict or a deadline has passed, in a worker or in the triggerer.

Everything that decides is in the conditions. A job manager that cannot answer is asked again with growing pauses until
the deadline; everything else is passed on. Single requests are the client's to repeat.
"""

from __future__ import annotations

import asyncio
import random
import time

from airflow_provider_ckpt.conditions.base import Condition, Status, Verdict
from ckpt_runtime.client import AsyncCkptClient, CkptApiError, CkptClient, CkptClientError, is_passing

MAX_PAUSE_SECONDS = 30.0
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


def is_waited_out(error: CkptClientError) -> bool:
    """Every error of the server: a wait has a deadline of its own, and Flink answers 500 also to what passes."""
    return is_passing(error) or (isinstance(error, CkptApiError) and error.status >= 500)


class _Wait:
    """What both waiting loops decide after each look: the verdict, or how many seconds to pause."""

    def __init__(self, condition: Condition, deadline: float | None, pacing: Pacing) -> None:
        self._subject = condition.subject
        self._deadline = deadline
        self._pacing = pacing
        self._trouble = ""

    def after(self, verdict: Verdict | None) -> Verdict | float:
        self._trouble = ""
        return verdict if verdict is not None else self._pause(self._pacing.after_answer())

    def after_error(self, error: CkptClientError) -> Verdict | float:
        if not is_waited_out(error):
            return Verdict(Status.REFUSED, str(error))
        self._trouble = f"; last trouble: {error}"
        return self._pause(self._pacing.after_failure())

    def over(self) -> Verdict:
        message = f"{self._subject}: not reached before the task's deadline{self._trouble}"
        return Verdict(Status.TIMEOUT, message)

    def _pause(self, wanted: float) -> Verdict | float:
        if self._deadline is None:
            return wanted
        remaining = self._deadline - time.time()
        return self.over() if remaining <= 0 else min(wanted, remaining)


def wait(condition: Condition, client: CkptClient, deadline: float | None, pacing: Pacing) -> Verdict:
    """Poll until there is a verdict, or ``deadline`` (seconds since the epoch; ``None``: never) has passed."""
    waiting = _Wait(condition, deadline, pacing)
    while True:
        try:
            outcome = waiting.after(client.run(condition.poll()))
        except CkptClientError as error:
            outcome = waiting.after_error(error)
        if isinstance(outcome, Verdict):
            return outcome
        time.sleep(outcome)


async def await_verdict(
    condition: Condition, client: AsyncCkptClient, deadline: float | None, pacing: Pacing
) -> Verdict:
    """As :func:`wait`; a request that hangs cannot outlive the deadline either."""
    waiting = _Wait(condition, deadline, pacing)
    patience = None if deadline is None else max(deadline - time.time(), 0.0) + _LAST_LOOK_SECONDS
    try:
        async with asyncio.timeout(patience):
            while True:
                try:
                    outcome = waiting.after(await client.run(condition.poll()))
                except CkptClientError as error:
                    outcome = waiting.after_error(error)
                if isinstance(outcome, Verdict):
                    return outcome
                await asyncio.sleep(outcome)
    except TimeoutError:
        return waiting.over()
