"""Computes when the next periodic checkpoint is due: fixed rate, minimum pause, interval changes (FLIP-571). Pure.

Takes and returns monotonic milliseconds only. A tick has a generation; ticks of an older generation do nothing.
"""

from __future__ import annotations

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration


class PeriodicTrigger:
    """The schedule of periodic checkpoints. ``next_at`` is None while no tick is scheduled."""

    def __init__(self, configuration: CheckpointConfiguration, first_delay_ms: int | None = None) -> None:
        self._configuration = configuration.effective()
        self._first_delay_ms = first_delay_ms
        self._backlog = False
        self._base = 0
        self._ticked = False
        self._last_completion: int | None = None
        self.generation = 0
        self.next_at: int | None = None
        self.running = False

    @property
    def interval_ms(self) -> int | None:
        """The interval in force: while sources report backlog, the backlog interval (0 means no checkpoints)."""
        during_backlog = self._configuration.interval_during_backlog_ms
        if self._backlog and during_backlog is not None:
            return max(during_backlog, self._configuration.min_pause_ms) if during_backlog else None
        return self._configuration.interval_ms

    @property
    def pause_ends_at(self) -> int:
        """The time before which no periodic checkpoint may start."""
        if self._last_completion is None:
            return 0
        # Computed on each call: the pause may have changed since the completion (FLIP-571).
        return self._last_completion + self._configuration.min_pause_ms

    def start(self, now: int) -> bool:
        """Starts ticking; returns whether a tick is now scheduled. The first delay lies in [pause, interval]."""
        self.running = True
        self._base, self._ticked = now, False
        interval = self.interval_ms
        if interval is None:
            return False
        pause = self._configuration.min_pause_ms
        if self._first_delay_ms is None:
            delay = interval
        else:
            delay = min(max(self._first_delay_ms, pause), interval)
        # Only the first deployment delays its first checkpoint; a restarted job takes one as soon as the pause allows.
        self._first_delay_ms = pause
        self._schedule(max(now + delay, self.pause_ends_at))
        return True

    def stop(self) -> None:
        self.running = False
        self._unschedule()

    def is_current(self, generation: int) -> bool:
        return self.running and self.next_at is not None and generation == self.generation

    def tick(self, now: int) -> None:
        """The scheduled tick fired: schedules the next one an interval after the scheduled time."""
        interval = self.interval_ms
        assert self.next_at is not None
        assert interval is not None
        # Based on the schedule and not on now: a late timer must not shift the schedule.
        self._base, self._ticked = self.next_at, True
        # If several ticks were missed, only one is made up for.
        self._schedule(max(now, self.next_at + interval))

    def postpone_to_pause_end(self) -> None:
        """The tick fell into the minimum pause: the schedule restarts at the end of the pause."""
        self._schedule(self.pause_ends_at)

    def completed(self, now: int) -> None:
        """A checkpoint or savepoint completed: the minimum pause starts now."""
        self._last_completion = now

    def configure(self, configuration: CheckpointConfiguration, now: int) -> bool:
        """Applies new settings; returns whether the schedule changed."""
        self._configuration, previous = configuration.effective(), self._configuration
        if (previous.interval_ms, previous.min_pause_ms, previous.interval_during_backlog_ms) == (
            self._configuration.interval_ms,
            self._configuration.min_pause_ms,
            self._configuration.interval_during_backlog_ms,
        ):
            return False
        return self._rephase(now)

    def set_backlog(self, backlog: bool, now: int) -> bool:
        """Sources started or stopped processing a backlog; returns whether the schedule changed."""
        if backlog == self._backlog:
            return False
        self._backlog = backlog
        return self._rephase(now)

    def _rephase(self, now: int) -> bool:
        if not self.running:
            return False
        interval = self.interval_ms
        before = self.next_at
        if interval is None:
            self._unschedule()
            return before is not None
        due = self._base + interval
        if before is not None and not self._ticked:
            due = min(before, due)  # the first delay may be anything up to the interval
        due = max(now, due, self.pause_ends_at)
        if due == before:
            return False
        self._schedule(due)
        return True

    def _schedule(self, at: int) -> None:
        self.generation += 1
        self.next_at = at

    def _unschedule(self) -> None:
        self.generation += 1
        self.next_at = None
