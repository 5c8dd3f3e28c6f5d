"""Buffers get the size at which all that may be in flight takes the target time; small changes are kept quiet."""

from __future__ import annotations

import pytest

from ckpt_runtime.network.elements import DesiredBufferSize
from ckpt_runtime.task.input_debloating import MIN_BUFFER_BYTES, BufferDebloater


def debloater(
    *, target_ms: int = 1_000, samples: int = 1, threshold: int = 25, buffers: int = 10, max_bytes: int = 1 << 20
) -> BufferDebloater:
    return BufferDebloater(
        target_ms=target_ms,
        period_ms=200,
        samples=samples,
        threshold_percentages=threshold,
        buffers=buffers,
        max_bytes=max_bytes,
    )


def test_all_buffers_in_flight_together_hold_what_the_target_time_takes() -> None:
    """200 kB in 200 ms, ten buffers, one second: 100 kB each."""
    assert debloater().measured(200_000, 200) == 100_000
    assert debloater(target_ms=500).measured(200_000, 200) == 50_000
    assert debloater(buffers=40).measured(200_000, 200) == 25_000


def test_one_sample_without_smoothing_shrinks_buffers_at_once_and_growth_doubles() -> None:
    known = debloater()
    assert known.measured(2_000, 200) == 1_000
    assert [known.measured(200_000, 200) for _ in range(9)] == [
        2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000, None, None,
    ]  # fmt: skip


def test_consumer_without_throughput_gets_the_smallest_buffers() -> None:
    assert debloater().measured(0, 200) == MIN_BUFFER_BYTES


def test_a_fast_consumer_keeps_the_largest_buffers() -> None:
    known = debloater()
    assert known.measured(1 << 30, 200) is None
    assert known.size == 1 << 20


def test_configured_buffers_below_the_minimum_stay_as_they_are() -> None:
    known = debloater(max_bytes=100)
    assert known.measured(0, 200) is None
    assert known.size == 100


def test_samples_smooth_a_burst() -> None:
    known = debloater(samples=19, threshold=0)
    assert known.measured(0, 200) == round((1 << 20) - 0.1 * ((1 << 20) - MIN_BUFFER_BYTES))


def test_a_long_sample_counts_as_all_its_periods() -> None:
    one, many = debloater(samples=19, threshold=0), debloater(samples=19, threshold=0)
    one.measured(3_000, 3_000)
    for _ in range(15):
        many.measured(200, 200)
    assert one.size == many.size


def test_changes_below_the_threshold_are_kept_quiet_until_they_add_up() -> None:
    known = debloater()
    assert known.measured(200_000, 200) == 100_000
    assert known.measured(160_000, 200) is None
    assert known.measured(151_000, 200) is None
    assert known.measured(150_000, 200) == 75_000
    assert known.measured(187_400, 200) is None
    assert known.measured(187_600, 200) == 93_800


def test_bounds_of_the_buffer_size_are_reached_with_any_threshold() -> None:
    known = debloater(threshold=100, max_bytes=1_000)
    assert known.measured(2_000 * 9 // 10, 200) is None
    assert known.measured(0, 200) == MIN_BUFFER_BYTES
    assert known.measured(2_000_000, 200) == 2 * MIN_BUFFER_BYTES
    assert known.measured(2_000_000, 200) == 1_000


@pytest.mark.parametrize("active_ms", [0, -0.5])
def test_measurement_without_elapsed_time_is_ignored(active_ms: float) -> None:
    known = debloater()
    assert known.measured(0, active_ms) is None
    assert known.size == 1 << 20


def test_debloater_refuses_fewer_than_one_buffer() -> None:
    with pytest.raises(ValueError, match="at least 1, was 0"):
        debloater(buffers=0)


class TestBufferSizeWish:
    def test_a_listener_receives_every_request(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.listen(heard.append)
        assert heard == []
        desired.announce(512)
        desired.announce(1_024)
        assert heard == [512, 1_024]

    def test_a_late_listener_hears_the_latest(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.announce(512)
        desired.announce(1_024)
        desired.listen(heard.append)
        assert heard == [1_024]

    def test_a_request_that_arrives_during_the_notification_of_an_older_one_wins(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.announce(512)

        def slow(size: int) -> None:
            if size == 512:
                desired.announce(1_024)
            heard.append(size)

        desired.listen(slow)
        assert heard[-1] == 1_024
