"""Whether and when a failed job comes back. Pure: the clock and the jitter come in as arguments.

Flink's strategies with its options' defaults (FLIP-364 for the exponential delay). Times are monotonic milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


class RestartStrategy(Protocol):
    """Asked once for each failure that is to be survived."""

    def on_failure(self, now: int) -> int | None:
        """Milliseconds from ``now`` until the restart, or None when the job must fail for good."""
        ...


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that grow from one failure in a row to the next, to a limit."""

    initial_ms: int
    max_ms: int
    multiplier: float

    def pause_ms(self, failures: int) -> int:
        """After so many failures in a row; none after none."""
        if failures <= 0:
            return 0
        return min(self.max_ms, round(self.initial_ms * self.multiplier ** min(failures - 1, 100)))


FAILED_CHECKPOINTS = Backoff(1_000, 60_000, 1.5)
"""Least pauses of a job that fails because its checkpoints do, until one completes: Flink's exponential delay."""


class NoRestart:
    """``none``: the first failure is the last."""

    def on_failure(self, now: int) -> int | None:
        return None


class FixedDelay:
    """``fixed-delay``: the same pause each time, a limited number of times over the job's whole life."""

    def __init__(self, attempts: int = 1, delay_ms: int = 1_000) -> None:
        self._remaining = attempts
        self._delay_ms = delay_ms

    def on_failure(self, now: int) -> int | None:
        if self._remaining <= 0:
            return None
        self._remaining -= 1
        return self._delay_ms


class FailureRate:
    """``failure-rate``: at most so many failures within any interval."""

    def __init__(self, max_failures_per_interval: int = 1, interval_ms: int = 60_000, delay_ms: int = 1_000) -> None:
        self._failures: deque[int] = deque(maxlen=max_failures_per_interval + 1)
        self._interval_ms = interval_ms
        self._delay_ms = delay_ms

    def on_failure(self, now: int) -> int | None:
        self._failures.append(now)
        is_full = len(self._failures) == self._failures.maxlen
        if is_full and now - self._failures[0] <= self._interval_ms:
            return None
        return self._delay_ms


class ExponentialDelay:
    """``exponential-delay``: each pause is longer than the one before, until the job has run well for a while.

    Failures before the planned restart belong to the one that caused it: they neither count nor lengthen the pause.
    ``jitter`` yields numbers in [-1, 1]; a pause is changed by that share of ``jitter_factor``.
    """

    def __init__(
        self,
        initial_backoff_ms: int = 1_000,
        max_backoff_ms: int = 60_000,
        multiplier: float = 1.5,
        reset_threshold_ms: int = 3_600_000,
        jitter_factor: float = 0.1,
        max_attempts: int | None = None,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self._initial = initial_backoff_ms
        self._max = max_backoff_ms
        self._multiplier = multiplier
        self._reset_threshold_ms = reset_threshold_ms
        self._jitter_factor = jitter_factor
        self._max_attempts = max_attempts
        self._jitter = jitter
        self._attempts = 0
        self._backoff = float(initial_backoff_ms)
        self._restart_at: int | None = None

    def on_failure(self, now: int) -> int | None:
        if self._restart_at is not None:
            if now < self._restart_at:
                return self._restart_at - now
            if now >= self._restart_at + self._reset_threshold_ms:
                self._attempts = 0
                self._backoff = float(self._initial)
        self._attempts += 1
        if self._max_attempts is not None and self._attempts > self._max_attempts:
            return None
        share = 0.0 if self._jitter is None else self._jitter() * self._jitter_factor
        delay = min(self._max, max(0, round(self._backoff * (1 + share))))
        self._backoff = min(float(self._max), self._backoff * self._multiplier)
        self._restart_at = now + delay
        return delay
