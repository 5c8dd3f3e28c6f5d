"""What waits ask and when, carried out by nobody: steps, pauses and deadlines on a clock of the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptClientError, JobEnded, NotFound, OperationFailed, Unreachable
from ckpt_runtime.client.waiting import (
    POLL_PATIENCE_S,
    Deadline,
    Pause,
    Steps,
    growing_delays,
    persistent,
    poll,
    until_final,
    wait_for_operation,
    wait_for_state,
    watch,
)
from ckpt_runtime.contract.base import read
from ckpt_runtime.contract.checkpoints import OperationOutcome, OperationStatus
from ckpt_runtime.contract.jobs import RETAINS, JobDetails, QueueStatus, RemoteFailure

JOB = "ab" * 16
T = TypeVar("T")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def parts(self, seconds: float, most: float) -> Iterator[float]:
        """A pause in parts, after which the deadline has passed."""
        yield most
        yield seconds - most
        self.now = 1e9


def found(what: T) -> Steps[T]:
    yield from ()
    return what


def outcome(steps: Steps[T]) -> T:
    """The result of steps that ask for nothing."""
    with pytest.raises(StopIteration) as end:
        next(steps)
    result: T = end.value.value
    return result


def test_delays_double_up_to_the_interval_and_end_with_the_deadline() -> None:
    clock = Clock()
    steps = poll(lambda: found(None), Deadline(1.0, clock), growing_delays(0.1))
    pauses = []
    for step in steps:
        assert isinstance(step, Pause)
        pauses.append(step.seconds)
        clock.now += step.seconds
    assert pauses[:5] == [0.02, 0.04, 0.08, 0.1, 0.1]
    assert sum(pauses) == pytest.approx(1.0)
    assert pauses[-1] == pytest.approx(0.06)


def test_a_poll_is_repeated_for_a_while_but_not_beyond_the_deadline() -> None:
    patience: list[float] = []

    def look(patience_s: float) -> Steps[bool | None]:
        patience.append(patience_s)
        return found(True)

    for timeout_s in (40.0, 5.0, 0.0, None):
        assert outcome(watch(look, "it", timeout_s, 1.0))
    assert patience == [POLL_PATIENCE_S, pytest.approx(5.0, abs=0.1), 0.0, POLL_PATIENCE_S]


@pytest.mark.parametrize(("timeout_s", "interval_s"), [(-1.0, 1.0), (1.0, 0.0), (None, -1.0)])
def test_waits_that_make_no_sense(timeout_s: float | None, interval_s: float) -> None:
    with pytest.raises(ValueError, match="not acceptable"):
        outcome(wait_for_state(JOB, {"RUNNING"}, timeout_s=timeout_s, poll_interval_s=interval_s))


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_passing_error_is_waited_out_until_the_patience_is_over(attempts: int) -> None:
    clock, tries = Clock(), list[float]()
    told: list[CkptClientError] = []

    def attempt() -> Steps[None]:
        tries.append(clock.now)
        yield Pause(0.0)
        raise Unreachable("u", str(len(tries)))

    steps = persistent(attempt, Deadline(10.0, clock), attempts=attempts, backoff=lambda _: 4.0, on_away=told.append)
    with pytest.raises(Unreachable, match=r": 4$") as error:
        for step in steps:
            assert isinstance(step, Pause)
            clock.now += step.seconds
    assert tries == [0.0, 4.0, 8.0, 12.0]
    assert [*map(str, told), str(error.value)] == [f"u cannot be reached: {number}" for number in range(1, 5)]


def test_a_pause_may_be_slept_in_parts() -> None:
    clock = Clock()
    steps = poll(lambda: found(None), Deadline(1.0, clock), iter([0.8]), lambda s: clock.parts(s, 0.5))
    assert [step.seconds for step in steps if isinstance(step, Pause)] == [0.5, pytest.approx(0.3)]


def test_an_operation_that_failed_and_a_job_that_ended_otherwise_are_errors() -> None:
    steps = wait_for_operation("checkpoint", "t", JOB, timeout_s=None)
    next(steps)
    assert isinstance(steps.send(OperationStatus(QueueStatus("IN_PROGRESS"))), Pause)
    next(steps)
    failed = OperationOutcome(checkpoint_failure=RemoteFailure(exception="E", stack_trace="E: no room"))
    with pytest.raises(OperationFailed) as error:
        steps.send(OperationStatus(QueueStatus("COMPLETED"), failed))
    assert (str(error.value), error.value.exception) == ("no room", "E")
    ending = wait_for_state(JOB, {"RUNNING"}, timeout_s=None)
    next(ending)
    with pytest.raises(JobEnded, match="CANCELED"):
        ending.send("CANCELED")


@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 5.0)), max_size=30), st.floats(0.0, 20.0))
def test_a_wait_looks_until_its_deadline_and_not_beyond(answers: list[tuple[bool, float]], limit_s: float) -> None:
    """Each look takes a while and is answered "not yet", or not at all."""
    clock, script, looks = Clock(), iter(answers), list[float]()
    deadline = Deadline(limit_s, clock)

    def attempt() -> Steps[None]:
        looks.append(clock.now)
        is_answered, seconds = next(script, (True, 1.0))
        clock.now += seconds
        yield from ()
        if not is_answered:
            raise Unreachable("u", "away")

    steps = poll(
        lambda: persistent(attempt, deadline, backoff=lambda _: min(3.0, deadline.left)), deadline, growing_delays(2.0)
    )
    try:
        for step in steps:
            assert isinstance(step, Pause)
            clock.now += step.seconds
    except Unreachable:
        pass
    assert clock.now >= limit_s
    assert max(looks) <= limit_s + 1e-9


def test_the_end_of_a_job_is_shown_when_every_older_copy_has_expired() -> None:
    """Flink's details may still say that the job runs; a session shows what is."""
    running = {"state": "RUNNING", "end-time": -1, "now": 5_000}
    ended = {"state": "FINISHED", "end-time": 4_000, "now": 5_500}
    shown = [details(**running), NotFound(404, ["not yet"]), details(**ended)]
    steps, pauses = until_final("f" * 32), []
    assert next(steps).path == requests.dashboard_config().path
    answer: object = {"refresh-interval": 3_000, "features": {}}
    with pytest.raises(StopIteration):
        while True:
            step = steps.throw(answer) if isinstance(answer, CkptClientError) else steps.send(answer)
            if isinstance(step, Pause):
                pauses.append(step.seconds)
                answer = None
            else:
                answer = shown.pop(0)
    assert pauses == [3.0, 3.0, 1.5]
    session = until_final("f" * 32)
    next(session)
    with pytest.raises(StopIteration):
        session.send({"refresh-interval": 3_000, "features": {RETAINS: True}})


def details(**shown: object) -> JobDetails:
    return read({"jid": "f" * 32, "name": "n", "start-time": 0, "duration": 0, "timestamps": {}, "vertices": [],
                 "plan": {}, **shown}, JobDetails)  # fmt: skip
