"""A subtask step by step: mails, sources, rows, timers, back-pressure, failure and cancellation."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.network.elements import EndOfData, EndOfPartition, EndOfRange, Watermark
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.operators.operator import MAX_WATERMARK, SourceStatus
from ckpt_runtime.task.watermark_valve import InputTime
from tests.unit.runtime.task.conftest import TaskKit


def test_rows_come_in_order_with_their_gate_and_are_counted(kit: TaskKit) -> None:
    bench = kit.Bench(channels=1).open()
    bench.put(0, kit.rows(1, 2), kit.rows(3)).run()
    assert bench.called("batch") == [(0, [1, 2]), (0, [3])]
    assert bench.out.elements == [[1, 2], [3]]
    assert bench.subtask.metrics.rows_in == 3
    assert bench.subtask.metrics.bytes_in == 24


def test_serialised_batches_are_read_with_their_own_schema(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    other = pa.record_batch({"m": pa.array([5], pa.int32()), "n": pa.array([6])})
    bench.put(0, kit.encoded(4), EncodedRows(other.schema, other.serialize()), kit.encoded(7)).run()
    assert bench.out.elements == [[4], [5], [7]]


def test_a_mail_comes_before_data(kit: TaskKit) -> None:
    bench = kit.Bench().open()
    seen: list[Any] = []
    bench.put(0, kit.rows(1)).mail(lambda: seen.append(list(bench.out.elements)))
    assert bench.subtask.has_work
    bench.run()
    assert seen == [[]]
    assert not bench.subtask.has_work


def test_subtask_whose_sources_are_in_step_reports_the_batches_that_all_have_ended(kit: TaskKit) -> None:
    bench = kit.Bench(channels=2).open()
    bench.subtask.event_time = InputTime([0, 1], in_step=True)
    bench.put(0, Watermark(30, batch=1)).put(1, Watermark(90, batch=1)).run()
    bench.put(0, Watermark(30), Watermark(70, batch=2)).put(1, Watermark(90), Watermark(95, batch=2)).run()
    assert (bench.called("watermark"), bench.called("coming")) == ([(30,)], [(30, 1), (70, 2)])
    assert [progress.event_time for progress in bench.host.progress] == [1, 2]


def test_end_of_a_range_passes_the_chain_between_its_rows_and_the_next_ones(kit: TaskKit) -> None:
    bench = kit.Bench(operators=2).open()
    bench.put(0, kit.rows(1), EndOfRange(), kit.rows(2)).run()
    calls = [call[1] for call in bench.calls if call[1] in ("batch", "end of range")]
    assert calls == ["batch", "batch", "end of range", "end of range", "batch", "batch"]


class TestSource:
    def test_source_is_polled_until_it_has_no_rows_and_again_after_its_pause(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[kit.rows(1), kit.rows(2), SourceStatus.NOTHING_AVAILABLE, kit.rows(3)]).open()
        bench.run()
        assert bench.out.elements == [[1], [2]]
        assert not bench.subtask.has_work
        assert bench.subtask.wait_ms() == 10
        bench.host.mono_ms = 9.9
        assert not bench.subtask.step()
        bench.host.mono_ms = 10
        bench.run()
        assert bench.out.elements == [[1], [2], [3]]

    def test_mails_wait_for_at_most_a_few_slow_rows_of_later_operators(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[kit.rows(*range(300)), kit.rows(*range(300, 500))], operators=2).open()
        bench.row_ms = 1.0
        waited = []
        while bench.host.mono_ms < 500:
            begun = bench.host.mono_ms
            assert bench.subtask.step()
            waited.append(bench.host.mono_ms - begun)
        assert max(waited) <= 5
        assert [row for batch in bench.out.elements for row in batch] == list(range(500))

    def test_source_refuses_input_rows(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[]).open()
        source = super(kit.Recorder, bench.head)
        with pytest.raises(TypeError, match="source 'op0' has no input"):
            source.process_batch(kit.rows(1), 0)


class TestOperatorInTheBackground:
    def test_full_operator_stops_input_and_polls_but_not_mails(self, kit: TaskKit) -> None:
        for bench in (kit.Bench(operators=2).open(), kit.Bench(source=[kit.rows(1)], operators=2).open()):
            bench.subtask.chain.operators[1].full = True  # type: ignore[attr-defined]
            seen: list[str] = []
            if bench.gate.channels:
                bench.put(0, kit.rows(1))
            bench.mail(lambda seen=seen: seen.append("mail")).run()  # type: ignore[misc]
            assert (seen, bench.out.elements) == (["mail"], [])
            assert bench.subtask.backpressured
            assert not bench.subtask.has_work
            wait = bench.subtask.wait_ms()
            assert wait is not None
            assert 0 < wait <= 100
            bench.subtask.chain.operators[1].full = False  # type: ignore[attr-defined]
            bench.run()
            assert bench.out.elements == [[1]]
            assert not bench.subtask.backpressured

    def test_subtask_ends_when_its_background_operators_have_committed(self, kit: TaskKit) -> None:
        bench = kit.Bench(source=[SourceStatus.END_OF_INPUT], operators=2).open()
        committing = bench.subtask.chain.operators[1]
        committing.requires_final_checkpoint = bench.head.requires_final_checkpoint = False
        committing.commits = True  # type: ignore[attr-defined]
        bench.run()
        assert bench.subtask.data_ended
        assert bench.subtask.state is TaskState.RUNNING
        assert not bench.subtask.has_work
        assert bench.subtask.wait_ms() is not None
        committing.commits = False  # type: ignore[attr-defined]
        bench.subtask.step()
        assert bench.subtask.state is TaskState.FINISHED


class TestBackpressure:
    def test_subtask_without_output_room_takes_no_input_and_polls_no_source(self, kit: TaskKit) -> None:
        bench = kit.Bench(capacity=1).open()
        bench.put(0, kit.rows(1), kit.rows(2)).run()
        assert bench.out.elements == [[1]]
        assert bench.subtask.backpressured
        assert not bench.subtask.has_work
        bench.out.capacity = 2
        bench.run()
        assert bench.out.elements == [[1], [2]]

    def test_mails_are_processed_without_output_room_and_a_blocked_source_sleeps(self, kit: TaskKit) -> None:
        bench = kit.Bench(capacity=0).open()
        seen: list[bool] = []
        bench.mail(lambda: seen.append(True)).run()
        assert seen == [True]
        bench = kit.Bench(source=[SourceStatus.NOTHING_AVAILABLE]).open()
        bench.run()
        bench.out.capacity = 0
        bench.run()
        assert bench.subtask.wait_ms() is None

    def test_timers_wait_for_room_since_they_may_emit(self, kit: TaskKit) -> None:
        bench = kit.Bench(capacity=0).open()
        bench.subtask.set_timer(0, 500)
        bench.run()
        assert bench.called("timer") == []
        assert bench.subtask.wait_ms() is None
        bench.out.capacity = 1
        bench.run()
        assert bench.called("timer") == [(1_000,)]

    def test_a_lost_consumer_ends_the_wait(self, kit: TaskKit) -> None:
        bench = kit.Bench(capacity=0).open()
        bench.out.error = ConnectionError("gone")
        with pytest.raises(ConnectionError, match="gone"):
            bench.subtask.step()


class TestFlush:
    def test_rows_held_back_are_sent_when_their_time_has_come(self, kit: TaskKit) -> None:
        bench = kit.Bench(buffer_timeout_ms=100).open()
        bench.put(0, kit.rows(1)).run()
        assert bench.out.elements == []
        assert bench.subtask.wait_ms() == 100
        bench.host.mono_ms = 100
        bench.run()
        assert bench.out.elements == [[1]]
        assert bench.subtask.wait_ms() is None


class TestTimers:
    def test_the_earliest_request_of_each_operator_counts(self, kit: TaskKit) -> None:
        bench = kit.Bench(operators=2).open()
        bench.subtask.set_timer(0, 1_200)
        bench.subtask.set_timer(0, 1_100)
        bench.subtask.set_timer(0, 1_300)
        bench.subtask.set_timer(1, 1_150)
        assert bench.subtask.wait_ms() == 100
        bench.host.wall_ms = 1_100
        bench.run()
        assert bench.calls == [("op0", "timer", 1_100)]
        assert bench.subtask.wait_ms() == 50
        bench.host.wall_ms = 1_150
        bench.run()
        assert bench.calls[1:] == [("op1", "timer", 1_150)]
        assert bench.subtask.wait_ms() is None

    def test_an_operator_may_ask_again_from_its_timer(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.head.at["timer"] = lambda: bench.subtask.set_timer(0, 1_500)
        bench.subtask.set_timer(0, 900)
        assert bench.subtask.wait_ms() == 0
        assert bench.subtask.step()
        assert not bench.subtask.step()
        assert bench.subtask.wait_ms() == 500

    def test_a_timer_fires_in_time_although_the_clock_was_put_back_or_forward(self, kit: TaskKit) -> None:
        bench = kit.Bench(operators=2).open()
        bench.subtask.set_timer(0, 1_100)
        bench.host.wall_ms -= 3_600_000
        bench.host.mono_ms = 60
        assert bench.subtask.wait_ms() == 40
        bench.host.mono_ms = 100
        bench.run()
        assert bench.calls == [("op0", "timer", 1_000 - 3_600_000)]
        bench.subtask.set_timer(1, bench.host.wall_ms + 500)
        assert bench.subtask.wait_ms() == 500
        bench.host.wall_ms += 3_600_000
        bench.run()
        assert bench.calls[1:] == [("op1", "timer", 1_000)]
        assert bench.subtask.wait_ms() is None

    def test_timers_do_not_fire_after_the_end_of_data(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.subtask.set_timer(0, 1_100)
        bench.put(0, EndOfData(True)).run()
        bench.subtask.set_timer(0, 1_100)
        bench.host.wall_ms = 2_000
        bench.run()
        assert bench.called("timer") == []
        assert bench.subtask.wait_ms() is None


class TestFailure:
    @pytest.mark.parametrize("call", ["batch", "watermark", "timer"])
    def test_error_of_an_operator_ends_the_step(self, kit: TaskKit, call: str) -> None:
        bench = kit.Bench().open()
        bench.head.raises_in.add(call)
        bench.subtask.set_timer(0, 0 if call == "timer" else 10_000)
        bench.put(0, kit.rows(1) if call == "batch" else Watermark(1))
        with pytest.raises(RuntimeError, match=f"{call} of op0"):
            bench.subtask.step()

    def test_a_lost_producer_is_a_failure(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        with pytest.raises(ConnectionError, match="lost"):
            bench.put(0, ConnectionError("lost")).run()

    def test_failing_closes_once_and_reports_the_error(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        error = RuntimeError("x")
        bench.subtask.fail(error)
        bench.subtask.fail(RuntimeError("y"))
        bench.subtask.cancel()
        assert bench.host.states == ["FAILED"]
        assert bench.host.errors == [error]
        assert bench.called("close") == [()]


class TestCancel:
    def test_canceled_subtask_closes_its_operators_without_finishing_them(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.mail(bench.subtask.cancel).run()
        assert bench.host.states == ["CANCELED"]
        assert bench.called("finish") == []
        assert bench.called("close") == [()]
        assert bench.out.elements == []

    def test_cancellation_succeeds_before_the_opening_and_although_closing_fails(self, kit: TaskKit) -> None:
        bench = kit.Bench().open()
        bench.head.raises_in.add("close")
        bench.subtask.cancel()
        assert bench.host.states == ["CANCELED"]
        bench = kit.Bench()
        bench.subtask.cancel()
        assert bench.host.states == ["CANCELED"]
        assert bench.calls == []


def test_a_subtask_that_had_finished_before_only_ends_its_outputs(kit: TaskKit) -> None:
    bench = kit.Bench(finished_on_restore=True)
    bench.subtask.open()
    assert bench.host.states == ["FINISHED"]
    assert bench.calls == []
    assert bench.out.elements == [Watermark(MAX_WATERMARK), EndOfData(True), EndOfPartition()]
