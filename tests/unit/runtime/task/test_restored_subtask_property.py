"""Whatever the schedule: a subtask restored from any of its checkpoints sees what an undisturbed one sees.

One subtask, one to three channels that a test fills, one channel out. Rows are numbers: the channel and a position in
it. Checked for every checkpoint that is taken, by restoring it: state, in-flight data, then what follows each barrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CancelCheckpoint, CheckpointBarrier, EndOfData, EndOfPartition, Watermark
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.storage.channel_state import ChannelStateReader
from ckpt_runtime.storage.filesystem import delete_tree, make_directory, resolve
from ckpt_runtime.task.restored_input import EdgeKeys, RestoredInput
from ckpt_runtime.task.snapshot_files import write_snapshot
from tests.support.effort import examples
from tests.unit.runtime.task.conftest import Bench, TaskKit, Wire

ALL = KeyGroupRange(0, 127)
PER_CHANNEL = 1_000
_NARROW = pa.schema([("n", pa.int32())])


@dataclass(frozen=True)
class Policy:
    """How one checkpoint is taken; ``cancelled`` by some channel's sender."""

    kind: str
    timeout_ms: int
    limit: int | None
    cancelled: int | None

    def element(self, kit: TaskKit, number: int, channel: int, directory: str) -> Any:
        if channel == self.cancelled:
            return CancelCheckpoint(number)
        if self.kind == "savepoint":
            return kit.barrier(number, CheckpointType.SAVEPOINT, directory=f"{directory}/chk-{number}")
        return kit.unaligned(
            number, timeout_ms=self.timeout_ms, limit=self.limit,
            directory=f"{directory}/chk-{number}", shared=f"{directory}/shared",
        )  # fmt: skip


policies = st.builds(
    Policy,
    st.sampled_from(["unaligned", "unaligned", "savepoint"]),
    st.sampled_from([0, 0, 0, 20]),
    st.sampled_from([None, None, None, None, 0, 400, 2_000]),
    st.sampled_from([None, None, None, None, None, 0]),
)
pieces = st.lists(st.one_of(st.integers(1, 6), st.just(0)), min_size=1, max_size=5)
"""Between two barriers: buffers of so many rows, 0 is a watermark."""


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[Policy], list[list[list[int]]], list[bool], list[int], float, int]:
    """(checkpoints, pieces around the barriers by channel, which channel overtakes, schedule, ms per row, capacity)"""
    checkpoints = draw(st.lists(policies, min_size=1, max_size=3))
    channels = draw(st.integers(1, 3))
    contents = [[draw(pieces) for _ in range(len(checkpoints) + 1)] for _ in range(channels)]
    overtakes = [draw(st.integers(0, 7)) > 0 for _ in range(channels)]
    schedule = draw(st.lists(st.integers(0, 99), min_size=40, max_size=150))
    return checkpoints, contents, overtakes, schedule, draw(st.sampled_from([0.0, 3.0])), draw(st.integers(1, 30))


def elements_of(kit: TaskKit, channel: int, content: list[list[int]], barriers: list[Any], ends: bool) -> list[Any]:
    found: list[Any] = []
    number = PER_CHANNEL * channel
    for position, piece in enumerate(content):
        for count in piece:
            number += max(count, 1)
            found.append(kit.rows(*range(number - count, number)) if count else Watermark(number))
        if position < len(barriers):
            found.append(barriers[position])
    return [*found, EndOfData(True), EndOfPartition()] if ends else found


def flat(elements: list[Any]) -> list[Any]:
    """Rows one by one, and watermarks."""
    found: list[Any] = []
    for element in elements:
        if isinstance(element, pa.RecordBatch):
            found += element.column(0).to_pylist()
        elif isinstance(element, list):
            found += element
        elif isinstance(element, Watermark):
            found.append(element)
    return found


def rows_only(elements: list[Any]) -> list[int]:
    return [element for element in elements if not isinstance(element, Watermark)]


