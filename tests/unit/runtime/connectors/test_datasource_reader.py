"""PySpark stream readers without Spark: offsets, ranges, partitions, commits, restore."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkContext

from ckpt_runtime.connectors.datasource_reader import EnumeratorOperator
from ckpt_runtime.connectors.range_reader import RangeReaderOperator
from ckpt_runtime.graph.specs import EnumeratorSpec, RangeReaderSpec
from ckpt_runtime.operators.operator import SourceStatus
from tests.unit.runtime.connectors.harness import Collector, context, drain, opened, snapshot_of
from tests.unit.runtime.connectors.user_data_sources import ARROW_SCHEMA, Counting, Old, Simple


def enumerator(source: type, **options: Any) -> EnumeratorOperator:
    return EnumeratorOperator(EnumeratorSpec(source, {key: str(value) for key, value in options.items()}))


def reader(source: type, **options: Any) -> RangeReaderOperator:
    return RangeReaderOperator(RangeReaderSpec(source, {key: str(value) for key, value in options.items()}))


def work_off(operator: RangeReaderOperator) -> None:
    while operator.has_work_left:
        operator.on_processing_time(0)


def read_all(source: type, ranges: Collector, parallelism: int = 1, **options: Any) -> list[Collector]:
    outputs = []
    for subtask in range(parallelism):
        operator = reader(source, **options)
        outputs.append(opened(operator, context(subtask, parallelism)))
        for batch in ranges.batches:
            operator.process_batch(batch, 0)
        work_off(operator)
    return outputs


@pytest.fixture
def world(tmp_path: Path) -> Path:
    (tmp_path / "available").write_text("25")
    return tmp_path


def commits(world: Path) -> list[Any]:
    log = world / "commits"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.row("io.2")
@pytest.mark.parametrize("form", ["tuple", "row", "arrow"])
def test_ranges_follow_the_read_limit_and_all_partitions_are_read_once(world: Path, form: str) -> None:
    planner = enumerator(Counting, directory=world, form=form)
    ranges = opened(planner, context())
    assert planner.poll() is SourceStatus.MORE_AVAILABLE
    drain(planner, 5)
    assert [(json.loads(row["start"]), json.loads(row["end"])) for row in ranges.rows] == [
        ({"n": 0}, {"n": 10}),
        ({"n": 10}, {"n": 20}),
        ({"n": 20}, {"n": 25}),
    ]
    outputs = read_all(Counting, ranges, 2, directory=world, form=form)
    assert all(output.batches and output.batches[0].schema.equals(ARROW_SCHEMA) for output in outputs)
    found = sorted((row["n"], row["label"]) for output in outputs for row in output.rows)
    assert found == [(n, f"l{n}") for n in range(25)]
    assert SparkContext._jvm is None


def test_nothing_new_means_waiting_ever_longer_and_data_ends_the_wait(world: Path) -> None:
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    drain(planner, 3)
    waits = []
    for _ in range(8):
        assert planner.poll() is SourceStatus.NOTHING_AVAILABLE
        waits.append(planner.idle_ms())
    assert waits == [20, 40, 80, 160, 320, 500, 500, 500]
    (world / "available").write_text("26")
    assert planner.poll() is SourceStatus.MORE_AVAILABLE
    assert planner.idle_ms() == 10


def test_offsets_are_committed_to_the_reader_when_a_checkpoint_covers_them(world: Path) -> None:
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    planner.poll()
    planner.snapshot(1)
    planner.poll()
    planner.snapshot(2)
    planner.notify_aborted(1)
    assert commits(world) == []
    planner.notify_complete(2)
    planner.snapshot(3)
    planner.notify_complete(3)
    planner.notify_complete(1)
    assert commits(world) == [{"n": 20}]
    planner.close()
    assert (world / "stopped").exists()


def test_a_restore_goes_on_at_the_checkpoints_offset(world: Path) -> None:
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    planner.poll()
    state = snapshot_of(planner, 1)
    planner.poll()
    again = enumerator(Counting, directory=world)
    ranges = opened(again, context(attempt=1, state=state, restored=1))
    again.poll()
    assert json.loads(ranges.rows[0]["start"]) == {"n": 10}


def test_available_now_ends_with_the_data_of_the_start(world: Path) -> None:
    planner = enumerator(Counting, directory=world, availableNow="true")
    ranges = opened(planner, context())
    (world / "available").write_text("99")
    assert drain(planner, 50)
    assert json.loads(ranges.rows[-1]["end"]) == {"n": 25}
    assert len(ranges.rows) == 3


def test_available_now_without_support_is_one_range(world: Path) -> None:
    planner = enumerator(Old, availablenow="true")
    ranges = opened(planner, context())
    assert drain(planner, 5)
    assert len(ranges.rows) == 1


def test_the_old_signature_and_offsets_with_number_keys_work(world: Path) -> None:
    planner = enumerator(Old)
    ranges = opened(planner, context())
    drain(planner, 2)
    [output] = read_all(Old, ranges)
    assert output.column("n") == [0, 1, 2, 3]


@pytest.mark.parametrize("parallelism", [1, 2])
def test_rows_of_a_simple_reader_travel_with_their_range(parallelism: int) -> None:
    planner = enumerator(Simple)
    ranges = opened(planner, context())
    drain(planner, 5)
    outputs = read_all(Simple, ranges, parallelism)
    assert sorted(n for output in outputs for n in output.column("n")) == list(range(7))
    assert outputs[0].batches[0].schema.equals(ARROW_SCHEMA)
    assert planner.poll() is SourceStatus.NOTHING_AVAILABLE
    again = enumerator(Simple)
    restored = opened(again, context(state=snapshot_of(planner, 1), restored=1))
    assert again.poll() is SourceStatus.NOTHING_AVAILABLE
    assert restored.batches == []


def test_the_task_context_tells_the_subtask(world: Path) -> None:
    planner = enumerator(Counting, directory=world, form="partition")
    ranges = opened(planner, context())
    drain(planner, 3)
    operator = reader(Counting, directory=world, form="partition")
    output = opened(operator, context(3, 4))
    for batch in ranges.batches:
        operator.process_batch(batch, 0)
    work_off(operator)
    assert set(output.column("label")) == {"3"}


def test_rows_that_do_not_fit_the_schema_are_named(world: Path) -> None:
    planner = enumerator(Counting, directory=world, form="wrong")
    ranges = opened(planner, context())
    planner.poll()
    with pytest.raises(
        ValueError, match=r"CountingReader.read yields a row with 1 values, declared are the columns \['n', 'label'\]"
    ):
        read_all(Counting, ranges, directory=world, form="wrong")
    narrow = RangeReaderOperator(
        RangeReaderSpec(
            Counting, {"directory": str(world), "form": "arrow"}, pa.schema([("n", pa.int32()), ("label", pa.string())])
        )
    )
    opened(narrow, context())
    narrow.process_batch(ranges.batches[0], 0)
    with pytest.raises(ValueError, match="yields batches of .n: int64, label: string., declared is .n: int32"):
        work_off(narrow)


def test_options_of_the_engine_do_not_reach_the_user_and_are_checked(world: Path) -> None:
    seen: list[dict[str, str]] = []

    class Curious(Counting):
        def streamReader(self, schema: Any) -> Any:
            seen.append(dict(self.options))
            return super().streamReader(schema)

    options = {"directory": world, "availablenow": "TRUE", "ORDEREDREADS": "yes"}
    opened(enumerator(Curious, **options), context())
    assert seen == [{"directory": str(world)}]
    for name in ("availableNow", "orderedReads"):
        with pytest.raises(ValueError, match=f"option '{name}': 'maybe' is not true or false"):
            reader(Counting, directory=world, **{name: "maybe"})


def test_an_offset_that_is_no_json_object_is_named() -> None:
    class Bad(Old):
        def streamReader(self, schema: Any) -> Any:
            inner = super().streamReader(schema)
            inner.latestOffset = lambda: {"at": object()}  # type: ignore[method-assign]
            return inner

    planner = enumerator(Bad)
    opened(planner, context())
    with pytest.raises(TypeError, match=r"latestOffset\(\) returned an offset that is no JSON"):
        planner.poll()
