"""Savepoints that are written without a job: any rows in any parts, beside what a base holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots import authoring
from ckpt_runtime.snapshots.authoring import NewState, check_base, give_up, open_write, publish_savepoint, write_part
from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import Snapshot, open_snapshot
from ckpt_runtime.state.canonical import CanonicalWriter
from ckpt_runtime.state.errors import StateValueError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.storage.errors import AlreadyExistsError, AmbiguousWriteError, InvalidLocationError, StorageError
from ckpt_runtime.storage.filesystem import Location, exists, list_names, make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.publish import publish
from tests.support.golden import DIRECTORY, placed
from tests.support.written_states import PREFIX, content, new_state, table, write

pytestmark = pytest.mark.row("203.9")

SAVEPOINT = DIRECTORY / "format-2" / "savepoint"


def files(target: Location) -> list[Path]:
    return sorted(path for path in Path(target.path).iterdir() if path.name != "_metadata")


def test_rows_in_parts_that_overlap_become_a_part_for_each_subtask(base: Location) -> None:
    rows = [(number, number * 10) for number in range(100)]
    snapshot = write(base.child("new"), new_state(), [rows[::3], rows[1::3], rows[2::3], []])
    assert sorted(content(snapshot)) == rows
    assert verify_snapshot(snapshot) == []
    metadata = snapshot.metadata
    assert (metadata.format, metadata.is_savepoint, metadata.id) == (SavepointFormat.CANONICAL, True, 1)
    (vertex,) = metadata.vertices
    assert (vertex.operator_uids, vertex.parallelism, vertex.max_parallelism) == (("op",), 3, 16)
    handles = [handle for state in snapshot.states("op") for handle in state.keyed]
    assert [handle.key_groups for handle in handles] == [
        KeyGroupRange(0, 5),
        KeyGroupRange(6, 10),
        KeyGroupRange(11, 15),
    ]


def test_only_referenced_files_stay(tmp_path: Path) -> None:
    target = resolve(tmp_path / "new")
    state = new_state()
    open_write(target, PREFIX)
    write_part(target, PREFIX, state, table(state, [(1, 1)]))  # of a task that was tried again
    (target_path := Path(target.path)).joinpath("users").write_text("not ours")
    parts = [[(number, 0) for number in range(20)], [(21, 0)]]
    handles = [write_part(target, PREFIX, state, table(state, rows)) for rows in parts]
    snapshot = open_snapshot(publish_savepoint(target, PREFIX, state, [h for h in handles if h], None, 1))
    referred = {file.path for state in snapshot.metadata.states.values() for file in state.files()}
    assert {path.name for path in files(target)} == {*referred, "users"}
    assert target_path.joinpath("users").read_text() == "not ours"


def test_parts_without_a_common_key_group_are_taken_as_they_are(tmp_path: Path) -> None:
    target = resolve(tmp_path / "new")
    everything = write(target, new_state(), [[(number, number) for number in range(100)]])
    by_group: dict[int, list[tuple[Any, ...]]] = {}
    (state,) = keyed_states(everything, "op")
    for group, batch in state.rows(state.key_groups):
        by_group.setdefault(group, []).extend(tuple(row.values()) for row in batch.to_pylist())
    parts = [[row for group in range(start, start + 8) for row in by_group[group]] for start in (8, 0)]
    other = resolve(tmp_path / "other")
    open_write(other, PREFIX)
    handles = [write_part(other, PREFIX, new_state(), table(new_state(), rows)) for rows in parts]
    snapshot = open_snapshot(publish_savepoint(other, PREFIX, new_state(), [h for h in handles if h], None, 1))
    assert {path.name for path in files(other)} == {handle.file.path for handle in handles if handle}
    assert content(snapshot) == content(everything)


def test_table_without_rows_makes_an_empty_state(tmp_path: Path) -> None:
    snapshot = write(resolve(tmp_path / "new"), new_state(), [[], []])
    assert keyed_states(snapshot, "op") == []
    assert verify_snapshot(snapshot) == []


@pytest.mark.parametrize(
    ("state", "once", "twice"),
    [
        (new_state("value"), [(1, 1)], [(1, 1), (2, 1), (1, 2)]),
        (new_state("map"), [(1, "a", 1), (1, "b", 1)], [(1, "a", 1), (1, "a", 2)]),
        (
            new_state("map", user_key=pa.list_(pa.int64())),
            [(1, [1], 1), (1, [1, 2], 1)],
            [(1, [1], 1), (1, [2], 1), (1, [1], 2)],
        ),
        (new_state("timers"), [(1, 5), (1, 6)], [(1, 5), (1, 5)]),
        (new_state(key=pa.float64()), [(0.0, 1), (1.5, 1), (None, 1)], [(0.0, 1), (-0.0, 2)]),
        (new_state(key=pa.float32()), [(0.0, 1)], [(float("nan"), 1), (-float("nan"), 2)]),
        (
            new_state("map", user_key=pa.struct([("x", pa.float64())])),
            [(1, {"x": 0.0}, 1), (1, {"x": -0.0}, 1)],
            [(1, {"x": -0.0}, 1), (1, {"x": 0.0}, 1), (1, {"x": -0.0}, 2)],
        ),
        (
            new_state("map", user_key=pa.float64()),
            [(1, 0.0, 1), (1, -0.0, 1)],
            [(1, -0.0, 1), (1, 0.0, 1), (1, -0.0, 2)],
        ),
    ],
    ids=["value", "map", "map-nested", "timers", "zeros", "nans", "map-nested-zeros", "map-zeros"],
)
def test_a_key_that_is_there_twice_is_refused(
    tmp_path: Path, state: NewState, once: list[Any], twice: list[Any]
) -> None:
    assert sorted(content(write(resolve(tmp_path / "once"), state, [once])), key=str) == sorted(once, key=str)
    with pytest.raises(StateValueError, match="state 'state' of operator 'op' has one row for each key, but"):
        write(resolve(tmp_path / "within"), state, [twice])
    with pytest.raises(StateValueError, match="occurs twice"):
        write(resolve(tmp_path / "across"), state, [[row] for row in twice])


def test_the_elements_of_a_list_keep_their_order(tmp_path: Path) -> None:
    state = new_state("list")
    snapshot = write(resolve(tmp_path / "new"), state, [[(1, 5), (2, 1), (1, 3)], [(2, 0), (1, 4)]])
    assert [row for row in content(snapshot) if row[0] == 1] == [(1, 5), (1, 3), (1, 4)]
    assert [row for row in content(snapshot) if row[0] == 2] == [(2, 1), (2, 0)]


def test_a_subtask_without_rows_has_no_state(tmp_path: Path) -> None:
    """As one that had finished has none."""
    parts = [[(1, 1)], [(1, 2)], [(1, 3)]]
    first = write(resolve(tmp_path / "first"), new_state("list"), parts)
    assert content(first) == [(1, 1), (1, 2), (1, 3)]
    other = NewState("other", "state", new_state().descriptor, new_state().schema, 16)
    second = write(resolve(tmp_path / "second"), other, [[(5, 5)]], first)
    for snapshot in (first, second):
        states = list(snapshot.states("op"))
        assert len(states) == 1
        assert [len(handle.row_groups) for handle in states[0].keyed] == [1]
    assert content(second) == content(first)


# --- from a base


def seen(base: Snapshot) -> NewState:
    (state,) = [state for state in keyed_states(base, "kept") if state.name == "seen"]
    return NewState("kept", "seen", state.descriptor, state.schema, 16)


def test_everything_else_of_the_base_is_taken_over(base: Location) -> None:
    before = open_snapshot(str(SAVEPOINT))
    after = write(base.child("new"), seen(before), [[(100, 7)]], before)
    assert content(after, "kept", "seen") == [(100, 7)]
    for state in keyed_states(before):
        if state.name != "seen":
            assert sorted(content(after, state.uid, state.name)) == sorted(content(before, state.uid, state.name))
    assert after.metadata.vertices == before.metadata.vertices
    assert (after.metadata.edges, after.metadata.job_id) == (before.metadata.edges, before.metadata.job_id)
    for key, state in before.metadata.states.items():
        for uid, operator in state.operators.items():
            assert after.metadata.states[key].operators[uid].lists == operator.lists
    assert verify_snapshot(after) == []
    third = write(base.child("third"), new_state(), [[(1, 2)]], after)
    assert content(third, "kept", "seen") == [(100, 7)]
    assert content(third) == [(1, 2)]
    assert len(third.metadata.vertices) == len(before.metadata.vertices) + 1


def test_the_order_of_lists_in_the_base_stays(tmp_path: Path) -> None:
    before = open_snapshot(str(SAVEPOINT))
    after = write(resolve(tmp_path / "new"), seen(before), [[(100, 7)]], before)
    for source in range(20):
        lists = [[row for row in content(which, "kept", "last") if row[0] == source] for which in (before, after)]
        assert lists[0] == lists[1]


@pytest.mark.parametrize("name", ["unaligned", "unaligned-files"])
def test_data_in_flight_is_not_lost_silently(tmp_path: Path, name: str) -> None:
    snapshot = open_snapshot(str(placed(DIRECTORY / "format-2" / name, tmp_path)))
    with pytest.raises(InvalidLocationError, match="contains in-flight data; use a savepoint"):
        check_base(snapshot, "kept")


def test_an_operator_that_had_finished_gets_no_state(tmp_path: Path) -> None:
    snapshot = open_snapshot(str(DIRECTORY / "format-2" / "checkpoint-partly-finished"))
    (vertex, _), *_ = snapshot.metadata.finished
    (uid, *_) = next(found.operator_uids for found in snapshot.metadata.vertices if found.id == vertex)
    with pytest.raises(InvalidLocationError, match="had finished in"):
        check_base(snapshot, uid)
    check_base(snapshot, "kept")
    after = write(resolve(tmp_path / "new"), seen(snapshot), [[(1, 1)]], snapshot)
    assert after.metadata.finished == snapshot.metadata.finished


# --- failures


def test_abandoned_write_leaves_no_files(tmp_path: Path) -> None:
    target = resolve(tmp_path / "new")
    state = new_state()
    open_write(target, PREFIX)
    write_part(target, PREFIX, state, table(state, [(1, 1)]))
    give_up(target, PREFIX)
    assert not (tmp_path / "new").exists()
    give_up(target, PREFIX)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("end", ["publish", "give up"])
@pytest.mark.parametrize("moment", ["before the files", "behind the files"])
def test_a_part_that_comes_too_late_takes_itself_back(
    base: Location, monkeypatch: pytest.MonkeyPatch, end: str, moment: str
) -> None:
    """Spark ends a write that failed while others of its tasks still run, and one of two attempts comes second."""
    target, state = base.child("new"), new_state()
    open_write(target, PREFIX)
    part = write_part(target, PREFIX, state, table(state, [(1, 1)]))
    assert part is not None
    write_table = CanonicalWriter.write_table

    def end_write() -> None:
        if end == "give up":
            give_up(target, PREFIX)
        else:
            publish_savepoint(target, PREFIX, state, [part], None, 1)
        if not target.is_object_store:
            make_directory(target)  # as a store has it that needs none

    def writing(self: CanonicalWriter, *args: Any) -> None:
        if moment == "before the files":
            end_write()
        write_table(self, *args)
        if moment == "behind the files":
            end_write()

    monkeypatch.setattr(CanonicalWriter, "write_table", writing)
    with pytest.raises(StorageError, match="a part of .* arrived after the write had ended"):
        write_part(target, PREFIX, state, table(state, [(1, 2), (2, 2)]))
    if end == "give up":
        assert not exists(target)
    else:
        assert content(open_snapshot(target)) == [(1, 1)]
        assert list_names(target) == sorted(["_metadata", *(file.path for file in part.state_files())])


def test_two_writes_to_one_target_cannot_be_open(base: Location) -> None:
    open_write(base.child("new"), PREFIX)
    with pytest.raises(AlreadyExistsError):
        open_write(base.child("new"), "other-")


def test_a_savepoint_is_published_once_and_never_discarded(base: Location) -> None:
    """A store without directories lets two writes begin in one place."""
    target, state = base.child("new"), new_state()
    rows = [(number, 0) for number in range(5_000)]
    written = write(target, state, [rows])
    publish(target.child("other-open"), b"")
    part = write_part(target, "other-", state, table(state, rows))
    assert part is not None
    with pytest.raises(AlreadyExistsError):
        publish_savepoint(target, "other-", state, [part], None, 2)
    assert [name for name in list_names(target) if name.startswith("other-")] == [part.file.path]
    for prefix in (PREFIX, "other-"):
        give_up(target, prefix)
    assert not [name for name in list_names(target) if name.startswith("other-")]
    assert verify_snapshot(open_snapshot(target)) == []
    assert content(open_snapshot(target)) == content(written)


def test_a_write_is_not_given_up_while_its_savepoint_may_come(base: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage has not answered the last request, and does what it was asked for when Spark has aborted."""
    target, state = base.child("new"), new_state()
    open_write(target, PREFIX)
    rows = [(number, number) for number in range(5_000)]
    part = write_part(target, PREFIX, state, table(state, rows))
    assert part is not None
    asked: list[Any] = []

    def unanswered(directory: Location, document: Any) -> str:
        asked.append(document)
        raise AmbiguousWriteError("it is unknown whether it was written", directory.url)

    monkeypatch.setattr(authoring, "write_metadata", unanswered)
    with pytest.raises(AmbiguousWriteError, match="its files are kept: if it exists the savepoint is complete"):
        publish_savepoint(target, PREFIX, state, [part], None, 1)
    give_up(target, PREFIX)
    write_metadata(target, asked[0])
    assert verify_snapshot(open_snapshot(target)) == []
    assert sorted(content(open_snapshot(target))) == rows
    give_up(target, PREFIX)
    assert verify_snapshot(open_snapshot(target)) == []
    assert list_names(target) == sorted(["_metadata", part.file.path])


