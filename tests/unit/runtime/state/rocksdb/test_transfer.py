"""Files of RocksDB's snapshots on their way: local copies, transfers, and what fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.snapshot import StoredFiles
from ckpt_runtime.state.rocksdb.local_files import MOST_CHECKPOINTS, LocalCopies, at_once, fetch
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.publish import checksum_of
from ckpt_runtime.task.snapshot_files import NewFiles
from tests.support.inline_snapshots import CHECKPOINT

NAMES = [f"{number:06d}.sst" for number in range(12)]


def stored(directory: Path, names: Collection[str], threads: int) -> tuple[NewFiles, dict[str, StateFile]]:
    """Writes a file for each name, in pieces."""
    files = NewFiles(CheckpointOptions(CHECKPOINT, str(directory)), 0)

    def write(name: str) -> StateFile:
        with files.private() as file:
            for _ in range(200):
                file.stream.write(name.encode())
            return file.finish()

    return files, at_once(threads, write, names)


@pytest.mark.parametrize("threads", [1, 4])
def test_files_come_back_as_they_were(tmp_path: Path, threads: int) -> None:
    names = [*NAMES, "MANIFEST-000001"]
    files, written = stored(tmp_path, names, threads)
    assert list(written) == names
    assert files.written_bytes == sum(200 * len(name) for name in names)
    assert len(files.locations) == len(names)
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", written, {})
    fetch(handle, StoredFiles(str(tmp_path)), tmp_path / "db", threads)
    assert {name: (tmp_path / "db" / name).read_text() for name in names} == {name: name * 200 for name in names}


def inodes(directory: Path, names: Collection[str]) -> dict[str, int]:
    return {name: (directory / name).stat().st_ino for name in names}


@pytest.mark.parametrize("copies_only", [False, True])
def test_tables_that_the_file_system_can_link_are_not_copied_unless_nothing_may_be_shared(
    tmp_path: Path, copies_only: bool
) -> None:
    names = [*NAMES, "MANIFEST-000001"]
    _, written = stored(tmp_path, names, 4)
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", written, {})
    fetch(handle, StoredFiles(str(tmp_path), copies_only=copies_only), tmp_path / "db", 4)
    there = {name: (tmp_path / written[name].path).stat().st_ino for name in names}
    shared = {name for name, inode in inodes(tmp_path / "db", names).items() if there[name] == inode}
    # RocksDB writes to a manifest.
    assert shared == (set() if copies_only else set(NAMES))


@pytest.mark.parametrize("copies_only", [False, True])
@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "another"])
def test_a_damaged_table_is_refused_and_not_left_behind(tmp_path: Path, damage: str, copies_only: bool) -> None:
    _, written = stored(tmp_path, NAMES[:2], 1)
    file, other = (written[name] for name in NAMES[:2])
    content = bytearray((tmp_path / file.path).read_bytes())
    content[len(content) // 2] ^= 1
    flipped = bytes(content)
    damaged = {"flipped": flipped, "shorter": flipped[:-1], "longer": flipped + b"x"}
    (tmp_path / file.path).write_bytes(damaged.get(damage) or (tmp_path / other.path).read_bytes())
    reader = StoredFiles(str(tmp_path), copies_only=copies_only)
    with pytest.raises(CorruptFileError, match=file.path):
        reader.fetch(file, str(tmp_path / "local"), may_link=True)
    assert not (tmp_path / "local").exists()


def test_a_stored_symbolic_link_is_followed_and_copied(tmp_path: Path) -> None:
    _, written = stored(tmp_path, NAMES[:1], 1)
    file = tmp_path / written[NAMES[0]].path
    file.rename(tmp_path / "elsewhere")
    file.symlink_to("elsewhere")
    StoredFiles(str(tmp_path)).fetch(written[NAMES[0]], str(tmp_path / "local"), may_link=True)
    assert not (tmp_path / "local").is_symlink()
    assert (tmp_path / "local").stat().st_ino != (tmp_path / "elsewhere").stat().st_ino


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    _, written = stored(tmp_path, NAMES[:1], 1)
    (tmp_path / written[NAMES[0]].path).unlink()
    with pytest.raises(FileNotFoundError, match=written[NAMES[0]].path):
        StoredFiles(str(tmp_path)).fetch(written[NAMES[0]], str(tmp_path / "local"), may_link=True)


def test_transfers_run_concurrently_up_to_the_number_of_threads() -> None:
    together, most = threading.Barrier(3), threading.Semaphore(3)

    def transfer(name: str) -> str:
        assert most.acquire(blocking=False), "a fourth one"
        together.wait(60)
        most.release()
        return name

    assert at_once(3, transfer, NAMES) == dict(zip(NAMES, NAMES, strict=True))
    assert at_once(3, transfer, []) == {}


def test_error_is_raised_after_all_running_transfers_have_ended() -> None:
    begun: set[str] = set()
    ended: set[str] = set()
    both = threading.Barrier(2)

    def transfer(name: str) -> None:
        begun.add(name)
        if name in NAMES[:2]:
            both.wait(60)
        try:
            if name == NAMES[0]:
                raise OSError("the disk is full")
        finally:
            ended.add(name)

    with pytest.raises(OSError, match="the disk is full"):
        at_once(2, transfer, NAMES)
    assert begun == ended


@pytest.fixture
def copies(tmp_path: Path) -> LocalCopies:
    def make_directory() -> str:
        (tmp_path / "local").mkdir()
        return str(tmp_path / "local")

    return LocalCopies(make_directory)


def table(directory: Path, name: str, content: bytes | None = None) -> tuple[StateFile, Path]:
    """As the storage names it, and as it lies in a database."""
    content = name.encode() * 100 if content is None else content
    path = directory / "db" / f"{name}.sst"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return StateFile(f"file:///storage/shared/{name}", len(content), checksum_of(content)), path


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.read_bytes().decode()[:1] for path in (tmp_path / "local").glob("*.sst"))


def test_files_of_the_last_completed_checkpoint_and_of_those_after_it_are_kept(
    tmp_path: Path, copies: LocalCopies
) -> None:
    a, b, c, d = (table(tmp_path, name) for name in "abcd")
    copies.keep(1, dict([a, b]))
    copies.keep(2, dict([b, c]))
    copies.completed(1)
    assert kept(tmp_path) == ["a", "b", "c"]
    copies.completed(2)
    copies.completed(1)  # late
    assert copies.path_of(a[0]) is not None, "a subtask removes nothing"
    copies.keep(3, dict([c, d]))
    assert kept(tmp_path) == ["b", "c", "d"]
    copies.aborted(3)
    copies.keep(4, dict([b]))
    assert kept(tmp_path) == ["b", "c"]
    assert copies.path_of(d[0]) is None


def test_local_copies_outlive_the_database_and_are_removed_with_the_worker(tmp_path: Path, copies: LocalCopies) -> None:
    file, path = table(tmp_path, "a")
    copies.keep(1, {file: path})
    path.unlink()
    copy = copies.path_of(file)
    assert copy is not None
    assert copy.read_bytes() == b"a" * 100
    copies.close()
    copies.close()
    assert not (tmp_path / "local").exists()
    copies.keep(2, dict([table(tmp_path, "b")]))
    assert not (tmp_path / "local").exists()


def test_checkpoints_of_which_nothing_is_heard_are_bounded(tmp_path: Path, copies: LocalCopies) -> None:
    first = table(tmp_path, "a")
    copies.keep(1, dict([first]))
    copies.completed(1)
    others = [table(tmp_path, chr(ord("b") + number)) for number in range(2 * MOST_CHECKPOINTS)]
    for number, other in enumerate(others, 2):
        copies.keep(number, dict([other]))
    assert copies.path_of(first[0]) is not None
    assert [copies.path_of(file) is not None for file, _ in others] == [
        number > MOST_CHECKPOINTS for number in range(2 * MOST_CHECKPOINTS)
    ]
    assert len(kept(tmp_path)) == MOST_CHECKPOINTS


def test_files_that_cannot_be_linked_are_not_kept_and_reported_once(
    tmp_path: Path, copies: LocalCopies, caplog: pytest.LogCaptureFixture
) -> None:
    (file, path), (other, gone), whole = (table(tmp_path, name) for name in "abc")
    path.unlink()
    gone.unlink()
    copies.keep(1, dict([(file, path), (other, gone), whole]))
    assert [copies.path_of(known) is None for known in (file, other, whole[0])] == [True, True, False]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


@pytest.mark.parametrize("harm", ["none", "flipped", "shorter", "missing", "directory"])
def test_a_copy_is_taken_if_it_is_what_the_checkpoint_says(tmp_path: Path, copies: LocalCopies, harm: str) -> None:
    """Which file it is a link of tells where it has come from."""
    (tmp_path / "storage").mkdir()
    manifest = tmp_path / "storage" / "manifest"
    manifest.write_bytes(b"m")
    stored = tmp_path / "storage" / "stored"
    stored.write_bytes(b"a" * 100)
    source = tmp_path / "000001.sst"
    source.write_bytes(b"a" * 100)
    file = StateFile("stored", 100, checksum_of(b"a" * 100))
    copies.keep(1, {file: source})
    copy = copies.path_of(file)
    assert copy is not None
    source.unlink()
    if harm != "none":
        copy.unlink()
    if harm == "flipped":
        copy.write_bytes(b"a" * 99 + b"b")
    elif harm == "shorter":
        copy.write_bytes(b"a" * 99)
    elif harm == "directory":
        copy.mkdir()
    files = {"000001.sst": file, "MANIFEST-000001": StateFile("manifest", 1, checksum_of(b"m"))}
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", files, {})
    fetch(handle, StoredFiles(str(tmp_path / "storage")), tmp_path / "db", 2, copies)
    restored = tmp_path / "db" / "000001.sst"
    assert restored.read_bytes() == b"a" * 100
    assert os.stat(restored).st_ino == os.stat(copy if harm == "none" else stored).st_ino
    assert (copies.path_of(file) is None) == (harm != "none")
