"""State files: streaming writes with a checksum, inline content, verified reads, damage, and a full disk."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from msgspec import convert, to_builtins
from msgspec.structs import replace

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.storage import state_files
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, delete_tree, list_names, resolve
from ckpt_runtime.storage.publish import replace as replace_file
from ckpt_runtime.storage.state_files import StateFileReader, StateFileWriter, locate


@pytest.fixture
def directory(base: Location) -> Location:
    return base


def write(directory: Location, content: bytes, threshold: int = 0) -> StateFile:
    with StateFileWriter(directory, threshold) as writer:
        for start in range(0, len(content), 100_000):
            writer.write(content[start : start + 100_000])
        assert writer.bytes_written == len(content)
        return writer.finish()


def read(directory: Location, file: StateFile) -> bytes:
    reader = StateFileReader(directory, file)
    try:
        return bytes(reader.read(0, file.length))
    finally:
        reader.close()


def test_content_comes_back_in_whole_and_in_part(directory: Location) -> None:
    content = os.urandom(1_234_567)
    file = write(directory, content)
    assert list_names(directory) == [file.path]
    assert file.inline is None
    assert file.checksum.startswith("xxh3-128:")
    reader = StateFileReader(directory, file)
    assert bytes(reader.read(1_000_000, 1_000)) == content[1_000_000:1_001_000]
    assert bytes(reader.read(0, 0)) == b""
    assert bytes(reader.read(file.length, 0)) == b""
    reader.close()
    reader.close()


@pytest.mark.parametrize("size", [0, 1, 20 << 10])
def test_small_content_is_stored_in_the_handle(directory: Location, size: int) -> None:
    content = os.urandom(size)
    file = write(directory, content, threshold=20 << 10)
    assert file.path == ""
    assert file.inline == content
    assert list_names(directory) == []
    assert read(directory, convert(to_builtins(file), StateFile)) == content


def test_content_just_above_the_threshold_becomes_a_file(directory: Location) -> None:
    content = os.urandom((20 << 10) + 1)
    file = write(directory, content, threshold=20 << 10)
    assert file.inline is None
    assert read(directory, file) == content


def test_the_stream_takes_arrow_batches_and_knows_its_position(directory: Location) -> None:
    batch = pa.record_batch({"x": list(range(10_000))})
    with StateFileWriter(directory, 0) as writer:
        writer.stream.write(b"head")
        assert writer.stream.tell() == 4
        with pa.ipc.new_stream(writer.stream, batch.schema) as ipc:
            ipc.write_batch(batch)
        writer.stream.close()
        file = writer.finish()
    content = read(directory, file)
    assert pa.ipc.open_stream(content[4:]).read_all().to_batches() == [batch]


def test_an_aborted_file_leaves_nothing(directory: Location) -> None:
    writer = StateFileWriter(directory, 10)
    writer.write(b"x" * 3_000_000)
    writer.abort()
    writer.abort()
    assert list_names(directory) == []
    with pytest.raises(ValueError, match="finished or aborted"):
        writer.write(b"x")
    with pytest.raises(ValueError, match="finished or aborted"):
        writer.finish()


@pytest.mark.parametrize(("failures", "left"), [(1, 0), (10, 1)])
def test_failed_deletion_is_repeated(
    failures: int, left: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    directory, unlink, asked = resolve(str(tmp_path)), os.unlink, []

    def fails_first(path: str) -> None:
        asked.append(path)
        if len(asked) <= failures:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        unlink(path)

    monkeypatch.setattr(os, "unlink", fails_first)
    with pytest.raises(RuntimeError), StateFileWriter(directory, 0) as writer:
        writer.write(b"x")
        raise RuntimeError
    assert len(list_names(directory)) == left
    assert ("a file that was given up stays" in caplog.text) == bool(left)


def test_leaving_without_finishing_aborts_and_after_finishing_keeps(directory: Location) -> None:
    with pytest.raises(RuntimeError), StateFileWriter(directory, 0) as writer:
        writer.write(b"x" * 100)
        raise RuntimeError("the operator failed")
    assert list_names(directory) == []
    file = write(directory, b"kept")
    assert list_names(directory) == [file.path]


@pytest.mark.row("203.10")
@pytest.mark.parametrize("base", ["local", "memory"], indirect=True)
def test_every_flipped_byte_and_every_truncation_is_refused_by_name(directory: Location) -> None:
    content = os.urandom(300)
    file = write(directory, content)
    location = directory.child(file.path)
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        for data in (bytes(damaged), content[:position]):
            replace_file(location, data)
            with pytest.raises(CorruptFileError, match=file.path):
                read(directory, file)
    replace_file(location, content + b"\0")
    with pytest.raises(CorruptFileError, match="301 bytes and not 300"):
        read(directory, file)


@pytest.mark.row("203.10")
def test_short_answer_does_not_count_as_damage_and_a_short_file_does(
    directory: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(directory, bytes(1000))
    stored = directory.child(file.path)
    honest = state_files.read_range
    monkeypatch.setattr(state_files, "read_range", lambda *args: honest(*args)[:-1])
    with pytest.raises(StorageError, match=f"{file.path}: storage gave 999 of 1000 bytes") as caught:
        read(directory, file)
    assert not isinstance(caught.value, CorruptFileError)
    monkeypatch.undo()
    replace_file(stored, bytes(999))
    with pytest.raises(CorruptFileError, match="it has 999 bytes and not 1000"):
        read(directory, file)


def test_missing_files_and_damaged_inline_content_are_refused(directory: Location) -> None:
    file = write(directory, b"x" * 100)
    delete_tree(directory)
    with pytest.raises(NotFoundError, match=file.path):
        read(directory, file)
    file = write(directory, b"content", threshold=100)
    for damaged in (replace(file, inline=b"cOntent"), replace(file, length=6), replace(file, inline=b"")):
        with pytest.raises(CorruptFileError, match="inline state"):
            StateFileReader(directory, damaged).read(0, 1)


@pytest.mark.parametrize("checksum", ["", "md5:00", "xxh3-128:zz", "xxh3-128:" + "0" * 31])
def test_a_handle_without_a_usable_checksum_is_refused(directory: Location, checksum: str) -> None:
    with pytest.raises(CorruptFileError, match="no usable length and checksum"):
        StateFileReader(directory, StateFile("x", 1, checksum))


def test_reading_outside_the_file_is_refused(directory: Location) -> None:
    reader = StateFileReader(directory, write(directory, b"0123456789"))
    for offset, length in ((-1, 2), (0, 11), (10, 1), (5, -1)):
        with pytest.raises(CorruptFileError, match="were asked for"):
            reader.read(offset, length)
    reader.close()


@pytest.mark.parametrize("path", ["../x", "a/../../x", "", ".", "a//b", "a/./b", "a\nb"])
def test_relative_paths_stay_in_the_snapshot(directory: Location, path: str) -> None:
    with pytest.raises(InvalidLocationError, match="does not stay in its directory"):
        locate(directory, path)


@pytest.mark.row("203.4")
def test_absolute_paths_are_refused_where_a_snapshot_is_self_contained(directory: Location) -> None:
    other = directory.child("other")
    assert locate(directory, other.url) == other
    assert locate(directory, "a/b") == directory.child("a", "b")
    for path in (other.url, "/etc/passwd"):
        with pytest.raises(InvalidLocationError, match="is not relative"):
            locate(directory, path, allow_absolute=False)


def test_a_directory_that_is_a_file_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    writer = StateFileWriter(resolve(tmp_path / "file"), 0)
    with pytest.raises(StorageError, match=f"cannot write file://{tmp_path}/file/"):
        writer.write(b"x")
    writer.abort()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Location]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system here: {mounted.stderr.decode().strip()}")
    try:
        yield resolve(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_full_disk_is_named_and_an_abort_frees_it(small_disk: Location) -> None:
    writer = StateFileWriter(small_disk, 0)
    with pytest.raises(StorageError, match="cannot write") as caught:
        for _ in range(64):
            writer.write(os.urandom(1 << 16))
        writer.finish()
    assert caught.value.errno == errno.ENOSPC
    writer.abort()
    assert list_names(small_disk) == []
    assert read(small_disk, write(small_disk, b"x" * 100_000)) == b"x" * 100_000
