"""The savepoint catalogue: what is listed, what is good, marks by many at once, and disposals that are broken off."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.cli.main import main
from ckpt_runtime.snapshots.catalogue import (
    SavepointFacts,
    dispose_of,
    find_places,
    latest_good,
    list_savepoints,
    look_at,
    mark_savepoint,
    record_savepoint,
)
from ckpt_runtime.snapshots.copying import copy_snapshot
from ckpt_runtime.storage import checkpoint_storage, versioned_document
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, initialize_savepoint
from ckpt_runtime.storage.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.publish import replace as replace_file
from ckpt_runtime.storage.savepoint_entry import MAX_MARKS, Mark, MarkKind, SavepointEntry, entry_document, read_entry
from tests.support.snapshots import JOB, completed, keyed, write_file

FACTS = SavepointFacts("flights", "5bfa03f3a0324da19bf4d4cb96cbace4_flights.zip", 3, "session 1", "ana")
GOOD, BAD = Mark(10, True, "ana", "complete and intact", 5), Mark(11, False, "ana", "the file is missing")


def savepoint(base: Location, completed_at: int, facts: SavepointFacts | None = FACTS, files: int = 1) -> Location:
    """One that a job has taken, as it lies there afterwards."""
    directory = initialize_savepoint(base, JOB)
    found: CompletedCheckpoint = replace(
        completed(directory, *(keyed(write_file(directory)) for _ in range(files))),
        properties=CheckpointProperties(CheckpointType.SAVEPOINT),
        completion_timestamp=completed_at,
    )
    write_metadata(directory, found.to_json())
    if facts is not None:
        record_savepoint(directory.url, facts)
    return directory


@pytest.mark.row("air.10")
def test_listing_of_a_directory_finds_each_savepoint_with_its_requester(base: Location) -> None:
    older, newer = savepoint(base, 2_000, None), savepoint(base, 3_000)
    storage = CheckpointStorage(base, JOB)
    make_directory(storage.location)
    checkpoint = storage.initialize_checkpoint(1)
    write_metadata(checkpoint, completed(checkpoint).to_json())
    damaged = base.child("damaged")
    make_directory(damaged)
    publish(damaged.child("_metadata"), b"garbage")
    first, second, third = list_savepoints(base)
    assert (first.location, second.location, third.location) == (newer.url, older.url, damaged.url)
    assert first.entry == SavepointEntry(
        JOB, 1, 1, 3_000, "NATIVE", "hashmap", 5, 1, first.entry and first.entry.written_by,
        "flights", FACTS.program, 3, "session 1", "ana", lineage=JOB,
    )  # fmt: skip
    assert first.entry is not None
    assert first.entry.duration_ms == 2_999
    assert second.entry is not None
    assert (second.entry.job_id, second.entry.bytes, second.entry.job_name) == (JOB, 5, None)
    assert (first.is_good, second.is_good, third.is_good) == (True, True, False)
    assert "damaged" in (third.problem or "")
    assert [found.location for found in list_savepoints(base, "flights")] == [newer.url]
    assert [found.location for found in list_savepoints(base, JOB)] == [newer.url, older.url]
    with pytest.raises(InvalidLocationError, match="is a checkpoint"):
        mark_savepoint(checkpoint, MarkKind.DRILL, GOOD)


@pytest.mark.row("air.10")
def test_the_latest_good_savepoint_has_not_failed_in_its_newest_verification_or_drill(base: Location) -> None:
    assert latest_good(base) is None
    oldest, older, newest = (savepoint(base, at) for at in (1_000, 2_000, 3_000))
    damaged = savepoint(base, 4_000)
    replace_file(damaged.child("_metadata"), b"garbage")

    def latest() -> str | None:
        found = latest_good(base, "flights")
        return None if found is None else found.location

    assert latest() == newest.url
    mark_savepoint(newest, MarkKind.DRILL, BAD)
    mark_savepoint(newest, MarkKind.VERIFICATION, GOOD)
    assert latest() == older.url
    failed = look_at(newest)
    assert failed is not None
    assert failed.problem == "its newest drill failed: the file is missing"
    mark_savepoint(older, MarkKind.VERIFICATION, BAD)
    assert latest() == oldest.url
    mark_savepoint(newest, MarkKind.DRILL, GOOD)
    assert latest() == newest.url
    delete_file(newest.child("_metadata"))
    assert latest() == oldest.url
    assert latest_good(base, "another") is None


@pytest.mark.row("air.10")
def test_marks_by_many_at_once_are_all_kept(base: Location) -> None:
    directory = savepoint(base, 1_000, None)
    with ThreadPoolExecutor(6) as pool:
        for number in range(12):
            kind = MarkKind.DRILL if number % 2 else MarkKind.VERIFICATION
            pool.submit(mark_savepoint, directory.url, kind, Mark(number, True))
    entry = read_entry(directory)
    assert entry is not None
    assert {mark.at_ms for mark in (*entry.verifications, *entry.drills)} == set(range(12))
    assert len(list_names(directory.child("catalogue"))) == 1


def test_a_mark_that_may_be_on_its_way_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = savepoint(resolve(tmp_path), 1_000)
    errors = [AmbiguousWriteError("no answer", "x"), StorageError("refused", "x")]

    def fail(file: Location, data: bytes) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(versioned_document, "publish", fail)
    with pytest.raises(AmbiguousWriteError, match="refused"):
        mark_savepoint(directory, MarkKind.DRILL, GOOD)


def test_oldest_marks_are_dropped_and_texts_are_bounded(tmp_path: Path) -> None:
    directory = savepoint(resolve(tmp_path), 1_000)
    for number in range(MAX_MARKS + 3):
        mark_savepoint(directory, MarkKind.VERIFICATION, Mark(number, True, detail="x" * 5_000))
    entry = read_entry(directory)
    assert entry is not None
    assert [mark.at_ms for mark in entry.verifications] == list(range(3, MAX_MARKS + 3))
    assert {len(mark.detail) for mark in entry.verifications} == {1_000}


def test_entry_that_is_recorded_late_keeps_the_marks(tmp_path: Path) -> None:
    """A drill may begin before the driver has written the entry."""
    directory = savepoint(resolve(tmp_path), 1_000, None)
    mark_savepoint(directory, MarkKind.DRILL, GOOD)
    record_savepoint(directory.url, FACTS)
    entry = read_entry(directory)
    assert entry is not None
    assert (entry.job_name, entry.drills) == ("flights", (GOOD,))


@pytest.mark.row("air.10")
def test_an_interrupted_disposal_is_found_and_continues(base: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it stops: what is left has an owner, which says what it is, until nothing is left."""
    deletions = 0
    for dies_at in range(1, 5):
        directory = savepoint(base, 1_000, FACTS if dies_at % 2 else None, files=2)

        def delete(location: Location, dies_at: int = dies_at) -> None:
            nonlocal deletions
            deletions += 1
            if deletions == dies_at:
                raise StorageError("storage is away", location.url)
            delete_file(location)

        deletions = 0
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint_storage, "delete_file", delete)
            patch.setattr(checkpoint_storage, "delete_entry", delete)
            with pytest.raises(StorageError, match="storage is away"):
                dispose_of(directory.url)
        (left,) = list_savepoints(base)
        assert (left.location, left.is_good) == (directory.url, False)
        assert "deletion is in progress or was interrupted" in (left.problem or "")
        assert latest_good(base) is None
        dispose_of(directory.url)
        assert list_names(base) == []
    alone = savepoint(base, 1_000)
    for name in list_names(alone):
        if name != "catalogue":
            delete_file(alone.child(name))
    (left,) = list_savepoints(base)
    assert left.problem == "its metadata no longer exists"
    dispose_of(alone.url)
    assert list_names(base) == []
    with pytest.raises(NotFoundError):
        dispose_of(base.child("savepoint-1").url)


