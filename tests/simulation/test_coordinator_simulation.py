"""Seeded schedules over coordinator and job machine, with protocol checkers on every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.aborted_checkpoints import AbortedCheckpoints
from ckpt_runtime.checkpoint.cleaner import CheckpointCleaner
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.coordinator_base import CoordinatorBase
from ckpt_runtime.checkpoint.effects import DiscardCheckpoint
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoint
from ckpt_runtime.checkpoint.request_decider import CheckpointRequestDecider
from ckpt_runtime.scheduler.job_machine import JobMachine
from tests.simulation.coordinator_world import World

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "500"))
BLOCK = 50


@pytest.mark.row("571.3")
@pytest.mark.parametrize("first", range(0, SEEDS, BLOCK))
def test_protocol_holds_under_faults(first: int) -> None:
    for seed in range(first, min(first + BLOCK, SEEDS)):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_the_schedules_are_worth_running() -> None:
    """Guards against a simulation in which nothing happens."""
    completed = aborted = deployments = steps = 0
    for seed in range(30):
        world = World(seed)
        world.run()
        counts = world.coordinator.statistics().counts
        completed += counts.completed
        aborted += counts.failed
        deployments += world.machine.attempt
        steps += world.steps
    assert completed > 300
    assert aborted > 100
    assert deployments > 60
    assert steps > 15_000


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    code = "from tests.simulation.coordinator_world import World; print([World(s).run() for s in (3, 4, 5)])"
    root = Path(__file__).resolve().parents[2]
    traces = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{root}:{root / 'runtime'}"},
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2", "2")
    }
    assert len(traces) == 1


# --- planted bugs: the simulation itself is graded


def _canceller_without_generation(self, checkpoint_id, generation, now):
    pending = self._pending.get(checkpoint_id)
    if pending is not None and pending.can_abort:
        self._abort(pending, CheckpointFailureReason.CHECKPOINT_EXPIRED, now)


def _unknown_pointer_is_a_failure(self, event, now):
    self._on_store_failed(event, now)


def _files_before_pointer(self, checkpoint, discard):
    if discard:
        self._deleting[checkpoint.id] += 1
        self._emit(DiscardCheckpoint(checkpoint))
    _RETIRE(self, checkpoint, False)


def _no_limit(self, load, now):
    return _NEXT(self, type(load)(False, 0, 0, 1_000, load.pause_ends_at), now)


def _stop_is_forgotten(self, cause, now, recoverable=True):
    self._stop = None
    _FAIL(self, cause, now, recoverable)


_RETIRE = CheckpointCleaner.retire
_NEXT = CheckpointRequestDecider.next
_FAIL = JobMachine._fail

PLANTED = {
    "an old canceller kills an extended checkpoint": (
        CheckpointCoordinator,
        "_on_canceller",
        _canceller_without_generation,
    ),
    "restore and publishing do not wait for writes in flight": (
        CoordinatorBase,
        "_is_finalizing",
        lambda self: False,
    ),
    "an unknown pointer is taken for a failure": (
        CheckpointCoordinator,
        "_on_store_unknown",
        _unknown_pointer_is_a_failure,
    ),
    "late state leaks": (CheckpointCoordinator, "_discard_state", lambda self, event: None),
    "repeated acknowledgements discard state in use": (AbortedCheckpoints, "__contains__", lambda self, number: True),
    "files go before the pointer": (CheckpointCleaner, "retire", _files_before_pointer),
    "a checkpoint that is being published can be aborted": (
        PendingCheckpoint,
        "can_abort",
        property(lambda self: True),
    ),
    "too many at the same time": (CheckpointRequestDecider, "next", _no_limit),
    "a restart after the savepoint of a stop": (JobMachine, "_fail", _stop_is_forgotten),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, planted = PLANTED[bug]
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises(Exception, match=r".+"):
        for seed in range(200):
            World(seed).run()
