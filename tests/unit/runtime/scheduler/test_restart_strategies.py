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


def test_delay_and_number_of_restarts_are_those_of_the_strategy():
    assert Restarts(NoRestart()).on_failure(0) is None
    restarts = Restarts(FixedDelay(attempts=2, delay_ms=50))
    assert [restarts.on_failure(now) for now in (0, 1, 10**9)] == [50, 50, None]
    assert Restarts(FixedDelay()).on_failure(0) == 1_000
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

    def test_backoff_is_reset_after_the_threshold_and_not_before(self):
        restarts = Restarts(ExponentialDelay(1_000, reset_threshold_ms=5_000, max_attempts=2))
        assert restarts.on_failure(0) == 1_000
        assert restarts.on_failure(1_000) == 1_500
        assert restarts.on_failure(2_500 + 5_000) == 1_000
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

    @pytest.mark.parametrize(
        ("strategy", "delays"),
        [
            (FixedDelay(attempts=3, delay_ms=7), [7, None]),
            (ExponentialDelay(1_000), [2_250]),
            (FailureRate(max_failures_per_interval=2, interval_ms=1_000), [None]),
        ],
    )
    def test_failures_before_another_strategy_count_for_it(self, strategy, delays):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=50))
        assert [restarts.on_failure(now) for now in (0, 100)] == [50, 50]
        restarts.strategy = strategy
        assert [restarts.on_failure(200 + 100 * number) for number in range(len(delays))] == delays

    def test_planned_and_refused_restarts_do_not_count_for_another_strategy(self):
        restarts = Restarts(FixedDelay(attempts=5, delay_ms=900))
        assert restarts.on_failure(0) == 900
        restarts.strategy = ExponentialDelay(10)
        assert restarts.on_failure(400) == 500
        restarts = Restarts(NoRestart())
        assert restarts.on_failure(0) is None
        restarts.strategy = FixedDelay(attempts=1, delay_ms=5)
        assert restarts.on_failure(10) == 5