@pytest.mark.parametrize("deleted", [True, False], ids=["and all is deleted", "and nothing is deleted yet"])
def test_a_write_that_was_given_up_is_not_published(
    base: Location, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    """A query is interrupted while the process that commits continues."""
    target, state = base.child("new"), new_state()
    open_write(target, PREFIX)
    part = write_part(target, PREFIX, state, table(state, [(1, 1)]))
    assert part is not None
    with monkeypatch.context() as patch:
        if not deleted:
            patch.setattr(authoring, "discard", lambda *_: None)
        give_up(target, PREFIX)
    if not target.is_object_store:
        make_directory(target)  # as a store has it that needs none
    with pytest.raises(StorageError, match="cannot be published: the write was abandoned"):
        publish_savepoint(target, PREFIX, state, [part], None, 1)
    give_up(target, PREFIX)
    assert not exists(target)


def test_key_groups_that_a_table_names_are_compared_with_those_of_the_keys(base: Location) -> None:
    target, state = base.child("new"), new_state()
    open_write(target, PREFIX)
    rows = table(state, [(1, 1), (2, 2)])
    right = key_groups_of(hash_arrays([rows.column("key.id").combine_chunks()], ["id"]), state.max_parallelism)
    assert write_part(target, PREFIX, state, rows, pa.chunked_array([right])) is not None
    for wrong, shown in ((int(right[1]) + 1, int(right[1]) + 1), (None, None)):
        given = pa.chunked_array([[int(right[0]), wrong]], pa.int64())
        message = f"'key_group' is {shown} for the key {{'key.id': 2}}, which is in key group {right[1]} of "
        with pytest.raises(StateValueError, match=message):
            write_part(target, PREFIX, state, rows, given)
