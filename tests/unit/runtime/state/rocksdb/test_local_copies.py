"""Tables that stay on the worker's disk for a restart: which there are, for how long, and what damage does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.snapshot import StoredFiles
from ckpt_runtime.state.rocksdb.local_files import MOST_CHECKPOINTS, LocalCopies, fetch
from ckpt_runtime.storage.publish import checksum_of


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
