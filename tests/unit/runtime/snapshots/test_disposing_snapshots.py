"""Disposing of a snapshot deletes what its metadata refers to, and never goes astray."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.snapshots.snapshot import disposal_of
from ckpt_runtime.storage.checkpoint_storage import initialize_savepoint
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, exists, list_names, make_directory, resolve
from ckpt_runtime.storage.metadata import has_metadata
from ckpt_runtime.storage.publish import publish, replace
from tests.support.snapshots import JOB, write_snapshot


def file_at(path: str) -> StateFile:
    return StateFile(path, 5, "xxh3-128:" + "0" * 32)


def test_disposal_deletes_the_files_of_the_snapshot_and_no_others(base: Location) -> None:
    savepoint = initialize_savepoint(base, JOB)
    publish(base.child("absolute"), b"x")
    nested = savepoint.child("nested")
    make_directory(nested)
    publish(nested.child("part"), b"x")
    replace(savepoint.child("mine"), b"the owner's own notes")
    write_snapshot(savepoint, file_at("nested/part"), file_at(base.child("absolute").url))
    disposal_of(savepoint.url).execute()
    assert list_names(savepoint) == ["mine"]
    assert exists(base.child("absolute"))
    with pytest.raises(NotFoundError):
        disposal_of(savepoint.url)


def test_an_ordinary_savepoint_leaves_nothing(base: Location) -> None:
    savepoint = initialize_savepoint(base, JOB)
    write_snapshot(savepoint)
    disposal_of(savepoint.url + "/_metadata").execute()
    assert list_names(base) == []


def test_a_damaged_snapshot_stays(base: Location) -> None:
    savepoint = initialize_savepoint(base, JOB)
    publish(savepoint.child("_metadata"), b"garbage")
    with pytest.raises(CorruptFileError):
        disposal_of(savepoint.url)
    assert exists(savepoint.child("_metadata"))


@pytest.mark.parametrize("path", ["../victim", "a/../../victim", ""])
def test_a_forged_path_deletes_nothing(base: Location, path: str) -> None:
    publish(base.child("victim"), b"x")
    savepoint = initialize_savepoint(base, JOB)
    write_snapshot(savepoint, file_at(path))
    if path:
        with pytest.raises(InvalidLocationError, match="leads out of its directory"):
            disposal_of(savepoint.url)
        assert has_metadata(savepoint)
    else:
        disposal_of(savepoint.url).execute()
    assert exists(base.child("victim"))


def test_a_symbolic_link_deletes_nothing_outside(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("x")
    savepoint = initialize_savepoint(resolve(tmp_path), JOB)
    (Path(savepoint.path) / "link").symlink_to(tmp_path / "outside")
    write_snapshot(savepoint, file_at("link/victim"))
    with pytest.raises(InvalidLocationError, match="symbolic link"):
        disposal_of(savepoint.url)
    assert (tmp_path / "outside" / "victim").exists()
    assert has_metadata(savepoint)


def test_deletions_do_not_count_as_done_while_storage_is_unavailable(tmp_path: Path) -> None:
    savepoint = initialize_savepoint(tmp_path / "savepoints", JOB)
    write_snapshot(savepoint)
    disposal = disposal_of(savepoint.url)
    (tmp_path / "savepoints").rename(tmp_path / "away")
    for call in (disposal.execute, lambda: disposal_of(savepoint.url)):
        with pytest.raises(StorageError, match="savepoints is not there: its storage is away"):
            call()
    assert [path.name for path in tmp_path.iterdir()] == ["away"]
