"""Partitions of PySpark readers in a real subtask: small steps, barriers in the middle, and exact restores."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.connectors import split_host
from ckpt_runtime.connectors.datasource_rows import values_of
from ckpt_runtime.connectors.range_reader import RangeReaderOperator, ReplayError
from ckpt_runtime.graph.formats import SPLIT_SCHEMA
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.specs import RangeReaderSpec
from ckpt_runtime.network.elements import (
    CancelCheckpoint,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    EndOfRange,
    Watermark,
)
from ckpt_runtime.network.gate import InputGate
from ckpt_runtime.operators.operator import MAX_WATERMARK, OperatorContext, OperatorStateStore, WaitingInput
from ckpt_runtime.task.chain import ChainEnd, OperatorChain
from ckpt_runtime.task.deployed_job import waiting_input
from ckpt_runtime.task.output import BufferLimits, ResultPartition
from ckpt_runtime.task.subtask import Subtask
from tests.support.effort import examples
from tests.unit.runtime.task.conftest import TaskKit

BATCH = 4
SIZES = [10, 0, 3, 17]
"""Rows of the partitions of each range."""


class Part(InputPartition):
    def __init__(self, range_: int, number: int) -> None:
        super().__init__((range_, number))
        self.range_, self.number = range_, number


class Reader(DataSourceStreamReader):
    """Range ``n`` has the partitions of SIZES."""

    closed = 0

    def read(self, partition: Any) -> Iterator[Any]:
        try:
            for row in range(SIZES[partition.number]):
                yield (partition.range_, partition.number, row)
        finally:
            type(self).closed += 1


class Ranges(DataSource):
    reader: type[DataSourceStreamReader] = Reader

    def schema(self) -> str:
        return "range INT, part INT, row INT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return self.reader()


def expected(ranges: int) -> list[tuple[int, int, int]]:
    return [(n, part, row) for n in range(ranges) for part, size in enumerate(SIZES) for row in range(size)]


VALUES = values_of(Ranges)


def range_of(number: int, subtask: int = 0, parallelism: int = 1) -> pa.RecordBatch:
    """The partitions of a range that go to a subtask, in turn."""
    first = number * len(SIZES)
    rows = [
        {"sequence": first + part, "number": part, "partition": VALUES.encode(Part(number, part), "it"), "rows": None}
        for part in range(len(SIZES))
        if (first + part) % parallelism == subtask
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SPLIT_SCHEMA)


def carried(number: int) -> pa.RecordBatch:
    schema = pa.schema([("range", pa.int32()), ("part", pa.int32()), ("row", pa.int32())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for row in range(3):
            writer.write_batch(pa.RecordBatch.from_pylist([{"range": number, "part": 0, "row": row}], schema=schema))
    rows = {"sequence": number, "number": 0, "partition": None, "rows": bytes(sink.getvalue())}
    return pa.RecordBatch.from_pylist([rows], schema=SPLIT_SCHEMA)


@dataclass
class Given:
    """What a test may change."""

    source: type = Ranges
    ordered: bool = True
    subtask: int = 0
    parallelism: int = 1
    state: tuple[OperatorListState, ...] = ()


class Lab:
    """A range reader in its subtask. The clock moves in ``run`` only, when nothing else does; output has no bounds."""

    def __init__(self, kit: TaskKit, how: Given | None = None) -> None:
        how = how or Given()
        self.host = kit.Host()
        self.out = kit.Sent()
        self.gate = InputGate(lambda: None)
        self.channel = self.gate.add_channel(0, 1)
        holder: list[Subtask] = []
        self.context = OperatorContext(
            job_id="j", uid="r", name="r", subtask_index=how.subtask, parallelism=how.parallelism,
            attempt=0,
            operator_state=OperatorStateStore(how.state),
            now_ms=self.host.now_ms, monotonic_ms=self.host.monotonic_ms,
            set_timer=lambda at_ms: holder[0].set_timer(0, at_ms),
            waiting_input=lambda: waiting_input(self.gate),
        )  # fmt: skip
        self.operator = RangeReaderOperator(RangeReaderSpec(how.source, {"orderedReads": str(how.ordered)}))
        partition = ResultPartition(
            Partitioning.FORWARD, (), 128, [self.out], limits=BufferLimits(1 << 20, 1 << 30, 0),
            now_ms=self.host.monotonic_ms,
        )  # fmt: skip
        chain = OperatorChain([self.operator], [self.context], ChainEnd([partition]))
        self.subtask = Subtask("v", how.subtask, "r (1/1)", self.host, self.gate, chain)
        holder.append(self.subtask)
        self.subtask.open()

    def put(self, *elements: Any) -> Lab:
        for element in elements:
            self.channel.put(element)
        return self

    def step(self, times: int = 1) -> Lab:
        for _ in range(times):
            self.subtask.step()
        return self

    def tick(self, times: int = 1) -> Lab:
        """Steps; the clock moves when there is nothing to do."""
        for _ in range(times):
            if not self.subtask.step():
                self.host.wall_ms += 1
        return self

    def run(self) -> Lab:
        for _ in range(10_000):
            if not self.subtask.step():
                if self.subtask.wait_ms() is None:
                    return self
                self.host.wall_ms += 1
        raise AssertionError("it never comes to rest")

    @property
    def rows(self) -> list[tuple[int, ...]]:
        return [tuple(row.values()) for batch in self.out.batches for row in batch.to_pylist()]

    @property
    def lists(self) -> tuple[OperatorListState, ...]:
        return self.context.operator_state.snapshot()

    @property
    def snapshots(self) -> list[int]:
        return list(self.host.snapshot_ids)


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_runtime.connectors.datasource_rows.BATCH_ROWS", BATCH)


def test_a_step_reads_one_buffer_and_the_mailbox_is_heard_between_two(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0))
    sizes = []
    heard: list[int] = []
    while lab.subtask.step():
        sizes.append(len(lab.rows) - sum(sizes))
        lab.subtask.mail(lambda: heard.append(len(lab.rows)))
        lab.subtask.step()
    assert max(sizes) == BATCH
    assert len(set(heard)) > len(SIZES)
    assert lab.rows == expected(1)


def test_output_without_room_stops_the_reading(kit: TaskKit) -> None:
    lab = Lab(kit)
    lab.out.capacity = 2
    lab.put(range_of(0)).run()
    assert len(lab.out.batches) == 2
    lab.out.capacity = None
    lab.run()
    assert lab.rows == expected(1)


@pytest.mark.row("io.2")
@pytest.mark.parametrize("ordered", [True, False])
def test_a_barrier_comes_into_the_middle_of_a_range_and_the_rest_is_state(kit: TaskKit, ordered: bool) -> None:
    lab = Lab(kit, Given(ordered=ordered)).put(range_of(0), range_of(1))
    lab.step(2).put(kit.barrier(1))
    while not lab.snapshots:
        lab.step()
    before = lab.rows
    assert len(before) == (8 if ordered else 10)
    assert lab.snapshots == [1]
    state = lab.lists
    lab.run()
    assert lab.rows == expected(2)
    restored = Lab(kit, Given(ordered=ordered, state=state)).run()
    assert before + restored.rows == expected(2)
    restored.put(kit.barrier(2)).run()
    assert [item for entry in restored.lists for item in entry.items] == []


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_any_cuts_and_parallelisms_give_each_row_once(
    kit: TaskKit, cuts: list[int], before: int, after: int, ordered: bool
) -> None:
    """Several checkpoints in the first run, one restore at another parallelism from the last, cut again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_runtime.connectors.datasource_rows.BATCH_ROWS", BATCH)
        labs = [Lab(kit, Given(ordered=ordered, subtask=i, parallelism=before)) for i in range(before)]
        rows: list[tuple[int, ...]] = []
        items: list[Any] = []
        for lab in labs:
            taken: list[tuple[int, ...]] = []
            for number, cut in enumerate(cuts):
                lab.put(range_of(number, lab.subtask.index, before)).step(cut).put(kit.barrier(number + 1))
                for _ in range(1_000):
                    if len(lab.snapshots) > number:
                        break
                    lab.step()
                taken = lab.rows
            assert lab.snapshots == list(range(1, len(cuts) + 1))
            rows += taken
            items += [item for entry in lab.lists for item in entry.items]
        name, mode = labs[0].lists[0].name, labs[0].lists[0].mode
        for index in range(after):
            own = OperatorListState(name, mode, tuple(json.loads(json.dumps(items))[index::after]))
            lab = Lab(kit, Given(ordered=ordered, subtask=index, parallelism=after, state=(own,)))
            rows += lab.put(range_of(len(cuts), index, after)).run().rows
        assert sorted(rows) == expected(len(cuts) + 1)


