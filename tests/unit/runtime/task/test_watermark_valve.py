"""Event time of a subtask is the least of its inputs', and never goes back; of batches, it is that of all subtasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK, UNNUMBERED
from ckpt_runtime.task.watermark_valve import InputTime, WatermarkValve


def test_watermark_is_the_least_of_all_channels_and_never_decreases() -> None:
    valve = WatermarkValve([0, 0])
    assert valve.advance(0, 10) == []
    assert valve.advance(0, 20) == []
    assert valve.advance(1, 5) == [5]
    assert valve.advance(1, 30) == [20]
    valve = WatermarkValve([0])
    assert valve.advance(0, 10) == [10]
    assert valve.advance(0, 10) == []
    assert valve.advance(0, 3) == []
    assert valve.advance(0, 11) == [11]


@pytest.mark.parametrize(
    ("gates", "advances", "expected"),
    [
        ([0], [(0, 7), (0, MAX_WATERMARK)], [7, MAX_WATERMARK]),
        # Two subtasks of one stream: its event time is that of the one that has come furthest.
        ([0, 0], [(0, 9), (1, 5), (0, MAX_WATERMARK), (1, MAX_WATERMARK)], [5, 9, MAX_WATERMARK]),
        # One of them had no rows.
        ([0, 0], [(1, MAX_WATERMARK), (0, 9), (0, MAX_WATERMARK)], [9, MAX_WATERMARK]),
        ([0, 0], [(0, 9), (0, MAX_WATERMARK), (1, MAX_WATERMARK)], [9, MAX_WATERMARK]),
        # Two streams: the one that lags behind counts.
        ([0, 1], [(0, 9), (1, 5), (1, MAX_WATERMARK), (0, MAX_WATERMARK)], [5, 9, MAX_WATERMARK]),
        ([0, 1], [(0, 9), (1, 5), (0, MAX_WATERMARK), (1, MAX_WATERMARK)], [5, MAX_WATERMARK]),
        ([0, 1], [(0, 9), (0, MAX_WATERMARK), (1, MAX_WATERMARK)], [MAX_WATERMARK]),
        ([0, 0, 1], [(0, 9), (1, 5), (2, 7), *((n, MAX_WATERMARK) for n in range(3))], [5, 7, MAX_WATERMARK]),
    ],
)
def test_end_of_all_channels_follows_the_last_watermark_of_the_data(
    gates: list[int], advances: list[tuple[int, int]], expected: list[int]
) -> None:
    valve = WatermarkValve(gates)
    assert [moved for advance in advances for moved in valve.advance(*advance)] == expected


@pytest.mark.parametrize("by_gate", [False, True])
@pytest.mark.parametrize(
    ("gates", "advances", "expected"),
    [
        # A stream without a watermark holds nothing back, and neither does one that lags behind.
        ([0, 1], [(1, 5), (0, 9), (1, 7), (1, 11)], [5, 9, 11]),
        ([0, 1], [(0, 9), (1, 5), (0, MAX_WATERMARK), (1, 7), (1, MAX_WATERMARK)], [9, MAX_WATERMARK]),
    ],
)
def test_greatest_watermark_of_all_streams_counts(
    gates: list[int], advances: list[tuple[int, int]], expected: list[int], by_gate: bool
) -> None:
    valve = WatermarkValve(gates, ended_hold=True, by_gate=by_gate, greatest=True)
    assert [moved for advance in advances for moved in valve.advance(*advance)] == expected


def test_subtasks_of_one_stream_are_waited_for_where_the_greatest_watermark_counts() -> None:
    valve = WatermarkValve([0, 0, 1], greatest=True)
    assert valve.advance(0, 9) == []
    assert valve.advance(2, 3) == [3]
    assert valve.advance(1, 5) == [5]


@pytest.mark.row("ends.3")
@pytest.mark.parametrize(
    ("gates", "advances", "expected"),
    [
        # A channel that never had a row, and one whose rows have ended for now.
        ([0, 0], [(0, 9), (1, IDLE_WATERMARK), (0, 11)], [9, 11]),
        ([0, 0], [(0, 9), (1, 5), (1, IDLE_WATERMARK), (0, 11)], [5, 9, 11]),
        # It holds event time again with its next watermark, and event time does not go back.
        ([0, 0], [(0, 9), (1, IDLE_WATERMARK), (1, 3), (0, 20), (1, 12)], [9, 12]),
        ([0, 0], [(0, 9), (1, 5), (1, IDLE_WATERMARK), (1, 5), (0, 20), (1, 10)], [5, 9, 10]),
        # All are idle: consumers hear of it once, and again when one is active.
        ([0], [(0, IDLE_WATERMARK), (0, IDLE_WATERMARK), (0, 4)], [IDLE_WATERMARK, 4]),
        ([0], [(0, 4), (0, IDLE_WATERMARK), (0, 4), (0, 6)], [4, IDLE_WATERMARK, 4, 6]),
        ([0, 0], [(0, 9), (1, 5), (1, IDLE_WATERMARK), (0, IDLE_WATERMARK)], [5, 9, IDLE_WATERMARK]),
        ([0, 1], [(0, 9), (1, 5), (1, IDLE_WATERMARK), (0, IDLE_WATERMARK)], [5, 9, IDLE_WATERMARK]),
        # The end of one channel is not the end of those that are idle.
        ([0, 0], [(0, 9), (1, IDLE_WATERMARK), (0, MAX_WATERMARK)], [9, IDLE_WATERMARK]),
        (
            [0, 0],
            [(0, 9), (1, IDLE_WATERMARK), (0, MAX_WATERMARK), (1, 12), (1, MAX_WATERMARK)],
            [9, IDLE_WATERMARK, 12, MAX_WATERMARK],
        ),
        (
            [0, 0],
            [(0, 9), (1, 5), (1, IDLE_WATERMARK), (0, MAX_WATERMARK), (1, MAX_WATERMARK)],
            [5, 9, IDLE_WATERMARK, MAX_WATERMARK],
        ),
    ],
)
def test_event_time_does_not_wait_for_idle_channels(
    gates: list[int], advances: list[tuple[int, int]], expected: list[int]
) -> None:
    valve = WatermarkValve(gates)
    assert [moved for advance in advances for moved in valve.advance(*advance)] == expected


@pytest.mark.parametrize(
    ("gates", "advances", "expected"),
    [
        ([0, 1], [(0, 9), (1, 5), (1, MAX_WATERMARK), (0, 20), (0, MAX_WATERMARK)], [5, MAX_WATERMARK]),
        # A gate without a watermark does not count once it has ended.
        ([0, 1], [(1, MAX_WATERMARK), (0, 20), (0, MAX_WATERMARK)], [20, MAX_WATERMARK]),
        ([0, 1], [(0, 20), (0, MAX_WATERMARK), (1, MAX_WATERMARK)], [20, MAX_WATERMARK]),
        # One of two channels of a gate has ended: the other one tells the time.
        ([0, 0, 1], [(0, 9), (1, 5), (2, 40), (1, MAX_WATERMARK), (0, 20), (0, MAX_WATERMARK), (2, 50)], [5, 9, 20]),
    ],
)
def test_event_time_waits_for_gates_that_have_ended_if_it_does_not_end_with_the_data(
    gates: list[int], advances: list[tuple[int, int]], expected: list[int]
) -> None:
    valve = WatermarkValve(gates, ended_hold=True)
    assert [moved for advance in advances for moved in valve.advance(*advance)] == expected


@pytest.mark.parametrize(
    ("gates", "advances", "expected"),
    [
        # Subtasks of one stream, of which one has had no row, or old ones only.
        ([0, 0], [(0, 9), (1, 5), (1, 12), (0, MAX_WATERMARK)], [9, 12]),
        ([0, 0], [(0, 9), (0, MAX_WATERMARK), (1, 5), (1, MAX_WATERMARK)], [9, MAX_WATERMARK]),
        ([0, 0], [(1, 5), (0, 9), (0, IDLE_WATERMARK), (1, 7), (1, 10)], [5, 9, 10]),
        # Two streams: the one that lags behind counts.
        ([0, 0, 1, 1], [(0, 9), (2, 3), (1, 20), (3, 15), (2, 40)], [3, 15, 20]),
        ([0, 0, 1, 1], [(0, 9), (2, 3), *((n, MAX_WATERMARK) for n in (2, 3)), (1, 20)], [3]),
    ],
)
def test_event_time_of_batches_is_that_of_the_subtask_that_has_come_furthest(
    gates: list[int], advances: list[tuple[int, int]], expected: list[int]
) -> None:
    valve = WatermarkValve(gates, by_gate=True, ended_hold=True)
    assert [moved for advance in advances for moved in valve.advance(*advance)] == expected


class TestSourcesInStep:
    """What channels send, and what it leads to: (watermark, None), or (the coming one, batch that has ended)."""

    @staticmethod
    def moved(time: InputTime, channel: int, *sent: tuple[int, int | None]) -> list[tuple[int, int | None]]:
        found = [each for watermark in sent for each in time.advance(channel, Watermark(*watermark))]
        return [(each.timestamp_ms, each.batch) for each in found]

    def test_times_count_when_all_have_ended_their_batch(self) -> None:
        """The first one ends batch 2 while the second one still sends rows of it, which are late by earlier times."""
        time = InputTime([0, 1], in_step=True)
        assert self.moved(time, 0, (30, 1)) == []
        assert self.moved(time, 1, (90, 1)) == [(30, 1)]
        assert self.moved(time, 0, (30, None), (70, 2)) == self.moved(time, 1, (90, None)) == []
        assert self.moved(time, 1, (95, 2)) == [(30, None), (70, 2)]
        assert time.current == 30

    def test_one_that_is_a_batch_ahead_after_a_restore_waits_for_the_others(self) -> None:
        time = InputTime([0, 1], in_step=True)
        assert self.moved(time, 0, (70, None), (80, UNNUMBERED), (80, 3)) == []
        assert self.moved(time, 1, (20, None), (90, UNNUMBERED), (90, 2)) == [(0, 2)]
        assert self.moved(time, 1, (90, None), (95, 3)) == [(70, None), (80, 3)]
        assert self.moved(time, 0, (80, None), (MAX_WATERMARK, None)) == [(80, None), (90, None), (95, 3)]

    def test_subtasks_of_one_source_have_the_time_of_all_rows_of_a_batch(self) -> None:
        time = InputTime([0, 0], in_step=True)
        assert self.moved(time, 0, (0, 1)) == []
        assert self.moved(time, 1, (50, 1)) == [(50, 1)]
        assert self.moved(time, 1, (50, None), (60, 2)) == []
        assert self.moved(time, 0, (0, None), (40, 2)) == [(50, None), (60, 2)]

    def test_one_that_ends_earlier_holds_event_time_and_no_batch(self) -> None:
        time = InputTime([0, 1], in_step=True, ended_hold=True)
        assert self.moved(time, 0, (30, 1), (30, None), (30, 2)) == []
        assert self.moved(time, 1, (50, 1), (50, None), (90, 2)) == [(30, 1), (30, None), (30, 2)]
        assert self.moved(time, 0, (MAX_WATERMARK, None)) == []
        assert self.moved(time, 1, (90, None), (95, 3)) == [(30, 3)]


@given(st.integers(1, 4).flatmap(lambda n: st.tuples(
    st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(-50, 50)), max_size=60)
)))  # fmt: skip
def test_the_combined_watermark_is_the_least_and_only_rises(given_: tuple[int, list[tuple[int, int]]]) -> None:
    channels, advances = given_
    valve = WatermarkValve([0] * channels)
    greatest: dict[int, int] = {}
    current: int | None = None
    for channel, timestamp in advances:
        greatest[channel] = max(greatest.get(channel, timestamp), timestamp)
        expected = min(greatest.values()) if len(greatest) == channels else None
        moved = valve.advance(channel, timestamp)
        assert moved == ([expected] if expected != current else [])
        current = expected
