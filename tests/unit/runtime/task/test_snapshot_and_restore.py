"""Keyed state goes to the snapshot's directory and comes back from it; what fails leaves nothing behind."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from msgspec import structs

from ckpt_runtime.checkpoint.completed_checkpoint import (
    KeyedHandle,
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
)
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.elements import CheckpointBarrier
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend, SnapshotFiles
from ckpt_runtime.state.errors import CorruptStateError, UnsupportedBackendError
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.storage import filesystem
from ckpt_runtime.storage.errors import CorruptFileError, InvalidLocationError, StorageError
from ckpt_runtime.task.in_flight import InFlight, PersistedBuffers
from ckpt_runtime.task.restored_input import (
    StateRestoreError,
    StateUnavailableError,
    create_keyed_backend,
    naming_operator,
)
from ckpt_runtime.task.snapshot_files import WrittenSnapshot, write_snapshot
from ckpt_runtime.task.subtask_checkpoints import OperatorSnapshot, SnapshotMeasures, SubtaskSnapshot
from ckpt_runtime.task.worker import describe_error

ALL = KeyGroupRange(0, 127)
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("v", pa.int64())])
POSITIONS = (OperatorListState("position", OperatorStateMode.SPLIT, (1, 2)),)


def parameters(key_groups: KeyGroupRange = ALL) -> BackendParameters:
    return BackendParameters("op", key_groups, 128, tempfile.mkdtemp)


def restored(
    handles: Sequence[KeyedStateHandle], directory: Path | str, key_groups: KeyGroupRange = ALL
) -> KeyedStateBackend:
    return create_keyed_backend("hashmap", parameters(key_groups), handles, str(directory), owned=True)


class Frozen:
    """A keyed snapshot with given content, which notes its release."""

    def __init__(self, content: bytes = b"", error: Exception | None = None) -> None:
        self.content = content
        self.error = error
        self.released = 0

    def write(self, files: SnapshotFiles) -> list[KeyedHandle]:
        with files.private() as file:
            file.stream.write(self.content)
            if self.error is not None:
                raise self.error
            return [KeyedStateHandle(ALL, file.finish(), ())] if self.content else []

    def release(self) -> None:
        self.released += 1


def write(directory: Path | str, operators: list[OperatorSnapshot], threshold: int) -> WrittenSnapshot:
    options = CheckpointOptions(CheckpointProperties(), str(directory))
    measures = SnapshotMeasures(0, 0, 0, 0.0)
    snapshot = SubtaskSnapshot(CheckpointBarrier(1, 0, options), tuple(operators), InFlight(), measures)
    return write_snapshot(snapshot, threshold, PersistedBuffers())


def backend_with(values: dict[int, int]) -> MemoryKeyedStateBackend:
    backend = MemoryKeyedStateBackend(ALL, 128, "op")
    state = backend.value_state("s", KEY, VALUE)
    for key, value in values.items():
        state.put((key,), (value,))
    return backend


def test_operators_without_state_are_left_out(tmp_path: Path) -> None:
    empty = Frozen()
    written = write(str(tmp_path), [OperatorSnapshot("a", (), None), OperatorSnapshot("b", (), empty)], 50)
    assert written.state.operators == {}
    assert written.written_bytes == 0
    assert empty.released == 1
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_releases_all_states_and_leaves_no_part_of_its_file(tmp_path: Path) -> None:
    broken, later = Frozen(b"x" * 100, OSError("disk full")), Frozen(b"y")
    with pytest.raises(OSError, match="disk full"):
        write(str(tmp_path), [OperatorSnapshot("a", (), broken), OperatorSnapshot("b", (), later)], 0)
    assert list(tmp_path.iterdir()) == []
    assert [broken.released, later.released] == [1, 1]


def test_snapshot_files_of_earlier_operators_are_removed_when_a_later_one_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="disk full"):
        write(
            str(tmp_path),
            [
                OperatorSnapshot("a", (), Frozen(b"x" * 100)),
                OperatorSnapshot("b", (), Frozen(b"y" * 100, OSError("disk full"))),
            ],
            0,
        )
    assert list(tmp_path.iterdir()) == []


def test_directories_that_cannot_be_used_are_named_and_release_the_states(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        write(str(tmp_path / "absent"), [OperatorSnapshot("a", (), Frozen(b"x"))], 0)
    frozen = Frozen(b"x")
    with pytest.raises(StorageError):
        write("relative/path", [OperatorSnapshot("a", (), frozen)], 0)
    assert frozen.released == 1


@pytest.mark.parametrize("threshold", [0, 1 << 20])
def test_state_is_restored_clipped_to_the_key_groups_of_the_subtask(tmp_path: Path, threshold: int) -> None:
    values = {key: key * 10 for key in range(200)}
    backend = backend_with(values)
    written = write(str(tmp_path), [OperatorSnapshot("op", (), backend.snapshot(1, CheckpointProperties()))], threshold)
    handles = written.state.operators["op"].keyed
    found: dict[int, Any] = {}
    for key_groups in (KeyGroupRange(0, 63), KeyGroupRange(64, 127)):
        found_again = restored(handles, tmp_path, key_groups)
        state = found_again.value_state("s", KEY, VALUE)
        present = {key: state.get((key,))[0] for key in values if state.get((key,)) is not None}
        assert 0 < len(present) < 200
        assert not found.keys() & present.keys()
        found |= present
    assert found == values


def _written(directory: Path, threshold: int = 0) -> list[KeyedStateHandle]:
    snapshot = OperatorSnapshot("op", (), backend_with(dict.fromkeys(range(50), 2)).snapshot(1, CheckpointProperties()))
    return list(write(str(directory), [snapshot], threshold).state.operators["op"].keyed)


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "directory", "swap"])
def test_a_damaged_file_is_named_with_its_operator(tmp_path: Path, damage: str) -> None:
    first, second = (
        _written(tmp_path),
        write(str(tmp_path), [OperatorSnapshot("op", (), backend_with({7: 8}).snapshot(1, CheckpointProperties()))], 0)
        .state.operators["op"]
        .keyed,
    )
    file, other = tmp_path / first[0].file.path, tmp_path / second[0].file.path
    content = bytearray(file.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif damage in ("truncate", "empty"):
        file.write_bytes(content[:-1] if damage == "truncate" else b"")
    elif damage == "swap":
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    else:
        file.unlink()
        file.mkdir()
    with pytest.raises(StateRestoreError, match=f"operator 'op' cannot restore its state from .*{file.name}") as caught:
        restored(first, tmp_path)
    assert file.name in caught.value.url


def _fails_to_restore(handles: list[KeyedStateHandle], directory: Path) -> StateUnavailableError:
    with pytest.raises(StateUnavailableError, match="operator 'op' cannot restore its state from ") as caught:
        restored(handles, directory)
    assert describe_error(caught.value).recoverable
    return caught.value


def test_missing_file_may_return_and_does_not_count_as_damage(tmp_path: Path) -> None:
    snapshot, away = tmp_path / "snapshot", tmp_path / "away"
    snapshot.mkdir()
    handles = _written(snapshot)
    snapshot.rename(away)
    assert handles[0].file.path in str(_fails_to_restore(handles, snapshot))
    away.rename(snapshot)
    restored(handles, snapshot)


def test_error_of_the_storage_does_not_count_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handles = _written(tmp_path)

    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(filesystem, "read_descriptor", fail)
    assert _fails_to_restore(handles, tmp_path).errno == errno.EIO


def test_damage_is_distinguished_from_a_full_disk() -> None:
    expected = pytest.raises(StateUnavailableError, match="operator 'op' .*No space left")
    with expected as caught, naming_operator("op", "state"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/local/db")
    assert caught.value.errno == errno.ENOSPC
    assert describe_error(caught.value).recoverable
    errors = [CorruptFileError("x", "u"), InvalidLocationError("x", "u"), CorruptStateError("x")]
    for error in errors:
        with pytest.raises(StateRestoreError) as caught, naming_operator("op", "state"):
            raise error
        assert not describe_error(caught.value).recoverable


def test_damaged_inline_state_is_named_by_its_snapshot(tmp_path: Path) -> None:
    (handle,) = _written(tmp_path, 1 << 20)
    assert handle.file.inline is not None
    content = bytearray(handle.file.inline)
    content[3] ^= 1
    broken = structs.replace(handle, file=structs.replace(handle.file, inline=bytes(content)))
    with pytest.raises(StateRestoreError, match=f"operator 'op' cannot restore its state from {tmp_path}"):
        restored([broken], tmp_path)


@pytest.mark.parametrize("change", [{"path": "../outside"}, {"checksum": "md5:0"}, {"length": -1}])
def test_handle_that_refers_to_another_place_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (handle,) = _written(tmp_path)
    with pytest.raises(StateRestoreError, match="operator 'op'"):
        restored([structs.replace(handle, file=structs.replace(handle.file, **change))], tmp_path)


def test_a_descriptor_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (handle,) = _written(tmp_path)
    (section,) = handle.sections
    later = structs.replace(handle, sections=(replace(section, descriptor={**section.descriptor, "format": 99}),))
    with pytest.raises(StateRestoreError, match="operator 'op'.*stored rows of version 99"):
        restored([later], tmp_path)


def test_a_backend_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedBackendError, match=r"state\.backend\.type.*nowhere.*hashmap"):
        create_keyed_backend("nowhere", parameters(), (), "", owned=True)


def test_a_backend_without_a_canonical_form_gives_no_canonical_savepoint(tmp_path: Path) -> None:
    properties = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL)
    options = CheckpointOptions(properties, str(tmp_path))
    operator = OperatorSnapshot("op", (), Frozen(b"x" * 100))
    snapshot = SubtaskSnapshot(
        CheckpointBarrier(1, 0, options), (operator,), InFlight(), SnapshotMeasures(0, 0, 0, 0.0)
    )
    with pytest.raises(UnsupportedBackendError, match="operator 'op'.*does not write canonical savepoints"):
        write_snapshot(snapshot, 0, PersistedBuffers())
    assert list(tmp_path.iterdir()) == []
