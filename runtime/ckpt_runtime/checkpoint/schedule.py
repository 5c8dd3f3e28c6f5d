"""Decides when periodic checkpoints and the final checkpoint of a bounded job are due. Pure.

Owns the periodic schedule and its timer, and the timer of the final checkpoint (FLIP-147).
"""

from __future__ import annotations

from collections.abc import Callable

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.executions import ExecutionView
from ckpt_runtime.checkpoint.instant import Instant

FINAL_CHECKPOINT_RETRY_MS = 1_000
"""Without periodic checkpoints, a failed final checkpoint is retried after this pause."""

_PERIODIC = TimerId(TimerKind.PERIODIC)
_FINAL = TimerId(TimerKind.FINAL_CHECKPOINT)


class CheckpointSchedule:
    """Schedules a job's checkpoints: periodic ones at a fixed rate with a minimum pause, and the final one.

    A tick has a generation; ticks of an older generation do nothing. ``emit`` takes the effects.
    """

    def __init__(
        self,
        configuration: CheckpointConfiguration,
        first_delay_ms: int | None,
        executions: ExecutionView,
        emit: Callable[[Effect], None],
    ) -> None:
        self._configuration = configuration.effective()
        self._first_delay_ms = first_delay_ms
        self._executions = executions
        self._emit = emit
        self._backlog = False
        self._base = 0
        self._ticked = False
        self._last_completion: int | None = None
        self._generation = 0
        self._next_at: int | None = None
        self.is_running = False
        """Whether checkpoints are triggered automatically; False while the job is being stopped with a savepoint."""
        self._final_generation = 0
        self._final_requested = False

    def deployed(self) -> None:
        """A new deployment has not requested its final checkpoint yet."""
        self._final_requested = False

    def undeployed(self) -> None:
        """The deployment has ended: no task waits for a final checkpoint."""
        self._emit(out.CancelTimer(_FINAL))
        # The timer may have fired already and its event be queued: it must not count for the next deployment.
        self._final_generation += 1

    # --- periodic checkpoints

    @property
    def has_tick(self) -> bool:
        """Whether a periodic checkpoint is scheduled."""
        return self._next_at is not None

    @property
    def interval_ms(self) -> int | None:
        """The interval in force: while sources report backlog, the backlog interval (0 means no checkpoints)."""
        during_backlog = self._configuration.interval_during_backlog_ms
        if self._backlog and during_backlog is not None:
            return max(during_backlog, self._configuration.min_pause_ms) if during_backlog else None
        return self._configuration.interval_ms

    @property
    def pause_ends_at(self) -> int:
        """The monotonic time in milliseconds before which no periodic checkpoint may start."""
        if self._last_completion is None:
            return 0
        # Computed on each call: the pause may have changed since the completion (FLIP-571).
        return self._last_completion + self._configuration.min_pause_ms

    def start(self, now: Instant) -> None:
        """Starts ticking. The first delay lies in [pause, interval]."""
        self.is_running = True
        self._base, self._ticked = now.rel_ms, False
        interval = self.interval_ms
        if interval is None:
            return
        pause = self._configuration.min_pause_ms
        if self._first_delay_ms is None:
            delay = interval
        else:
            delay = min(max(self._first_delay_ms, pause), interval)
        # Only the first deployment delays its first checkpoint; a restarted job takes one as soon as the pause allows.
        self._first_delay_ms = pause
        self._schedule(max(now.rel_ms + delay, self.pause_ends_at))

    def stop(self) -> None:
        self.is_running = False
        self._schedule(None)

    def tick(self, generation: int, now: Instant) -> bool:
        """The timer fired: schedules the next tick; returns whether a checkpoint is due now."""
        due = self._next_at
        if not self.is_running or due is None or generation != self._generation:
            return False
        # A timer that fired too early is armed again for the same time.
        if now.rel_ms < due:
            self._emit(out.ScheduleTimer(_PERIODIC, generation, due))
            return False
        interval = self.interval_ms
        assert interval is not None
        # Based on the schedule and not on now: a late timer must not shift the schedule.
        self._base, self._ticked = due, True
        # If several ticks were missed, only one is made up for.
        self._schedule(max(now.rel_ms, due + interval))
        return True

    def postpone_to_pause_end(self) -> None:
        """The checkpoint was due within the minimum pause: the schedule restarts at the end of the pause."""
        self._schedule(self.pause_ends_at)

    def completed(self, now: Instant) -> None:
        """A checkpoint or savepoint completed: the minimum pause starts now."""
        self._last_completion = now.rel_ms

    def configure(self, configuration: CheckpointConfiguration, now: Instant) -> None:
        """Applies another interval or pause (FLIP-571)."""
        self._configuration = configuration.effective()
        self._rephase(now)

    def set_backlog(self, backlog: bool, now: Instant) -> None:
        """Sources started or stopped processing a backlog."""
        if backlog != self._backlog:
            self._backlog = backlog
            self._rephase(now)

    def _rephase(self, now: Instant) -> None:
        """Moves the tick to where the interval and the pause in force put it."""
        before, interval = self._next_at, self.interval_ms
        if not self.is_running:
            return
        due = None
        if interval is not None:
            due = self._base + interval
            if before is not None and not self._ticked:
                due = min(before, due)  # the first delay may be anything up to the interval
            due = max(now.rel_ms, due, self.pause_ends_at)
        if due != before:
            self._schedule(due)
            self.retry_final(now)

    def _schedule(self, at: int | None) -> None:
        self._generation += 1
        self._next_at = at
        self._emit(out.CancelTimer(_PERIODIC) if at is None else out.ScheduleTimer(_PERIODIC, self._generation, at))

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
