"""Snapshot directories: their layout, finding and publishing metadata, and deletion that never goes astray."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert, to_builtins

from ckpt_runtime.storage.checkpoint_storage import (
    CheckpointStorage,
    delete_checkpoint,
    delete_job_directory,
    delete_state_file,
    initialize_savepoint,
    release_job_directory,
)
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, exists, list_names, make_directory, resolve
from ckpt_runtime.storage.metadata import has_metadata, read_metadata, write_metadata
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.state_files import StateFileReader, StateFileWriter

JOB = "0123456789abcdef" * 2


@pytest.fixture
def directory(base: Location) -> Location:
    return base


def take_snapshot(directory: Location, **more: Any) -> dict[str, Any]:
    with StateFileWriter(directory, 0) as writer:
        writer.write(b"state")
        file = writer.finish()
    document = {"id": 1, "states": [{"file": to_builtins(file)}], **more}
    write_metadata(directory, document)
    return document


def test_the_layout_is_flinks(directory: Location) -> None:
    storage = CheckpointStorage(directory, JOB)
    storage.initialize()
    storage.initialize()
    assert storage.initialize_checkpoint(7) == directory.child(JOB, "chk-7")
    take_snapshot(storage.initialize_checkpoint(10))
    assert list_names(directory) == [JOB]
    names = list_names(directory.child(JOB))
    assert {"chk-10", *(() if directory.is_object_store else ("shared", "taskowned"))} <= set(names)
    assert 10 in storage.list_checkpoints()


def test_a_job_s_directory_belongs_to_one_cluster_until_the_job_has_ended(directory: Location) -> None:
    storage = CheckpointStorage(directory, JOB)
    storage.initialize()
    storage.claim(None)
    storage.claim("file:///ha/flights")
    storage.claim("file:///ha/flights")
    for other in ("file:///ha/trains", None):
        with pytest.raises(AlreadyExistsError, match="in the cluster file:///ha/flights; choose another job id"):
            storage.claim(other)
    another = CheckpointStorage(directory, JOB[::-1])
    another.initialize()
    another.claim("file:///ha/trains")
    release_job_directory(storage)
    storage.claim("file:///ha/trains")
    release_job_directory(storage)
    assert delete_job_directory(storage)


def test_a_complete_checkpoint_is_not_begun_again(directory: Location) -> None:
    storage = CheckpointStorage(directory, JOB)
    storage.initialize()
    take_snapshot(storage.initialize_checkpoint(1))
    with pytest.raises(AlreadyExistsError, match="already holds a complete checkpoint"):
        storage.initialize_checkpoint(1)


@pytest.mark.parametrize("job_id", ["", "x", "../" + "a" * 29, "A" * 32, "a" * 31, "a" * 33])
def test_job_ids_are_checked(directory: Location, job_id: str) -> None:
    with pytest.raises(InvalidLocationError, match="32 lower-case hex digits"):
        CheckpointStorage(directory, job_id)
    with pytest.raises(InvalidLocationError, match="32 lower-case hex digits"):
        initialize_savepoint(directory, job_id)


def test_savepoint_directories_are_new_and_named_after_the_job(directory: Location) -> None:
    tokens = iter(["a" * 12, "a" * 12, "b" * 12])
    first = initialize_savepoint(directory, JOB, lambda: next(tokens))
    publish(first.child("x"), b"")
    second = initialize_savepoint(directory, JOB, lambda: next(tokens))
    assert [first.name, second.name] == ["savepoint-012345-" + "a" * 12, "savepoint-012345-" + "b" * 12]
    with pytest.raises(StorageError, match="all names tried exist"):
        initialize_savepoint(directory, JOB, lambda: "a" * 12)


@pytest.mark.parametrize("target", ["relative", "file:///proc/nowhere", "nosuch://x", "/a/../b"])
def test_a_bad_savepoint_target_is_named(target: str) -> None:
    with pytest.raises(StorageError, match=target.rstrip("x").replace("..", r"\.\.")):
        initialize_savepoint(target, JOB)


def test_metadata_is_found_by_its_directory_and_by_its_own_name(directory: Location) -> None:
    savepoint = initialize_savepoint(directory, JOB)
    assert not has_metadata(savepoint)
    document = take_snapshot(savepoint)
    for url in (savepoint.url, savepoint.url + "/", savepoint.url + "/_metadata"):
        found = read_metadata(url)
        assert found.document == document
        assert found.directory == savepoint
        assert found.size > 0
    with pytest.raises(AlreadyExistsError):
        write_metadata(savepoint, {})


def test_path_that_is_not_a_snapshot_is_refused_by_name(directory: Location) -> None:
    make_directory(directory.child("empty"))
    publish(directory.child("file"), b"x")
    publish(directory.child("empty", "other"), b"x")
    with pytest.raises(NotFoundError, match="empty has no _metadata file"):
        read_metadata(directory.child("empty").url)
    with pytest.raises(NotFoundError, match="there is no file or directory .*missing"):
        read_metadata(directory.child("missing").url)
    with pytest.raises(InvalidLocationError, match="neither a directory nor a _metadata file"):
        read_metadata(directory.child("file").url)


@pytest.mark.parametrize("content", [b"", b"garbage"])
def test_damaged_metadata_is_refused_by_name(directory: Location, content: bytes) -> None:
    savepoint = initialize_savepoint(directory, JOB)
    publish(savepoint.child("_metadata"), content)
    with pytest.raises(CorruptFileError, match=f"{savepoint.name}/_metadata"):
        read_metadata(savepoint.url)


@pytest.mark.row("203.4")
def test_a_moved_savepoint_is_read_where_it_lies(tmp_path: Path) -> None:
    savepoint = initialize_savepoint(resolve(tmp_path / "a"), JOB)
    document = take_snapshot(savepoint)
    shutil.move(savepoint.path, tmp_path / "b")
    found = read_metadata(str(tmp_path / "b"))
    assert found.document == document
    assert not Path(document["states"][0]["file"]["path"]).is_absolute()
    from ckpt_runtime.checkpoint.completed_checkpoint import StateFile

    reader = StateFileReader(found.directory, convert(document["states"][0]["file"], StateFile))
    assert bytes(reader.read(0, 5)) == b"state"
    reader.close()


def test_checkpoint_is_deleted_as_a_whole_and_files_outside_it_stay(directory: Location) -> None:
    storage = CheckpointStorage(directory, JOB)
    storage.initialize()
    for checkpoint_id in (1, 11):
        take_snapshot(storage.initialize_checkpoint(checkpoint_id))
    publish(storage.shared.child("file"), b"x")
    for _ in range(2):
        delete_checkpoint(storage, 1)
    assert storage.list_checkpoints() == [11]
    assert read_metadata(storage.checkpoint(11)).document["id"] == 1
    assert not delete_job_directory(storage)
    delete_checkpoint(storage, 11)
    delete_state_file(storage.location, storage.shared.child("file"))
    assert delete_job_directory(storage)
    assert list_names(directory) == []


def test_unavailable_storage_is_not_replaced_by_a_directory_and_no_deletion_counts(tmp_path: Path) -> None:
    storage = CheckpointStorage(resolve(tmp_path), JOB)
    for call in (lambda: storage.initialize_checkpoint(1), lambda: delete_checkpoint(storage, 1)):
        with pytest.raises(StorageError, match=f"{JOB} is not there: its storage is away"):
            call()


def test_a_state_file_outside_its_owner_is_not_deleted(directory: Location) -> None:
    publish(directory.child("other"), b"x")
    with pytest.raises(InvalidLocationError, match="is not below"):
        delete_state_file(directory.child("job"), directory.child("other"))
    assert exists(directory.child("other"))
