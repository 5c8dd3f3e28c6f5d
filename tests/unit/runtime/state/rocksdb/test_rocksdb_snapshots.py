"""Snapshots of the RocksDB backend as real files: what is new, what is shared, what is duplicated, what is damaged."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, KeyedHandle
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.configuration.state_options import CompactionStyle
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.backend import RocksDBKeyedStateBackend
from ckpt_runtime.state.rocksdb.store import Store
from ckpt_runtime.task import snapshot_files
from ckpt_runtime.task.in_flight import InFlight, PersistedBuffers
from ckpt_runtime.task.restored_input import StateRestoreError, create_keyed_backend
from ckpt_runtime.task.snapshot_files import WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot

GROUPS = 32
ALL = KeyGroupRange(0, GROUPS - 1)
KEY, VALUE = pa.schema([("k", pa.int64())]), pa.schema([("v", pa.string())])
CHECKPOINT = CheckpointProperties()
SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT)
KEYS = range(3000)


class Job:
    """Directories of a job, and a backend whose snapshots go there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shared = root / "shared"
        self.shared.mkdir()
        self.opened: list[Any] = []
        self.backend = RocksDBKeyedStateBackend(self.parameters())
        self.opened.append(self.backend)

    def parameters(self, groups: KeyGroupRange = ALL) -> BackendParameters:
        return BackendParameters("op", groups, GROUPS, lambda: tempfile.mkdtemp(prefix="local-", dir=self.root))

    def put(self, keys: Sequence[int], value: str) -> None:
        state = self.backend.value_state("s", KEY, VALUE)
        for key in keys:
            state.put((key,), (f"{value}-{key * 2654435761 % 2**32:x}",))

    def take(self, number: int, properties: CheckpointProperties = CHECKPOINT) -> SubtaskSnapshot:
        directory = self.root / f"chk-{number}"
        directory.mkdir()
        shared = "" if properties.is_savepoint else str(self.shared)
        options = CheckpointOptions(properties, str(directory), shared_directory=shared)
        keyed = self.backend.snapshot(number, properties)
        operators = (OperatorSnapshot("op", (), keyed),)
        return SubtaskSnapshot(
            CheckpointBarrier(number, 0, options), operators, InFlight(), SnapshotMeasures(0, 0, 0, 0.0)
        )

    def write(self, number: int, properties: CheckpointProperties = CHECKPOINT) -> WrittenSnapshot:
        return written(self.take(number, properties))

    def restored(self, handles: Sequence[KeyedHandle], number: int, groups: KeyGroupRange = ALL) -> Any:
        directory = str(self.root / f"chk-{number}")
        self.opened.append(create_keyed_backend("rocksdb", self.parameters(groups), handles, directory, owned=True))
        return self.opened[-1]


def written(snapshot: SubtaskSnapshot) -> WrittenSnapshot:
    return write_snapshot(snapshot, 0, PersistedBuffers())


def handle_of(snapshot: WrittenSnapshot) -> IncrementalKeyedStateHandle:
    (handle,) = snapshot.state.operators["op"].keyed
    assert isinstance(handle, IncrementalKeyedStateHandle)
    return handle


def value_of(backend: Any, key: int) -> str | None:
    found = backend.value_state("s", KEY, VALUE).get((key,))
    return None if found is None else str(found[0]).split("-")[0]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for backend in made.opened:
        backend.close()
    assert list(tmp_path.glob("local-*")) == []


@pytest.mark.row("203.2")
def test_an_increment_and_a_savepoint_write_what_has_changed(job: Job) -> None:
    job.put(KEYS, "a")
    first = job.write(1)
    job.backend.notify_complete(1)
    job.put(KEYS[:30], "b")
    second = job.write(2)
    assert second.written_bytes < first.written_bytes / 10
    assert len(handle_of(second).files) == 3, "two table files, one of them the first one's, and the manifest"
    job.backend.notify_complete(2)
    savepoint = job.write(3, SAVEPOINT)
    assert savepoint.written_bytes < first.written_bytes / 10
    assert savepoint.files.duplicated_bytes > first.written_bytes / 2
    assert all("/" not in file.path for file in handle_of(savepoint).files.values()), "it lies in its own directory"
    full = job.write(4, CheckpointProperties(full=True))
    assert full.written_bytes > first.written_bytes / 2
    for path in job.shared.iterdir():
        path.unlink()
    found = job.restored([handle_of(savepoint)], 3)
    assert {value_of(found, key) for key in KEYS[:30]} == {"b"}
    assert {value_of(found, key) for key in KEYS[30:]} == {"a"}


