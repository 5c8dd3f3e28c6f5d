"""Channel state files: what is written, referred to and copied; lazy reading; damage; a full disk."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import convert, structs, to_builtins

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateSegment, ChannelStateStream, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.storage import channel_state
from ckpt_runtime.storage.channel_state import (
    HEADER_BYTES,
    CapturedStream,
    ChannelStateReader,
    ElementKind,
    InFlightElement,
    InFlightWatermark,
    PersistedElement,
    WrittenChannelState,
    frame_header,
    watermark_body,
    write_channel_state,
)
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, delete_tree, list_names, make_directory, resolve

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])


@pytest.fixture
def job(base: Location) -> Location:
    make_directory(base.child("shared"))
    return base


@pytest.fixture
def local_job(tmp_path: Path) -> Location:
    location = resolve(tmp_path / "job")
    make_directory(location.child("shared"))
    return location


def rows(*values: int) -> pa.RecordBatch:
    return pa.record_batch([[f"k{v}" for v in values], list(values)], schema=SCHEMA)


def write(
    job: Location,
    inputs: Sequence[CapturedStream],
    outputs: Sequence[CapturedStream] = (),
    *,
    number: int = 1,
    threshold: int = 0,
    full: bool = False,
) -> WrittenChannelState:
    return write_channel_state(job.child("shared"), job.child(f"chk-{number}"), inputs, outputs, threshold, full=full)


def captured(*elements: InFlightElement, edge: int = 0, peer: int = 0) -> CapturedStream:
    return CapturedStream(edge, peer, SCHEMA, elements)


def content(job: Location, stream: ChannelStateStream) -> list[object]:
    """Values of every element, by reading it."""
    reader = ChannelStateReader(job, stream)
    found: list[object] = []
    while (element := reader.read()) is not None:
        if isinstance(element.content, InFlightWatermark):
            found.append(element.content)
        else:
            found.append(pa.ipc.read_record_batch(element.content, reader.schema).column("v").to_pylist())
    assert reader.read() is None
    reader.close()
    return found


def places(written: WrittenChannelState) -> list[PersistedElement]:
    found = [place for stream in (*written.input_places, *written.output_places) for place in stream]
    assert all(place is not None for place in found)
    return [place for place in found if place is not None]


@pytest.mark.row("76.3")
def test_channels_of_a_subtask_are_in_one_file_each_in_its_order(job: Location) -> None:
    mark, coming = InFlightWatermark(-(1 << 62)), InFlightWatermark(7, batch=3)
    written = write(
        job,
        [captured(rows(1, 2), mark, coming, rows(3).serialize()), captured(edge=1), captured(rows(4), edge=1, peer=3)],
        [captured(rows(), rows(5), edge=2, peer=1)],
    )
    assert [(s.edge, s.peer) for s in written.inputs] == [(0, 0), (1, 3)]
    assert [(s.edge, s.peer) for s in written.outputs] == [(2, 1)]
    assert [content(job, stream) for stream in (*written.inputs, *written.outputs)] == [
        [[1, 2], mark, coming, [3]],
        [[4]],
        [[], [5]],
    ]
    assert written.file is not None
    assert list_names(job.child("shared")) == [resolve(written.file.path).name]
    assert resolve(written.file.path).name.startswith("chk-1-")
    segments = [segment for stream in (*written.inputs, *written.outputs) for segment in stream.segments]
    assert [segment.file for segment in segments] == [written.file] * 3
    assert [segment.offset for segment in segments] == [0, segments[0].length, segments[0].length + segments[1].length]
    assert sum(segment.length for segment in segments) == written.file.length == written.written_bytes
    assert written.referenced_bytes == 0
    assert [len(entry) for entry in written.input_places] == [4, 0, 1]


def test_the_format_never_changes(local_job: Location) -> None:
    """What an earlier release has written has to be read."""
    body = bytes(range(16))
    rows_header = "434b49460100000010000000000000000f1ccc3fbae5021a"
    mark_header = "434b4946020000000800000000000000e934d990edbdfb2f"
    assert frame_header("chk-1-x", 5, ElementKind.ROWS, body).hex() == rows_header
    assert frame_header("", 0, ElementKind.WATERMARK, watermark_body(InFlightWatermark(-2))).hex() == mark_header


def test_channel_state_without_elements_makes_no_file(job: Location) -> None:
    written = write(job, [captured(), captured(edge=1)], [captured()])
    assert (written.inputs, written.outputs, written.file, written.written_bytes) == ((), (), None, 0)
    assert (written.input_places, written.output_places) == (((), ()), ((),))
    assert list_names(job.child("shared")) == []


def test_small_content_is_stored_in_the_handles_once(job: Location) -> None:
    written = write(
        job,
        [captured(rows(1), InFlightWatermark(7)), captured(rows(2), peer=1)],
        [captured(rows(3))],
        threshold=1 << 20,
    )
    assert list_names(job.child("shared")) == []
    assert written.file is None
    assert written.input_places == ((None, None), (None,))
    streams = [convert(to_builtins(stream), ChannelStateStream) for stream in (*written.inputs, *written.outputs)]
    assert [content(job, stream) for stream in streams] == [[[1], InFlightWatermark(7)], [[2]], [[3]]]
    held = sum(len(segment.file.inline or b"") for stream in streams for segment in stream.segments)
    assert held == written.written_bytes


def test_the_threshold_counts_new_bytes_to_the_byte(job: Location) -> None:
    size = write(job, [captured(rows(1), rows(2))], threshold=1 << 20).written_bytes
    assert write(job, [captured(rows(1), rows(2))], threshold=size).file is None
    assert write(job, [captured(rows(1), rows(2))], threshold=size - 1).file is not None


@pytest.mark.row("76.11")
def test_stored_content_is_reused_and_adjacent_parts_are_joined(job: Location) -> None:
    first = write(job, [captured(rows(1), rows(2), rows(3), rows(4))])
    one, two, three, four = places(first)
    second = write(job, [captured(two, three, rows(9), one, four)], number=2)
    assert content(job, second.inputs[0]) == [[2], [3], [9], [1], [4]]
    segments = second.inputs[0].segments
    assert [segment.file for segment in segments] == [first.file, second.file, first.file, first.file]
    assert segments[0].length == two.length + three.length
    assert second.referenced_bytes == one.length + two.length + three.length + four.length
    assert second.written_bytes == second.inputs[0].segments[1].length
    assert second.input_places[0][:2] == (two, three)
    third = write(job, [captured(one, two, three, four)], number=3)
    assert third.file is None
    assert third.inputs[0].segments == first.inputs[0].segments


def test_other_rows_of_the_same_bytes_are_not_joined(job: Location) -> None:
    one, two = places(write(job, [captured(rows(1), rows(2))]))
    clipped = replace(two, key_groups=KeyGroupRange(3, 5))
    written = write(job, [captured(one, clipped)], number=2)
    assert [segment.key_groups for segment in written.inputs[0].segments] == [None, KeyGroupRange(3, 5)]
    copied = write(job, [captured(one, clipped)], number=3, full=True)
    assert [segment.key_groups for segment in copied.inputs[0].segments] == [None, KeyGroupRange(3, 5)]
    assert [place.key_groups for place in places(copied)] == [None, KeyGroupRange(3, 5)]


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_a_full_checkpoint_copies_and_needs_nothing_older(job: Location, threshold: int) -> None:
    first = write(job, [captured(rows(1), InFlightWatermark(5), rows(2))])
    run = first.inputs[0].segments[0]
    whole = PersistedElement(run.file, run.offset, run.length)
    second = write(job, [captured(whole, rows(3))], number=2, full=True, threshold=threshold)
    assert first.file is not None
    delete_file(resolve(first.file.path))
    assert content(job, second.inputs[0]) == [[1], InFlightWatermark(5), [2], [3]]
    assert len(second.inputs[0].segments) == 1
    assert second.referenced_bytes == 0
    assert second.written_bytes == second.inputs[0].bytes


@pytest.mark.row("203.6")
def test_foreign_and_inline_elements_are_copied_by_any_checkpoint(job: Location) -> None:
    stored = write(job, [captured(rows(1), rows(2))])
    reader = ChannelStateReader(job, stored.inputs[0], foreign=True)
    first = reader.read()
    assert first is not None
    inline = write(job, [captured(rows(8))], threshold=1 << 20).inputs[0].segments[0]
    held = PersistedElement(inline.file, inline.offset, inline.length)
    second = write(job, [captured(first.place, *reader.unread_elements(), held)], number=2)
    reader.close()
    assert content(job, second.inputs[0]) == [[1], [2], [8]]
    assert {segment.file for segment in second.inputs[0].segments} == {second.file}
    assert [place.foreign for place in places(second)] == [False] * 3


@pytest.mark.row("76.7")
def test_unread_content_is_reused_with_a_new_offset(job: Location) -> None:
    groups = KeyGroupRange(0, 9)
    segments = [
        replace(write(job, [captured(rows(i), rows(i + 1))]).inputs[0].segments[0], key_groups=groups) for i in (1, 3)
    ]
    stream = ChannelStateStream(2, 1, write(job, [captured(rows(0))]).inputs[0].schema, tuple(segments))
    reader = ChannelStateReader(job, stream)
    expected = [[1], [2], [3], [4]]
    while True:
        rest = reader.unread()
        assert (rest.edge, rest.peer, rest.schema) == (2, 1, stream.schema)
        assert all(segment.key_groups == groups and segment.length for segment in rest.segments)
        assert content(job, rest) == expected
        again = write(job, [CapturedStream(2, 1, SCHEMA, reader.unread_elements())], number=9)
        assert again.file is None
        assert [s.segments for s in again.inputs] == ([rest.segments] if expected else [])
        element = reader.read()
        if element is None:
            break
        assert element.place.key_groups == groups
        expected = expected[1:]
    assert expected == []
    assert reader.unread().segments == ()


def test_a_file_that_is_deleted_while_it_is_read_is_read_to_its_end(local_job: Location) -> None:
    written = write(local_job, [captured(*(rows(*range(20_000)) for _ in range(5)))])
    reader = ChannelStateReader(local_job, written.inputs[0])
    assert reader.read() is not None
    assert written.file is not None
    delete_file(resolve(written.file.path))
    assert sum(1 for _ in iter(reader.read, None)) == 4


READ_ALL = """
import json, resource, sys
from msgspec import convert
from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream
from ckpt_runtime.storage.channel_state import ChannelStateReader
from ckpt_runtime.storage.filesystem import resolve
reader = ChannelStateReader(resolve(sys.argv[1]), convert(json.loads(sys.argv[2]), ChannelStateStream))
reader.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in iter(reader.read, None))
print(count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.row("76.7")
def test_reading_keeps_one_element_in_memory(local_job: Location) -> None:
    batch = rows(*range(40_000)).serialize()
    written = write(local_job, [captured(*[batch] * 150)])
    assert written.written_bytes > 100 << 20
    arguments = [sys.executable, "-c", READ_ALL, local_job.path, json.dumps(to_builtins(written.inputs[0]))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, done.stdout.split())
    assert count == 149
    assert grown_kib < 20 << 10


class TestDamage:
    """Whatever is wrong is refused by name; nothing that was not written is ever returned."""

    def two_files(self, job: Location) -> tuple[WrittenChannelState, WrittenChannelState]:
        mark = InFlightWatermark(77)
        return write(job, [captured(rows(1), rows(2), mark)]), write(job, [captured(rows(3), rows(4), mark)])

    def path(self, written: WrittenChannelState) -> Path:
        assert written.file is not None
        return Path(resolve(written.file.path).path)

    def refused(self, job: Location, written: WrittenChannelState, match: str = "byte") -> None:
        """Reading ends with an error that names the file; everything before it is what was written."""
        expected: list[object] = [[1], [2], InFlightWatermark(77)]
        reader = ChannelStateReader(job, written.inputs[0])
        found: list[object] = []
        with pytest.raises(CorruptFileError, match=match) as caught:
            while (element := reader.read()) is not None:
                message = element.content
                if isinstance(message, InFlightWatermark):
                    found.append(message)
                else:
                    found.append(pa.ipc.read_record_batch(message, reader.schema).column("v").to_pylist())
        assert self.path(written).name in str(caught.value)
        assert self.path(written).name in caught.value.url
        assert found == expected[: len(found)]
        with pytest.raises(CorruptFileError):
            reader.read()
        reader.close()

    def test_every_flipped_bit(self, local_job: Location) -> None:
        written, _ = self.two_files(local_job)
        good = self.path(written).read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << position % 8
            self.path(written).write_bytes(bad)
            self.refused(local_job, written, "byte")

    def test_every_truncation(self, local_job: Location) -> None:
        written, _ = self.two_files(local_job)
        good = self.path(written).read_bytes()
        for length in range(len(good)):
            self.path(written).write_bytes(good[:length])
            self.refused(local_job, written, f"it has {length} bytes")
        self.path(written).write_bytes(good + b"x")
        self.refused(local_job, written, "bytes and not")

    def test_swapped_elements_and_files_are_damage(self, local_job: Location) -> None:
        first, second = self.two_files(local_job)
        one, two, _ = places(first)
        assert one.length == two.length
        good = self.path(first).read_bytes()
        self.path(first).write_bytes(good[one.length : 2 * one.length] + good[: one.length] + good[2 * one.length :])
        self.refused(local_job, first, "byte 0 is damaged: the element's checksum")
        self.path(first).write_bytes(self.path(second).read_bytes())
        self.refused(local_job, first, "checksum")

    def test_a_missing_file(self, job: Location) -> None:
        written = write(job, [captured(rows(1))])
        assert written.file is not None
        delete_file(resolve(written.file.path))
        with pytest.raises(NotFoundError, match=resolve(written.file.path).name):
            ChannelStateReader(job, written.inputs[0]).read()
        with pytest.raises(NotFoundError):
            write(job, [captured(rows(0), *places(written))], full=True)
        assert list_names(job.child("shared")) == []

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 10**9), (10**9, 1), (-1, 5), (0, -1), (1 << 70, 1), (True, 5), (0, 1.5), ("0", 5), (None, None)],
    )
    def test_handles_that_refer_to_other_places_are_refused(
        self, local_job: Location, offset: object, length: object
    ) -> None:
        written, _ = self.two_files(local_job)
        stream = written.inputs[0]
        bad = replace(stream, segments=(replace(stream.segments[0], offset=offset, length=length),))
        with pytest.raises(CorruptFileError, match=self.path(written).name):
            ChannelStateReader(local_job, bad)

    def test_other_places_in_handles_are_not_copied(self, local_job: Location) -> None:
        written, _ = self.two_files(local_job)
        assert written.file is not None
        for offset, length in ((0, 10**9), (10**9, 1), (-1, 5)):
            with pytest.raises(CorruptFileError, match=self.path(written).name):
                write(local_job, [captured(PersistedElement(written.file, offset, length))], full=True)

    @pytest.mark.parametrize("shift", [1, -1, HEADER_BYTES])
    def test_a_segment_that_begins_or_ends_inside_an_element(self, local_job: Location, shift: int) -> None:
        written, _ = self.two_files(local_job)
        stream = written.inputs[0]
        whole = stream.segments[0]
        late = replace(whole, offset=abs(shift), length=whole.length - abs(shift))
        early = replace(whole, length=whole.length - abs(shift))
        for segment in (late, early):
            self.refused(local_job, replace(written, inputs=(replace(stream, segments=(segment,)),)), "byte")

    def test_a_length_out_of_all_bounds_takes_no_memory(self, local_job: Location) -> None:
        name, claimed = "crafted", 1 << 29
        fields = struct.pack("<4sB3xQ", b"CKIF", 1, claimed)
        Path(local_job.path, "shared", name).write_bytes(fields + bytes(8) + bytes(1_000))
        file = StateFile(local_job.child("shared", name).url, 1_024, "")
        tracemalloc.start()
        with pytest.raises(CorruptFileError, match=f"crafted.*byte 0 is damaged: the element claims {claimed} bytes"):
            ChannelStateReader(local_job, ChannelStateStream(0, 0, "", (ChannelStateSegment(file, 0, 1_024),))).read()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()

    @pytest.mark.parametrize("schema", ["***", "AAAA", "/////zAAAAAQ", "ä"])
    def test_a_damaged_schema(self, local_job: Location, schema: str) -> None:
        stream = replace(self.two_files(local_job)[0].inputs[0], schema=schema)
        with pytest.raises(CorruptFileError, match="schema of in-flight data"):
            ChannelStateReader(local_job, stream)

    def test_streams_without_a_schema_with_other_paths_or_lengths_are_refused(self, local_job: Location) -> None:
        self.refused(local_job, replace(w := self.two_files(local_job)[0], inputs=(replace(w.inputs[0], schema=""),)))
        file = StateFile("../x", 1, "")
        with pytest.raises(InvalidLocationError):
            ChannelStateReader(local_job, ChannelStateStream(0, 0, "", (ChannelStateSegment(file, 0, 1),)))
        stream = write(local_job, [captured(rows(1))], threshold=1 << 20).inputs[0]
        file = stream.segments[0].file
        bad = replace(stream.segments[0], file=structs.replace(file, inline=(file.inline or b"")[:-1]))
        with pytest.raises(CorruptFileError, match="wrong length"):
            ChannelStateReader(local_job, replace(stream, segments=(bad,)))

    def test_copied_content_is_verified_and_damage_leaves_no_file(self, local_job: Location) -> None:
        written, _ = self.two_files(local_job)
        good = bytearray(self.path(written).read_bytes())
        good[-1] ^= 1
        self.path(written).write_bytes(good)
        before = os.listdir(Path(local_job.path, "shared"))
        with pytest.raises(CorruptFileError, match=self.path(written).name):
            write(local_job, [captured(rows(0), *places(written))], full=True)
        assert os.listdir(Path(local_job.path, "shared")) == before