def test_ranges_in_front_of_a_barrier_are_taken_so_that_it_can_pass(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).step(2).put(range_of(1), range_of(2), kit.barrier(1), range_of(3))
    lab.step(4)
    assert lab.snapshots == [1]
    assert [item["sequence"] for item in lab.lists[0].items] == list(range(3 * len(SIZES)))
    assert lab.run().rows == expected(4)


def test_ranges_are_taken_from_time_to_time_as_a_barrier_may_lack_credit(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).step(1).put(range_of(1))
    lab.step(2)
    assert len(lab.channel.queue) == 1
    lab.host.wall_ms += split_host._LEAST_TAKE_MS
    lab.host.mono_ms += split_host._LEAST_TAKE_MS
    lab.step(2)
    assert len(lab.channel.queue) == 0
    lab.put(range_of(2)).step(2)
    assert len(lab.channel.queue) == 1
    assert lab.run().rows == expected(3)


def test_the_end_of_data_waits_for_the_rows_and_a_stop_without_drain_does_not(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).step(2).put(EndOfData(True), kit.barrier(1)).step(3)
    assert not lab.subtask.data_ended
    assert lab.run().rows == expected(1)
    assert lab.subtask.data_ended
    assert lab.snapshots == [1]
    stopped = Lab(kit).put(range_of(0)).step(2).put(EndOfData(False), kit.barrier(1)).run()
    assert stopped.subtask.data_ended
    assert stopped.snapshots == [1]
    assert 0 < len(stopped.rows) < len(expected(1))
    assert stopped.rows + Lab(kit, Given(state=stopped.lists)).run().rows == expected(1)


