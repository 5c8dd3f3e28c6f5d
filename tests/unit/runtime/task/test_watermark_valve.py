"""Event time of a subtask is the least of its inputs', and never goes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.task.watermark_valve import WatermarkValve


def test_nothing_is_known_until_every_channel_has_spoken() -> None:
    valve = WatermarkValve(2)
    assert valve.advance(0, 10) is None
    assert valve.advance(0, 20) is None
    assert valve.advance(1, 5) == 5
    assert valve.advance(1, 30) == 20


def test_a_channel_that_goes_back_is_ignored() -> None:
    valve = WatermarkValve(1)
    assert valve.advance(0, 10) == 10
    assert valve.advance(0, 10) is None
    assert valve.advance(0, 3) is None
    assert valve.advance(0, 11) == 11


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(-50, 50)), max_size=60)
)))  # fmt: skip
def test_the_combined_watermark_is_the_least_and_only_rises(given_: tuple[int, list[tuple[int, int]]]) -> None:
    channels, advances = given_
    valve = WatermarkValve(channels)
    greatest: dict[int, int] = {}
    current: int | None = None
    for channel, timestamp in advances:
        greatest[channel] = max(greatest.get(channel, timestamp), timestamp)
        expected = min(greatest.values()) if len(greatest) == channels else None
        moved = valve.advance(channel, timestamp)
        assert moved == (expected if expected != current else None)
        current = expected