@pytest.mark.row("air.10")
def test_a_copy_is_of_the_same_job_and_not_verified_yet(base: Location) -> None:
    original = savepoint(base.child("here"), 1_000)
    mark_savepoint(original, MarkKind.VERIFICATION, BAD)
    copy_snapshot(original, base.child("there"))
    found = latest_good(base.child("there"), "flights")
    assert found is not None
    assert found.entry is not None
    assert (found.entry.taken_by, found.entry.verifications) == ("ana", ())


def test_a_file_that_is_not_an_entry_is_reported_and_deletes_nothing(tmp_path: Path) -> None:
    directory = savepoint(resolve(tmp_path), 1_000)
    entry_document(directory).write(1, {"job_id": 5})
    (found,) = list_savepoints(str(tmp_path))
    assert "is not an entry of the savepoint catalogue" in (found.problem or "")
    with pytest.raises(CorruptFileError, match="is not an entry"):
        mark_savepoint(directory, MarkKind.DRILL, GOOD)
    forged = savepoint(resolve(tmp_path / "more"), 1_000)
    entry = read_entry(forged)
    assert entry is not None
    victim = tmp_path / "victim"
    victim.touch()
    delete_file(forged.child("_metadata"))
    document = {name: getattr(entry, name) for name in SavepointEntry.__slots__}
    entry_document(forged).write(1, {**document, "verifications": [], "drills": [], "disposing": ["../../victim"]})
    with pytest.raises(InvalidLocationError, match="leads out of its directory"):
        dispose_of(forged.url)
    assert victim.exists()


