"""Opening a snapshot refuses whatever is wrong with its metadata; verifying it finds whatever else is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots import snapshot as snapshot_module
from ckpt_runtime.snapshots.snapshot import Snapshot, newest_checkpoint, open_in_place, open_snapshot
from ckpt_runtime.storage.channel_state import ElementKind, InFlightWatermark, frame_header, watermark_body
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, make_directory, resolve
from ckpt_runtime.storage.metadata import encode, read_metadata, write_metadata
from ckpt_runtime.storage.publish import checksum_of, publish
from ckpt_runtime.version import VERSION
from tests.support.snapshots import UID, VERTEX, completed, keyed, write_file, write_snapshot


@pytest.fixture
def directory(tmp_path: Path) -> Location:
    location = resolve(tmp_path / "snapshot")
    make_directory(location)
    return location


def path_of(directory: Location, file: StateFile) -> Path:
    return Path(directory.path) / file.path


def own_file(snapshot: Snapshot) -> StateFile:
    (file, *_) = next(snapshot.states(UID)).keyed[0].state_files()
    return file


def in_flight(directory: Location, name: str = "") -> ChannelStateStream:
    """One watermark; inline without a name."""
    body = watermark_body(InFlightWatermark(7))
    data = frame_header(name, 0, ElementKind.WATERMARK, body) + body
    if name:
        publish(directory.child(name), data)
    file = StateFile(name, len(data), checksum_of(data), None if name else data)
    return ChannelStateStream(0, 0, "", (ChannelStateSegment(file, 0, len(data)),))


def test_a_snapshot_is_read_where_it_lies(base: Location) -> None:
    checkpoint = write_snapshot(base)
    for url in (base.url, base.url + "/", base.url + "/_metadata"):
        snapshot = open_snapshot(url)
        assert snapshot.metadata == checkpoint
        assert snapshot.directory == base
    assert open_snapshot(base, own=True).metadata == checkpoint
    with closing(snapshot.open(own_file(snapshot))) as reader:
        assert bytes(reader.read(0, 5)) == b"state"
    assert snapshot.verify() == []
    assert list(snapshot.states("unknown")) == []


@pytest.mark.row("203.4")
def test_a_moved_snapshot_is_whole(directory: Location, tmp_path: Path) -> None:
    write_snapshot(directory)
    shutil.move(directory.path, tmp_path / "elsewhere")
    snapshot = open_snapshot(str(tmp_path / "elsewhere"))
    assert snapshot.metadata.directory == resolve(tmp_path / "elsewhere").url
    assert snapshot.verify() == []


def test_a_checkpoint_that_shares_files_is_restored_where_it_was_written(directory: Location, tmp_path: Path) -> None:
    write_snapshot(directory, StateFile(f"{directory.url}-shared/f", 1, checksum_of(b"f")))
    (tmp_path / "link").symlink_to(directory.path)
    for place in (directory.path, tmp_path / "link"):
        assert open_in_place(str(place)).metadata.directory == resolve(place).url
    shutil.copytree(directory.path, tmp_path / "copy")
    refusal = f"{tmp_path}/copy is a moved or copied checkpoint, written to {directory.url}; 1 of .*take a savepoint"
    with pytest.raises(InvalidLocationError, match=refusal):
        open_in_place(str(tmp_path / "copy"))
    shutil.move(directory.path, tmp_path / "elsewhere")
    with pytest.raises(InvalidLocationError, match=r"Restore it from .*/snapshot, or take a savepoint"):
        open_in_place(str(tmp_path / "elsewhere"))


def test_newest_checkpoint_of_a_directory_is_the_complete_one_that_was_triggered_last(tmp_path: Path) -> None:
    base = resolve(tmp_path)
    assert newest_checkpoint(str(tmp_path / "absent")) is None
    for job, number, triggered in (("a", 7, 100), ("b", 5, 300), ("b", 4, 200), ("c", 9, None)):
        directory = base.child(job * 32, f"chk-{number}")
        make_directory(directory)
        if triggered is not None:
            write_metadata(directory, replace(completed(directory), id=number, timestamp=triggered).to_json())
    make_directory(base.child("staged"))
    assert newest_checkpoint(str(tmp_path)) == base.child("b" * 32, "chk-5").url


def test_a_snapshot_that_shares_nothing_is_restored_wherever_it_lies(directory: Location, tmp_path: Path) -> None:
    write_snapshot(directory)
    shutil.move(directory.path, tmp_path / "elsewhere")
    open_in_place(str(tmp_path / "elsewhere"))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "there is no"),
    "cut": (cut, "damaged, it has 4 bytes and not 5"),
    "flipped": (flip, "damaged, its checksum is"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_file_is_named_with_whose_it_is(directory: Location, name: str) -> None:
    write_snapshot(directory, write_file(directory, b"other"))
    snapshot = open_snapshot(directory)
    damage, reason = DAMAGE[name]
    file = path_of(directory, own_file(snapshot))
    damage(file)
    (problem,) = snapshot.verify()
    assert problem.state == f"subtask 0 of vertex {VERTEX!r}, operator {UID!r}"
    assert str(file) in problem.reason
    assert reason in problem.reason
    assert str(problem) == f"{problem.state}: {problem.reason}"


@pytest.mark.parametrize("path", ["../outside", "a/../../outside"])
def test_a_path_that_leads_out_is_a_problem_and_is_not_read(directory: Location, path: str) -> None:
    (Path(directory.path).parent / "outside").write_bytes(b"state")
    write_metadata(directory, completed(directory, keyed(StateFile(path, 5, checksum_of(b"state")))).to_json())
    (problem,) = open_snapshot(directory).verify()
    assert "does not stay in its directory" in problem.reason


def test_offsets_beyond_the_file_are_a_problem(directory: Location) -> None:
    write_metadata(directory, completed(directory, keyed(write_file(directory, b"few"))).to_json())
    (problem,) = open_snapshot(directory).verify()
    assert "bytes 0 to 5 of 3 were asked for" in problem.reason


@pytest.mark.parametrize("name", ["", "channel"])
def test_in_flight_data_is_verified(directory: Location, name: str) -> None:
    stream = in_flight(directory, name)
    write_metadata(directory, completed(directory, SubtaskState(inputs=(stream,), bytes=stream.bytes)).to_json())
    snapshot = open_snapshot(directory)
    assert snapshot.verify() == []
    if name:
        flip(Path(directory.path) / name)
        (problem,) = snapshot.verify()
        assert problem.state.endswith("in-flight data")
        assert "checksum is wrong" in problem.reason


def test_inline_state_is_verified(directory: Location) -> None:
    inline = write_file(directory, threshold=100)
    write_metadata(directory, completed(directory, keyed(inline)).to_json())
    assert open_snapshot(directory).verify() == []
    forged = StateFile("", 5, inline.checksum, b"other")
    (directory.child("_metadata")).filesystem.rm(directory.child("_metadata").path)
    write_metadata(directory, completed(directory, keyed(forged)).to_json())
    (problem,) = open_snapshot(directory).verify()
    assert "its checksum is" in problem.reason


def test_unavailable_storage_does_not_count_as_damage(directory: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    write_snapshot(directory)
    snapshot = open_snapshot(directory)

    def away(*_: object) -> int:
        raise StorageError("away", "x")

    monkeypatch.setattr("ckpt_runtime.storage.state_files.open_regular", away)
    with pytest.raises(StorageError, match="away"):
        snapshot.verify()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "too short"),
        (b"garbage", "too short|no metadata"),
        (encode({"version": 2, "id": 1}), "has another shape"),
        (encode({"version": 2, "id": 1})[:-1], "bytes of content and not"),
    ],
)
def test_hostile_metadata_is_refused_by_name(directory: Location, content: bytes, reason: str) -> None:
    publish(directory.child("_metadata"), content)
    with pytest.raises(CorruptFileError, match=reason) as caught:
        open_snapshot(directory)
    assert f"{directory.url}/_metadata" in str(caught.value)


def test_large_metadata_is_tried_in_a_process_of_its_own(directory: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt_runtime.snapshots.snapshot.HARMLESS_TEXT_BYTES", 0)
    checkpoint = write_snapshot(directory)
    assert open_snapshot(directory).metadata == checkpoint

    with pytest.raises(CorruptFileError, match=r"n is damaged or foreign: its content has another shape: .*`\$.id`"):
        snapshot_module.try_metadata(encode({**checkpoint.to_json(), "id": "one"}), "n")
    with pytest.raises(CorruptFileError, match="n is damaged or foreign: it is too short"):
        snapshot_module.try_metadata(b"", "n")


def test_path_that_is_not_a_snapshot_is_refused(directory: Location) -> None:
    with pytest.raises(NotFoundError, match="has no _metadata file"):
        open_snapshot(directory)
    with pytest.raises(NotFoundError, match="no file or directory"):
        open_snapshot(directory.child("missing"))
    with pytest.raises(InvalidLocationError):
        open_snapshot("relative")


def test_a_stream_is_read_element_by_element(directory: Location) -> None:
    stream = in_flight(directory, "channel")
    write_metadata(directory, completed(directory, SubtaskState(inputs=(stream,), bytes=stream.bytes)).to_json())
    with closing(open_snapshot(directory).open_stream(stream)) as reader:
        element = reader.read()
        assert element is not None
        assert not isinstance(element.content, pa.Buffer)
        assert reader.read() is None


@pytest.mark.row("203.13")
def test_metadata_names_the_release_backend_and_format(directory: Location) -> None:
    write_snapshot(directory)
    document = read_metadata(directory).document
    said = {name: document[name] for name in ("version", "written_by", "state_backend", "format")}
    assert said == {"version": 2, "written_by": VERSION, "state_backend": "hashmap", "format": "NATIVE"}
    assert open_snapshot(directory).metadata.written_by == VERSION


@pytest.mark.parametrize("version", [1, 3, 0, "2", None, True])
def test_document_of_another_version_is_refused_with_both_versions(directory: Location, version: object) -> None:
    write_metadata(directory, {"version": version, "written_by": "9.0"})
    reason = f"has version .*, written by release 9.0; this release, {VERSION}, reads version 2"
    with pytest.raises(CorruptFileError, match=reason) as caught:
        open_snapshot(directory)
    assert "_metadata cannot be read" in str(caught.value)


def test_the_backend_of_files_that_only_it_reads_is_named(directory: Location) -> None:
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "mine", {"one": write_file(directory)})
    state = SubtaskState({UID: OperatorSubtaskState((handle,))}, 5)
    write_metadata(directory, completed(directory, state).to_json())
    assert read_metadata(directory).document["state_backend"] == "mine"
    snapshot = open_snapshot(directory)
    assert snapshot.verify() == []
    cut(path_of(directory, handle.files["one"]))
    (problem,) = snapshot.verify()
    assert "it has 4 bytes and not 5" in problem.reason
