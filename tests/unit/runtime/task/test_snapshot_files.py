"""New files of a snapshot: private and shared ones, what a full snapshot may refer to, and reading them back."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, KeyedHandle, StateFile
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.snapshots.snapshot import StoredFiles
from ckpt_runtime.state.backend import BackendParameters, SnapshotFiles
from ckpt_runtime.state.errors import SharedFileError, UnsupportedBackendError
from ckpt_runtime.state.registry import register_backend
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task.in_flight import InFlight, PersistedBuffers
from ckpt_runtime.task.restored_input import StateRestoreError, StateUnavailableError, create_keyed_backend
from ckpt_runtime.task.snapshot_files import NewFiles, WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot
from tests.support.pipelines.file_backend import FileKeyedStateBackend

ALL = KeyGroupRange(0, 31)
KEY, VALUE = pa.schema([("k", pa.int64())]), pa.schema([("v", pa.int64())])
SAVEPOINT = CheckpointProperties(CheckpointType.SAVEPOINT)

register_backend("files", FileKeyedStateBackend)


class Job:
    """Directories of a job, and a backend whose snapshots go there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.shared = root / "shared"
        self.shared.mkdir()
        self.backend = FileKeyedStateBackend(self.parameters())

    def parameters(self) -> BackendParameters:
        return BackendParameters("op", ALL, 32, lambda: tempfile.mkdtemp(dir=self.root))

    def put(self, key: int, value: int) -> None:
        self.backend.value_state("s", KEY, VALUE).put((key,), (value,))

    def options(self, number: int, properties: CheckpointProperties) -> CheckpointOptions:
        directory = self.root / f"chk-{number}"
        directory.mkdir(exist_ok=True)
        shared = "" if properties.is_savepoint else str(self.shared)
        return CheckpointOptions(properties, str(directory), shared_directory=shared)

    def write(self, number: int, properties: CheckpointProperties, keyed: object = None) -> WrittenSnapshot:
        keyed = keyed or self.backend.snapshot(number, properties)
        snapshot = SubtaskSnapshot(
            CheckpointBarrier(number, 0, self.options(number, properties)),
            (OperatorSnapshot("op", (), keyed),),  # type: ignore[arg-type]
            InFlight(),
            SnapshotMeasures(0, 0, 0, 0.0),
        )
        return write_snapshot(snapshot, 0, PersistedBuffers())


@pytest.fixture
def other_file_system(tmp_path: Path) -> Iterator[Path]:
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is no second file system")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_private_files_are_in_the_snapshot_and_shared_ones_in_the_jobs_directory(job: Job) -> None:
    files = NewFiles(job.options(7, CheckpointProperties()), 3)
    handles = []
    for opened, content in ((files.private, b"private"), (files.shared, b"shared"), (files.shared, b"ab")):
        with opened() as file:
            file.stream.write(content)
            handles.append(file.finish())
    private, shared, inline = handles
    assert names(job.root / "chk-7") == [private.path]
    assert [f"{job.shared.as_uri()}/{name}" for name in names(job.shared)] == [shared.path]
    assert names(job.shared)[0].startswith("chk-7-")
    assert inline.inline == b"ab"
    assert files.written_bytes == 15
    files.discard()
    assert names(job.root / "chk-7") == names(job.shared) == []


def test_a_file_that_is_not_finished_is_given_up(job: Job) -> None:
    files = NewFiles(job.options(7, CheckpointProperties()), 0)
    with pytest.raises(OSError, match="full"), files.shared() as file:
        file.stream.write(b"x" * 100)
        raise OSError("disk full")
    assert (names(job.shared), files.locations, files.written_bytes) == ([], [], 0)


def table(directory: Path, content: bytes = b"entries" * 100) -> Path:
    path = directory / "000007.sst"
    path.write_bytes(content)
    path.chmod(0o644)
    return path