@pytest.mark.row("147.1")
@pytest.mark.parametrize("ordered", [True, False])
def test_checkpoints_continue_after_the_end_of_data(kit: TaskKit, ordered: bool) -> None:
    """First in the channel; then, when the predecessor is gone, by the coordinator."""
    how = Given(ordered=ordered)
    lab = Lab(kit, how).put(range_of(0)).step(2).put(Watermark(MAX_WATERMARK), EndOfData(True), kit.barrier(1))
    while not lab.snapshots:
        lab.step()
    before, state = lab.rows, lab.lists
    assert len(before) == (8 if ordered else 10)
    assert before + Lab(kit, Given(ordered=ordered, state=state)).run().rows == expected(1)
    lab.put(EndOfPartition()).step(4)
    lab.subtask.trigger_checkpoint(kit.barrier(2))
    assert lab.snapshots == [1, 2]
    assert not lab.subtask.data_ended
    before, state = lab.rows, lab.lists
    assert len(before) < len(expected(1))
    if ordered:
        assert before + Lab(kit, Given(ordered=ordered, state=state)).run().rows == expected(1)
    lab.run()
    assert lab.rows == expected(1)
    assert lab.subtask.data_ended
    assert lab.subtask.state is TaskState.RUNNING
    lab.subtask.notify_complete(2)
    assert lab.subtask.state is TaskState.FINISHED


@pytest.mark.row("147.5")
@pytest.mark.parametrize("by", ["barrier", "coordinator"])
def test_a_savepoint_with_drain_waits_for_the_rows(kit: TaskKit, by: str) -> None:
    stop = kit.barrier(7, CheckpointType.SYNC_SAVEPOINT, drain=True)
    lab = Lab(kit).put(range_of(0)).step(2).put(Watermark(MAX_WATERMARK), EndOfData(True))
    if by == "barrier":
        lab.put(kit.barrier(6), stop).step(4)
    else:
        lab.put(EndOfPartition()).step(4)
        lab.subtask.trigger_checkpoint(stop)
    assert 7 not in lab.snapshots
    assert lab.run().rows == expected(1)
    assert lab.snapshots[-1] == 7
    assert lab.lists[0].items == ()
    ends = [item for item in lab.out.elements if isinstance(item, EndOfData | Watermark)]
    assert ends == [Watermark(MAX_WATERMARK), EndOfData(True)]
    assert lab.out.elements[-3:] == [*ends, stop]


@pytest.mark.row("147.5")
def test_savepoint_without_drain_after_the_end_of_data_keeps_the_remaining_rows(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).step(2).put(EndOfData(True), EndOfPartition()).step(4)
    lab.subtask.trigger_checkpoint(kit.barrier(7, CheckpointType.SYNC_SAVEPOINT))
    assert lab.snapshots == [7]
    assert lab.subtask.data_ended
    stopped = lab.rows
    assert lab.run().rows == stopped
    assert stopped + Lab(kit, Given(state=lab.lists)).run().rows == expected(1)


def test_final_watermark_stays_after_the_rows(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).step(2).put(Watermark(MAX_WATERMARK), EndOfData(True))
    lab.host.wall_ms += split_host._GREATEST_TAKE_MS
    lab.run()
    assert lab.rows == expected(1)
    assert lab.out.elements[-2:] == [Watermark(MAX_WATERMARK), EndOfData(True)]
    assert sum(isinstance(item, Watermark) for item in lab.out.elements) == 1


SIZE = len(SIZES)


