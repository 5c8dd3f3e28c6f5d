"""In-flight data on its way into a snapshot: sizes, what is written or referred to, and that failures leave nothing."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream, KeyedHandle, KeyedStateHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CheckpointBarrier, Watermark
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.state.backend import SnapshotFiles
from ckpt_runtime.storage.channel_state import HEADER_BYTES, ChannelStateReader, PersistedElement, decode_schema
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task import snapshot_files
from ckpt_runtime.task.in_flight import CapturedChannel, InFlight, PersistedBuffers, size_of
from ckpt_runtime.task.snapshot_files import WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot
from tests.unit.runtime.task.conftest import TaskKit

ALL = KeyGroupRange(0, 127)


class Frozen:
    """A keyed snapshot of some bytes, which notes its release."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.released = 0

    def write(self, files: SnapshotFiles) -> list[KeyedHandle]:
        with files.private() as file:
            file.stream.write(bytes(100))
            if self.error is not None:
                raise self.error
            return [KeyedStateHandle(ALL, file.finish(), ())]

    def release(self) -> None:
        self.released += 1


class Storage:
    """A job's directories, and snapshots written there one after the other."""

    def __init__(self, directory: Path) -> None:
        self.root = directory
        self.persisted = PersistedBuffers()
        (directory / "shared").mkdir()

    def write(
        self,
        number: int,
        inputs: Sequence[CapturedChannel] = (),
        outputs: Sequence[CapturedChannel] = (),
        operators: Sequence[Frozen] = (),
        *,
        threshold: int = 0,
        full: bool = False,
    ) -> WrittenSnapshot:
        (self.root / f"chk-{number}").mkdir()
        options = CheckpointOptions(
            CheckpointProperties(full=full), str(self.root / f"chk-{number}"), unaligned=True,
            shared_directory=str(self.root / "shared"),
        )  # fmt: skip
        snapshot = SubtaskSnapshot(
            CheckpointBarrier(number, 0, options),
            tuple(OperatorSnapshot(f"op{i}", (), frozen) for i, frozen in enumerate(operators)),
            InFlight(tuple(inputs), tuple(outputs)),
            SnapshotMeasures(0, 0, 0, 0.0),
        )
        return write_snapshot(snapshot, threshold, self.persisted)

    def files(self) -> list[Path]:
        return sorted(path for path in self.root.rglob("*") if path.is_file())

    def content(self, number: int, stream: ChannelStateStream) -> list[Any]:
        reader = ChannelStateReader(resolve(str(self.root / f"chk-{number}")), stream)
        found: list[Any] = []
        while (element := reader.read()) is not None:
            found.append(element.content)
        reader.close()
        return found


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(tmp_path)


@pytest.mark.row("76.3")
def test_in_flight_data_of_a_subtask_is_one_file_apart_from_its_state(storage: Storage, kit: TaskKit) -> None:
    encoded, batch = kit.encoded(1), kit.rows(2)
    message = encoded.message
    frozen = Frozen()
    written = storage.write(
        1,
        [CapturedChannel(0, [encoded, Watermark(3)]), CapturedChannel(1, [batch], edge=1)],
        [CapturedChannel(4, [encoded], edge=2)],
        [frozen],
    )
    assert len(written.files.locations) == len(storage.files()) == 2
    assert [(s.edge, s.peer) for s in written.state.inputs] == [(0, 0), (1, 1)]
    assert [(s.edge, s.peer) for s in written.state.outputs] == [(2, 4)]
    assert written.state.inputs[1].schema, "a batch brings its own schema"
    in_flight = 2 * message.size + batch.serialize().size + 4 * HEADER_BYTES + 8
    assert written.in_flight_bytes == in_flight
    assert written.written_bytes == written.state.bytes == 100 + in_flight
    assert storage.content(1, written.state.outputs[0]) == [message]
    assert frozen.released == 1


def test_rows_with_dictionaries_are_stored_plain_and_reused_later(storage: Storage, kit: TaskKit) -> None:
    texts = [pa.array(values).dictionary_encode() for values in (["a", "b", "a"], ["c", None])]
    batches = [pa.record_batch({"s": text, "t": pa.StructArray.from_arrays([text], ["u"])}) for text in texts]
    stream = storage.write(1, [CapturedChannel(0, list(batches))]).state.inputs[0]
    schema = decode_schema(stream.schema)
    assert schema is not None
    assert schema.types == [pa.string(), pa.struct([("u", pa.string())])]
    read = [pa.ipc.read_record_batch(content, schema) for content in storage.content(1, stream)]
    assert [batch.column("s").to_pylist() for batch in read] == [["a", "b", "a"], ["c", None]]
    assert [batch.column("t").field(0).to_pylist() for batch in read] == [["a", "b", "a"], ["c", None]]
    storage.persisted.completed(1)
    again = storage.write(2, [CapturedChannel(0, list(batches))])
    assert (again.in_flight_bytes, again.state.inputs[0].schema) == (0, stream.schema)


