"""Map and watermark."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.graph.specs import MapInArrowSpec, WatermarkSpec
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK
from ckpt_runtime.operators.python_functions import MapInArrowOperator
from ckpt_runtime.operators.watermark import WatermarkOperator
from tests.unit.runtime.operators.conftest import Harness

BATCH = pa.record_batch({"k": [1, 2, 3, None], "v": [10.0, None, 30.0, 40.0]})


def test_map_is_called_once_per_buffer(harness: type[Harness]) -> None:
    calls = []

    def double(batches: Any) -> Any:
        for batch in batches:
            calls.append(batch.num_rows)
            yield batch
            yield batch.slice(0, 0)
            yield batch.slice(0, 1)

    run = harness(MapInArrowOperator(MapInArrowSpec(double, BATCH.schema)))
    assert len(run.process(BATCH)) == 5
    assert len(run.process(BATCH.slice(1, 2))) == 3
    assert calls == [4, 2]


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (None, UserFunctionError, "'op' returned NoneType"),
        (BATCH, UserFunctionError, "'op' returned RecordBatch"),
        (iter([BATCH.select(["v", "k"])]), OutputSchemaError, r"returned .*\[v: double, k: int64\], but \[k: int64"),
        (iter([1]), UserFunctionError, "'op' returned a int"),
        (iter([BATCH.select(["k"])]), OutputSchemaError, r"'op' returned .*\[k: int64\], but \[k: int64, v: double\]"),
    ],
)
def test_map_that_breaks_its_contract_is_named(
    harness: type[Harness], result: Any, error: type[Exception], text: str
) -> None:
    run = harness(MapInArrowOperator(MapInArrowSpec(lambda _: result, BATCH.schema)))
    with pytest.raises(error, match=text):
        run.process(BATCH)


TEXTS = pa.array(["x", None])
DECIMALS = pa.array(["1.5", None]).cast(pa.decimal128(5, 1))
ZONED = pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        (TEXTS.cast(pa.large_string()), pa.string()),
        (TEXTS.cast(pa.string_view()), pa.string()),
        (TEXTS.dictionary_encode(), pa.string()),
        (pa.array([b"x", None], pa.large_binary()), pa.binary()),
        (pa.nulls(2), pa.int64()),
        (pa.array([1, None], pa.timestamp("us")), ZONED),
        (pa.array([1, None], pa.timestamp("us", tz="Europe/Berlin")), ZONED),
        (DECIMALS, pa.decimal128(10, 2)),
        (pa.array([["x"], None], pa.list_(pa.field("x", pa.large_string(), False))), pa.list_(pa.string())),
        (pa.array([{"a": "x"}, None], pa.struct([("a", pa.large_string())])), pa.struct([("a", pa.string())])),
        (pa.array([[("x", None)], None], pa.map_(pa.large_string(), pa.null())), pa.map_(pa.string(), pa.int8())),
    ],
)
def test_a_map_gives_the_declared_types_in_forms_that_spark_takes(
    harness: type[Harness], column: pa.Array, declared: pa.DataType
) -> None:
    """Names do not count, as in Spark: columns go by position."""
    result = pa.record_batch({"other": column}).replace_schema_metadata({"pandas": "{}"})
    run = harness(MapInArrowOperator(MapInArrowSpec(lambda _: [result], pa.schema([("x", declared)]))))
    run.process(BATCH)
    [given] = run.batches
    assert given.schema.equals(pa.schema([("x", declared)]), check_metadata=True)
    assert [row is None for row in given.column("x").to_pylist()] == [row is None for row in column.to_pylist()]


@pytest.mark.parametrize(
    ("column", "declared", "text"),
    [
        (pa.array([1], pa.int32()), pa.field("x", pa.int64()), "int32"),
        (pa.array(["1"]), pa.field("x", pa.int64()), "string"),
        (pa.array([1], pa.timestamp("ns")), pa.field("x", ZONED), "ns"),
        (DECIMALS, pa.field("x", pa.decimal128(3, 0)), "decimal"),
        (pa.array([{"a": 1}]), pa.field("x", pa.struct([("b", pa.int64())])), "struct"),
        (TEXTS, pa.field("x", pa.string(), False), "returned null in column 'x', which is declared not null"),
    ],
)
def test_a_map_that_gives_other_values_than_declared_fails(
    harness: type[Harness], column: pa.Array, declared: pa.Field, text: str
) -> None:
    result = pa.record_batch({"x": column})
    run = harness(MapInArrowOperator(MapInArrowSpec(lambda _: iter([result]), pa.schema([declared]))))
    with pytest.raises(OutputSchemaError, match=text):
        run.process(BATCH)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_watermark_trails_and_never_falls(harness: type[Harness], unit: str) -> None:
    run = harness(WatermarkOperator(WatermarkSpec("t", 1000)))

    def batch(*seconds: int | None) -> pa.RecordBatch:
        times = [None if s is None else dt.datetime.fromtimestamp(s, dt.UTC) for s in seconds]
        return pa.record_batch({"t": pa.array(times, pa.timestamp(unit, "UTC"))})

    assert run.process(batch(10, 5))[-1] == ("watermark", 9000)
    assert ("watermark", 9000) not in run.process(batch(7, None, 10))
    assert not any(isinstance(event, tuple) for event in run.process(batch(None)))
    assert run.process(batch(12))[-1] == ("watermark", 11_000)
    assert run.watermark(99_999) == []
    assert run.watermark(MAX_WATERMARK) == [("watermark", MAX_WATERMARK)]


def at(*seconds: int) -> pa.RecordBatch:
    times = [dt.datetime.fromtimestamp(s, dt.UTC) for s in seconds]
    return pa.record_batch({"t": pa.array(times, pa.timestamp("ms", "UTC"))})


@pytest.mark.row("76.9")
def test_a_restored_watermark_is_emitted_again_before_anything_else(harness: type[Harness]) -> None:
    """Or event time would stand still until newer rows than those in flight come."""
    run = harness(WatermarkOperator(WatermarkSpec("t", 1000)))
    run.process(at(10, 5))
    restored = harness(WatermarkOperator(WatermarkSpec("t", 1000)), lists=run.lists())
    assert restored.take() == [("watermark", 9000)]
    assert [event for event in restored.process(at(8)) if isinstance(event, tuple)] == []
    assert restored.process(at(11))[-1] == ("watermark", 10_000)
    assert restored.lists()[0].items == ({"ms": 10_000, "next_ms": 10_000, "parallelism": 1},)


def by_ranges(delay_ms: int = 1000, *, by_batches: bool = False) -> WatermarkOperator:
    return WatermarkOperator(WatermarkSpec("t", delay_ms, by_ranges=True, by_batches=by_batches))


def test_event_time_after_a_stream_reader_advances_between_ranges(harness: type[Harness]) -> None:
    """What the reader gives within one has no order, in Spark either."""
    run = harness(by_ranges())
    assert not any(isinstance(event, tuple) for event in run.process(at(10)) + run.process(at(1)))
    assert run.end_of_range() == [("watermark", 9000), "end of range"]
    assert run.end_of_range() == ["end of range"]
    assert not any(isinstance(event, tuple) for event in run.process(at(30)) + run.process(at(8)))


def test_rows_of_a_range_count_at_its_end_across_a_restore(harness: type[Harness]) -> None:
    run = harness(by_ranges())
    run.process(at(10))
    run.end_of_range()
    run.process(at(20))
    restored = harness(by_ranges(), lists=run.lists())
    assert restored.take() == [("watermark", 9000)]
    assert not any(isinstance(event, tuple) for event in restored.process(at(15)))
    assert restored.end_of_range() == [("watermark", 19_000), "end of range"]


def test_a_snapshot_inside_the_first_range_has_no_watermark_yet(harness: type[Harness]) -> None:
    run = harness(by_ranges())
    run.process(at(10))
    restored = harness(by_ranges(), lists=run.lists())
    assert restored.take() == []
    assert restored.end_of_range() == [("watermark", 9000), "end of range"]


def end_of_batch(run: Harness, batch: int) -> list[Any]:
    """What the end of a reader's range gives, without the end itself."""
    run.context.chain_time.batch = batch
    *events, end = run.end_of_range()
    assert end == "end of range"
    return events