@pytest.mark.parametrize("properties", [CheckpointProperties(), SAVEPOINT])
def test_a_local_file_that_never_changes_is_linked(job: Job, properties: CheckpointProperties) -> None:
    path = table(job.root)
    files = NewFiles(job.options(7, properties), 20)
    file = files.shared_from(path)
    files.settle()
    directory = job.root / "chk-7" if properties.is_savepoint else job.shared
    (stored,) = directory.iterdir()
    assert file.path == (stored.name if properties.is_savepoint else stored.as_uri())
    assert stored.name.startswith("chk-7-") is not properties.is_savepoint
    assert (stored.stat().st_ino, stored.stat().st_mode & 0o777) == (path.stat().st_ino, 0o600)
    assert files.written_bytes == file.length == 700
    with closing(StoredFiles(str(job.root / "chk-7"))) as reader:
        assert bytes(reader.read(file, 0, 700)) == path.read_bytes()
    files.discard()
    assert (names(directory), path.exists()) == ([], True)


def test_file_that_is_linked_for_a_snapshot_keeps_its_rights(job: Job) -> None:
    path = table(job.root)
    for name in ("snapshot", "other-link"):
        (job.root / name).hardlink_to(path)
    NewFiles(job.options(7, CheckpointProperties()), 20).shared_from(path)
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_local_file_is_copied_where_it_must_not_or_cannot_be_linked(job: Job, other_file_system: Path) -> None:
    for copies_only, source in ((True, job.root), (False, other_file_system)):
        path = table(source)
        files = NewFiles(job.options(7, CheckpointProperties()), 20, copies_only=copies_only)
        handles = [files.shared_from(path) for _ in range(2)]
        assert files.written_bytes == 1400
        for file in handles:
            stored = Path(resolve(file.path).path)
            assert stored.read_bytes() == path.read_bytes()
            assert stored.stat().st_ino != path.stat().st_ino or source == other_file_system
            assert stored.stat().st_mode & 0o777 == 0o600
        assert path.stat().st_mode & 0o777 == 0o644


def test_a_small_local_file_is_inside_its_handle(job: Job) -> None:
    file = NewFiles(job.options(7, CheckpointProperties()), 700).shared_from(table(job.root))
    assert (file.inline, names(job.shared)) == (b"entries" * 100, [])


def test_unavailable_storage_is_named(job: Job) -> None:
    files = NewFiles(job.options(7, CheckpointProperties()), 20)
    job.shared.rmdir()
    with pytest.raises(StorageError, match="shared/chk-7-"):
        files.shared_from(table(job.root))
    assert (files.locations, files.written_bytes) == ([], 0)


def test_an_increment_writes_what_is_new_and_counts_what_it_holds(job: Job) -> None:
    for key in range(20):
        job.put(key, 1)
    first = job.write(1, CheckpointProperties())
    assert first.state.bytes == first.written_bytes
    job.backend.notify_complete(1)
    job.put(3, 2)
    second = job.write(2, CheckpointProperties())
    assert 0 < second.written_bytes < first.written_bytes
    assert second.state.bytes == first.state.bytes
    assert len(second.files.locations) == 2, "one segment and the list of segments"
    assert {resolve(file.path).name for file in second.state.files() if "://" in file.path} <= set(names(job.shared))


def test_a_full_checkpoint_refers_to_nothing_and_a_savepoint_shares_nothing(job: Job) -> None:
    for key in range(20):
        job.put(key, 1)
    first = job.write(1, CheckpointProperties())
    job.backend.notify_complete(1)
    full = job.write(2, CheckpointProperties(full=True))
    assert not {file.path for file in full.state.files()} & {file.path for file in first.state.files()}
    savepoint = job.write(3, SAVEPOINT)
    assert names(job.root / "chk-3") == sorted(file.path for file in savepoint.state.files())
    job.backend.notify_complete(2)
    assert job.write(4, CheckpointProperties()).written_bytes < full.written_bytes