@pytest.mark.row("76.11")
def test_in_flight_data_of_a_completed_checkpoint_is_reused(storage: Storage, kit: TaskKit) -> None:
    first, second = kit.encoded(1), kit.encoded(2)
    storage.write(1, [CapturedChannel(0, [first])])
    storage.persisted.completed(1)
    later = storage.write(2, [CapturedChannel(0, [first, second])])
    assert later.in_flight_bytes == second.message.size + HEADER_BYTES
    assert later.state.bytes == first.message.size + second.message.size + 2 * HEADER_BYTES
    assert later.state.inputs[0].bytes == later.state.bytes
    assert len({segment.file for segment in later.state.inputs[0].segments}) == 2
    assert len(later.files.locations) == 1
    assert storage.content(2, later.state.inputs[0]) == [first.message, second.message]
    storage.persisted.completed(2)
    nothing_new = storage.write(3, [CapturedChannel(0, [first, second])])
    assert (nothing_new.in_flight_bytes, nothing_new.files.locations) == (0, [])
    full = storage.write(4, [CapturedChannel(0, [first, second])], full=True)
    assert len({segment.file for segment in full.state.inputs[0].segments}) == 1
    assert storage.content(4, full.state.inputs[0]) == [first.message, second.message]


def test_rows_whose_schema_changes_are_one_stream_for_each_run_and_reused_later(storage: Storage, kit: TaskKit) -> None:
    other = pa.record_batch({"m": pa.array(["x"])})
    encoded = EncodedRows(other.schema, other.serialize())
    captured = [kit.encoded(1), Watermark(1), kit.rows(2), other, Watermark(2), encoded, kit.encoded(3)]
    written = storage.write(1, [CapturedChannel(5, list(captured))], [CapturedChannel(6, [encoded])])
    streams = written.state.inputs
    assert [(stream.peer, decode_schema(stream.schema)) for stream in streams] == [
        (5, kit.rows(1).schema),
        (5, other.schema),
        (5, kit.rows(1).schema),
    ]
    assert [len(storage.content(1, stream)) for stream in (*streams, *written.state.outputs)] == [3, 3, 1, 1]
    storage.persisted.completed(1)
    again = storage.write(2, [CapturedChannel(5, list(captured))])
    assert [stream.schema for stream in again.state.inputs] == [stream.schema for stream in streams]
    assert again.in_flight_bytes == 2 * (HEADER_BYTES + 8), "only the watermarks"


def test_small_data_is_stored_in_the_handles_and_never_reused(storage: Storage, kit: TaskKit) -> None:
    encoded = kit.encoded(1)
    written = storage.write(1, [CapturedChannel(0, [encoded])], threshold=1 << 20)
    assert (written.files.locations, storage.files()) == ([], [])
    assert written.in_flight_bytes == encoded.message.size + HEADER_BYTES
    storage.persisted.completed(1)
    assert storage.persisted.place_of(encoded, 3) is None


