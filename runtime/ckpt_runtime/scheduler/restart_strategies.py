"""Decides whether and when a failed job restarts. Pure: time and jitter are passed as arguments.

Flink's strategies with its options' defaults (FLIP-364 for the exponential delay). Times are monotonic milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_MAX_FAILURES = 10_000
"""Number of failures whose times are kept. A strategy that allows more per interval allows any number."""


@dataclass(slots=True)
class RestartHistory:
    """The history of a job's failures: the state of its strategy, which a replacing strategy takes over.

    ``attempts`` is the number of counted restarts, ``failures`` are the times of the latest failures, ``restart_at`` is
    the time of the last planned restart.
    """

    attempts: int = 0
    failures: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_FAILURES))
    restart_at: int | None = None


class RestartStrategy(Protocol):
    """A stateless set of limits, so that one strategy can replace another while a job runs (FLIP-530)."""

    def delay(self, history: RestartHistory, now: int) -> int | None:
        """Milliseconds from ``now`` to the restart after a failure that ``history`` contains, None if the job must
        fail."""
        ...


class Restarts:
    """Asks the job's strategy and keeps its history. ``strategy`` may be replaced at any time."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self.strategy = strategy
        self._history = RestartHistory()

    def on_failure(self, now: int) -> int | None:
        """Returns milliseconds from ``now`` until the restart, or None if the job must fail for good."""
        self._history.failures.append(now)
        delay = self.strategy.delay(self._history, now)
        if delay is not None:
            self._history.restart_at = now + delay
        return delay


@dataclass(frozen=True, slots=True)
class BackoffSettings:
    """Pauses that grow with each consecutive failure, up to a limit."""

    initial_ms: int
    max_ms: int
    multiplier: float

    def pause_ms(self, failures: int) -> int:
        """The pause after this number of consecutive failures; 0 without failures."""
        if failures <= 0:
            return 0
        # The exponent is limited: 1.5 to the power of several thousand overflows a float.
        return min(self.max_ms, round(self.initial_ms * self.multiplier ** min(failures - 1, 100)))


FAILED_CHECKPOINTS = BackoffSettings(1_000, 60_000, 1.5)
"""Minimum pauses before restarts caused by failed checkpoints, until one completes: Flink's exponential delay."""


@dataclass(frozen=True, slots=True)
class NoRestart:
    """``none``: the first failure ends the job."""

    def delay(self, history: RestartHistory, now: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """``fixed-delay``: the same pause each time, for a limited number of restarts over the job's whole life."""

    attempts: int = 1
    delay_ms: int = 1_000

    def delay(self, history: RestartHistory, now: int) -> int | None:
        if history.attempts >= self.attempts:
            return None
        history.attempts += 1
        return self.delay_ms


@dataclass(frozen=True, slots=True)
class FailureRate:
    """``failure-rate``: limits the number of failures within any interval."""

    max_failures_per_interval: int = 1
    interval_ms: int = 60_000
    delay_ms: int = 1_000

    def delay(self, history: RestartHistory, now: int) -> int | None:
        # All failures count, including those under an earlier strategy.
        recent = sum(now - failure <= self.interval_ms for failure in history.failures)
        if recent > self.max_failures_per_interval:
            return None
        history.attempts += 1
        return self.delay_ms


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """``exponential-delay``: each pause is longer than the one before, until the job has run well for a while.

    Failures before the planned restart belong to the failure that caused it: they neither count nor extend the pause.
    ``jitter`` yields numbers in [-1, 1]; a pause is changed by this number times ``jitter_factor``.
    """

    initial_backoff_ms: int = 1_000
    max_backoff_ms: int = 60_000
    multiplier: float = 1.5
    reset_threshold_ms: int = 3_600_000
    jitter_factor: float = 0.1
    max_attempts: int | None = None
    jitter: Callable[[], float] | None = field(default=None, compare=False)

    def delay(self, history: RestartHistory, now: int) -> int | None:
        if history.restart_at is not None:
            # Several tasks may fail for one cause: failures while the restart is pending do not count separately.
            if now < history.restart_at:
                return history.restart_at - now
            if now >= history.restart_at + self.reset_threshold_ms:
                history.attempts = 0
        history.attempts += 1
        if self.max_attempts is not None and history.attempts > self.max_attempts:
            return None
        backoff = BackoffSettings(self.initial_backoff_ms, self.max_backoff_ms, self.multiplier).pause_ms(
            history.attempts
        )
        share = 0.0 if self.jitter is None else self.jitter() * self.jitter_factor
        return min(self.max_backoff_ms, max(0, round(backoff * (1 + share))))
