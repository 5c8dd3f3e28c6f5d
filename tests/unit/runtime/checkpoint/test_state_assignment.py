"""Which state goes where: keyed ranges, list modes, uids, limits, finished parts."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.completed_checkpoint import (
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.state_assignment import (
    FinishedStateError,
    MaxParallelismMismatchError,
    NonRestoredStateError,
    ParallelismError,
    assign_states,
    restored_max_parallelism,
)
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, Partitioning
from ckpt_runtime.graph.key_groups import key_group_range
from tests.unit.runtime.checkpoint.checkpoint_driver import checkpoint_of, vertex

SPLIT, UNION, BROADCAST = OperatorStateMode.SPLIT, OperatorStateMode.UNION, OperatorStateMode.BROADCAST


def keyed(index, parallelism, max_parallelism=128):
    own = key_group_range(max_parallelism, parallelism, index)
    return KeyedStateHandle(own, StateFile(f"f{index}", 1, "c"), ())


def keyed_checkpoint(parallelism, max_parallelism=128, uid="a"):
    old = vertex(uid, parallelism, max_parallelism=max_parallelism)
    states = {
        (old.id, i): SubtaskState({uid: OperatorSubtaskState((keyed(i, parallelism, max_parallelism),))}, 1)
        for i in range(parallelism)
    }
    return checkpoint_of(graph_of(old), states)


def list_checkpoint(copies, mode, finished=()):
    old = vertex("a", len(copies))
    states = {
        (old.id, i): SubtaskState({"a": OperatorSubtaskState(lists=(OperatorListState("s", mode, tuple(items)),))})
        for i, items in enumerate(copies)
        if i not in finished
    }
    return checkpoint_of(graph_of(old), states, [(old.id, i) for i in finished])


def graph_of(*vertices, edges=()):
    return JobGraph("job", tuple(vertices), tuple(edges))


def items(assignment, index, uid="a", vertex_id="v-a"):
    state = assignment.subtasks[vertex_id, index].get(uid)
    return [] if state is None else [item for entry in state.lists for item in entry.items]


def watermarks(*uids):
    """A vertex for each uid, which the compiler has derived."""
    made = [vertex(uid, 1, kind="watermark") for uid in uids]
    return [replace(each, operators=(replace(each.operators[0], uid_given=False),)) for each in made]


@pytest.mark.parametrize("now", [("watermark-0", "watermark-1"), ("watermark-2", "watermark-10")])
def test_watermarks_without_given_uids_keep_their_order(now):
    """Snapshots of earlier versions have positions in the program in their uids."""
    old = watermarks("watermark-10", "watermark-1")
    reached = (OperatorListState("watermark", SPLIT, ({"ms": each.operators[0].uid},)) for each in old)
    states = {
        (each.id, 0): SubtaskState({each.operators[0].uid: OperatorSubtaskState(lists=(state,))})
        for each, state in zip(old, reached, strict=True)
    }
    assigned = assign_states(checkpoint_of(graph_of(*old), states), graph_of(*watermarks(*now)))
    assert [items(assigned, 0, uid, f"v-{uid}") for uid in now] == [[{"ms": "watermark-1"}], [{"ms": "watermark-10"}]]
    with pytest.raises(NonRestoredStateError, match="watermark-1'"):
        assign_states(checkpoint_of(graph_of(*old), states), graph_of(*watermarks("watermark-10")))


def test_event_time_behind_filters_that_a_snapshot_does_not_have_starts_with_that_of_all_rows():
    """Filters may change: their event time in a snapshot is not missed."""
    old = watermarks("watermark-4", "watermark-4.filtered.gone", "watermark-4.filtered.kept")
    states = {
        (each.id, 0): SubtaskState(
            {
                each.operators[0].uid: OperatorSubtaskState(
                    lists=(OperatorListState("watermark", SPLIT, (each.operators[0].uid,)),)
                )
            }
        )
        for each in old
    }
    now = "watermark-0", "watermark-0.filtered.added", "watermark-4.filtered.kept"
    assigned = assign_states(checkpoint_of(graph_of(*old), states), graph_of(*watermarks(*now)))
    assert [items(assigned, 0, uid, f"v-{uid}") for uid in now] == [["watermark-4"], ["watermark-4"], [now[2]]]


def test_fresh_operators_get_no_state_and_the_others_all_of_theirs():
    old = [vertex("kept", 1), vertex("a", 1, "b"), vertex("ended", 1)]
    of = {uid: OperatorSubtaskState(lists=(OperatorListState("s", SPLIT, (uid,)),)) for uid in ("kept", "a", "b")}
    states = {("v-kept", 0): SubtaskState({"kept": of["kept"]}), ("v-a", 0): SubtaskState({"a": of["a"], "b": of["b"]})}
    checkpoint = checkpoint_of(graph_of(*old), states, [("v-ended", 0)])
    graph = graph_of(vertex("kept", 1), vertex("a", 1, "b"), vertex("ended", 2))
    fresh = assign_states(checkpoint, graph, fresh=frozenset({"a", "b", "ended"}))
    assert [items(fresh, 0, uid, at) for uid, at in (("kept", "v-kept"), ("a", "v-a"), ("b", "v-a"))] == [
        ["kept"],
        [],
        [],
    ]
    assert fresh.finished_vertices == frozenset()
    assert items(assign_states(checkpoint, graph), 0, "b", "v-a") == ["b"]


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from([40, 128, 1_000]))
def test_every_key_group_reaches_exactly_its_owner(before, after, max_parallelism):
    checkpoint = keyed_checkpoint(before, max_parallelism)
    graph = graph_of(vertex("a", after, max_parallelism=max_parallelism))
    assignment = assign_states(checkpoint, graph)
    for index in range(after):
        own = key_group_range(max_parallelism, after, index)
        got = assignment.subtasks["v-a", index]["a"].keyed
        covered = sorted(
            group for handle in got for group in range(handle.key_groups.first, handle.key_groups.last + 1)
        )
        assert set(range(own.first, own.last + 1)) <= set(covered)
        assert len(covered) == len(set(covered))
        assert all(len(handle.key_groups.intersection(own)) for handle in got)


@given(st.lists(st.lists(st.integers(), max_size=5), min_size=1, max_size=6), st.integers(1, 8))
def test_split_loses_and_doubles_nothing(copies, parallelism):
    assignment = assign_states(list_checkpoint(copies, SPLIT), graph_of(vertex("a", parallelism)))
    spread = [items(assignment, index) for index in range(parallelism)]
    assert sorted(chain.from_iterable(spread)) == sorted(chain.from_iterable(copies))
    if parallelism == len(copies):
        assert spread == copies
    else:
        assert max(map(len, spread)) - min(map(len, spread)) <= 1


def test_split_starts_where_the_state_before_ended():
    old = vertex("a", 1)
    lists = tuple(OperatorListState(name, SPLIT, (name,)) for name in ("x", "y", "z"))
    checkpoint = checkpoint_of(graph_of(old), {(old.id, 0): SubtaskState({"a": OperatorSubtaskState(lists=lists)})})
    assignment = assign_states(checkpoint, graph_of(vertex("a", 3)))
    assert [items(assignment, index) for index in range(3)] == [["x"], ["y"], ["z"]]


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_union_state_is_given_to_all_subtasks(parallelism):
    assignment = assign_states(list_checkpoint([[1], [2, 3]], UNION), graph_of(vertex("a", parallelism)))
    assert all(items(assignment, index) == [1, 2, 3] for index in range(parallelism))


def test_broadcast_copies_fill_every_subtask_and_the_place_of_a_finished_one():
    assignment = assign_states(list_checkpoint([[1], [2]], BROADCAST), graph_of(vertex("a", 3)))
    assert [items(assignment, index) for index in range(3)] == [[1], [2], [1]]
    checkpoint = list_checkpoint([[1], [2], [3]], BROADCAST, finished=[1])
    assignment = assign_states(checkpoint, graph_of(vertex("a", 3)))
    assert [items(assignment, index) for index in range(3)] == [[1], [3], [3]]


def test_state_follows_the_uid_into_another_chain():
    checkpoint = keyed_checkpoint(2, uid="a")
    graph = graph_of(vertex("new", 2, "a"))
    assignment = assign_states(checkpoint, graph)
    assert assignment.subtasks["v-new", 1]["a"].keyed == (keyed(1, 2),)
    assert assignment.subtasks["v-new", 0].keys() == {"a"}


def test_state_without_operator_is_refused_unless_allowed_or_empty():
    checkpoint = keyed_checkpoint(2, uid="gone")
    graph = graph_of(vertex("a", 2))
    with pytest.raises(NonRestoredStateError, match=r"\['gone'\]"):
        assign_states(checkpoint, graph)
    assert assign_states(checkpoint, graph, allow_non_restored_state=True).subtasks == {("v-a", 0): {}, ("v-a", 1): {}}
    checkpoint = list_checkpoint([[]], SPLIT)
    assert assign_states(checkpoint, graph_of(vertex("b", 1))).subtasks == {("v-b", 0): {}}


def test_max_parallelism_may_change_without_keyed_state_only():
    checkpoint = keyed_checkpoint(2, max_parallelism=128)
    with pytest.raises(MaxParallelismMismatchError, match="'a'.*128.*256"):
        assign_states(checkpoint, graph_of(vertex("a", 2, max_parallelism=256)))
    assert restored_max_parallelism(checkpoint) == {"a": 128}
    assign_states(list_checkpoint([[1]], SPLIT), graph_of(vertex("a", 1, max_parallelism=256)))
    with pytest.raises(ParallelismError, match="129"):
        assign_states(keyed_checkpoint(1), graph_of(vertex("a", 129)))


@pytest.mark.row("147.6")
class TestFinished:
    def pair(self, partitioning=Partitioning.HASH) -> tuple[list[JobVertex], JobGraph]:
        up, down = vertex("up", 2), vertex("down", 2)
        return [up, down], graph_of(up, down, edges=[JobEdge(up.id, down.id, partitioning)])

    def test_finished_vertex_stays_finished_and_may_not_get_a_running_predecessor(self):
        vertices, graph = self.pair()
        checkpoint = checkpoint_of(graph_of(*vertices), {}, [("v-up", 0), ("v-up", 1)])
        assert assign_states(checkpoint, graph).finished_vertices == {"v-up"}
        checkpoint = checkpoint_of(graph_of(*vertices), {}, [("v-down", 0), ("v-down", 1)])
        with pytest.raises(FinishedStateError, match="'down'"):
            assign_states(checkpoint, graph)

    @pytest.mark.parametrize(
        ("partitioning", "upstream", "fits"),
        [
            (Partitioning.HASH, [0], False),
            (Partitioning.HASH, [0, 1], True),
            (Partitioning.FORWARD, [0], True),
            (Partitioning.FORWARD, [], False),
        ],
    )
    def test_partly_finished(self, partitioning, upstream, fits):
        vertices, graph = self.pair(partitioning)
        checkpoint = checkpoint_of(graph_of(*vertices), {}, [("v-down", 0), *(("v-up", i) for i in upstream)])
        if fits:
            assert "v-down" not in assign_states(checkpoint, graph).finished_vertices
        else:
            with pytest.raises(FinishedStateError):
                assign_states(checkpoint, graph)

    def test_a_vertex_has_one_status(self):
        old = vertex("a", 1)
        checkpoint = checkpoint_of(graph_of(old), {}, [("v-a", 0)])
        with pytest.raises(FinishedStateError, match=r"a: fully, new: none"):
            assign_states(checkpoint, graph_of(vertex("a", 1, "new")))

    def test_an_operator_without_state_that_a_new_version_adds_to_a_finished_vertex_has_finished_too(self):
        old, now = vertex("a", 1), vertex("a", 1, "filter-3")
        checkpoint = checkpoint_of(graph_of(old), {}, [("v-a", 0)])
        head, added = now.operators
        for derived in (replace(added, uid_given=False), replace(added, uid_given=False, kind="watermark")):
            changed = replace(now, operators=(head, derived))
            assert assign_states(checkpoint, graph_of(changed)).finished_vertices == {"v-a"}
        with pytest.raises(FinishedStateError, match=r"a: fully, filter-3: none"):
            assign_states(
                checkpoint, graph_of(replace(now, operators=(head, replace(added, uid_given=False, stateful=True))))
            )

    def test_a_finished_subtask_restores_empty_and_runs_again(self):
        checkpoint = list_checkpoint([[1], [2]], SPLIT, finished=[0])
        assignment = assign_states(checkpoint, graph_of(vertex("a", 2)))
        assert [items(assignment, index) for index in range(2)] == [[], [2]]
        assert not assignment.finished_vertices


def test_a_moved_checkpoint_is_assigned_alike():
    checkpoint = keyed_checkpoint(2)
    graph = graph_of(vertex("a", 3))
    assert assign_states(replace(checkpoint, directory="x"), graph) == assign_states(checkpoint, graph)
