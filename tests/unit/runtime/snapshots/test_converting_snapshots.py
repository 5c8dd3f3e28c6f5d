"""Conversion between the native and the canonical form: the same rows, whatever was lost on the way is nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedStateHandle,
    OperatorSubtaskState,
    SubtaskState,
)
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.copying import convert_snapshot
from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.state.registry import register_backend
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, InvalidLocationError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import write_metadata
from tests.support.golden import DIRECTORY, placed
from tests.support.pipelines.file_backend import NAME, FileKeyedStateBackend
from tests.support.snapshots import UID, completed, write_file

NATIVE, CANONICAL = SavepointFormat.NATIVE, SavepointFormat.CANONICAL
SAVEPOINT = DIRECTORY / "format-2" / "savepoint"

pytestmark = pytest.mark.row("203.5")


@pytest.fixture(autouse=True)
def _backend_of_files() -> None:
    register_backend(NAME, FileKeyedStateBackend)


def rows_of(snapshot: Snapshot) -> dict[tuple[str, str], list[tuple[object, ...]]]:
    """All rows by operator and state; those of a key in their order."""
    found: dict[tuple[str, str], list[tuple[object, ...]]] = {}
    for state in keyed_states(snapshot):
        batches = [batch for _, batch in state.rows(state.key_groups)]
        table = pa.Table.from_batches(batches, state.schema)
        keys = [name for name in table.column_names if name.startswith("key.")]
        ordered = sorted(table.to_pylist(), key=lambda row: tuple(row[key] for key in keys))
        found[state.uid, state.name] = [tuple(row.items()) for row in ordered]
    return found


def converted(source: Path | str, target: Path, form: SavepointFormat, backend: str = "hashmap") -> Snapshot:
    assert convert_snapshot(str(source), resolve(target), form, backend).location == target.as_uri()
    return open_snapshot(str(target))


def kinds(snapshot: Snapshot) -> set[type]:
    states = snapshot.metadata.states.values()
    return {type(handle) for state in states for entry in state.operators.values() for handle in entry.keyed}


def test_files_made_to_read_a_database_are_removed_when_its_states_are_closed() -> None:
    def made() -> list[Path]:
        return list(Path(tempfile.gettempdir()).glob("ckpt-exported-*"))

    states = keyed_states(open_snapshot(str(DIRECTORY / "format-2" / "rocksdb")))
    before = [list(state.rows(state.key_groups)) for state in states]
    assert made()
    for state in states:
        state.close()
    assert made() == []
    assert [list(state.rows(state.key_groups)) for state in states] == before, "they are read again"


@pytest.mark.parametrize("name", ["savepoint", "stop", "checkpoint", "checkpoint-partly-finished", "canonical"])
def test_conversion_to_the_other_format_and_back_loses_nothing(name: str, tmp_path: Path) -> None:
    source = open_snapshot(str(DIRECTORY / "format-2" / name))
    canonical = converted(DIRECTORY / "format-2" / name, tmp_path / "canonical", CANONICAL)
    native = converted(tmp_path / "canonical", tmp_path / "native", NATIVE)
    assert (kinds(canonical), kinds(native)) == ({CanonicalKeyedStateHandle}, {KeyedStateHandle})
    assert rows_of(canonical) == rows_of(native) == rows_of(source)
    for made, form in ((canonical, CANONICAL), (native, NATIVE)):
        assert verify_snapshot(made) == []
        assert (made.metadata.format, made.metadata.is_savepoint) == (form, True)
        assert made.metadata.vertices == source.metadata.vertices
        assert made.metadata.finished == source.metadata.finished
        lists = [[entry.lists for entry in made.states(uid)] for uid in ("left", "right")]
        assert lists == [[entry.lists for entry in source.states(uid)] for uid in ("left", "right")]
    assert {path.suffix for path in (tmp_path / "canonical").iterdir()} == {".parquet", ""}
    assert canonical.metadata.state_backend == "any"


def test_a_backend_of_other_files_is_reached_through_the_canonical_form(tmp_path: Path) -> None:
    converted(SAVEPOINT, tmp_path / "canonical", CANONICAL)
    other = converted(tmp_path / "canonical", tmp_path / "other", NATIVE, NAME)
    assert kinds(other) == {IncrementalKeyedStateHandle}
    assert other.metadata.state_backend == NAME
    back = converted(tmp_path / "other", tmp_path / "back", CANONICAL)
    assert rows_of(back) == rows_of(open_snapshot(str(SAVEPOINT)))


def test_data_in_flight_and_another_native_form_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidLocationError, match="native form of the state backend 'hashmap', not of 'files'"):
        converted(SAVEPOINT, tmp_path / "target", NATIVE, NAME)
    assert not (tmp_path / "target").exists()
    unaligned = placed(DIRECTORY / "format-2" / "unaligned", tmp_path)
    with pytest.raises(InvalidLocationError, match="unaligned checkpoint with in-flight data.*take a savepoint"):
        converted(unaligned, tmp_path / "target", CANONICAL)
    assert not (tmp_path / "target").exists()


def test_a_target_that_exists_stays(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").touch()
    with pytest.raises(AlreadyExistsError):
        converted(SAVEPOINT, target, CANONICAL)
    assert [path.name for path in target.iterdir()] == ["mine"]


def test_conversion_of_a_damaged_snapshot_leaves_no_files(tmp_path: Path) -> None:
    damaged = placed(SAVEPOINT, tmp_path)
    file = max(path for path in damaged.iterdir() if path.name != "_metadata")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptFileError, match=file.name):
        converted(damaged, tmp_path / "new" / "target", CANONICAL)
    assert not (tmp_path / "new").exists()


def test_unknown_backend_is_refused_for_any_state(tmp_path: Path) -> None:
    directory = resolve(tmp_path / "without")
    Path(directory.path).mkdir()
    write_metadata(directory, completed(directory).to_json())
    with pytest.raises(ValueError, match="'nope' is not available"):
        converted(directory.path, tmp_path / "target", SavepointFormat.NATIVE, "nope")
    assert not (tmp_path / "target").exists()


def test_a_backend_that_is_not_here_is_named(tmp_path: Path) -> None:
    directory = resolve(tmp_path / "strange")
    Path(directory.path).mkdir()
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "strange", {"one": write_file(directory)})
    write_metadata(directory, completed(directory, SubtaskState({UID: OperatorSubtaskState((handle,))}, 5)).to_json())
    with pytest.raises(ValueError, match="'strange' is not available"):
        converted(directory.path, tmp_path / "target", CANONICAL)
    assert not (tmp_path / "target").exists()
