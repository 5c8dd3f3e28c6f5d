"""Files of a database on their way to the storage and back, several at a time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.state_handles import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.stored_files import StoredFiles
from ckpt_runtime.state.rocksdb.local_files import at_once, fetch
from ckpt_runtime.storage.errors import CorruptFileError
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


@pytest.mark.parametrize("owned", [True, False])
def test_tables_of_an_own_checkpoint_are_reused_where_they_lie(tmp_path: Path, owned: bool) -> None:
    _, written = stored(tmp_path, [*NAMES, "MANIFEST-000001"], 1)
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", written, {})
    fetch(handle, StoredFiles(str(tmp_path), owned=owned), tmp_path / "db", 2)
    linked = {name for name, file in written.items() if (tmp_path / "db" / name).samefile(tmp_path / file.path)}
    assert linked == (set(NAMES) if owned else set())
    (tmp_path / "db" / "MANIFEST-000001").write_text("changed")
    assert (tmp_path / written["MANIFEST-000001"].path).read_text() == "MANIFEST-000001" * 200


def test_a_damaged_table_is_not_reused(tmp_path: Path) -> None:
    _, written = stored(tmp_path, ["000001.sst", "MANIFEST-000001"], 1)
    place = tmp_path / written["000001.sst"].path
    place.write_bytes(b"x" + place.read_bytes()[1:])
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", written, {})
    with pytest.raises(CorruptFileError, match=place.name):
        fetch(handle, StoredFiles(str(tmp_path), owned=True), tmp_path / "db", 1)


def test_without_links_tables_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, "another file system")

    _, written = stored(tmp_path, ["000001.sst", "MANIFEST-000001"], 1)
    monkeypatch.setattr(os, "link", refuse)
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 1), "rocksdb", written, {})
    fetch(handle, StoredFiles(str(tmp_path), owned=True), tmp_path / "db", 1)
    assert (tmp_path / "db" / "000001.sst").read_text() == "000001.sst" * 200
    assert not (tmp_path / "db" / "000001.sst").samefile(tmp_path / written["000001.sst"].path)


def test_as_many_as_there_are_threads_go_at_the_same_time() -> None:
    together, most = threading.Barrier(3), threading.Semaphore(3)

    def transfer(name: str) -> str:
        assert most.acquire(blocking=False), "a fourth one"
        together.wait(10)
        most.release()
        return name

    assert at_once(3, transfer, NAMES) == dict(zip(NAMES, NAMES, strict=True))
    assert at_once(3, transfer, []) == {}


def test_an_error_comes_when_nothing_is_under_way_any_more() -> None:
    begun: set[str] = set()
    ended: set[str] = set()
    both = threading.Barrier(2)

    def transfer(name: str) -> None:
        begun.add(name)
        if name in NAMES[:2]:
            both.wait(10)
        try:
            if name == NAMES[0]:
                raise OSError("the disk is full")
        finally:
            ended.add(name)

    with pytest.raises(OSError, match="the disk is full"):
        at_once(2, transfer, NAMES)
    assert begun == ended
