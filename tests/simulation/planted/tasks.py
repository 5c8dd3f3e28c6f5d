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


bug("a checkpoint waits for a task that has ended", "6.1, FLINK-33186", Completion, "subtask_finished", seed=30)(
    nothing
)

bug(
    "the last checkpoint of a bounded job is not tried again",
    "FLIP-147, FLINK-23741",
    CheckpointSchedule,
    "retry_final",
    seed=45,
)(nothing)

bug("the end of data triggers no checkpoint", "6.2", Triggering, "request_final", seed=4)(nothing)


@bug("finished tasks are awaited", "FLIP-147", seed=7)
def _():
    from ckpt_runtime.checkpoint.executions import ExecutionView

    return [(ExecutionView, "finished", nothing)]


@bug("a restart after the savepoint of a stop", "FLINK-26783", JobMachine, "_fail", seed=146)
def _(original, self, cause, now, *more):
    self._stop = None
    original(self, cause, now, *more)


@bug("a second stop replaces the first", "spotify #1017", JobMachine, "_on_stop", seed=88)
def _(original, self, event, now):
    if self.state is JobState.STOPPING:
        self.state = JobState.RUNNING
    original(self, event, now)


bug(
    "the job continues with tasks whose sources have stopped",
    "6.3, FLINK-22367",
    JobMachine,
    "_on_savepoint_failed",
    seed=17,
)(lambda original, self, event, now: original(self, replace(event, reached_tasks=False), now))


@bug("a restart does not wait for the tasks", "faust #91", JobMachine, "_check_all_gone", seed=1)
def _(self, now):
    alive = self.tasks.alive
    if self.state is JobState.CLEARING and alive and self._stop is None:
        self._back_off(now)
    else:
        _CHECK_ALL_GONE(self, now)


_CHECK_ALL_GONE = JobMachine._check_all_gone


bug(
    "ticks do not continue when a stop came to nothing", "6.3", CheckpointCoordinator, "_on_periodic_started", seed=342
)(nothing)


# --- restarts


bug(
    "a restore that failed counts as hopeless",
    "a mount that was missing for five seconds",
    JobMachine,
    "_on_state_restore_failed",
    seed=15,
)(lambda original, self, event, now: original(self, replace(event, recoverable=False), now))

bug(
    "failed checkpoints restart the job at once",
    "an unusable checkpoint directory",
    JobMachine,
    "_on_job_failed",
    seed=82,
)(lambda original, self, event, now: original(self, replace(event, failed_checkpoints=0), now))

bug(
    "the pause after failed checkpoints does not grow",
    "an unusable checkpoint directory",
    JobMachine,
    "_on_job_failed",
    seed=64,
)(
    lambda original, self, event, now: original(
        self, replace(event, failed_checkpoints=min(1, event.failed_checkpoints)), now
    )
)
