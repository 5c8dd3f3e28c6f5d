"""Restart strategies with Flink's defaults, by a clock passed in."""

from __future__ import annotations

from ckpt_runtime.scheduler.restart_strategies import ExponentialDelay, FailureRate, FixedDelay, NoRestart


def test_none():
    assert NoRestart().on_failure(0) is None


def test_fixed_delay():
    strategy = FixedDelay(attempts=2, delay_ms=50)
    assert [strategy.on_failure(now) for now in (0, 1, 10**9)] == [50, 50, None]
    assert FixedDelay().on_failure(0) == 1_000


def test_failure_rate():
    strategy = FailureRate(max_failures_per_interval=2, interval_ms=100, delay_ms=7)
    assert [strategy.on_failure(now) for now in (0, 50, 101)] == [7, 7, 7]
    assert strategy.on_failure(150) is None


class TestExponentialDelay:
    def test_defaults(self):
        strategy = ExponentialDelay()
        delays, now = [], 0
        for _ in range(12):
            delays.append(strategy.on_failure(now))
            now += delays[-1]
        assert delays[:4] == [1_000, 1_500, 2_250, 3_375]
        assert delays[-1] == 60_000

    def test_failures_before_the_restart_belong_together(self):
        strategy = ExponentialDelay(1_000, max_attempts=1)
        assert strategy.on_failure(0) == 1_000
        assert strategy.on_failure(400) == 600
        assert strategy.on_failure(1_000) is None

    def test_reset_after_a_quiet_time(self):
        strategy = ExponentialDelay(1_000, reset_threshold_ms=5_000, max_attempts=2)
        assert strategy.on_failure(0) == 1_000
        assert strategy.on_failure(1_000) == 1_500
        assert strategy.on_failure(2_500 + 5_000) == 1_000

    def test_no_reset_before_it(self):
        strategy = ExponentialDelay(1_000, reset_threshold_ms=5_000)
        strategy.on_failure(0)
        assert strategy.on_failure(1_000 + 4_999) == 1_500

    def test_jitter_comes_from_outside_and_keeps_the_limit(self):
        assert ExponentialDelay(1_000, jitter_factor=0.1, jitter=lambda: 1.0).on_failure(0) == 1_100
        assert ExponentialDelay(1_000, jitter_factor=0.1, jitter=lambda: -1.0).on_failure(0) == 900
        assert ExponentialDelay(1_000, max_backoff_ms=1_000, jitter=lambda: 1.0).on_failure(0) == 1_000
