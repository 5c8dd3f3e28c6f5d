"""Decides when periodic checkpoints and the final checkpoint of a bounded job are due. Pure.

Owns the periodic schedule (``periodic_trigger``) and its timer, and the timer of the final checkpoint (FLIP-147).
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.execution_view import ExecutionView
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.periodic_trigger import PeriodicTrigger

FINAL_CHECKPOINT_RETRY_MS = 1_000
"""Without periodic checkpoints, a failed final checkpoint is retried after this pause."""

_PERIODIC = TimerId(TimerKind.PERIODIC)
_FINAL = TimerId(TimerKind.FINAL_CHECKPOINT)


class CheckpointSchedule:
    """Schedules a job's checkpoints; ``emit`` takes the effects."""

    def __init__(
        self,
        configuration: CheckpointConfiguration,
        first_delay_ms: int | None,
        executions: ExecutionView,
        emit: Callable[[Effect], None],
    ) -> None:
        self._periodic = PeriodicTrigger(configuration, first_delay_ms)
        self._executions = executions
        self._emit = emit
        self._final_generation = 0
        self._final_requested = False

    @property
    def is_running(self) -> bool:
        """Whether checkpoints are triggered automatically; False while the job is being stopped with a savepoint."""
        return self._periodic.running

    @property
    def has_tick(self) -> bool:
        """Whether a periodic checkpoint is scheduled."""
        return self._periodic.next_at is not None

    @property
    def pause_ends_at(self) -> int:
        """The time before which no periodic checkpoint may start."""
        return self._periodic.pause_ends_at

    def deployed(self) -> None:
        """A new deployment has not requested its final checkpoint yet."""
        self._final_requested = False

    def undeployed(self) -> None:
        """The deployment is gone: no task waits for a final checkpoint."""
        self._emit(out.CancelTimer(_FINAL))
        # The timer may have fired already and its event be queued: it must not count for the next deployment.
        self._final_generation += 1

    # --- periodic checkpoints

    def start(self, now: Instant) -> None:
        if self._periodic.start(now.rel_ms):
            self._schedule_tick()

    def stop(self) -> None:
        self._periodic.stop()
        self._emit(out.CancelTimer(_PERIODIC))

    def tick(self, generation: int, now: Instant) -> bool:
        """The timer fired: schedules the next tick; returns whether a checkpoint is due now."""
        if not self._periodic.is_current(generation):
            return False
        due = self._periodic.next_at
        is_due = due is not None and now.rel_ms >= due
        # A timer that fired too early is armed again for the same time.
        if is_due:
            self._periodic.tick(now.rel_ms)
        self._schedule_tick()
        return is_due

    def postpone_to_pause_end(self) -> None:
        """The checkpoint was due within the minimum pause, so its tick moves to the end of the pause."""
        self._periodic.postpone_to_pause_end()
        self._schedule_tick()

    def completed(self, now: Instant) -> None:
        """A checkpoint or savepoint completed: the minimum pause starts now."""
        self._periodic.completed(now.rel_ms)

    def configure(self, configuration: CheckpointConfiguration, now: Instant) -> None:
        if self._periodic.configure(configuration, now.rel_ms):
            self._schedule_tick()
            self.retry_final(now)

    def set_backlog(self, backlog: bool, now: Instant) -> None:
        if self._periodic.set_backlog(backlog, now.rel_ms):
            self._schedule_tick()
            self.retry_final(now)

    def _schedule_tick(self) -> None:
        if self._periodic.next_at is None:
            self._emit(out.CancelTimer(_PERIODIC))
        else:
            self._emit(out.ScheduleTimer(_PERIODIC, self._periodic.generation, self._periodic.next_at))

    # --- the final checkpoint

    def claim_final(self) -> bool:
        """Whether to request the final checkpoint now: once per deployment, never after a stop's savepoint."""
        if self._final_requested or not self.is_running or not self._executions.all_wait_for_final_checkpoint:
            return False
        self._final_requested = True
        return True

    def retry_final(self, now: Instant) -> None:
        """Schedules a retry; without periodic checkpoints, tasks would wait forever for their final checkpoint."""
        if not self.has_tick and self._executions.all_wait_for_final_checkpoint:
            self._final_generation += 1
            at = now.rel_ms + FINAL_CHECKPOINT_RETRY_MS
            self._emit(out.ScheduleTimer(_FINAL, self._final_generation, at))

    def final_timer_fired(self, generation: int, now: Instant) -> bool:
        """Returns whether to request the final checkpoint again now."""
        if generation != self._final_generation or not self._executions.all_wait_for_final_checkpoint:
            return False
        if not self.is_running:
            self.retry_final(now)  # a stop is in progress; it may fail
            return False
        self._final_requested = True
        return True
