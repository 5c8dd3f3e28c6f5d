"""Suspending and resuming under seeded trouble: crashes before and after each call, late requests, other drivers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from airflow_provider_ckpt.upgrades import machine
from airflow_provider_ckpt.upgrades.actions import Cancel, JobMissing, Look, Refused, Run, Seen
from airflow_provider_ckpt.upgrades.record import Goal, Mode, Outcome, Step, Upgrade
from tests.simulation.upgrades.suspend_run import SuspendRun
from tests.simulation.upgrades.upgrade_cluster import Broken

SEEDS = 5_000


@pytest.mark.row("air.4")
def test_upgrade_keeps_every_promise_under_all_faults() -> None:
    ends: Counter[tuple[Outcome | None, ...]] = Counter()
    for seed in range(SEEDS):
        run = SuspendRun(seed)
        try:
            run.go()
        except Exception as error:
            error.add_note(f"seed {seed}\n" + "\n".join(run.trace))
            raise
        ends[tuple(run.ends)] += 1
    suspended, resumed, stranded = Outcome.SUSPENDED, Outcome.RESUMED, Outcome.STRANDED
    assert ends[suspended, resumed] > 1_000, ends
    assert ends[suspended, stranded, resumed] > 100, ends
    assert ends[(Outcome.REFUSED,)] > 100, ends


# --- the simulation finds what is wrong


def _turn(step: Step, wrong: Callable[[Any], Upgrade]) -> AbstractContextManager[Any]:
    return patch.dict(machine._AFTER, {step: wrong})


def the_id_is_never_retired() -> Iterator[None]:
    """The request of the first resumption arrives beside the second one."""

    def wrong(turn: Any) -> Upgrade:
        lives = isinstance(turn.answer, Seen) and not turn.answer.has_ended
        return machine._Turn.retire_new(
            machine._Turn(turn.record, Refused("") if lives else JobMissing(""), turn.now_ms)
        )

    looks = {Step.RETIRE_NEW: lambda record: Look(record.new_job)}
    with patch.dict(machine._ACTIONS, looks), _turn(Step.RETIRE_NEW, wrong):
        yield


def a_job_that_arrived_late_is_taken_for_absent() -> Iterator[None]:
    """A person is told that nothing runs."""
    with _turn(Step.RETIRE_NEW, lambda turn: machine._strand(turn.record, turn.record.why)):
        yield


def ids_of_each_try() -> Iterator[None]:
    """Ids that are not written down: each try has its own."""
    original = machine._start

    def start(record: Upgrade) -> Any:
        run = original(record)
        return Run(run.program, uuid.uuid4().hex, run.like_job, run.options, run.snapshot, run.claim)

    with patch.dict(machine._ACTIONS, {Step.START: start}):
        yield


def a_suspended_program_is_let_go() -> Iterator[None]:
    """Another driver does not have it any more."""
    original = machine._held

    def held(record: Upgrade) -> tuple[str, ...]:
        return original(replace(record, outcome=None) if record.outcome is Outcome.SUSPENDED else record)

    with patch.object(machine, "_held", held):
        yield


def nothing_is_retained() -> Iterator[None]:
    with patch.dict(machine._ACTIONS, {Step.CANCEL: lambda record: Cancel(record.old_job, False, record.claim)}):
        yield


def a_cancelled_job_is_taken_for_ended() -> Iterator[None]:
    with _turn(Step.CANCEL, lambda turn: machine._end(turn.record, Outcome.SUSPENDED)):
        yield


def the_snapshot_of_the_first_look_is_kept() -> Iterator[None]:
    """The job went on until its last checkpoint."""

    def wrong(turn: Any) -> Upgrade:
        ended = isinstance(turn.answer, Seen) and turn.answer.has_ended
        return machine._with_snapshot(turn.record, turn.record.snapshot) if ended else turn.record

    with _turn(Step.CANCELLING, wrong):
        yield


def it_is_resumed_from_what_it_began_with() -> Iterator[None]:
    def wrong(turn: Any) -> Upgrade:
        changed = machine._Turn.inspect(turn)
        return replace(changed, snapshot=changed.origin) if changed.desired.goal is Goal.RESUME else changed

    with _turn(Step.INSPECT, wrong):
        yield


def an_unhealthy_job_is_started_once_more() -> Iterator[None]:
    """It may have committed, and still live."""

    def wrong(turn: Any) -> Upgrade:
        changed = machine._Turn.gate(turn)
        if changed.outcome is not Outcome.STRANDED:
            return changed
        return replace(turn.record, step=Step.START, deadline=None, new_job=uuid.uuid4().hex)

    with _turn(Step.GATE, wrong):
        yield


def a_savepoint_that_failed_is_taken_for_an_end() -> Iterator[None]:
    def wrong(turn: Any) -> Upgrade:
        failed = turn.record.desired.mode is Mode.SAVEPOINT and bool(turn.answer.failure)
        return machine._end(turn.record, Outcome.SUSPENDED) if failed else machine._Turn.stopping(turn)

    with _turn(Step.STOPPING, wrong):
        yield


BUGS = [
    the_id_is_never_retired,
    a_job_that_arrived_late_is_taken_for_absent,
    ids_of_each_try,
    a_suspended_program_is_let_go,
    nothing_is_retained,
    a_cancelled_job_is_taken_for_ended,
    the_snapshot_of_the_first_look_is_kept,
    it_is_resumed_from_what_it_began_with,
    an_unhealthy_job_is_started_once_more,
    a_savepoint_that_failed_is_taken_for_an_end,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: str(bug.__name__))
def test_a_planted_bug_is_found(bug: Callable[[], Iterator[None]]) -> None:
    planted = bug()
    next(planted)
    try:
        with pytest.raises(Broken):
            for seed in range(SEEDS):
                SuspendRun(seed).go()
    finally:
        planted.close()
