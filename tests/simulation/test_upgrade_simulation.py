"""Upgrades, suspensions and resumptions under seeded trouble: crashes before and after each call, failing jobs, late
requests, other drivers, bad new versions.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace as changed
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.actions import (
    Accepted,
    Action,
    Answer,
    Cancel,
    Hold,
    JobMissing,
    Look,
    ReadStop,
    Refused,
    Retire,
    Seen,
    Stop,
    StopSeen,
)
from airflow_provider_ckpt.upgrades.actions import Run as RunRequest
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal, Mode, Outcome, Step, Upgrade
from airflow_provider_ckpt.upgrades.steps import Ask, Turn
from tests.simulation.schedules.simulation import collections_by_hand
from tests.simulation.upgrades.planted import asking, ending, replaced
from tests.simulation.upgrades.suspend_run import SuspendRun
from tests.simulation.upgrades.upgrade_cluster import OLD, Broken
from tests.simulation.upgrades.upgrade_run import Run
from tests.support.effort import THOROUGH

R = TypeVar("R", bound=Run)
SEEDS = 5_000 if THOROUGH else 1_500
"""A planted bug shows in a few of them."""


def _runs_of(kind: type[R]) -> Iterator[tuple[R, Upgrade]]:
    """All that hold."""
    for seed in collections_by_hand(range(SEEDS)):
        run = kind(seed)
        try:
            record = run.go()
        except Exception as error:
            error.add_note(f"seed {seed}\n" + "\n".join(run.trace))
            raise
        yield run, record


@pytest.mark.row("air.4")
def test_upgrade_keeps_every_promise_under_all_faults() -> None:
    ends = Counter((record.desired.mode, record.outcome) for _, record in _runs_of(Run))
    for mode in Mode:
        assert ends[mode, Outcome.UPGRADED] > 30, ends
        assert ends[mode, Outcome.ROLLED_BACK] > 30, ends
        assert ends[mode, Outcome.REFUSED] > 15, ends


@pytest.mark.row("air.4")
def test_suspend_and_resume_keep_every_promise_under_all_faults() -> None:
    ends = Counter(tuple(run.ends) for run, _ in _runs_of(SuspendRun))
    suspended, resumed, stranded = Outcome.SUSPENDED, Outcome.RESUMED, Outcome.STRANDED
    assert ends[suspended, resumed] > 300, ends
    assert ends[suspended, stranded, resumed] > 30, ends
    assert ends[(Outcome.REFUSED,)] > 30, ends


# --- the simulation finds what is wrong


def ids_are_made_by_each_try() -> AbstractContextManager[Any]:
    async def wrong(action: Action, ask: Ask) -> Answer:
        return await ask(changed(action, job=uuid.uuid4().hex) if isinstance(action, RunRequest) else action)

    return asking(Step.SUBMIT, wrong)


def the_new_version_starts_before_the_old_one_has_ended() -> AbstractContextManager[Any]:
    async def wrong(record: Upgrade, turn: Turn) -> Upgrade:
        await turn.ask(Cancel(record.old_job, True, record.claim))
        return steps._next(record, Step.CHECK)

    return patch.object(steps, "_cancel_old", wrong)


def the_old_version_starts_before_the_new_one_has_ended() -> AbstractContextManager[Any]:
    async def wrong(record: Upgrade, turn: Turn) -> Upgrade | None:
        if record.restarted:
            return await steps._gate_old(record, turn)
        await turn.ask(Cancel(record.new_job, False, record.claim))
        return await steps._start_old(record, turn)

    return replaced(Step.ROLL_BACK, wrong)


def no_checkpoint_is_retained() -> AbstractContextManager[Any]:
    async def wrong(action: Action, ask: Ask) -> Answer:
        return await ask(changed(action, retain=False) if isinstance(action, Cancel) else action)

    return asking(Step.SAVEPOINT, wrong)


def the_snapshot_of_the_preparation_is_kept() -> AbstractContextManager[Any]:
    """The old job took further checkpoints after it."""

    async def wrong(record: Upgrade, turn: Turn) -> Upgrade | None:
        found = await right(record, turn)
        return found if found is None else replace(found, snapshot=record.snapshot)

    right = steps._cancel_old
    return patch.object(steps, "_cancel_old", wrong)


def an_accepted_stop_counts_as_completed() -> AbstractContextManager[Any]:
    async def wrong(record: Upgrade, turn: Turn) -> Upgrade | None:
        requests: list[Action] = []

        async def ask(action: Action) -> Answer:
            requests.append(action)
            return await turn.ask(action)

        found = await right(record, Turn(ask, turn.now_ms))
        stopped = any(isinstance(action, Stop) for action in requests)
        return steps._next(record, Step.CHECK) if stopped and found is None else found

    right = steps.STEPS[Step.SAVEPOINT]
    return replaced(Step.SAVEPOINT, wrong)


def the_old_program_is_not_held() -> AbstractContextManager[Any]:
    async def wrong(action: Action, ask: Ask) -> Answer:
        return Accepted() if isinstance(action, Hold) and action.program == OLD else await ask(action)

    return asking(Step.PREPARE, wrong)


def a_stateless_upgrade_rolls_back_to_nothing() -> AbstractContextManager[Any]:
    def wrong(record: Upgrade, found: Upgrade | None) -> Upgrade | None:
        return found if found is None or record.desired.mode is not Mode.STATELESS else replace(found, snapshot=None)

    return ending(Step.SAVEPOINT, wrong)


def an_unhealthy_version_keeps_running() -> AbstractContextManager[Any]:
    """The upgrade ends behind the start, without a gate."""

    async def wrong(record: Upgrade, turn: Turn) -> Upgrade:
        await turn.ask(steps._start(record))
        return steps._next(steps._end(record, Outcome.REFUSED, "x"), Step.ENDED)

    return replaced(Step.SUBMIT, wrong)


def the_id_of_the_new_job_is_never_retired(step: Step) -> AbstractContextManager[Any]:
    """Its request arrives after the old version was started again, or beside the second resumption."""

    async def wrong(action: Action, ask: Ask) -> Answer:
        if not isinstance(action, Retire):
            return await ask(action)
        job = await ask(Look(action.job))
        return Refused("it lives") if isinstance(job, Seen) and not job.has_ended else JobMissing("")

    return asking(step, wrong)


def a_refusal_to_retire_is_ignored(step: Step) -> AbstractContextManager[Any]:
    """The request has arrived in between, and its job runs."""

    async def wrong(action: Action, ask: Ask) -> Answer:
        answer = await ask(action)
        return Accepted() if isinstance(action, Retire) else answer

    return asking(step, wrong)


def the_program_of_a_suspended_job_is_released() -> AbstractContextManager[Any]:
    """Another driver no longer has it."""
    original = steps._held

    def held(record: Upgrade) -> tuple[str, ...]:
        return original(replace(record, outcome=None) if record.outcome is Outcome.SUSPENDED else record)

    return patch.object(steps, "_held", held)


def a_cancelled_job_counts_as_ended_at_once() -> AbstractContextManager[Any]:
    async def wrong(record: Upgrade, turn: Turn) -> Upgrade:
        await turn.ask(Cancel(record.old_job, True, record.claim))
        return steps._end(record, Outcome.SUSPENDED)

    return patch.object(steps, "_cancel_old", wrong)


def a_job_is_resumed_from_the_snapshot_that_it_began_with() -> AbstractContextManager[Any]:
    def wrong(record: Upgrade, found: Upgrade | None) -> Upgrade | None:
        resumes = found is not None and record.desired.goal is Goal.RESUME
        return replace(found, snapshot=found.origin) if found is not None and resumes else found

    return ending(Step.PREPARE, wrong)


def an_unhealthy_job_is_started_once_more() -> AbstractContextManager[Any]:
    """It may have committed, and still live."""

    def wrong(record: Upgrade, found: Upgrade | None) -> Upgrade | None:
        if found is None or found.outcome is not Outcome.STRANDED:
            return found
        return steps._next(record, Step.SUBMIT, new_job=uuid.uuid4().hex)

    return ending(Step.GATE, wrong)


def a_failed_savepoint_counts_as_an_end() -> AbstractContextManager[Any]:
    right = steps.STEPS[Step.SAVEPOINT]

    async def wrong(record: Upgrade, turn: Turn) -> Upgrade | None:
        failed = False

        async def ask(action: Action) -> Answer:
            nonlocal failed
            answer = await turn.ask(action)
            failed = isinstance(action, ReadStop) and isinstance(answer, StopSeen) and bool(answer.failure)
            return answer

        found = await right(record, Turn(ask, turn.now_ms))
        suspends = failed and record.desired.mode is Mode.SAVEPOINT
        return steps._end(record, Outcome.SUSPENDED) if suspends else found

    return replaced(Step.SAVEPOINT, wrong)


OF_BOTH = [ids_are_made_by_each_try, no_checkpoint_is_retained, the_snapshot_of_the_preparation_is_kept]
OF_UPGRADES = [
    partial(the_id_of_the_new_job_is_never_retired, Step.ROLL_BACK),
    partial(a_refusal_to_retire_is_ignored, Step.ROLL_BACK),
    the_new_version_starts_before_the_old_one_has_ended,
    the_old_version_starts_before_the_new_one_has_ended,
    an_accepted_stop_counts_as_completed,
    the_old_program_is_not_held,
    a_stateless_upgrade_rolls_back_to_nothing,
    an_unhealthy_version_keeps_running,
]
OF_SUSPENSIONS = [
    partial(the_id_of_the_new_job_is_never_retired, Step.SUBMIT),
    partial(a_refusal_to_retire_is_ignored, Step.SUBMIT),
    the_program_of_a_suspended_job_is_released,
    a_cancelled_job_counts_as_ended_at_once,
    a_job_is_resumed_from_the_snapshot_that_it_began_with,
    an_unhealthy_job_is_started_once_more,
    a_failed_savepoint_counts_as_an_end,
]
BUGS = [*((Run, bug) for bug in [*OF_BOTH, *OF_UPGRADES]), *((SuspendRun, bug) for bug in [*OF_BOTH, *OF_SUSPENSIONS])]


def _name(value: Any) -> str:
    return str(getattr(value, "func", value).__name__)


@pytest.mark.parametrize(("kind", "bug"), BUGS, ids=_name)
def test_a_planted_bug_is_found(kind: type[Run], bug: Callable[[], AbstractContextManager[Any]]) -> None:
    with bug(), pytest.raises(Broken):
        for seed in range(SEEDS):
            kind(seed).go()


def test_a_record_survives_its_journal() -> None:
    record = steps.begin(DesiredUpgrade(goal=Run(1).desired.goal, job="0" * 32, program="p"), "series")
    assert Upgrade.from_json(record.to_json()) == record
    assert json.loads(json.dumps(record.to_json())) == record.to_json()  # Airflow's store takes no tuples
    with pytest.raises(ValueError, match="not a record of an upgrade"):
        Upgrade.from_json({"step": "NOWHERE"})