def test_the_time_of_a_batch_is_announced_at_its_end_and_reached_behind_the_next_one(harness: type[Harness]) -> None:
    run = harness(by_ranges(by_batches=True))
    run.process(at(10))
    assert end_of_batch(run, 1) == [("coming", 9000, 1)]
    run.process(at(5))
    assert end_of_batch(run, 2) == [("watermark", 9000), ("coming", 9000, 2)]
    run.process(at(30))
    assert end_of_batch(run, 3) == [("coming", 29_000, 3)]
    run.process(at(40))
    assert run.watermark(MAX_WATERMARK) == [("watermark", 39_000), ("watermark", MAX_WATERMARK)]


def test_the_announced_time_is_kept_in_a_snapshot_and_comes_again_with_the_range_that_a_restored_reader_names(
    harness: type[Harness],
) -> None:
    run = harness(by_ranges(by_batches=True))
    for batch in (1, 2):
        run.process(at(10 * batch))
        end_of_batch(run, batch)
    run.process(at(30))
    restored = harness(by_ranges(by_batches=True), lists=run.lists())
    assert restored.take() == [("watermark", 9000), ("coming", 19_000, -1)]
    assert end_of_batch(restored, 2) == [("coming", 19_000, 2)]
    assert end_of_batch(restored, 3) == [("watermark", 19_000), ("coming", 29_000, 3)]
    continuous = harness(by_ranges(), lists=run.lists())
    assert continuous.take() == [("watermark", 9000), ("watermark", 19_000)]
    before = (OperatorListState("watermark", OperatorStateMode.SPLIT, ({"ms": 9000, "parallelism": 1},)),)
    older = harness(by_ranges(by_batches=True), lists=before)
    assert older.take() == [("watermark", 9000)]
    older.process(at(20))
    assert end_of_batch(older, 5) == [("coming", 19_000, 5)]