def test_entries_of_the_first_version_are_read(tmp_path: Path) -> None:
    directory = savepoint(resolve(tmp_path), 1_000, None)
    make_directory(directory.child("catalogue"))
    stored = Path(__file__).parents[3] / "data" / "savepoint-entry-1.json"
    publish(directory.child("catalogue", f"{1:020d}.json"), stored.read_bytes())
    entry = read_entry(directory)
    assert entry is not None
    assert (entry.job_name, entry.taken_by, entry.verifications, entry.drills) == ("flights", "ana", (GOOD,), (BAD,))


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no directory"):
        list_savepoints(str(tmp_path / "none"))


def test_unreadable_savepoint_is_shown_and_no_older_one_counts_as_the_latest(tmp_path: Path) -> None:
    older = savepoint(resolve(tmp_path), 1_000)
    odd = tmp_path / "odd"
    odd.mkdir()
    os.mkfifo(odd / "_metadata")
    (tmp_path / "none").symlink_to(tmp_path / "none")
    found, unreadable = list_savepoints(str(tmp_path))
    assert (found.location, found.is_good, unreadable.is_good) == (older.url, True, False)
    assert "FIFO" in (unreadable.problem or "")
    with pytest.raises(StorageError, match="FIFO"):
        latest_good(str(tmp_path))


def test_too_many_directories_are_refused(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / str(number)).mkdir()
    assert list(find_places(resolve(tmp_path), at_most=6)) == []
    with pytest.raises(InvalidLocationError, match="name a directory closer to the savepoints"):
        list(find_places(resolve(tmp_path), at_most=5))


# --- the command line


@pytest.mark.row("air.10")
def test_the_commands_show_and_mark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = savepoint(resolve(tmp_path), 1_000_000, None), savepoint(resolve(tmp_path), 2_000_000)
    Path(newer.path, next(name for name in list_names(newer) if len(name) == 36)).unlink()
    assert main(["snapshot", "latest", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == newer.url
    assert main(["snapshot", "verify", newer.url, "--no-mark"]) == ExitCode.FAILED
    assert main(["snapshot", "latest", str(tmp_path), "--job", "flights"]) == 0
    assert main(["snapshot", "verify", newer.url]) == ExitCode.FAILED
    capsys.readouterr()
    assert main(["snapshot", "latest", str(tmp_path), "--job", "flights"]) == ExitCode.NOT_FOUND
    assert "no good savepoint of job flights" in capsys.readouterr().err
    assert main(["snapshot", "latest", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == older.url
    assert main(["snapshot", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "flights" in shown
    assert "verification failed" in shown
    assert main(["snapshot", "list", str(tmp_path), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["catalogue"]["taken_by"], first["catalogue"]["good"]) == ("ana", False)
    assert first["catalogue"]["verifications"][0]["detail"].startswith("1 problems, the first: ")
    assert (second["catalogue"]["job_name"], second["catalogue"]["good"]) == (None, True)
    Path(newer.path, "_metadata").write_bytes(b"garbage")
    assert main(["snapshot", "verify", newer.url]) == ExitCode.FAILED
    entry = read_entry(newer)
    assert entry is not None
    assert "damaged or foreign" in entry.verifications[-1].detail


def test_verification_succeeds_although_its_mark_cannot_be_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = savepoint(resolve(tmp_path), 1_000, None)
    Path(directory.path, "catalogue").touch()  # where the entry would lie
    assert main(["snapshot", "verify", directory.url]) in (0, ExitCode.FAILED)
    assert "the result is not recorded in the catalogue" in capsys.readouterr().err
