"""PySpark stream readers without Spark: offsets, ranges, partitions, commits, restore."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkContext

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState, OperatorStateMode
from ckpt_runtime.connectors.datasource_reader import EnumeratorOperator
from ckpt_runtime.connectors.range_reader import RangeReaderOperator
from ckpt_runtime.connectors.split_host import UNREAD_PARTITIONS
from ckpt_runtime.connectors.tagged_values import ValueNotCarriedError
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import SPLIT_SCHEMA
from ckpt_runtime.graph.specs import EnumeratorSpec, RangeReaderSpec
from ckpt_runtime.operators.operator import SourceStatus
from ckpt_runtime.state.errors import StateSchemaError
from ckpt_runtime.storage.errors import InvalidLocationError
from tests.unit.runtime.connectors.harness import Collector, context, drain, opened, snapshot_of
from tests.unit.runtime.connectors.split_jobs import moved
from tests.unit.runtime.connectors.user_data_sources import (
    ARROW_SCHEMA,
    Counting,
    Forgetful,
    Listing,
    Old,
    Simple,
)


def enumerator(source: type, **options: Any) -> EnumeratorOperator:
    return EnumeratorOperator(EnumeratorSpec(source, {key: str(value) for key, value in options.items()}))


def reader(source: type, **options: Any) -> RangeReaderOperator:
    return RangeReaderOperator(RangeReaderSpec(source, {key: str(value) for key, value in options.items()}))


def work_off(operator: RangeReaderOperator) -> None:
    while operator.has_work_left:
        operator.on_processing_time(0)


def read_all(source: type, splits: Collector, parallelism: int = 1, **options: Any) -> list[Collector]:
    """Each split goes to one reader, in turn."""
    outputs = []
    for subtask in range(parallelism):
        operator = reader(source, **options)
        outputs.append(opened(operator, context(subtask, parallelism)))
        for row in splits.rows[subtask::parallelism]:
            operator.process_batch(pa.RecordBatch.from_pylist([row], schema=SPLIT_SCHEMA), 0)
        work_off(operator)
    return outputs


def offset_of(operator: EnumeratorOperator, checkpoint_id: int = 99) -> Any:
    """What a snapshot says."""
    (entry,) = snapshot_of(operator, checkpoint_id)
    return json.loads(entry.items[0]["offset"])


@pytest.fixture
def world(tmp_path: Path) -> Path:
    (tmp_path / "available").write_text("25")
    return tmp_path


def commits(world: Path) -> list[Any]:
    log = world / "commits"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.mark.row("io.2")
@pytest.mark.parametrize("form", ["tuple", "row", "arrow", "leaving", "locked"])
def test_ranges_follow_the_read_limit_and_all_partitions_are_read_once(world: Path, form: str) -> None:
    planner = enumerator(Counting, directory=world, form=form)
    ranges = opened(planner, context())
    ends = []
    while planner.poll() is SourceStatus.MORE_AVAILABLE:
        ends.append(offset_of(planner))
    assert ends == [{"n": 10}, {"n": 20}, {"n": 25}]
    assert [batch.num_rows for batch in ranges.batches] == [4, 4, 2]
    assert ranges.column("sequence") == list(range(10))
    assert ranges.column("number") == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert ranges.watermarks == [4, 8, 10]
    assert opened(
        enumerator(Counting, directory=world, form=form), context(state=snapshot_of(planner, 1))
    ).watermarks == [10]
    outputs = read_all(Counting, ranges, 2, directory=world, form=form)
    assert all(output.batches and output.batches[0].schema.equals(ARROW_SCHEMA) for output in outputs)
    found = sorted((row["n"], row["label"]) for output in outputs for row in output.rows)
    assert found == [(n, f"l{n}") for n in range(25)]
    assert SparkContext._jvm is None


def test_waits_for_new_data_grow_until_data_arrives(world: Path) -> None:
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


def test_an_offset_at_which_no_range_ends_is_not_committed(world: Path) -> None:
    """Spark commits ends of batches only: a reader need not know the initial offset. Neither does a restore tell it."""
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    state = snapshot_of(planner, 1)
    planner.notify_complete(1)
    again = enumerator(Counting, directory=world)
    opened(again, context(attempt=1, state=state, restored=1))
    again.snapshot(2)
    again.notify_complete(2)
    assert commits(world) == []
    again.poll()
    again.snapshot(3)
    again.notify_complete(3)
    assert commits(world) == [{"n": 10}]


def test_a_restore_continues_at_the_checkpoints_offset(world: Path) -> None:
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    planner.poll()
    state = snapshot_of(planner, 1)
    planner.poll()
    again = enumerator(Counting, directory=world)
    splits = opened(again, context(attempt=1, state=state, restored=1))
    again.poll()
    assert offset_of(again) == {"n": 20}
    [output] = read_all(Counting, splits, directory=world)
    assert output.column("n") == list(range(10, 20))
    assert splits.column("sequence") == [4, 5, 6, 7]


@pytest.mark.row("ends.7")
@pytest.mark.parametrize(
    ("position", "numbers", "committed"),
    [("earliest", range(10), [{"n": 10}]), ("latest", (), []), ('{"n": 12}', range(12, 22), [{"n": 22}])],
)
def test_partitions_are_read_from_the_position_that_was_set(
    world: Path, position: str, numbers: Iterable[int], committed: list[Any]
) -> None:
    planner = enumerator(Counting, directory=world)
    opened(planner, context())
    planner.poll()
    unread = OperatorListState(UNREAD_PARTITIONS, OperatorStateMode.SPLIT, ({"sequence": 0},))
    head, tail = moved(([snapshot_of(planner, 1)], [[unread]]), position)
    assert tail == [[]], "a partition that was planned before is still read"
    again = enumerator(Counting, directory=world)
    splits = opened(again, context(attempt=1, state=head[0], restored=1))
    again.snapshot(2)
    again.notify_complete(2)
    assert commits(world) == [], "the source is notified of an offset at which no range ends"
    again.poll()
    [output] = read_all(Counting, splits, directory=world)
    assert output.column("n") == list(numbers)
    again.snapshot(3)
    again.notify_complete(3)
    assert commits(world) == committed


@pytest.mark.row("ends.7")
def test_a_simple_reader_takes_offsets_and_the_beginning_but_no_end(world: Path) -> None:
    planner = enumerator(Simple, directory=world)
    first = opened(planner, context())
    planner.poll()
    states = [snapshot_of(planner, 1)], [list[OperatorListState]()]
    again = enumerator(Simple, directory=world)
    rows = opened(again, context(attempt=1, state=moved(states, "earliest")[0][0], restored=1))
    again.poll()
    assert rows.column("rows") == first.column("rows")
    with pytest.raises(InvalidLocationError, match="cannot be set to latest: its format takes earliest, offsets"):
        moved(states, "latest")


def test_attributes_set_by_latest_offset_are_there_for_partitions_and_commit() -> None:
    """The reader keeps its ranges, changes the offset that it gets, and forgets what is committed."""
    planner = enumerator(Forgetful)
    splits = opened(planner, context())
    drain(planner, 3)
    state = snapshot_of(planner, 1)
    planner.notify_complete(1)
    assert planner._planner is not None
    assert planner._planner.reader.ranges == {}
    outputs = read_all(Forgetful, splits, 2)
    assert sorted(n for output in outputs for n in output.column("n")) == list(range(15))
    again = enumerator(Forgetful)
    splits = opened(again, context(attempt=1, state=state, restored=1))
    drain(again, 1)
    assert read_all(Forgetful, splits)[0].column("n") == list(range(15, 20))


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_partitions_that_come_in_another_order_each_time_are_planned_once(parallelism: int) -> None:
    planner = enumerator(Listing)
    splits = opened(planner, context())
    drain(planner, 4)
    outputs = read_all(Listing, splits, parallelism)
    assert sorted(n for output in outputs for n in output.column("n")) == list(range(40))


def test_a_partition_that_cannot_travel_is_refused_when_it_is_planned(world: Path) -> None:
    planner = enumerator(Counting, directory=world, form="lock")
    opened(planner, context())
    with pytest.raises(
        ValueNotCarriedError, match=r"^CountingReader\.partitions\(\)\[0\]\.lock is of type _thread.lock"
    ):
        planner.poll()


def test_state_of_another_version_is_refused(world: Path) -> None:
    old = OperatorListState("offset", OperatorStateMode.SPLIT, ({"offset": {"n": 3}, "sequence": 2},))
    with pytest.raises(StateSchemaError, match="operator 'op': the snapshot holds state of version 1, and this engine"):
        opened(enumerator(Counting, directory=world), context(state=[old], restored=1))
    old = OperatorListState(UNREAD_PARTITIONS, OperatorStateMode.SPLIT, ({"sequence": 0, "start": {}, "end": {}},))
    with pytest.raises(
        StateSchemaError, match="this engine reads version 2; finish the job with the engine that wrote"
    ):
        opened(reader(Counting, directory=world), context(state=[old], restored=1))


def test_a_source_without_a_stream_reader_is_named() -> None:
    class Neither(Counting):
        def streamReader(self, schema: Any) -> Any:
            raise NotImplementedError

    with pytest.raises(
        PlanError, match="Neither has neither a streamReader nor a simpleStreamReader: it is not a stream"
    ):
        opened(enumerator(Neither), context())


def test_the_source_that_makes_the_reader_has_reported_its_schema(world: Path) -> None:
    class Inferring(Counting):
        columns = 0

        def schema(self) -> str:
            self.columns = 2
            return super().schema()

        def streamReader(self, schema: Any) -> Any:
            made = super().streamReader(schema)
            made.step = self.columns
            return made

    planner = enumerator(Inferring, directory=world)
    splits = opened(planner, context())
    assert planner.poll() is SourceStatus.MORE_AVAILABLE
    assert offset_of(planner) == {"n": 2}
    [output] = read_all(Inferring, splits, directory=world)
    assert output.column("n") == [0, 1]
    for is_reported, end in ((True, 2), (False, 0)):
        planner = EnumeratorOperator(
            EnumeratorSpec(Inferring, {"directory": str(world)}, ARROW_SCHEMA, reported=is_reported)
        )
        opened(planner, context())
        planner.poll()
        assert offset_of(planner) == {"n": end}, "with a declared schema it is not asked"


def test_available_now_ends_with_the_data_of_the_start(world: Path) -> None:
    planner = enumerator(Counting, directory=world, availableNow="true")
    opened(planner, context())
    (world / "available").write_text("99")
    assert drain(planner, 50)
    assert offset_of(planner) == {"n": 25}


@pytest.mark.parametrize(("source", "then"), [(Old, []), (Counting, list(range(25, 99)))])
def test_available_now_reads_the_data_of_the_first_start_through_restarts(
    world: Path, source: type, then: list[int]
) -> None:
    """Another job that starts from the savepoint of the first asks for what is available then."""
    planner = enumerator(source, directory=world, availablenow="true")
    ranges = opened(planner, context())
    assert drain(planner, 5)
    ends, state = offset_of(planner), snapshot_of(planner, 1)
    assert ranges.rows
    (world / "available").write_text("99")
    restarted = enumerator(source, directory=world, availableNow="true")
    assert opened(restarted, context(attempt=1, state=state, restored=1)).rows == []
    assert restarted.poll() is SourceStatus.END_OF_INPUT
    assert offset_of(restarted) == ends
    resumed = enumerator(source, directory=world, availableNow="true")
    splits = opened(resumed, context(state=state, restored=1, job_id="f" * 32))
    assert drain(resumed, 50)
    [output] = read_all(source, splits, directory=world)
    assert output.column("n") == then


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


def test_task_context_has_the_partition_within_its_range_and_a_unique_id(world: Path) -> None:
    planner = enumerator(Counting, directory=world, form="task")
    splits = opened(planner, context())
    drain(planner, 3)
    outputs = read_all(Counting, splits, 2, directory=world, form="task")
    found = {row["n"]: json.loads(row["label"]) for output in outputs for row in output.rows}
    assert {n: partition for n, (partition, _, _) in found.items()} == {n: n % 10 // 3 for n in range(25)}
    assert len({task_attempt for _, _, task_attempt in found.values()}) == 10
    assert {attempt for _, attempt, _ in found.values()} == {0}


def test_rows_that_do_not_fit_the_schema_are_named(world: Path) -> None:
    planner = enumerator(Counting, directory=world, form="wrong")
    ranges = opened(planner, context())
    planner.poll()
    with pytest.raises(
        ValueError,
        match=r"CountingReader.read yields a row with 1 values, but the columns \['n', 'label'\] are declared",
    ):
        read_all(Counting, ranges, directory=world, form="wrong")
    narrow = RangeReaderOperator(
        RangeReaderSpec(
            Counting, {"directory": str(world), "form": "arrow"}, pa.schema([("n", pa.int32()), ("label", pa.string())])
        )
    )
    opened(narrow, context())
    narrow.process_batch(ranges.batches[0], 0)
    with pytest.raises(ValueError, match="yields batches of .n: int64, label: string., but .n: int32"):
        work_off(narrow)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("none", "CountingReader.read yields NoneType; allowed are tuples, lists, Row or pyarrow.RecordBatch"),
        ("nothing", "CountingReader.read returned NoneType, expected an iterator of tuples"),
    ],
)
def test_missing_row_or_result_does_not_end_the_partition(world: Path, form: str, message: str) -> None:
    class Missing(Counting):
        def streamReader(self, schema: Any) -> Any:
            made = super().streamReader(schema)
            if form == "nothing":
                made.read = lambda partition: None  # type: ignore[method-assign,assignment,return-value]
            return made

    planner = enumerator(Counting, directory=world)
    ranges = opened(planner, context())
    planner.poll()
    with pytest.raises(TypeError, match=message):
        read_all(Missing, ranges, directory=world, form=form)


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


def test_offset_that_is_not_a_json_object_is_named() -> None:
    class Bad(Old):
        def streamReader(self, schema: Any) -> Any:
            inner = super().streamReader(schema)
            inner.latestOffset = lambda: {"at": object()}  # type: ignore[method-assign]
            return inner

    planner = enumerator(Bad)
    opened(planner, context())
    with pytest.raises(TypeError, match=r"latestOffset\(\) returned an offset that is not JSON"):
        planner.poll()
