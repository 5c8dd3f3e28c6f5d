"""Waits: what they ask and when, with pauses and deadlines on a clock of the test."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.client.errors import CkptClientError, JobEnded, NotFound, OperationFailed, Unreachable
from ckpt_runtime.client.requests import Call
from ckpt_runtime.client.waiting import (
    POLL_PATIENCE_S,
    Caller,
    Deadline,
    growing_delays,
    persistent,
    poll,
    until_final,
    wait_for_operation,
    wait_for_state,
    watch,
)
from ckpt_runtime.contract.checkpoints import OperationOutcome, OperationStatus
from ckpt_runtime.contract.jobs import RETAINS, JobDetails, QueueStatus, RemoteFailure
from ckpt_runtime.contract.spelling import read

JOB = "ab" * 16


class Clock:
    """A clock that moves when the test's thread sleeps; loops of other threads really sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self._thread, self._really_sleep = threading.get_ident(), asyncio.sleep

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if threading.get_ident() != self._thread:
            await self._really_sleep(seconds)
            return
        self.pauses.append(seconds)
        self.now += seconds


class Script:
    """Gives one answer after the other, whatever is asked."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def execute(self, call: Call[Any], *, retry_timeout_s: float | None = None) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, CkptClientError):
            raise answer
        return answer


def script(*answers: object) -> Caller:
    return cast("Caller", Script(*answers))


async def nothing() -> None:
    return None


def test_delays_double_up_to_the_interval_and_end_with_the_deadline() -> None:
    clock = Clock()
    asyncio.run(poll(nothing, Deadline(1.0, clock), growing_delays(0.1), clock.sleep))
    assert clock.pauses[:5] == [0.02, 0.04, 0.08, 0.1, 0.1]
    assert sum(clock.pauses) == pytest.approx(1.0)
    assert clock.pauses[-1] == pytest.approx(0.06)


def test_request_of_a_poll_is_repeated_for_a_while_but_not_beyond_the_deadline() -> None:
    patience: list[float] = []

    async def look(retry_timeout_s: float) -> bool | None:
        patience.append(retry_timeout_s)
        return True

    for timeout_s in (40.0, 5.0, 0.0, None):
        assert asyncio.run(watch(look, "it", timeout_s, 1.0))
    assert patience == [POLL_PATIENCE_S, pytest.approx(5.0, abs=0.1), 0.0, POLL_PATIENCE_S]


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(-1.0, 1.0), (1.0, 0.0), (None, -1.0)])
def test_wait_with_impossible_times_is_refused(timeout_s: float | None, interval_s: float) -> None:
    with pytest.raises(ValueError, match="not acceptable"):
        asyncio.run(wait_for_state(script(), JOB, {"RUNNING"}, timeout_s=timeout_s, poll_interval_s=interval_s))


@pytest.mark.parametrize("attempts", [1, 3])
def test_passing_error_is_retried_until_the_patience_is_over(attempts: int) -> None:
    clock, tries = Clock(), list[float]()
    reported: list[CkptClientError] = []

    async def attempt() -> None:
        tries.append(clock.now)
        raise Unreachable("u", str(len(tries)))

    with pytest.raises(Unreachable, match=r": 4$") as error:
        asyncio.run(
            persistent(
                attempt,
                Deadline(10.0, clock),
                attempts=attempts,
                backoff=lambda _: 4.0,
                on_away=reported.append,
                sleep=clock.sleep,
            )
        )
    assert tries == [0.0, 4.0, 8.0, 12.0]
    assert [*map(str, reported), str(error.value)] == [f"u cannot be reached: {number}" for number in range(1, 5)]


def test_failed_operation_and_job_that_ended_otherwise_are_errors() -> None:
    outcome = OperationOutcome(checkpoint_failure=RemoteFailure(exception="E", stack_trace="E: no room"))
    failed = OperationStatus(QueueStatus("COMPLETED"), outcome)
    answers = script(OperationStatus(QueueStatus("IN_PROGRESS")), failed)
    with pytest.raises(OperationFailed) as error:
        asyncio.run(wait_for_operation(answers, "checkpoint", "t", JOB, timeout_s=None))
    assert (str(error.value), error.value.exception) == ("no room", "E")
    with pytest.raises(JobEnded, match="CANCELED"):
        asyncio.run(wait_for_state(script("CANCELED"), JOB, {"RUNNING"}, timeout_s=None))


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 5.0)), max_size=30), st.floats(0.0, 20.0))
def test_wait_looks_until_its_deadline_and_not_beyond(answers: list[tuple[bool, float]], limit_s: float) -> None:
    """Each look takes a while and is answered "not yet", or not at all."""
    clock, answered, looks = Clock(), iter(answers), list[float]()
    deadline = Deadline(limit_s, clock)

    async def attempt() -> None:
        looks.append(clock.now)
        is_answered, seconds = next(answered, (True, 1.0))
        clock.now += seconds
        if not is_answered:
            raise Unreachable("u", "away")

    async def look() -> None:
        await persistent(attempt, deadline, backoff=lambda _: min(3.0, deadline.left), sleep=clock.sleep)

    with suppress(Unreachable):
        asyncio.run(poll(look, deadline, growing_delays(2.0), clock.sleep))
    assert clock.now >= limit_s
    assert max(looks) <= limit_s + 1e-9


def test_end_of_a_job_is_final_when_every_older_copy_has_expired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flink's details may still say that the job runs; a session never answers with an old copy."""
    clock = Clock()
    running = {"state": "RUNNING", "end-time": -1, "now": 5_000}
    ended = {"state": "FINISHED", "end-time": 4_000, "now": 5_500}
    shown = (details(**running), NotFound(404, ["not yet"]), details(**ended))
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    asyncio.run(until_final(script({"refresh-interval": 3_000, "features": {}}, *shown), JOB))
    assert clock.pauses == [3.0, 3.0, 1.5]
    asyncio.run(until_final(script({"refresh-interval": 3_000, "features": {RETAINS: True}}), JOB))


def details(**shown: object) -> JobDetails:
    return read({"jid": "f" * 32, "name": "n", "start-time": 0, "duration": 0, "timestamps": {}, "vertices": [],
                 "plan": {}, **shown}, JobDetails)  # fmt: skip
