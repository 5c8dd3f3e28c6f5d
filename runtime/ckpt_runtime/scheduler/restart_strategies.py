"""Whether and when a failed job comes back. Pure: the clock and the jitter come in as arguments.

Flink's strategies with its options' defaults (FLIP-364 for the exponential delay). Times are monotonic milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

_MAX_FAILURES = 10_000
"""Whose moments are kept. A strategy that allows more within its interval allows any number."""


@dataclass(slots=True)
class RestartHistory:
    """What a job's failures so far mean for the next one: the state of its strategy, and of the one that replaces it.

    ``attempts`` are restarts that count, ``failures`` the moments of the latest failures, ``restart_at`` the moment of
    the last restart that was planned.
    """

    attempts: int = 0
    failures: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_FAILURES))
    restart_at: int | None = None


class RestartStrategy(Protocol):
    """Limits without a state of their own, so that one can take the place of another while a job lives (FLIP-530)."""

    def delay(self, history: RestartHistory, now: int) -> int | None:
        """Asked once for each failure that is to be survived, which ``history`` has already.

        Returns milliseconds from ``now`` until the restart, or None when the job must fail for good.
        """
        ...


class Restarts:
    """Asks the job's strategy and keeps its history. ``strategy`` may be replaced at any time."""

    def __init__(self, strategy: RestartStrategy) -> None:
        self.strategy = strategy
        self._history = RestartHistory()

    def on_failure(self, now: int) -> int | None:
        """Milliseconds from ``now`` until the restart, or None when the job must fail for good."""
        self._history.failures.append(now)
        delay = self.strategy.delay(self._history, now)
        if delay is not None:
            self._history.restart_at = now + delay
        return delay


@dataclass(frozen=True, slots=True)
class BackoffSettings:
    """Pauses that grow from one failure in a row to the next, to a limit."""

    initial_ms: int
    max_ms: int
    multiplier: float

    def pause_ms(self, failures: int) -> int:
        """After so many failures in a row; none after none."""
        if failures <= 0:
            return 0
        # The exponent is bounded: 1.5 to the power of some thousands is no float any more.
        return min(self.max_ms, round(self.initial_ms * self.multiplier ** min(failures - 1, 100)))


FAILED_CHECKPOINTS = BackoffSettings(1_000, 60_000, 1.5)
"""Minimum pauses before a job restarts whose checkpoints fail, until one completes: Flink's exponential delay."""


@dataclass(frozen=True, slots=True)
class NoRestart:
    """``none``: the first failure is the last."""

    def delay(self, history: RestartHistory, now: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class FixedDelay:
    """``fixed-delay``: the same pause each time, a limited number of times over the job's whole life."""

    attempts: int = 1
    delay_ms: int = 1_000

    def delay(self, history: RestartHistory, now: int) -> int | None:
        if history.attempts >= self.attempts:
            return None
        history.attempts += 1
        return self.delay_ms


@dataclass(frozen=True, slots=True)
class FailureRate:
    """``failure-rate``: at most so many failures within any interval."""

    max_failures_per_interval: int = 1
    interval_ms: int = 60_000
    delay_ms: int = 1_000

    def delay(self, history: RestartHistory, now: int) -> int | None:
        # Counted from all failures, whichever strategy they happened under.
        recent = sum(now - failure <= self.interval_ms for failure in history.failures)
        if recent > self.max_failures_per_interval:
            return None
        history.attempts += 1
        return self.delay_ms


@dataclass(frozen=True, slots=True)
class ExponentialDelay:
    """``exponential-delay``: each pause is longer than the one before, until the job has run well for a while.

    Failures before the planned restart belong to the one that caused it: they neither count nor lengthen the pause.
    ``jitter`` yields numbers in [-1, 1]; a pause is changed by that share of ``jitter_factor``.
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
            # Several tasks fail for one cause: those that come while the restart is pending are no failures of their
            # own.
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