def test_large_element_and_directory_that_cannot_be_written_are_refused_by_name(
    job: Location, monkeypatch: pytest.MonkeyPatch, local_job: Location
) -> None:
    monkeypatch.setattr(channel_state, "MAX_BODY_BYTES", 1_000)
    with pytest.raises(StorageError, match="larger than the 1000 allowed"):
        write(job, [captured(rows(1), rows(*range(1_000)))])
    assert list_names(job.child("shared")) == []
    delete_tree(local_job.child("shared"))
    with pytest.raises(NotFoundError, match="shared/chk-1-"):
        write(local_job, [captured(rows(1))])


elements = st.one_of(
    st.lists(st.integers(0, 99), max_size=4).map(lambda values: ("rows", values)),
    st.integers(-(1 << 63), (1 << 63) - 1).map(lambda time: ("watermark", time)),
)


@settings(deadline=None)
@given(st.data())
def test_successive_checkpoints_carry_what_is_left_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Each checkpoint captures what is still queued, new or stored; some are full, some inline, some read back."""
    job = resolve(tmp_path_factory.mktemp("job"))
    make_directory(job.child("shared"))
    queue: list[tuple[InFlightElement, object]] = []
    for number in range(1, data.draw(st.integers(2, 5))):
        for kind, value in data.draw(st.lists(elements, max_size=4)):
            if kind == "rows":
                batch = rows(*value)
                queue.append((data.draw(st.sampled_from([batch, batch.serialize()])), value))
            else:
                queue.append((InFlightWatermark(value), InFlightWatermark(value)))
        threshold = data.draw(st.sampled_from([0, 0, 1_000, 1 << 20]))
        entry = captured(*(element for element, _ in queue))
        written = write(job, [entry], number=number, threshold=threshold, full=data.draw(st.booleans()))
        stored = content(job, written.inputs[0]) if written.inputs else []
        assert stored == [value for _, value in queue]
        queue = [
            (element if place is None else place, value)
            for (element, value), place in zip(queue, written.input_places[0], strict=True)
        ]
        if data.draw(st.booleans()) and written.inputs:
            reader = ChannelStateReader(job, written.inputs[0], foreign=data.draw(st.booleans()))
            read = list(iter(reader.read, None))
            queue = [(element.place, value) for element, (_, value) in zip(read, queue, strict=True)]
        queue = queue[data.draw(st.integers(0, 2)) :]
