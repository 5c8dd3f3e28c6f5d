"""Performing a condition's requests with a client, once or until a deadline.

The two ``poll_once`` functions differ only in the ``await``; everything that decides is in the conditions. Transport
errors and a job manager that is starting are waited out with growing pauses, everything else is passed on.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from ckpt_runtime.client import AsyncCkptClient, CkptApiError, CkptClient, CkptUnreachable

from airflow_provider_ckpt.conditions.base import Call, Condition, Status, Verdict

MAX_PAUSE_SECONDS = 30.0
_JITTER = 0.2


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


def is_passing(error: CkptApiError) -> bool:
    """Whether trying again later may help: no answer, overload, a driver that starts or is not the leader."""
    return isinstance(error, CkptUnreachable) or error.status in (408, 425, 429) or (error.status or 0) >= 500


def poll_once(condition: Condition, client: CkptClient) -> Verdict | None:
    """One look with the synchronous client."""
    steps = condition.poll()
    try:
        call = next(steps)
        while True:
            try:
                answer = call(client)
            except CkptApiError as error:
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
                answer = await call(client)
            except CkptApiError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration as end:
        verdict: Verdict | None = end.value
        return verdict


def wait(
    condition: Condition,
    client: CkptClient,
    deadline: float,
    pacing: Pacing,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Verdict:
    """Poll until there is a verdict, or ``deadline`` (seconds since the epoch) has passed."""
    trouble = ""
    while True:
        try:
            verdict = poll_once(condition, client)
        except CkptApiError as error:
            if not is_passing(error):
                return Verdict(Status.REFUSED, str(error))
            trouble, pause = f"; last trouble: {error}", pacing.after_failure()
        else:
            if verdict is not None:
                return verdict
            trouble, pause = "", pacing.after_answer()
        remaining = deadline - time.time()
        if remaining <= 0:
            return Verdict(Status.TIMEOUT, f"waited for {condition.subject} until the task's deadline{trouble}")
        sleep(min(pause, remaining))


def insist(client: CkptClient, call: Call, deadline: float, pacing: Pacing) -> Any:
    """Perform one idempotent request, again while the trouble is a passing one and the deadline has not passed.

    :raises CkptApiError: the last trouble, or at once one that does not pass.
    """
    while True:
        try:
            return call(client)
        except CkptApiError as error:
            remaining = deadline - time.time()
            if not is_passing(error) or remaining <= 0:
                raise
            time.sleep(min(pacing.after_failure(), remaining))
