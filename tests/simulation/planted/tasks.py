"""Planted bugs of tasks that finish and of stops with a savepoint."""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.checkpoint.completion import Completion
from ckpt_runtime.checkpoint.coordinator import CheckpointCoordinator
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.triggering import Triggering
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from tests.simulation.planted.registry import bug, nothing

# --- finished tasks and stops


@bug("a checkpoint waits for a task that has ended", "6.1, FLINK-33186")
def _():
    return [(Completion, "subtask_finished", nothing)]


@bug("the last checkpoint of a bounded job is not tried again", "FLIP-147, FLINK-23741")
def _():
    return [(CheckpointSchedule, "retry_final", nothing)]


@bug("the end of data triggers no checkpoint", "6.2")
def _():
    return [(Triggering, "request_final", nothing)]


@bug("finished tasks are awaited", "FLIP-147")
def _():
    from ckpt_runtime.checkpoint.execution_view import ExecutionView

    return [(ExecutionView, "finished", nothing)]


@bug("a restart after the savepoint of a stop", "FLINK-26783", seed=146)
def _():
    original = JobMachine._fail

    def fail(self, cause, now, *more):
        self._stop = None
        original(self, cause, now, *more)

    return [(JobMachine, "_fail", fail)]


@bug("a second stop replaces the first", "spotify #1017", seed=88)
def _():
    original = JobMachine._on_stop

    def on_stop(self, event, now):
        if self._state is JobState.STOPPING:
            self._state = JobState.RUNNING
        original(self, event, now)

    return [(JobMachine, "_on_stop", on_stop)]


@bug("the job goes on with tasks whose sources have stopped", "6.3, FLINK-22367")
def _():
    original = JobMachine._on_savepoint_failed
    return [
        (
            JobMachine,
            "_on_savepoint_failed",
            lambda self, event, now: original(self, replace(event, reached_tasks=False), now),
        )
    ]


@bug("a restart does not wait for the tasks", "faust #91")
def _():
    def gone(self, now):
        alive = self._tasks.alive
        if self._state is JobState.CLEARING and alive and self._stop is None:
            self._back_off(now)
        else:
            _CHECK_ALL_GONE(self, now)

    return [(JobMachine, "_check_all_gone", gone)]


_CHECK_ALL_GONE = JobMachine._check_all_gone


@bug("ticks do not go on when a stop came to nothing", "6.3")
def _():
    return [(CheckpointCoordinator, "_on_periodic_started", nothing)]


# --- restarts


@bug("a restore that failed counts as hopeless", "a mount that was missing for five seconds")
def _():
    original = JobMachine._on_state_restore_failed
    return [
        (
            JobMachine,
            "_on_state_restore_failed",
            lambda self, event, now: original(self, replace(event, recoverable=False), now),
        )
    ]


@bug("failed checkpoints restart the job at once", "an unusable checkpoint directory")
def _():
    original = JobMachine._on_job_failed
    return [
        (
            JobMachine,
            "_on_job_failed",
            lambda self, event, now: original(self, replace(event, failed_checkpoints=0), now),
        )
    ]


@bug("the pause after failed checkpoints does not grow", "an unusable checkpoint directory")
def _():
    original = JobMachine._on_job_failed
    return [
        (
            JobMachine,
            "_on_job_failed",
            lambda self, event, now: original(
                self, replace(event, failed_checkpoints=min(1, event.failed_checkpoints)), now
            ),
        )
    ]
