"""Finding, describing, reading and copying snapshots without a job, on those that versions have kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.catalogue import find_places
from ckpt_runtime.snapshots.copying import convert_snapshot, copy_snapshot
from ckpt_runtime.snapshots.inspection import states_of, summarized, verify_snapshot
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.state.errors import UnsupportedBackendError
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, InvalidLocationError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.publish import checksum_of
from tests.support.golden import DIRECTORY, KEPT, SOURCES, placed
from tests.support.pipelines.golden import GROUP
from tests.support.snapshots import UID, completed, keyed, write_file, write_keyed_state, write_snapshot

SAVEPOINT = DIRECTORY / "format-2" / "savepoint"


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.row("203.10")
@pytest.mark.parametrize(("version", "name"), KEPT)
def test_a_kept_snapshot_is_proven_whole(version: str, name: str, tmp_path: Path) -> None:
    snapshot = open_snapshot(str(placed(DIRECTORY / version / name, tmp_path)))
    assert verify_snapshot(snapshot) == []


# --- finding


def test_snapshots_and_only_snapshots_are_found_at_any_level(base: Location) -> None:
    places = [("savepoint-1",), ("a" * 32, "chk-3"), ("a" * 32, "chk-10")]
    for names in places:
        make_directory(base.child(*names))
        write_snapshot(base.child(*names))
    for names in (("a" * 32, "shared"), ("a" * 32, "chk-11"), ("a" * 32, "chk-3", "deeper")):
        make_directory(base.child(*names))
    assert set(find_places(base)) == {base.child(*names) for names in places}
    assert list(find_places(base.child("savepoint-1"))) == [base.child("savepoint-1")]
    assert list(find_places(base, depth=1)) == [base.child("savepoint-1")]


# --- describing


def test_summary_names_the_release_that_wrote_the_snapshot() -> None:
    summary = summarized(open_snapshot(str(SAVEPOINT)))
    assert (summary.kind, summary.format, summary.state_backend, summary.written_by) == (
        "SAVEPOINT",
        "NATIVE",
        "hashmap",
        "0.1.0",
    )
    assert (summary.checkpoint_id, summary.files, summary.self_contained) == (1, 6, True)


def test_states_are_described_with_schemas_sizes_and_counts() -> None:
    snapshot = open_snapshot(str(SAVEPOINT))
    states = {(state.operator, state.state): state for state in states_of(snapshot, count=True)}
    (seen,) = [state for state in keyed_states(snapshot, "kept") if state.name == "seen"]
    rows = [row["value.seen"] for _, batch in seen.rows(seen.key_groups) for row in batch.to_pylist()]
    groups = states["kept", "groups"]
    assert (groups.kind, groups.rows, groups.keys) == ("map", sum(-(-number // GROUP) for number in rows), SOURCES)
    assert groups.schema == ("key.source: int64", "user_key.start: int64", "value.rows: int64", "value.total: int64")
    assert (groups.parallelism, groups.max_parallelism) == (2, 16)
    assert states["kept", "last"].keys == states["totals", "aggregates"].rows == SOURCES
    assert (states["left", "positions"].kind, states["left", "positions"].rows) == ("list (split)", 128)
    files = sum(path.stat().st_size for path in SAVEPOINT.iterdir() if path.name != "_metadata")
    assert sum(state.bytes or 0 for state in states.values()) == files
    uncounted = states_of(open_snapshot(str(SAVEPOINT)), count=False)
    assert {state.keys for state in uncounted} == {None}


# --- reading


def test_rows_are_ordered_by_key_group_and_ranges_cover_all_of_them() -> None:
    snapshot = open_snapshot(str(SAVEPOINT))
    (state,) = [state for state in keyed_states(snapshot, "kept") if state.name == "seen"]
    everything = list(state.rows(KeyGroupRange(0, 15)))
    assert [group for group, _ in everything] == sorted(group for group, _ in everything)
    rows = pa.Table.from_batches([batch for _, batch in everything]).to_pylist()
    assert sorted(row["key.source"] for row in rows) == list(range(SOURCES))
    for last in (0, 6, 7, 8, 15):
        parts = [KeyGroupRange(0, last), KeyGroupRange(last + 1, 15)]
        found = [batch for part in parts for _, batch in state.rows(part)]
        assert found == [batch for _, batch in everything]


def test_states_of_an_operator_that_is_unknown_or_has_none() -> None:
    snapshot = open_snapshot(str(SAVEPOINT))
    assert keyed_states(snapshot, "unknown") == keyed_states(snapshot, "left") == []


@pytest.mark.row("203.9")
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_state_in_native_files_is_read_by_its_backend(tmp_path: Path, backend: str) -> None:
    ranges = [KeyGroupRange(0, 50), KeyGroupRange(51, 127)]
    snapshot = write_keyed_state(backend, resolve(tmp_path / "snapshot"), ranges)
    states = {state.name: state for state in keyed_states(snapshot)}
    assert {state.name: state.kind for state in states.values()} == {"v": "value", "l": "list", "t": "timers"}

    def rows(name: str, key_groups: KeyGroupRange) -> list[tuple[int, ...]]:
        found = {state.name: state for state in keyed_states(snapshot, UID)}[name]
        return [tuple(row.values()) for _, batch in found.rows(key_groups) for row in batch.to_pylist()]

    everything = KeyGroupRange(0, 127)
    assert sorted(rows("v", everything)) == [(number, number * 10) for number in range(100)]
    assert sorted(rows("t", everything)) == [(number, number) for number in range(100)]
    assert [value for _, value in rows("l", everything)] == [1, 0] * 100
    some = rows("v", KeyGroupRange(40, 60))
    assert 0 < len(some) < 100
    assert sorted(some + rows("v", KeyGroupRange(0, 39)) + rows("v", KeyGroupRange(61, 127))) == sorted(
        rows("v", everything)
    )
    assert verify_snapshot(snapshot) == []
    assert {state.state: state.keys for state in states_of(snapshot, count=True)} == {"v": 100, "l": 100, "t": 100}


def test_the_files_of_a_backend_that_is_unknown_are_verified_and_not_read(tmp_path: Path) -> None:
    directory = resolve(tmp_path / "snapshot")
    make_directory(directory)
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "theirs", {"one": write_file(directory)})
    write_metadata(directory, completed(directory, SubtaskState({UID: OperatorSubtaskState((handle,))}, 5)).to_json())
    snapshot = open_snapshot(directory)
    with pytest.raises(UnsupportedBackendError, match="what the state backend 'theirs' wrote only its jobs can read"):
        keyed_states(snapshot)
    assert verify_snapshot(snapshot) == []
    Path(directory.path, handle.files["one"].path).write_bytes(b"stat3")
    (problem,) = verify_snapshot(snapshot)
    assert "its checksum is" in problem.reason


# --- copying


@pytest.mark.row("203.4")
def test_a_copy_is_the_same_in_any_file_system(base: Location, tmp_path: Path) -> None:
    reported: list[tuple[int, int]] = []
    target = base.child("copies", "first")
    copied = copy_snapshot(str(SAVEPOINT), target, lambda done, total: reported.append((done, total)))
    assert copied.location == target.url
    assert (copied.files, copied.bytes) == (6, sum(map(len, content(SAVEPOINT).values())))
    assert len(reported) == 6
    assert reported[-1][0] == reported[-1][1]
    assert verify_snapshot(open_snapshot(target)) == []
    back = tmp_path / "back"
    copy_snapshot(target, resolve(back))
    assert content(back) == content(SAVEPOINT)


def test_files_in_directories_of_their_own_are_copied(tmp_path: Path) -> None:
    source = resolve(tmp_path / "source")
    make_directory(source.child("a", "b"))
    file = write_file(source.child("a", "b"))
    nested = StateFile(f"a/b/{file.path}", file.length, file.checksum)
    write_metadata(source, completed(source, keyed(nested)).to_json())
    copy_snapshot(source, resolve(tmp_path / "target"))
    assert content(tmp_path / "target") == content(tmp_path / "source")


@pytest.mark.parametrize("damage", ["deleted", "cut", "flipped"])
def test_a_damaged_snapshot_is_not_copied_and_nothing_stays(tmp_path: Path, damage: str) -> None:
    source = Path(shutil.copytree(SAVEPOINT, tmp_path / "source"))
    victim = next(path for path in source.iterdir() if path.name != "_metadata")
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data[:-1] if damage == "cut" else data)
    if damage == "deleted":
        victim.unlink()
    with pytest.raises(CorruptFileError, match=victim.name):
        copy_snapshot(str(source), resolve(tmp_path / "new" / "parent" / "target"))
    assert list(tmp_path.iterdir()) == [source], "nor the parents that were made for it"


def test_existing_directory_is_refused_as_a_target(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    with pytest.raises(AlreadyExistsError):
        copy_snapshot(str(SAVEPOINT), resolve(tmp_path / "target"))
    assert list((tmp_path / "target").iterdir()) == []
    with pytest.raises(NotFoundError):
        copy_snapshot(str(tmp_path / "missing"), resolve(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("into", ["{}/inner", "{}/deep/inner", "{}-link/inner"])
def test_directory_inside_a_snapshot_is_refused_as_a_target(tmp_path: Path, into: str) -> None:
    source = Path(shutil.copytree(SAVEPOINT, tmp_path / "source"))
    (tmp_path / "source-link").symlink_to(source)
    before = content(source)
    target = resolve(into.format(source))
    with pytest.raises(InvalidLocationError, match="is inside the snapshot"):
        copy_snapshot(str(source), target)
    with pytest.raises(InvalidLocationError, match="is inside the snapshot"):
        convert_snapshot(str(source), target, SavepointFormat.CANONICAL, "hashmap")
    assert content(source) == before


@pytest.mark.parametrize("path", ["/etc/passwd", "file:///etc/passwd", "_metadata"])
def test_snapshot_that_is_not_self_contained_is_not_copied(tmp_path: Path, path: str) -> None:
    source = resolve(tmp_path / "source")
    make_directory(source)
    write_metadata(source, completed(source, keyed(StateFile(path, 5, checksum_of(b"state")))).to_json())
    with pytest.raises(InvalidLocationError, match="is not self-contained: 1 of its files lie elsewhere"):
        copy_snapshot(source, resolve(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_a_path_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    source = resolve(tmp_path / "source")
    make_directory(source)
    (tmp_path / "outside").write_bytes(b"state")
    write_metadata(source, completed(source, keyed(StateFile("../outside", 5, checksum_of(b"state")))).to_json())
    with pytest.raises(InvalidLocationError, match="does not stay in its directory"):
        copy_snapshot(source, resolve(tmp_path / "target"))


def test_handles_that_disagree_about_a_file_are_refused(tmp_path: Path) -> None:
    source = resolve(tmp_path / "source")
    make_directory(source)
    file = write_file(source)
    other = StateFile(file.path, 4, checksum_of(b"othe"))
    write_metadata(source, completed(source, keyed(file), keyed(other)).to_json())
    with pytest.raises(CorruptFileError, match="two handles"):
        copy_snapshot(source, resolve(tmp_path / "target"))
