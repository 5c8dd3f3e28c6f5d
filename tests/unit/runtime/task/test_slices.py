"""A subtask works on a buffer slice by slice: what may happen between two of them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from ckpt_runtime.operators.slice_size import FIRST_ROWS
from ckpt_runtime.task.output import CurrentBuffer
from tests.unit.runtime.task.conftest import Bench, TaskKit


def sizes(bench: Bench) -> list[int]:
    return [len(values) for _, values in bench.called("batch")]


def test_fast_operators_soon_take_whole_buffers(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    for _ in range(4):
        bench.put(0, kit.rows(*range(2_000))).run()
    assert sizes(bench)[0] < 2_000
    assert sizes(bench)[-2:] == [2_000, 2_000]
    assert sum(sizes(bench)) == 8_000


def test_slow_rows_are_taken_about_five_milliseconds_at_a_time_and_slower_ones_alone(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    bench.row_ms = 0.5
    bench.put(0, kit.rows(*range(1_000))).run()
    assert set(sizes(bench)[2:-1]) == {10}
    assert [value for _, values in bench.called("batch") for value in values] == list(range(1_000))
    bench = kit.Bench().open()
    bench.row_ms = 60
    bench.put(0, kit.rows(*range(300))).run()
    assert set(sizes(bench)[2:]) == {1}


def test_a_buffer_is_counted_and_gives_credit_back_once(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    granted: list[int] = []
    bench.gate.channels[0].on_credit(granted.append)
    bench.row_ms = 1
    bench.put(0, kit.rows(*range(300)))
    bench.subtask.step()
    assert (bench.subtask.metrics.rows_in, granted) == (300, [])
    bench.run()
    assert (bench.subtask.metrics.rows_in, granted) == (300, [1])


def test_mails_and_announcements_come_between_slices(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    bench.row_ms = 1
    bench.put(0, kit.rows(*range(300)))
    bench.subtask.step()
    slices = len(sizes(bench))
    seen: list[int] = []
    bench.mail(lambda: seen.append(len(sizes(bench)))).put(0, kit.unaligned(1))
    bench.subtask.step()
    bench.subtask.step()
    assert seen == [slices]
    assert len(sizes(bench)) == slices
    assert bench.host.snapshot_ids == [1]


def test_next_slice_waits_for_output_room(kit: TaskKit) -> None:
    bench = kit.Bench(capacity=1).open()
    bench.row_ms = 1
    bench.put(0, kit.rows(*range(300))).run()
    assert len(sizes(bench)) == 1
    assert not bench.subtask.has_work
    bench.out.capacity = None
    assert bench.subtask.has_work
    bench.run()
    assert sum(sizes(bench)) == 300


def test_channel_in_order_is_read_by_whole_buffers(kit: TaskKit) -> None:
    bench = kit.Bench(inputs=[(0, False)]).open()
    bench.row_ms = 50
    bench.put(0, kit.rows(*range(400)), kit.rows(*range(300))).run()
    assert sizes(bench) == [400, 300]


def test_the_rest_is_what_has_not_been_processed(kit: TaskKit) -> None:
    clock = [0.0]
    seen: list[Any] = []

    def process(batch: Any, edge: int) -> None:
        seen.append((edge, batch.column(0).to_pylist()))
        clock[0] += 5 * batch.num_rows

    work = CurrentBuffer(lambda: clock[0])
    assert work.is_empty
    assert work.rest is None
    work.put(kit.rows(*range(258)), 3, None)
    assert work.rest is not None
    assert work.rest.num_rows == 258
    assert not work.process(process)
    assert work.rest.column(0).to_pylist() == list(range(FIRST_ROWS, 258))
    while not work.process(process):
        pass
    assert work.is_empty
    assert work.rest is None
    assert [value for _, values in seen for value in values] == list(range(258))
    assert {edge for edge, _ in seen} == {3}


def test_an_operator_that_fails_leaves_its_slice_unprocessed(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    bench.head.raises_in.add("batch")
    bench.put(0, kit.rows(1))
    with pytest.raises(RuntimeError, match="batch of op0"):
        bench.run()
    bench.subtask.fail(RuntimeError("x"))
    assert bench.host.states == ["FAILED"]


def test_a_slice_ends_where_the_operator_allows_it(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    bench.head.together = lambda batch: (batch.slice(0), [100, 101, 250, 300])
    bench.row_ms = 1
    bench.put(0, kit.rows(*range(300))).run()
    ends = list(accumulate(sizes(bench)))
    assert ends[0] == 100
    assert ends[-1] == 300
    assert set(ends) <= {100, 101, 250, 300}