def test_a_savepoint_duplicates_what_is_in_storage_and_writes_what_is_not(job: Job) -> None:
    for key in range(20):
        job.put(key, 1)
    first = job.write(1, CheckpointProperties())
    job.backend.notify_complete(1)
    job.put(3, 2)
    savepoint = job.write(2, SAVEPOINT)
    files = savepoint.files
    assert sum(files.duplicated.values()) == len(names(job.shared)) - 1 > 1
    assert 0 < savepoint.written_bytes < first.written_bytes
    assert savepoint.written_bytes + files.duplicated_bytes == savepoint.state.bytes
    assert not any("/" in file.path for file in savepoint.state.files()), "paths are relative"
    assert names(job.root / "chk-2") == sorted(file.path for file in savepoint.state.files())
    shutil.rmtree(job.shared)
    (job.root / "chk-2").rename(job.root / "moved")
    handles = savepoint.state.operators["op"].keyed
    restored = create_keyed_backend("files", job.parameters(), handles, str(job.root / "moved"), owned=False)
    state = restored.value_state("s", KEY, VALUE)
    assert [state.get((key,)) for key in range(20)] == [(2,) if key == 3 else (1,) for key in range(20)]


def test_only_notified_files_of_incremental_jobs_are_duplicated(job: Job) -> None:
    job.put(1, 1)
    job.write(1, CheckpointProperties())
    assert job.write(2, SAVEPOINT).files.duplicated_bytes == 0, "not notified"
    job.backend.notify_complete(1)
    assert job.write(3, replace(SAVEPOINT, incremental=False)).files.duplicated_bytes == 0
    assert job.write(4, replace(SAVEPOINT, savepoint_format=SavepointFormat.CANONICAL)).files.duplicated_bytes == 0
    assert job.write(5, SAVEPOINT).files.duplicated_bytes > 0