def test_failing_to_freeze_state_leaves_no_file(storage: Storage, kit: TaskKit) -> None:
    good, bad = Frozen(), Frozen(RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        storage.write(1, [CapturedChannel(0, [kit.rows(1)])], operators=[good, bad])
    assert storage.files() == []
    assert [good.released, bad.released] == [1, 1]


def test_failing_to_write_in_flight_data_leaves_no_file(
    storage: Storage, kit: TaskKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = Frozen()
    monkeypatch.setattr("ckpt_runtime.storage.channel_state.MAX_BODY_BYTES", 500)
    channels = [CapturedChannel(0, [kit.rows(1), kit.rows(*range(1_000))])]
    with pytest.raises(StorageError, match="in-flight element of .* bytes is larger"):
        storage.write(1, channels, operators=[frozen])
    assert storage.files() == []
    assert frozen.released == 1


def test_full_disk_at_the_second_file_removes_the_first(
    storage: Storage, kit: TaskKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> Any:
        raise StorageError("no space left", "x")

    monkeypatch.setattr(snapshot_files, "write_channel_state", no_room)
    with pytest.raises(StorageError, match="no space left"):
        storage.write(1, [CapturedChannel(0, [kit.rows(1)])], operators=[Frozen()])
    assert storage.files() == []


def test_an_abandoned_snapshot_is_deleted_but_not_the_files_that_it_refers_to(storage: Storage, kit: TaskKit) -> None:
    first, second = kit.encoded(1), kit.encoded(2)
    kept = storage.write(1, [CapturedChannel(0, [first])])
    storage.persisted.completed(1)
    storage.write(2, [CapturedChannel(0, [first, second])], operators=[Frozen()]).files.discard()
    assert [path.name for path in storage.files()] == [resolve(kept.state.inputs[0].segments[0].file.path).name]


def place(number: int) -> PersistedElement:
    return PersistedElement(StateFile(f"file:///shared/{number}", 100, "c"), 0, 10)


@pytest.fixture(params=["message", "batch"])
def buffer(request: pytest.FixtureRequest, kit: TaskKit) -> Any:
    return kit.encoded(1, 2) if request.param == "message" else kit.rows(1, 2)


def test_rows_count_as_they_are_kept_whether_they_came_over_the_wire_or_not(kit: TaskKit) -> None:
    batch = kit.rows(1, 2, 3)
    assert size_of(batch) == size_of(kit.encoded(1, 2, 3)) == batch.serialize().size
    assert size_of(batch.slice(1, 1)) == batch.slice(1, 1).serialize().size
    assert size_of(Watermark(5)) == 0
    assert size_of(place(1)) == 10
    assert CapturedChannel(0, [batch, Watermark(1), place(1)]).bytes == size_of(batch) + 10


def test_channels_without_elements_are_no_in_flight_data() -> None:
    empty = CapturedChannel(0)
    assert InFlight((empty,), (empty,)).is_empty
    assert not InFlight((empty,), (CapturedChannel(0, [Watermark(1)]),)).is_empty


class TestPersistedBuffers:
    def test_pending_older_checkpoint_that_stores_a_buffer_elsewhere_makes_its_file_unused(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        known.begun(2)
        assert known.place_of(buffer, 2) == place(1)
        assert known.place_of(buffer, 3) is None
        known.written(2, [(buffer, place(1))])
        assert known.place_of(buffer, 3) == place(1)
        known.written(2, [(buffer, place(2))])
        assert known.place_of(buffer, 3) is None
        known.aborted(2)
        assert known.place_of(buffer, 3) == place(1)

    @pytest.mark.row("76.11")
    def test_only_files_of_completed_checkpoints_are_reused(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        assert known.place_of(buffer, 3) is None
        known.completed(1)
        assert known.place_of(buffer, 3) == place(1)

    def test_an_aborted_one_is_forgotten_and_what_was_known_stays(self, buffer: Any) -> None:
        known = PersistedBuffers()
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        known.written(2, [(buffer, place(2))])
        known.aborted(2)
        known.completed(2)
        assert known.place_of(buffer, 3) == place(1)

    def test_later_checkpoint_replaces_the_buffer_and_earlier_ones_are_forgotten(
        self, buffer: Any, kit: TaskKit
    ) -> None:
        known, other = PersistedBuffers(), kit.rows(9)
        known.written(1, [(other, place(1))])
        known.written(2, [(buffer, place(2))])
        known.written(3, [(buffer, place(3))])
        known.completed(2)
        assert known.place_of(buffer, 3) == place(2)
        known.completed(1)
        assert known.place_of(other, 3) is None
        known.completed(3)
        assert known.place_of(buffer, 3) == place(3)

    def test_buffers_are_not_kept_alive(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        before = pa.total_allocated_bytes()
        for number in range(1, 4):
            big = kit.encoded(*range(100_000))
            known.written(number, [(big, place(number))])
            known.completed(number)
            assert known.place_of(big, 100) == place(number)
        del big
        gc.collect()
        assert pa.total_allocated_bytes() - before < 100_000
        assert known._places == {}
        assert known._written == {}

    def test_buffer_that_is_freed_before_completion_is_not_remembered(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        gone = kit.encoded(1)
        known.written(1, [(gone, place(1))])
        del gone
        gc.collect()
        known.completed(1)
        assert known._places == {}

    def test_an_equal_buffer_is_another_one(self, kit: TaskKit) -> None:
        known = PersistedBuffers()
        buffer = kit.encoded(1)
        known.written(1, [(buffer, place(1))])
        known.completed(1)
        assert known.place_of(kit.encoded(1), 3) is None