def of_channel(rows: list[int], channel: int) -> list[int]:
    return [row for row in rows if row // PER_CHANNEL == channel]


def ids_of(elements: list[Any]) -> list[int]:
    """Of barriers and cancellations."""
    return [e.checkpoint_id for e in elements if isinstance(e, CheckpointBarrier | CancelCheckpoint)]


def read_back(directory: Any, stream: ChannelStateStream) -> list[Any]:
    reader = ChannelStateReader(directory, stream)
    found: list[Any] = []
    while (element := reader.read()) is not None:
        if isinstance(element.content, pa.Buffer):
            found += pa.ipc.read_record_batch(element.content, reader.schema).column(0).to_pylist()
        else:
            found.append(Watermark(element.content.timestamp_ms))
    reader.close()
    return found


class Collector:
    """Makes the head of a bench keep every row in its state, and notes what the state was for each checkpoint."""

    def __init__(self, bench: Bench, rows: list[int]) -> None:
        self.rows = list(rows)
        self.states: dict[int, list[int]] = {}
        worked = bench.head.at["batch"]

        def batch() -> None:
            self.rows += bench.calls[-1][3]
            worked()

        bench.head.at["batch"] = batch
        bench.head.at["snapshot"] = lambda: self.states.update({bench.calls[-1][2]: list(self.rows)})


class Run:
    """One subtask, driven by the schedule; ``taken`` are its written checkpoints by id."""

    def __init__(self, kit: TaskKit, bench: Bench, wire: Wire, channels: list[list[Any]], state: list[int]) -> None:
        self.bench, self.wire = bench, wire
        self.waiting = [list(channel) for channel in channels]
        self.collector = Collector(bench, state)
        self.taken: dict[int, Any] = {}
        self.sent: list[Any] = []
        self._written = 0
        bench.subtask.open()

    def act(self, choice: int) -> None:
        if choice < 40:
            self.put(choice % len(self.waiting))
        elif choice < 80:
            self.bench.subtask.step()
        elif choice < 90:
            self.wire.grant(1 + choice % 3)
        elif choice < 95:
            self.bench.host.wall_ms += choice - 85
        else:
            done = sorted(self.taken)
            if done:
                self.bench.subtask.notify_complete(done[choice % len(done)])
        self.look()

    def put(self, channel: int) -> None:
        if self.waiting[channel]:
            element = self.waiting[channel].pop(0)
            if channel == 1 and isinstance(element, pa.RecordBatch):
                # Of two types, which take turns at random.
                element = element.cast(_NARROW) if element.column(0)[0].as_py() % 2 else element
                element = EncodedRows(element.schema, element.serialize())
            self.bench.put(channel, element)

    def look(self) -> None:
        """Writes what has been handed over, as the worker's pool would."""
        host = self.bench.host
        while self._written < len(host.written):
            snapshot = host.written[self._written]
            self._written += 1
            persisted = self.bench.subtask.checkpoints.persisted
            assert snapshot.barrier.checkpoint_id not in self.taken
            self.taken[snapshot.barrier.checkpoint_id] = (snapshot, write_snapshot(snapshot, 100, persisted))
        self.sent += self.wire.take()

    def to_the_end(self) -> None:
        for channel in range(len(self.waiting)):
            while self.waiting[channel]:
                self.put(channel)
        for _ in range(2_000):
            self.wire.grant(9)
            self.bench.host.wall_ms += 50
            if not self.bench.subtask.step():
                break
        else:
            raise AssertionError("the subtask never comes to rest")
        self.look()


@pytest.fixture(scope="module")
def short_slices() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.row("76.2", "76.5", "76.8", "76.11")
@settings(max_examples=examples(100))
@given(scenarios(), st.booleans())
def test_a_restored_subtask_sees_what_an_undisturbed_one_sees(
    kit: TaskKit, short_slices: pytest.MonkeyPatch, scenario: Any, ends: bool
) -> None:
    checkpoints, contents, overtakes, schedule, row_ms, capacity = scenario
    directory = f"memory://{uuid4().hex}"
    make_directory(resolve(directory).child("shared"))
    try:
        barriers = [
            [policy.element(kit, number, channel, directory) for number, policy in enumerate(checkpoints, 1)]
            for channel in range(len(contents))
        ]
        channels = [
            elements_of(kit, channel, content, barriers[channel], ends) for channel, content in enumerate(contents)
        ]
        wire = kit.Wire(capacity)
        short_slices.setattr("ckpt_runtime.operators.slice_size.FIRST_ROWS", 2)
        bench = kit.Bench(inputs=[(0, overtakes[c]) for c in range(len(channels))], wires=[wire])
        bench.row_ms = row_ms
        run = Run(kit, bench, wire, channels, [])
        for choice in schedule:
            run.act(choice)
        run.to_the_end()
        everything = [rows_only(flat(channel)) for channel in channels]
        assert [of_channel(run.collector.rows, c) for c in range(len(channels))] == everything
        assert ids_of(run.sent) == sorted(ids_of(run.sent)), "a barrier overtook another"
        cancelled = {number for number, policy in enumerate(checkpoints, 1) if policy.cancelled is not None}
        # One that a sender cancelled may still be taken, without effect, when the end of the channel is announced.
        assert set(run.taken) | cancelled == set(range(1, len(checkpoints) + 1))
        for number in run.taken.keys() - cancelled:
            check(kit, run, number, channels, overtakes, directory, ends)
    finally:
        delete_tree(resolve(directory))


def check(
    kit: TaskKit, run: Run, number: int, channels: list[list[Any]], overtakes: list[bool], directory: str, ends: bool
) -> None:
    snapshot, written = run.taken[number]
    state = run.collector.states[number]
    here = resolve(f"{directory}/chk-{number}")
    limit = snapshot.barrier.options.max_inflight_data_bytes
    if not snapshot.barrier.options.unaligned:
        assert not written.state.has_channel_state
    if limit is not None:
        assert sum(c.bytes for c in (*snapshot.in_flight.inputs, *snapshot.in_flight.outputs)) <= limit
    after = []
    for index, channel in enumerate(channels):
        place = next(i for i, e in enumerate(channel) if isinstance(e, CheckpointBarrier) and e.checkpoint_id == number)
        before = flat(channel[:place])
        after.append([e for e in channel[place + 1 :] if not isinstance(e, CheckpointBarrier | CancelCheckpoint)])
        kept = [e for stream in written.state.inputs if stream.peer == index for e in read_back(here, stream)]
        assert kept == (before[-len(kept) :] if kept else []), "rows or watermarks are not where they were"
        assert of_channel(state, index) + rows_only(kept) == rows_only(before)
        if not overtakes[index]:
            assert kept == []
    place = next(i for i, e in enumerate(run.sent) if isinstance(e, CheckpointBarrier) and e.checkpoint_id == number)
    overtaken = [e for stream in written.state.outputs for e in read_back(here, stream)]
    assert rows_only(flat(run.sent[:place])) + rows_only(overtaken) == state
    restored = RestoredInput(
        "op0", written.state.inputs, lambda stream: ChannelStateReader(here, stream), [EdgeKeys(("n",), 128)]
    )
    wire = kit.Wire()
    again = kit.Bench(inputs=[(0, True)] * len(channels), wires=[wire], restored=restored)
    rest = Run(kit, again, wire, after, state)
    rest.to_the_end()
    expected = [rows_only(flat(channel)) for channel in channels]
    assert [of_channel(rest.collector.rows, c) for c in range(len(channels))] == expected
    assert rows_only(flat(rest.sent)) == rest.collector.rows[len(state) :]
    if ends:
        assert again.host.ends_of_data == 1
        assert rest.bench.subtask.state is TaskState.RUNNING
