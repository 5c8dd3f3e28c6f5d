"""Pacing by an injected clock."""

from __future__ import annotations

from ckpt_runtime.connectors.splits import Pacer
from tests.unit.runtime.connectors.harness import Clock


def test_source_without_a_rate_has_no_limit() -> None:
    pacer = Pacer(0, Clock())
    pacer.spend(1 << 40)
    assert pacer.allowance() > 1 << 40


def test_rows_are_earned_as_time_passes_and_at_most_a_second_is_saved() -> None:
    clock = Clock()
    pacer = Pacer(100, clock)
    assert pacer.allowance() == 0
    clock.ms += 250
    assert pacer.allowance() == 25
    pacer.spend(20)
    assert pacer.allowance() == 5
    clock.ms += 3_600_000
    assert pacer.allowance() == 100


def test_a_slow_rate_says_how_long_to_wait() -> None:
    clock = Clock()
    pacer = Pacer(2, clock)
    assert pacer.idle_ms() == 501
    clock.ms += 501
    assert pacer.allowance() == 1
    pacer.spend(1)
    assert 400 < pacer.idle_ms() <= 501