def test_subtasks_continue_with_the_times_of_the_slowest_ones_batch_and_of_all_rows(harness: type[Harness]) -> None:
    """The first one has ended batch 2, the second one reads it, and the third one has had no row."""
    runs = [harness(by_ranges(by_batches=True)) for _ in range(3)]
    for batch in (1, 2):
        runs[0].process(at(10 * batch))
        end_of_batch(runs[0], batch)
    runs[1].process(at(15))
    for run in runs[1:]:
        end_of_batch(run, 1)
    runs[1].process(at(30))
    (first,), *others = [run.lists() for run in runs]
    items = [*first.items, *(item for (state,) in others for item in state.items)]
    assert first.mode is OperatorStateMode.UNION
    together = (OperatorListState(first.name, first.mode, tuple(items)),)
    restored = harness(by_ranges(by_batches=True), lists=together)
    assert restored.take() == [("coming", 14_000, -1)]
    restored.process(at(25))
    assert end_of_batch(restored, 2) == [("watermark", 14_000), ("coming", 29_000, 2)]


def test_event_time_of_united_streams_is_that_of_all_rows_and_moves_when_all_have_ended_a_batch(
    harness: type[Harness],
) -> None:
    spec = WatermarkSpec("t", 1000, by_ranges=True, by_batches=True, united=True)

    def end_of_batch(run: Harness, batch: int) -> list[Any]:
        run.operator.process_coming_watermark(0, batch)
        return run.take()

    run = harness(WatermarkOperator(spec))
    run.process(at(10))
    assert run.end_of_range() == run.watermark(3000) == []  # those of one stream
    run.process(at(20))
    assert end_of_batch(run, 1) == [("coming", 19_000, 1)]
    run.process(at(5))
    restored = harness(WatermarkOperator(spec), lists=run.lists())
    assert restored.take() == [("coming", 19_000, -1)]
    assert end_of_batch(restored, -1) == []
    assert end_of_batch(restored, 1) == [("coming", 19_000, 1)]
    assert end_of_batch(restored, 2) == [("watermark", 19_000), ("coming", 19_000, 2)]
    later = harness(WatermarkOperator(spec), lists=restored.lists())
    assert later.take() == [("watermark", 19_000), ("coming", 19_000, -1)]
    assert end_of_batch(later, 0) == [("coming", 19_000, 0)]  # the numbers of the next run
    later.process(at(50))
    assert end_of_batch(later, 1) == [("coming", 49_000, 1)]
    restored.process(at(40))
    assert restored.watermark(MAX_WATERMARK) == [("watermark", 39_000), ("watermark", MAX_WATERMARK)]