def between_ends(lab: Lab) -> list[list[tuple[int, ...]]]:
    """The rows in front of each end of a range, and those behind the last one."""
    rows = iter(lab.rows)
    found: list[list[tuple[int, ...]]] = [[]]
    for element in lab.out.elements:
        if isinstance(element, EndOfRange):
            found.append([])
        elif isinstance(element, list):
            found[-1] += [next(rows) for _ in element]
    return found


@pytest.mark.parametrize(
    "elements",
    [
        (range_of(0), Watermark(SIZE), range_of(1), Watermark(2 * SIZE)),
        (range_of(0), range_of(1), Watermark(2 * SIZE)),
        (range_of(0), range_of(1).slice(0, 2), Watermark(SIZE), range_of(1).slice(2), Watermark(2 * SIZE)),
        (range_of(0), range_of(1), Watermark(SIZE), Watermark(2 * SIZE)),
        (range_of(0).slice(0, 1), range_of(0).slice(1), Watermark(SIZE), range_of(1), Watermark(2 * SIZE)),
    ],
    ids=["each", "the last", "late", "both late", "in two buffers"],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_end_of_a_range_follows_all_of_its_rows_and_no_others(
    kit: TaskKit, elements: tuple[Any, ...], at_once: bool
) -> None:
    """Wherever the enumerator's watermarks stand among the partitions, which wait for full buffers."""
    lab = Lab(kit)
    if at_once:
        lab.put(*elements).run()
    else:
        for element in elements:
            lab.put(element).run()
    assert [rows for rows in between_ends(lab) if rows] == [expected(1), expected(2)[len(expected(1)) :]]
    assert isinstance(lab.out.elements[-1], EndOfRange)


def test_rows_that_arrive_with_their_range_end_it(kit: TaskKit) -> None:
    lab = Lab(kit).put(carried(0), carried(1), Watermark(2)).run()
    assert between_ends(lab) == [[(n, 0, row) for row in range(3)] for n in range(2)] + [[]]


def test_range_without_an_end_from_the_enumerator_may_continue(kit: TaskKit) -> None:
    lab = Lab(kit).put(range_of(0)).run()
    assert between_ends(lab) == [expected(1)]
    lab.put(Watermark(SIZE)).run()
    assert between_ends(lab) == [expected(1), []]


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("cut", range(1, 14))
def test_restored_rows_of_a_range_precede_its_end(kit: TaskKit, ordered: bool, cut: int) -> None:
    """The enumerator says again how far it has come."""
    lab = Lab(kit, Given(ordered=ordered)).put(range_of(0), range_of(1)).step(cut).put(kit.barrier(1))
    while not lab.snapshots:
        lab.step()
    before, state = between_ends(lab), lab.lists
    restored = Lab(kit, Given(ordered=ordered, state=state)).put(Watermark(2 * SIZE)).run()
    first, *after = between_ends(restored)
    whole = [*before[:-1], before[-1] + first, *after]
    assert [rows for rows in whole if rows] == [expected(1), expected(2)[len(expected(1)) :]]


class Committing(Reader):
    def commit(self, end: dict[str, Any]) -> None:
        pass


class Committed(Ranges):
    reader = Committing


def test_ranges_of_a_reader_that_commits_are_not_cut(kit: TaskKit) -> None:
    lab = Lab(kit, Given(source=Committed)).put(range_of(0)).step(2).put(kit.barrier(1), range_of(1))
    while not lab.snapshots:
        lab.step()
    assert lab.rows == expected(1)
    assert lab.lists[0].items == ()
    assert lab.run().rows == expected(2)


def test_rows_that_came_with_their_range_are_not_cut(kit: TaskKit) -> None:
    lab = Lab(kit).put(carried(0)).step(2).put(kit.barrier(1))
    assert len(lab.rows) == 1
    lab.step(10)
    assert lab.snapshots == [1]
    assert lab.lists[0].items == ()
    assert lab.rows == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"digest": "0" * 16}, "does not give the 8 rows that it gave before the restore in the same order"),
        ({"rows": 11}, r"Ranges: partition .*Part.*\[0,0\].* does not give the 11 rows that it gave"),
    ],
)
def test_a_reader_that_gives_something_else_after_a_restore_is_named(
    kit: TaskKit, change: dict[str, Any], text: str
) -> None:
    lab = Lab(kit).put(range_of(0)).step(2).put(kit.barrier(1)).step(2)
    (entry,) = lab.lists
    first, *others = entry.items
    assert (first["rows"], len(others)) == (8, 3)
    broken = OperatorListState(entry.name, entry.mode, ({**first, **change}, *others))
    with pytest.raises(ReplayError, match=text):
        Lab(kit, Given(state=(broken,))).run()