def test_names_of_files_are_durable_before_anybody_hears_of_them(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    durable: list[tuple[Path, set[str]]] = []

    def settled(path: str) -> None:
        durable.append((Path(path), {entry.name for entry in Path(path).iterdir()}))

    monkeypatch.setattr(snapshot_files, "fsync_directory", settled)
    for number, properties in ((1, CHECKPOINT), (2, CHECKPOINT), (3, SAVEPOINT)):
        job.put(KEYS, f"{number}")
        written = job.write(number, properties)
        job.backend.notify_complete(number)
        places = {Path(location.path).parent for location in written.files.locations}
        assert len(places) == (1 if properties.is_savepoint else 2)
        assert {path for path, _ in durable} == places
        assert len(durable) == len(places), "once each"
        for path, names in durable:
            assert names == {entry.name for entry in path.iterdir()}
        durable.clear()


def test_a_restored_job_continues_from_the_files_that_it_was_restored_from(job: Job) -> None:
    job.put(KEYS, "a")
    first = job.write(1)
    before = set(job.shared.iterdir())
    job.backend = job.restored([handle_of(first)], 1)
    job.put(KEYS[:3], "b")
    second = job.write(2)
    assert len(set(job.shared.iterdir()) - before) == 1
    assert before <= {Path(file.path.removeprefix("file://")) for file in second.state.files() if "://" in file.path}


def test_snapshot_of_linked_tables_does_not_change_with_the_job(job: Job) -> None:
    job.put(KEYS, "a")
    handle = handle_of(job.write(1))
    linked = [Path(file.path.removeprefix("file://")) for file in handle.files.values() if "://" in file.path]
    before = {path: path.read_bytes() for path in linked}
    assert linked
    assert {path.stat().st_nlink for path in linked} == {2}, "the first database's name and the stored one"
    job.backend = job.restored([handle], 1, KeyGroupRange(0, GROUPS // 2))
    assert {path.stat().st_nlink for path in linked} == {3}
    own = [key for key in KEYS if value_of(job.backend, key) is not None]
    for number in range(2, 24):  # more than wait for a compaction
        job.put(own, "b")
        written(job.take(number))
    job.backend.close()
    assert {path: path.read_bytes() for path in linked} == before
    assert {path.stat().st_nlink for path in linked} == {2}
    assert value_of(job.restored([handle], 1), KEYS[-1]) == "a"


@pytest.mark.parametrize("style", CompactionStyle)
def test_the_configuration_says_how_files_are_merged(job: Job, style: CompactionStyle) -> None:
    job.put(KEYS, "a")
    handle = handle_of(job.write(1))
    parameters = replace(job.parameters(), configuration={"state.backend.rocksdb.compaction.style": style.value})
    for handles in ((), (handle,)):
        backend = create_keyed_backend("rocksdb", parameters, handles, str(job.root / "chk-1"), owned=True)
        job.opened.append(backend)
        assert value_of(backend, KEYS[0]) == ("a" if handles else None)
        newest = max(job.root.glob("local-*/db/OPTIONS-*"), key=lambda path: path.stat().st_mtime_ns)
        assert f"compaction_style=kCompactionStyle{style.value.title()}\n" in newest.read_text()


@pytest.mark.parametrize("own_first", [True, False])
def test_concurrent_snapshots_have_their_moments_when_written_in_any_order(job: Job, own_first: bool) -> None:
    taken = []
    for number, value in enumerate("abc"):
        job.put(KEYS[number * 10 : 100], value)
        taken.append(job.take(number))
    job.put(KEYS[:100], "d")
    job.backend.close()
    for number in (0, 1, 2) if own_first else (2, 0, 1):
        found = job.restored(written(taken[number]).state.operators["op"].keyed, number)
        assert [value_of(found, key) for key in (0, 10, 20, 99)] == [
            "a", "ab"[number > 0], "abc"[number], "abc"[number]
        ]  # fmt: skip
    assert job.opened.pop(0) is job.backend


def test_snapshot_that_cannot_be_linked_fails_without_failing_the_job(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Store, directory: Path) -> None:
        raise OSError("no space left")

    job.put(KEYS[:10], "a")
    failing = job.take(1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space left"):
        patch.setattr(Store, "checkpoint", full)
        written(failing)
    job.put(KEYS[5:10], "b")
    found = job.restored([handle_of(job.write(2))], 2)
    assert [value_of(found, key) for key in (4, 5)] == ["a", "b"]


def test_a_write_that_fails_is_tried_again_by_the_next_one(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Store, puts: Any, deletes: Any = ()) -> None:
        list(puts)
        raise OSError("input/output error")

    job.put(KEYS[:10], "a")
    failing = job.take(1)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="input/output error"):
        patch.setattr(Store, "write", broken)
        written(failing)
    job.put(KEYS[5:10], "b")
    found = job.restored([handle_of(job.write(2))], 2)
    assert [value_of(found, key) for key in (4, 5)] == ["a", "b"]


def test_rescaling_opens_one_part_and_adds_the_others(job: Job) -> None:
    job.put(KEYS, "a")
    whole = handle_of(job.write(1))
    parts = []
    for index in range(3):
        job.backend = job.restored([whole], 1, key_group_range(GROUPS, 3, index))
        # Another order of states: what is merged has other ids.
        for name in ("x", "y")[:: 1 if index else -1]:
            job.backend.value_state(name, KEY, VALUE)
        parts.append(handle_of(job.write(10 + index, SAVEPOINT)))
        assert len(parts[-1].files) <= 3
    for index, part in enumerate(parts):
        # As one checkpoint of three subtasks has them.
        for file in part.files.values():
            if not (job.root / "chk-1" / file.path).exists():
                (job.root / f"chk-{10 + index}" / file.path).rename(job.root / "chk-1" / file.path)
    merged = job.restored(parts, 1)
    state = merged.value_state("s", KEY, VALUE)
    assert sorted(key for (key,), _ in state.stored_entries()) == list(KEYS)
    half = job.restored(parts, 1, KeyGroupRange(5, 20))
    state = half.value_state("s", KEY, VALUE)
    kept = sorted(key for (key,), _ in state.stored_entries())
    assert 0 < len(kept) < len(KEYS)
    assert {value_of(half, key) for key in kept} == {"a"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda files: files | {"CURRENT": files["manifest"]}, "no database"),
        (lambda files: {name: file for name, file in files.items() if "MANIFEST" not in name}, "no database"),
        (lambda files: {name: file for name, file in files.items() if "sst" not in name}, "RocksDB cannot open"),
        (lambda files: dict.fromkeys(files, files["manifest"]), "RocksDB cannot open"),
    ],
)
def test_files_that_do_not_belong_together_count_as_damage(job: Job, change: Any, message: str) -> None:
    job.put(KEYS[:10], "a")
    handle = handle_of(job.write(1))
    (manifest,) = [file for name, file in handle.files.items() if "MANIFEST" in name]
    files = change({**handle.files, "manifest": manifest})
    files.pop("manifest", None)
    with pytest.raises(StateRestoreError, match=f"operator 'op'.*{message}"):
        job.restored([structs.replace(handle, files=files)], 1)


@pytest.mark.parametrize(
    "states",
    [
        None,
        {"s": {"id": 70000, "descriptors": [{}]}},
        {"s": {"id": 0, "descriptors": []}},
        {"s": {"id": 0, "descriptors": [{"format": 1, "kind": "value"}], "current": 3}},
        {"s": {"id": 0, "descriptors": [{"format": 9, "kind": "value"}]}},
        {"s": {"id": 0, "descriptors": [{"format": 1, "kind": "value"}, {"format": 1, "kind": "list"}]}},
        {name: {"id": 0, "descriptors": [{"format": 1, "kind": "value"}]} for name in "st"},
    ],
)
def test_a_description_that_makes_no_sense_is_damage(job: Job, states: Any) -> None:
    job.put(KEYS[:10], "a")
    handle = handle_of(job.write(1))
    with pytest.raises(StateRestoreError, match=r"state .* of operator 'op'|operator 'op'"):
        job.restored([structs.replace(handle, description={"states": states})], 1)


def test_entries_that_make_no_sense_are_named(job: Job) -> None:
    job.put([1], "a")
    job.write(1)
    database = job.backend._database
    (encoded,) = [key for key, _ in database.scan(b"")]
    for entry in (b"", b"\0\7", b"\0\0\xff", b"\0\0\x91\x93\1\2\3"):
        database.write([(encoded, entry)])
        restored = job.restored([handle_of(job.write(100 + len(entry)))], 100 + len(entry))
        with pytest.raises(CorruptStateError, match="an entry"):
            value_of(restored, 1)
