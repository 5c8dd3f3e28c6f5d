"""Restart strategies with Flink's defaults, by a clock passed in, and one that takes the place of another."""

from __future__ import annotations

import pytest

from ckpt_runtime.scheduler.restart_strategies import (
    BackoffSettings,
    ExponentialDelay,
    FailureRate,
    FixedDelay,
    NoRestart,
    Restarts,
)


def test_none():
    assert Restarts(NoRestart()).on_failure(0) is None


def test_fixed_delay():
    restarts = Restarts(FixedDelay(attempts=2, delay_ms=50))
    assert [restarts.on_failure(now) for now in (0, 1, 10**9)] == [50, 50, None]
    assert Restarts(FixedDelay()).on_failure(0) == 1_000


def test_failure_rate():
    restarts = Restarts(FailureRate(max_failures_per_interval=2, interval_ms=100, delay_ms=7))
    assert [restarts.on_failure(now) for now in (0, 50, 101)] == [7, 7, 7]
    assert restarts.on_failure(150) is None


def test_a_growing_pause():
    backoff = BackoffSettings(10, 50, 2.0)
    assert [backoff.pause_ms(failures) for failures in (0, 1, 2, 3, 4, 5_000)] == [0, 10, 20, 40, 50, 50]


class TestExponentialDelay:
    def test_defaults(self):
        restarts = Restarts(ExponentialDelay())
        delays, now = [], 0
        for _ in range(12):
            delays.append(restarts.on_failure(now))
            now += delays[-1]
        assert delays[:4] == [1_000, 1_500, 2_250, 3_375]
        assert delays[-1] == 60_000

    def test_failures_before_the_restart_belong_together(self):
        restarts = Restarts(ExponentialDelay(1_000, max_attempts=1))
        assert restarts.on_failure(0) == 1_000
        assert restarts.on_failure(400) == 600
        assert restarts.on_failure(1_000) is None

    def test_reset_after_a_quiet_time(self):
        restarts = Restarts(ExponentialDelay(1_000, reset_threshold_ms=5_000, max_attempts=2))
        assert restarts.on_failure(0) == 1_000
        assert restarts.on_failure(1_000) == 1_500
        assert restarts.on_failure(2_500 + 5_000) == 1_000

    def test_backoff_is_not_reset_before_the_threshold(self):
        restarts = Restarts(ExponentialDelay(1_000, reset_threshold_ms=5_000))
        restarts.on_failure(0)
        assert restarts.on_failure(1_000 + 4_999) == 1_500

    def test_jitter_comes_from_outside_and_keeps_the_limit(self):
        assert Restarts(ExponentialDelay(1_000, jitter_factor=0.1, jitter=lambda: 1.0)).on_failure(0) == 1_100
        assert Restarts(ExponentialDelay(1_000, jitter_factor=0.1, jitter=lambda: -1.0)).on_failure(0) == 900
        assert Restarts(ExponentialDelay(1_000, max_backoff_ms=1_000, jitter=lambda: 1.0)).on_failure(0) == 1_000


@pytest.mark.row("530.6")
class TestReplacement:
    """The new strategy counts what has happened so far."""

    def test_attempts_that_are_used_up_stay_used_up(self):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=50))
        assert [restarts.on_failure(now) for now in (0, 100)] == [50, 50]
        restarts.strategy = FixedDelay(attempts=3, delay_ms=7)
        assert [restarts.on_failure(now) for now in (200, 300)] == [7, None]

    def test_restarts_of_a_fixed_delay_lengthen_an_exponential_one(self):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=50))
        assert [restarts.on_failure(now) for now in (0, 100)] == [50, 50]
        restarts.strategy = ExponentialDelay(1_000)
        assert restarts.on_failure(200) == 2_250

    def test_moments_of_earlier_failures_count_for_a_rate(self):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=50))
        assert [restarts.on_failure(now) for now in (0, 100)] == [50, 50]
        restarts.strategy = FailureRate(max_failures_per_interval=2, interval_ms=1_000)
        assert restarts.on_failure(200) is None

    def test_the_planned_restart_stays_where_it_is(self):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=900))
        assert restarts.on_failure(0) == 900
        restarts.strategy = ExponentialDelay(10)
        assert restarts.on_failure(400) == 500

    def test_refused_restart_does_not_count(self):
        restarts = Restarts(NoRestart())
        assert restarts.on_failure(0) is None
        restarts.strategy = FixedDelay(attempts=1, delay_ms=5)
        assert restarts.on_failure(10) == 5