def test_files_that_cannot_be_duplicated_are_rewritten(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    for key in range(20):
        job.put(key, 1)
    job.write(1, CheckpointProperties())
    job.backend.notify_complete(1)
    gone, damaged, *_ = names(job.shared)
    (job.shared / gone).unlink()
    (job.shared / damaged).write_bytes(b"short")
    savepoint = job.write(2, SAVEPOINT)
    assert savepoint.written_bytes > 0 < savepoint.files.duplicated_bytes
    assert gone in caplog.text
    assert f"{damaged}: damaged" in caplog.text
    handles = savepoint.state.operators["op"].keyed
    restored = create_keyed_backend("files", job.parameters(), handles, str(job.root / "chk-2"), owned=False)
    assert [restored.value_state("s", KEY, VALUE).get((key,)) for key in range(20)] == [(1,)] * 20


def test_duplicates_are_discarded_with_their_snapshot_and_no_source_is(job: Job) -> None:
    job.put(1, 1)
    job.write(1, CheckpointProperties())
    job.backend.notify_complete(1)
    before = names(job.shared)
    job.write(2, SAVEPOINT).files.discard()
    assert (names(job.root / "chk-2"), names(job.shared)) == ([], before)


def test_small_content_stays_in_the_handle(job: Job) -> None:
    files = NewFiles(job.options(3, SAVEPOINT), 100)
    small = StateFile("", 1, "c", b"x")
    assert files.duplicate_all({"small": small}) == {"small": small}
    assert names(job.root / "chk-3") == []


@pytest.mark.row("203.8")
def test_without_the_option_the_backend_in_memory_writes_all_of_its_state_each_time(job: Job) -> None:
    backend = create_keyed_backend("hashmap", job.parameters(), (), "", owned=True)
    state = backend.value_state("s", KEY, VALUE)
    for key in range(20):
        state.put((key,), (1,))
    for number, properties in enumerate((CheckpointProperties(), CheckpointProperties(), SAVEPOINT), 1):
        written = job.write(number, properties, backend.snapshot(number, properties))
        backend.notify_complete(number)
        assert (written.reused_bytes, written.files.duplicated_bytes) == (0, 0)
        assert written.written_bytes == written.state.bytes > 0


@pytest.mark.row("203.11")
def test_with_the_option_the_backend_in_memory_writes_what_has_changed(job: Job) -> None:
    parameters = replace(job.parameters(), configuration={"execution.checkpointing.incremental": "true"})
    backend = create_keyed_backend("hashmap", parameters, (), "", owned=True)
    state = backend.value_state("s", KEY, VALUE)
    for key in range(1000):
        state.put((key,), (1,))
    first = job.write(1, CheckpointProperties(), backend.snapshot(1, CheckpointProperties()))
    backend.notify_complete(1)
    state.put((1,), (2,))
    second = job.write(2, CheckpointProperties(), backend.snapshot(2, CheckpointProperties()))
    assert second.written_bytes < first.written_bytes / 10 < second.reused_bytes
    savepoint = job.write(3, SAVEPOINT, backend.snapshot(3, SAVEPOINT))
    assert savepoint.written_bytes < first.written_bytes / 10 < savepoint.files.duplicated_bytes
    unshared = job.write(4, CheckpointProperties(full=True), backend.snapshot(4, CheckpointProperties(full=True)))
    assert (unshared.reused_bytes, unshared.written_bytes) == (0, unshared.state.bytes)
    (job.shared / names(job.shared)[0]).unlink()
    rewritten = job.write(5, SAVEPOINT, backend.snapshot(5, SAVEPOINT))
    for number, taken in ((3, savepoint), (4, unshared), (5, rewritten)):
        handles = taken.state.operators["op"].keyed
        found = create_keyed_backend("hashmap", job.parameters(), handles, str(job.root / f"chk-{number}"), owned=True)
        restored = found.value_state("s", KEY, VALUE)
        assert [restored.get((key,)) for key in range(1000)] == [(1 + (key == 1),) for key in range(1000)]


class Careless:
    """A snapshot that refers to a file of another one, whatever it was asked for."""

    def __init__(self, file: StateFile) -> None:
        self.file = file

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        with files.private() as file:
            file.stream.write(b"new")
            return [IncrementalKeyedStateHandle(ALL, "files", {"new": file.finish(), "old": self.file})]

    def release(self) -> None:
        pass


@pytest.mark.parametrize("properties", [CheckpointProperties(full=True), SAVEPOINT])
def test_a_backend_that_breaks_this_is_stopped(job: Job, properties: CheckpointProperties) -> None:
    with pytest.raises(SharedFileError, match="'op'.*shared/x in a full snapshot"):
        job.write(5, properties, Careless(StateFile("file:///job/shared/x", 1, "c")))
    assert names(job.root / "chk-5") == []


def test_files_are_fetched_verified_and_only_where_their_keys_are(job: Job) -> None:
    for key in range(20):
        job.put(key, key)
    handles = job.write(1, CheckpointProperties()).state.operators["op"].keyed

    def restored(groups: KeyGroupRange) -> FileKeyedStateBackend:
        parameters = BackendParameters("op", groups, 32, job.parameters().make_directory)
        backend = create_keyed_backend("files", parameters, handles, str(job.root / "chk-1"), owned=True)
        assert isinstance(backend, FileKeyedStateBackend)
        return backend

    half = restored(KeyGroupRange(0, 7))
    assert len(names(half.directory)) == 1
    state = restored(ALL).value_state("s", KEY, VALUE)
    assert [state.get((key,)) for key in range(20)] == [(key,) for key in range(20)]
    damaged = job.shared / names(job.shared)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    before = set(job.root.iterdir())
    with pytest.raises(StateRestoreError, match=f"operator 'op' cannot restore.*{damaged.name}"):
        restored(ALL)
    assert set(job.root.iterdir()) == before, "local files of a backend that was never there"
    damaged.unlink()
    with pytest.raises(StateUnavailableError, match=damaged.name):
        restored(ALL)


def test_state_of_another_backend_is_refused(job: Job) -> None:
    job.put(1, 1)
    handles = job.write(1, CheckpointProperties()).state.operators["op"].keyed
    with pytest.raises(UnsupportedBackendError, match="operator 'op'.*written by the backend 'files'"):
        create_keyed_backend("hashmap", job.parameters(), handles, str(job.root / "chk-1"), owned=True)
