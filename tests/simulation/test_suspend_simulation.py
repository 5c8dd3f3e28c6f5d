"""Suspending and resuming under seeded trouble: crashes before and after each call, late requests, other drivers."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace as changed
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.actions import (
    Accepted,
    Action,
    Answer,
    Cancel,
    JobMissing,
    Look,
    ReadStop,
    Refused,
    Retire,
    Run,
    Seen,
    StopSeen,
)
from airflow_provider_ckpt.upgrades.record import Goal, Mode, Outcome, Step, Upgrade
from airflow_provider_ckpt.upgrades.steps import Ask, Turn
from tests.simulation.upgrades.planted import asking, ending, replaced
from tests.simulation.upgrades.suspend_run import SuspendRun
from tests.simulation.upgrades.upgrade_cluster import Broken
from tests.support.effort import THOROUGH

SEEDS = 5_000 if THOROUGH else 1_500
"""A planted bug shows in a few of them."""


@pytest.mark.row("air.4")
def test_suspend_and_resume_keep_every_promise_under_all_faults() -> None:
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
    assert ends[suspended, resumed] > 300, ends
    assert ends[suspended, stranded, resumed] > 30, ends
    assert ends[(Outcome.REFUSED,)] > 30, ends


# --- the simulation finds what is wrong


def the_id_is_never_retired() -> AbstractContextManager[Any]:
    """The request of the first resumption arrives beside the second one."""

    async def wrong(action: Action, ask: Ask) -> Answer:
        if not isinstance(action, Retire):
            return await ask(action)
        job = await ask(Look(action.job))
        return Refused("it lives") if isinstance(job, Seen) and not job.has_ended else JobMissing("")

    return asking(Step.SUBMIT, wrong)


def a_job_that_arrived_late_counts_as_absent() -> AbstractContextManager[Any]:
    """The message says that nothing runs."""

    async def wrong(action: Action, ask: Ask) -> Answer:
        answer = await ask(action)
        return Accepted() if isinstance(action, Retire) else answer

    return asking(Step.SUBMIT, wrong)


def ids_are_made_by_each_try() -> AbstractContextManager[Any]:
    async def wrong(action: Action, ask: Ask) -> Answer:
        return await ask(changed(action, job=uuid.uuid4().hex) if isinstance(action, Run) else action)

    return asking(Step.SUBMIT, wrong)


def the_program_of_a_suspended_job_is_released() -> AbstractContextManager[Any]:
    """Another driver no longer has it."""
    original = steps._held

    def held(record: Upgrade) -> tuple[str, ...]:
        return original(replace(record, outcome=None) if record.outcome is Outcome.SUSPENDED else record)

    return patch.object(steps, "_held", held)


def no_checkpoint_is_retained() -> AbstractContextManager[Any]:
    async def wrong(action: Action, ask: Ask) -> Answer:
        return await ask(changed(action, retain=False) if isinstance(action, Cancel) else action)

    return asking(Step.SAVEPOINT, wrong)


def a_cancelled_job_counts_as_ended_at_once() -> AbstractContextManager[Any]:
    async def wrong(record: Upgrade, turn: Turn) -> Upgrade:
        await turn.ask(Cancel(record.old_job, True, record.claim))
        return steps._end(record, Outcome.SUSPENDED)

    return patch.object(steps, "_cancel_old", wrong)


def the_snapshot_of_the_preparation_is_kept() -> AbstractContextManager[Any]:
    """The job took further checkpoints after it."""
    right = steps._cancel_old

    async def wrong(record: Upgrade, turn: Turn) -> Upgrade | None:
        found = await right(record, turn)
        return found if found is None else replace(found, snapshot=record.snapshot)

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


BUGS = [
    the_id_is_never_retired,
    a_job_that_arrived_late_counts_as_absent,
    ids_are_made_by_each_try,
    the_program_of_a_suspended_job_is_released,
    no_checkpoint_is_retained,
    a_cancelled_job_counts_as_ended_at_once,
    the_snapshot_of_the_preparation_is_kept,
    a_job_is_resumed_from_the_snapshot_that_it_began_with,
    an_unhealthy_job_is_started_once_more,
    a_failed_savepoint_counts_as_an_end,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: str(bug.__name__))
def test_a_planted_bug_is_found(bug: Callable[[], AbstractContextManager[Any]]) -> None:
    with bug(), pytest.raises(Broken):
        for seed in range(SEEDS):
            SuspendRun(seed).go()
