"""Upgrades under seeded trouble: crashes before and after each call, failing jobs, other drivers, bad new versions."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from airflow_provider_ckpt.upgrades import machine
from airflow_provider_ckpt.upgrades.actions import Cancel, JobMissing, Look, Refused, Seen
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Mode, Outcome, Step, Upgrade
from tests.simulation.upgrades.upgrade_cluster import Broken
from tests.simulation.upgrades.upgrade_run import Run

SEEDS = 5_000


@pytest.mark.row("air.4")
def test_upgrade_keeps_every_promise_under_all_faults() -> None:
    ends: Counter[tuple[Mode, Outcome | None]] = Counter()
    for seed in range(SEEDS):
        run = Run(seed)
        try:
            record = run.go()
        except Exception as error:
            error.add_note(f"seed {seed}\n" + "\n".join(run.trace))
            raise
        ends[record.desired.mode, record.outcome] += 1
    for mode in Mode:
        assert ends[mode, Outcome.UPGRADED] > 100, ends
        assert ends[mode, Outcome.ROLLED_BACK] > 100, ends
        assert ends[mode, Outcome.REFUSED] > 50, ends


# --- the simulation finds what is wrong


def _turn(step: Step, wrong: Callable[[Any], Upgrade]) -> AbstractContextManager[Any]:
    return patch.dict(machine._AFTER, {step: wrong})


def ids_of_each_try() -> Iterator[None]:
    """Ids that are not written down: each record has its own."""
    original = machine._start

    def start(record: Upgrade) -> Any:
        run = original(record)
        return type(run)(run.program, uuid.uuid4().hex, run.like_job, run.options, run.snapshot, run.claim)

    with patch.dict(machine._ACTIONS, {Step.START: start}):
        yield


def the_new_one_starts_at_once() -> Iterator[None]:
    """Nobody waits for the end of a cancelled job."""

    def wrong(turn: Any) -> Upgrade:
        return machine._to(turn.record, Step.CHECK)

    with _turn(Step.CANCEL, wrong):
        yield


def the_old_one_returns_at_once() -> Iterator[None]:
    """Nobody waits for the end of the unhealthy one."""
    with _turn(Step.CANCEL_NEW, lambda turn: machine._to(turn.record, Step.ROLL_BACK)):
        yield


def nothing_is_retained() -> Iterator[None]:
    with patch.dict(machine._ACTIONS, {Step.CANCEL: lambda record: Cancel(record.old_job, False, record.claim)}):
        yield


def the_snapshot_of_the_preflight_is_used() -> Iterator[None]:
    """That was the latest some time before the old job has ended."""

    def wrong(turn: Any) -> Upgrade:
        ended = isinstance(turn.answer, Seen) and turn.answer.has_ended
        return machine._with_snapshot(turn.record, turn.record.snapshot) if ended else turn.record

    with _turn(Step.CANCELLING, wrong):
        yield


def a_stop_that_was_accepted_is_taken_for_done() -> Iterator[None]:
    with _turn(Step.STOP, lambda turn: machine._to(turn.record, Step.CHECK)):
        yield


def the_old_program_is_not_held() -> Iterator[None]:
    with _turn(Step.INSPECT, lambda turn: _without_pin(machine._Turn.inspect(turn))):
        yield


def _without_pin(record: Upgrade) -> Upgrade:
    return replace(record, step=Step.PREVIEW) if record.step is Step.PIN_OLD else record


def a_stateless_upgrade_rolls_back_to_nothing() -> Iterator[None]:
    def wrong(turn: Any) -> Upgrade:
        changed = machine._Turn.cancelling(turn)
        return replace(changed, snapshot=None) if changed.desired.mode is Mode.STATELESS else changed

    with _turn(Step.CANCELLING, wrong):
        yield


def an_unhealthy_version_is_let_go_on() -> Iterator[None]:
    """The gate gives up, and nobody cancels."""
    with _turn(Step.START, lambda turn: machine._to(machine._end(turn.record, Outcome.REFUSED, "x"), Step.ENDED)):
        yield


def the_id_of_the_new_job_is_never_retired() -> Iterator[None]:
    """Its request arrives after the old version was started again."""

    def wrong(turn: Any) -> Upgrade:
        return machine._Turn.retire_new(replace_answer(turn))

    with (
        patch.dict(machine._ACTIONS, {Step.RETIRE_NEW: lambda record: Look(record.new_job)}),
        _turn(Step.RETIRE_NEW, wrong),
    ):
        yield


def replace_answer(turn: Any) -> Any:
    """As if what is not there now could be taken for retired."""
    lives = isinstance(turn.answer, Seen) and not turn.answer.has_ended
    return machine._Turn(turn.record, Refused("it lives") if lives else JobMissing(""), turn.now_ms)


def a_refusal_to_retire_is_ignored() -> Iterator[None]:
    """The request has arrived in between, and its job runs."""
    with _turn(Step.RETIRE_NEW, lambda turn: machine._to(turn.record, Step.ROLL_BACK)):
        yield


BUGS = [
    the_id_of_the_new_job_is_never_retired,
    a_refusal_to_retire_is_ignored,
    ids_of_each_try,
    the_new_one_starts_at_once,
    the_old_one_returns_at_once,
    nothing_is_retained,
    the_snapshot_of_the_preflight_is_used,
    a_stop_that_was_accepted_is_taken_for_done,
    the_old_program_is_not_held,
    a_stateless_upgrade_rolls_back_to_nothing,
    an_unhealthy_version_is_let_go_on,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: str(bug.__name__))
def test_a_planted_bug_is_found(bug: Callable[[], Iterator[None]]) -> None:
    planted = bug()
    next(planted)
    try:
        with pytest.raises(Broken):
            for seed in range(SEEDS):
                Run(seed).go()
    finally:
        planted.close()


def test_a_record_survives_its_journal() -> None:
    record = machine.begin(DesiredUpgrade(goal=Run(1).desired.goal, job="0" * 32, program="p"), "series")
    assert Upgrade.from_json(record.to_json()) == record
    assert json.loads(json.dumps(record.to_json())) == record.to_json()  # Airflow's store takes no tuples
    with pytest.raises(ValueError, match="not a record of an upgrade"):
        Upgrade.from_json({"step": "NOWHERE"})
