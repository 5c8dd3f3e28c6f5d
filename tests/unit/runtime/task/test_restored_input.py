"""In-flight data of the restored checkpoint: read one element at a time, clipped, and kept again by the next one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import NO_PEER, ChannelStateSegment, ChannelStateStream
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.operators.operator import MAX_WATERMARK
from ckpt_runtime.state.hashing import hash_columns, key_groups_of
from ckpt_runtime.storage.channel_state import (
    CapturedStream,
    ChannelStateReader,
    InFlightWatermark,
    PersistedElement,
    write_channel_state,
)
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task.restored_input import (
    EdgeKeys,
    RestoredInput,
    RestoredRows,
    RestoredWatermark,
    StateRestoreError,
    StateUnavailableError,
    UnreadableInFlightDataError,
    check_schema,
)
from tests.unit.runtime.task.conftest import TaskKit

SCHEMA = pa.schema([("n", pa.int64())])
KEYS = [EdgeKeys(("n",), 128)]


class Stored:
    """Streams in real channel state files."""

    def __init__(self, root: Path) -> None:
        self.directory = resolve(str(root))
        self.shared = root / "shared"
        self.shared.mkdir()
        self.readers: list[ChannelStateReader] = []

    def stream(
        self, *elements: Any, edge: int = 0, peer: int = 0, groups: KeyGroupRange | None = None
    ) -> ChannelStateStream:
        written = write_channel_state(
            resolve(str(self.shared)), self.directory.child("chk-1"),
            [CapturedStream(edge, peer, SCHEMA, elements)], [], 0, full=False,
        )  # fmt: skip
        (stream,) = written.inputs
        segments = tuple(ChannelStateSegment(s.file, s.offset, s.length, groups) for s in stream.segments)
        return ChannelStateStream(stream.edge, stream.peer, stream.schema, segments)

    def restored(self, *streams: ChannelStateStream, keys: Sequence[EdgeKeys] = KEYS) -> RestoredInput:
        def open_reader(stream: ChannelStateStream) -> ChannelStateReader:
            self.readers.append(ChannelStateReader(self.directory, stream))
            return self.readers[-1]

        return RestoredInput("op0", streams, open_reader, keys)


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def everything(restored: RestoredInput) -> list[Any]:
    found: list[Any] = []
    while not restored.is_empty:
        match restored.poll():
            case RestoredRows(edge, batch):
                found.append((edge, batch.column(0).to_pylist()))
            case RestoredWatermark() as watermark:
                found.append(watermark)
    return found


@pytest.mark.row("76.5")
def test_streams_come_one_after_the_other_each_in_its_order(stored: Stored, kit: TaskKit) -> None:
    restored = stored.restored(
        stored.stream(kit.rows(1, 2), InFlightWatermark(5), InFlightWatermark(7, batch=3), kit.rows(3)),
        stored.stream(kit.rows(4), edge=1, peer=7),
    )
    assert everything(restored) == [
        (0, [1, 2]),
        RestoredWatermark(0, 0, Watermark(5)),
        RestoredWatermark(0, 0, Watermark(7, batch=3)),
        (0, [3]),
        (1, [4]),
    ]
    assert restored.poll() is None


def test_files_are_opened_when_their_turn_comes(stored: Stored, kit: TaskKit) -> None:
    restored = stored.restored(stored.stream(kit.rows(1)), stored.stream(kit.rows(2)))
    assert stored.readers == []
    restored.poll()
    assert len(stored.readers) == 1
    restored.close()
    assert restored.is_empty


def test_restore_has_one_element_in_memory(stored: Stored, kit: TaskKit) -> None:
    big = [kit.rows(*range(start, start + 50_000)) for start in range(0, 500_000, 50_000)]
    restored = stored.restored(stored.stream(*big))
    del big
    before, rows, most = pa.total_allocated_bytes(), 0, 0
    while not restored.is_empty:
        found = restored.poll()
        if isinstance(found, RestoredRows):
            rows += found.batch.num_rows
            most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 500_000
    assert most < 2 * 50_000 * 8


@pytest.mark.row("76.6")
def test_rows_are_clipped_to_the_key_groups_that_are_meant(stored: Stored, kit: TaskKit) -> None:
    batch = kit.rows(*range(100))
    groups = key_groups_of(hash_columns(batch, ["n"]), 128)
    own = KeyGroupRange(0, 63)
    expected = [n for n, group in enumerate(groups) if group <= 63]
    assert 0 < len(expected) < 100
    foreign = kit.rows(next(n for n, group in enumerate(groups) if group > 63))
    restored = stored.restored(stored.stream(foreign, batch, groups=own))
    assert everything(restored) == [(0, expected)]


@pytest.mark.row("76.7")
def test_checkpoint_during_a_restore_reuses_unread_data_after_the_rest_of_the_current_buffer(
    stored: Stored, kit: TaskKit
) -> None:
    first, second = stored.stream(kit.rows(1), kit.rows(2), peer=3), stored.stream(kit.rows(4), edge=1)
    restored = stored.restored(first, second, keys=[*KEYS, *KEYS])
    assert [kit.kept(c) for c in restored.unread(0, None)] == [[self_of(first)], [self_of(second)]]
    restored.poll()
    rest = kit.rows(9)
    left = restored.unread(0, rest)
    assert [(c.edge, c.peer) for c in left] == [(0, 3), (0, 3), (1, 0)]
    assert left[0].elements == [rest]
    (unread,) = left[1].elements
    assert isinstance(unread, PersistedElement)
    assert unread.file == first.segments[0].file
    assert unread.offset + unread.length == first.segments[0].length
    assert unread.offset > 0
    restored.poll()
    assert [(c.edge, len(c.elements)) for c in restored.unread(0, None)] == [(1, 1)]


def self_of(stream: ChannelStateStream) -> PersistedElement:
    (segment,) = stream.segments
    return PersistedElement(segment.file, segment.offset, segment.length)


def test_damage_is_named_with_the_file(stored: Stored, kit: TaskKit) -> None:
    stream = stored.stream(kit.rows(1))
    (file,) = stored.shared.iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateRestoreError, match=f"'op0'.*{file.name}"):
        stored.restored(stream).poll()


def test_missing_file_is_named_and_does_not_count_as_damage(stored: Stored, kit: TaskKit) -> None:
    stream = stored.stream(kit.rows(1))
    (file,) = stored.shared.iterdir()
    away = file.rename(file.with_name("away"))
    restored = stored.restored(stream)
    with pytest.raises(StateUnavailableError, match=f"'op0'.*{file.name}"):
        restored.poll()
    away.rename(file)
    assert restored.poll() is not None


class TestSchema:
    def test_another_one_is_refused_with_the_operator_and_both(self, stored: Stored, kit: TaskKit) -> None:
        now = pa.schema([("n", pa.string()), ("m", pa.int64())])
        with pytest.raises(UnreadableInFlightDataError) as caught:
            check_schema(stored.stream(kit.rows(1)), now, "my-operator")
        for part in ("'my-operator'", "[n: int64]", "[n: string, m: int64]", "Take a savepoint"):
            assert part in str(caught.value)

    def test_nullability_is_not_compared_and_streams_without_rows_fit(self, stored: Stored, kit: TaskKit) -> None:
        check_schema(stored.stream(kit.rows(1)), pa.schema([pa.field("n", pa.int64(), nullable=False)]), "op")
        check_schema(ChannelStateStream(0, 0, "", ()), SCHEMA, "op")
        check_schema(stored.stream(kit.rows(1)), None, "op")


class TestInASubtask:
    @pytest.mark.row("76.5")
    def test_restored_data_precedes_new_data_of_the_channels(self, stored: Stored, kit: TaskKit) -> None:
        restored = stored.restored(stored.stream(kit.rows(1), kit.rows(2)), stored.stream(kit.rows(3), peer=1))
        bench = kit.Bench(channels=2, restored=restored).open()
        bench.put(0, kit.rows(10)).put(1, kit.rows(11)).run()
        assert bench.out.elements == [[1], [2], [3], [10], [11]]
        assert bench.subtask.metrics.rows_in == 5

    def test_watermarks_count_for_the_channels_that_there_still_are(self, stored: Stored, kit: TaskKit) -> None:
        streams = [stored.stream(InFlightWatermark(5 + peer), peer=peer) for peer in (0, 1, 2, NO_PEER)]
        bench = kit.Bench(channels=2, restored=stored.restored(*streams)).open()
        bench.run()
        assert bench.called("watermark") == [(5,)]
        bench.put(0, Watermark(4), Watermark(9)).run()
        assert bench.called("watermark") == [(5,), (6,)]

    def test_coming_watermarks_of_all_channels_are_combined(self, stored: Stored, kit: TaskKit) -> None:
        streams = [
            stored.stream(InFlightWatermark(5), InFlightWatermark(8, batch=1)),
            stored.stream(InFlightWatermark(6), peer=1),
        ]
        bench = kit.Bench(channels=2, restored=stored.restored(*streams)).open()
        bench.run()
        assert (bench.called("watermark"), bench.called("coming")) == ([(5,)], [])
        bench.put(1, Watermark(9, batch=1), Watermark(7)).run()
        assert (bench.called("watermark"), bench.called("coming")) == ([(5,)], [(8, 1)])
        bench.put(0, Watermark(8), Watermark(9, batch=2)).run()
        assert (bench.called("watermark"), bench.called("coming")) == ([(5,), (7,)], [(8, 1)])
        bench.put(1, Watermark(12, batch=2), Watermark(9)).put(0, Watermark(MAX_WATERMARK)).run()
        assert bench.called("coming") == [(8, 1), (9, 2), (12, 2)]
        sent = [element for element in bench.out.elements if isinstance(element, Watermark)]
        assert sent[-2:] == [Watermark(9), Watermark(12, batch=2)]

    @pytest.mark.row("76.7")
    def test_checkpoint_during_a_restore_has_the_current_buffer_then_unread_data_then_the_channel(
        self, stored: Stored, kit: TaskKit
    ) -> None:
        stream = stored.stream(kit.rows(*range(300)), kit.rows(300))
        bench = kit.Bench(restored=stored.restored(stream)).open()
        bench.row_ms = 5
        bench.subtask.step()
        done = len(bench.called("batch")[0][1])
        bench.put(0, kit.rows(301), kit.unaligned(1))
        bench.subtask.step()
        found = bench.host.written[0].in_flight.inputs
        assert kit.kept(found[0]) == [list(range(done, 300))]
        (unread,) = found[1].elements
        assert unread.file == stream.segments[0].file
        assert kit.kept(found[2]) == [[301]]
        bench.run()
        assert [row for _, rows in bench.called("batch") for row in rows] == list(range(302))

    @pytest.mark.row("76.1")
    def test_restored_data_counts_for_the_bound_of_in_flight_data(self, stored: Stored, kit: TaskKit) -> None:
        bench = kit.Bench(restored=stored.restored(stored.stream(kit.rows(1), kit.rows(2)))).open()
        bench.put(0, kit.unaligned(1, limit=kit.rows(1).serialize().size + 30))
        bench.subtask.step()
        assert bench.host.snapshots == []
        bench.run()
        assert bench.host.snapshot_ids == [1]
        assert bench.out.elements == [[1], kit.unaligned(1, limit=kit.rows(1).serialize().size + 30), [2]]

    def test_the_end_of_the_subtask_closes_the_file(self, stored: Stored, kit: TaskKit) -> None:
        restored = stored.restored(stored.stream(kit.rows(1), kit.rows(2)))
        bench = kit.Bench(restored=restored).open()
        bench.subtask.step()
        bench.subtask.cancel()
        assert bench.subtask.state is TaskState.CANCELED
        assert restored.is_empty