class Shuffled(Reader):
    """The rows of a partition in another order each time."""

    def read(self, partition: Any) -> Iterator[Any]:
        rows = list(super().read(partition))
        random.SystemRandom().shuffle(rows)
        yield from rows


class InAnyOrder(Ranges):
    reader = Shuffled


@pytest.mark.row("147.1")
@pytest.mark.parametrize("steps", range(5, 30))
@pytest.mark.parametrize("savepoint", [False, True])
def test_a_trigger_of_the_coordinator_waits_for_the_end_of_a_partition(
    kit: TaskKit, steps: int, savepoint: bool
) -> None:
    """The enumerator has finished; what is restored may come in another order."""
    how = Given(source=InAnyOrder, ordered=False)
    lab = Lab(kit, how).put(range_of(0), range_of(1), Watermark(MAX_WATERMARK), EndOfData(True), EndOfPartition())
    lab.tick(steps)
    stop = kit.barrier(3, CheckpointType.SYNC_SAVEPOINT) if savepoint else kit.barrier(3)
    lab.subtask.trigger_checkpoint(stop)
    for _ in range(20):
        lab.tick(not lab.snapshots)
    assert lab.snapshots == [3]
    before, state = lab.rows, lab.lists
    assert all((item["rows"], item["digest"]) == (0, "") for entry in state for item in entry.items)
    rest = Lab(kit, Given(source=InAnyOrder, ordered=False, state=state)).run().rows
    assert sorted(before + rest) == expected(2)


@pytest.mark.parametrize("what", ["rows instead", "a reader that commits"])
def test_coordinators_trigger_waits_for_a_partition_that_must_be_read_as_a_whole(kit: TaskKit, what: str) -> None:
    given, sent = (Given(), carried(0)) if what == "rows instead" else (Given(source=Committed), range_of(0))
    lab = Lab(kit, given).put(sent, Watermark(MAX_WATERMARK), EndOfData(True), EndOfPartition())
    lab.tick(2)
    whole = [(0, 0, row) for row in range(3)] if what == "rows instead" else expected(1)
    assert len(lab.rows) < len(whole)
    lab.subtask.trigger_checkpoint(kit.barrier(1))
    assert lab.snapshots == []
    for _ in range(20):
        lab.tick(not lab.snapshots)
    assert lab.snapshots == [1]
    assert lab.rows == whole
    assert lab.run().subtask.data_ended


def test_a_trigger_that_waits_is_forgotten_when_its_checkpoint_is_aborted(kit: TaskKit) -> None:
    lab = Lab(kit, Given(ordered=False)).put(range_of(0), EndOfData(True), EndOfPartition()).tick(7)
    assert lab.operator.holds_checkpoints_back
    lab.subtask.trigger_checkpoint(kit.barrier(1, CheckpointType.SYNC_SAVEPOINT))
    lab.subtask.trigger_checkpoint(kit.barrier(2))
    lab.subtask.notify_aborted(1, None)
    assert lab.run().rows == expected(1)
    assert lab.snapshots == [2]


def test_an_open_partition_is_closed_with_the_subtask(kit: TaskKit) -> None:
    gc.collect()  # closes the readers of tests before this one
    closed = Reader.closed
    lab = Lab(kit).put(range_of(0)).step(2)
    lab.subtask.cancel()
    assert Reader.closed == closed + 1


def test_waiting_input_of_a_gate_is_recognized(kit: TaskKit) -> None:
    def found(*elements: Any) -> WaitingInput:
        gate = InputGate(lambda: None)
        channel = gate.add_channel(0, 4)
        for element in elements:
            channel.put(element)
        return waiting_input(gate)

    barrier: CheckpointBarrier = kit.barrier(1)
    assert found() is WaitingInput.NOTHING
    assert found(range_of(0), Watermark(1), CancelCheckpoint(1)) is WaitingInput.ROWS
    assert found(range_of(0), barrier) is WaitingInput.BARRIER
    assert found(range_of(0), EndOfData(True)) is WaitingInput.ROWS
    assert found(EndOfData(True), barrier) is WaitingInput.BARRIER
    assert found(EndOfData(True), EndOfPartition()) is WaitingInput.BARRIER
    stop = kit.barrier(1, CheckpointType.SYNC_SAVEPOINT, drain=True)
    assert found(EndOfData(True), stop, EndOfPartition()) is WaitingInput.NOTHING
    assert found(range_of(0), EndOfData(False)) is WaitingInput.BARRIER
    assert found(ConnectionError("lost")) is WaitingInput.BARRIER