def test_the_time_of_the_last_batch_is_left_to_the_next_run(harness: type[Harness]) -> None:
    """As in Spark without batches that have no data."""
    spec = WatermarkSpec("t", 1000, by_ranges=True, by_batches=True, keeps_last=True)
    run = harness(WatermarkOperator(spec))
    run.process(at(10))
    end_of_batch(run, 1)
    run.process(at(20))
    assert end_of_batch(run, 2) == [("watermark", 9000), ("coming", 19_000, 2)]
    assert run.watermark(MAX_WATERMARK) == [("watermark", MAX_WATERMARK)]
    assert harness(WatermarkOperator(spec), lists=run.lists()).take() == [("watermark", 9000), ("coming", 19_000, -1)]


def test_last_range_ends_with_the_data_and_one_without_event_time_moves_nothing(harness: type[Harness]) -> None:
    run = harness(by_ranges())
    run.process(at(10))
    run.process(at(4))
    assert run.watermark(MAX_WATERMARK) == [("watermark", 9000), ("watermark", MAX_WATERMARK)]
    run = harness(by_ranges())
    run.process(pa.record_batch({"t": pa.array([None], pa.timestamp("ms", "UTC"))}))
    assert run.end_of_range() == ["end of range"]
    assert [state.items for state in run.lists()] == [()]


def test_a_pipeline_with_another_event_time_continues(harness: type[Harness]) -> None:
    """A withWatermark that was put behind a reader, or away from it, between two versions of a job."""
    run = harness(by_ranges())
    run.process(at(10))
    buffers = harness(WatermarkOperator(WatermarkSpec("t", 1000)), lists=run.lists())
    assert buffers.take() == [("watermark", 9000)]
    before = (OperatorListState("watermark", OperatorStateMode.SPLIT, ({"ms": 9000, "parallelism": 1},)),)
    ranges = harness(by_ranges(), lists=before)
    assert ranges.take() == [("watermark", 9000)]
    ranges.process(at(20))
    assert ranges.end_of_range() == [("watermark", 19_000), "end of range"]


def test_watermark_is_restored_at_the_same_parallelism_but_not_the_final_one(harness: type[Harness]) -> None:
    lists = harness(WatermarkOperator(WatermarkSpec("t", 0))).lists()
    assert [state.items for state in lists] == [()]
    assert harness(WatermarkOperator(WatermarkSpec("t", 0)), lists=lists).take() == []
    run = harness(WatermarkOperator(WatermarkSpec("t", 0)))
    run.process(at(3))
    run.watermark(MAX_WATERMARK)
    assert harness(WatermarkOperator(WatermarkSpec("t", 0)), lists=run.lists()).take() == [("watermark", 3000)]
    # Rows of a slower subtask may come here; behind this one's watermark they would be late.
    lists = (OperatorListState("watermark", OperatorStateMode.SPLIT, ({"ms": 9000, "parallelism": 2},)),)
    restored = harness(WatermarkOperator(WatermarkSpec("t", 0)), lists=lists)
    assert restored.take() == []
    assert restored.process(at(1))[-1] == ("watermark", 1000)


@pytest.mark.row("ends.3")
def test_watermark_says_once_that_no_rows_come_and_comes_again_with_the_next_row(harness: type[Harness]) -> None:
    configuration = {"pipeline.source.idle-timeout": "400 ms"}
    run = harness(WatermarkOperator(WatermarkSpec("t", 1000)), configuration=configuration)

    def pass_time(ms: int) -> list[Any]:
        end = run.now + ms
        while run.timer is not None and run.timer <= end:
            run.now, run.timer = max(run.now, run.timer), None
            run.operator.on_processing_time(run.now)
        run.now = end
        return run.take()

    assert run.process(at(10))[-1] == ("watermark", 9000)
    assert pass_time(300) == []
    assert run.process(at(11))[-1] == ("watermark", 10_000)
    assert pass_time(400) == []
    assert pass_time(1000) == [("watermark", IDLE_WATERMARK)]
    found = run.process(at(5))
    assert found[0] == ("watermark", 10_000), "before the row, so that no consumer takes it for late by mistake"
    assert pass_time(300) == []
    run.now += 5000  # the subtask could not run: it may be back-pressured, with rows in front of it
    assert pass_time(0) == []
    assert pass_time(1000) == [("watermark", IDLE_WATERMARK)]


def test_watermark_without_a_timeout_asks_for_no_timer(harness: type[Harness]) -> None:
    run = harness(WatermarkOperator(WatermarkSpec("t", 1000)))
    run.process(at(10))
    assert run.timer is None
