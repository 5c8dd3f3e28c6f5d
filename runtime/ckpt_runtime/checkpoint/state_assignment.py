"""Assigns the state of a checkpoint to the subtasks of a new deployment. Pure; reads no file, clips no key group.

State belongs to an operator's uid, regardless of the vertex that the operator is chained into. Source: Flink's
StateAssignmentOperation and VertexFinishedStateChecker (FLIP-147).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from ckpt_runtime.checkpoint.channel_state_assignment import (
    StateAssignmentError,
    assign_channel_state,
    broadcast_origin,
    keyed_channel_targets,
)
from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateStream,
    CompletedCheckpoint,
    KeyedHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
)
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.graph.job_graph import FILTERED, WATERMARK, JobGraph, JobVertex, Partitioning
from ckpt_runtime.graph.key_groups import key_group_range


class NonRestoredStateError(StateAssignmentError):
    """The checkpoint holds state of operators that the job does not have."""

    def __init__(self, uids: list[str]) -> None:
        super().__init__(
            f"the snapshot holds state of operators {uids} that the job does not have; restore the uids of these "
            "operators, or allow non-restored state to drop it"
        )
        self.uids = tuple(uids)


class MaxParallelismMismatchError(StateAssignmentError):
    """The key groups of the checkpoint and of the job differ."""

    def __init__(self, uid: str, restored: int, configured: int) -> None:
        super().__init__(
            f"operator {uid!r}: the snapshot's keyed state has max parallelism {restored}, the job's is {configured}; "
            f"set it to {restored}"
        )


class ParallelismError(StateAssignmentError):
    """A vertex has more subtasks than key groups."""

    def __init__(self, vertex: JobVertex) -> None:
        super().__init__(
            f"vertex {vertex.name!r}: parallelism {vertex.parallelism} is above its max parallelism "
            f"{vertex.max_parallelism}"
        )


class FinishedStateError(StateAssignmentError):
    """The finished parts of the checkpoint do not fit the job's topology (FLIP-147)."""


class _Finished(Enum):
    """How far the subtasks of an operator or a vertex had finished."""

    NONE = "none"
    PARTLY = "partly"
    FULLY = "fully"


@dataclass(frozen=True, slots=True)
class StateAssignment:
    """State by subtask and operator uid; every subtask has an entry, operators without state have none.

    ``finished_vertices`` had finished in the checkpoint: they are deployed without running their operators.
    ``in_flight`` is the data that a subtask has to process before anything it receives; most subtasks have none.
    """

    subtasks: Mapping[SubtaskKey, Mapping[str, OperatorSubtaskState]]
    finished_vertices: frozenset[str] = frozenset()
    in_flight: Mapping[SubtaskKey, tuple[ChannelStateStream, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class _OperatorState:
    """One operator in the checkpoint: its subtasks' states by index. ``alive`` are the unfinished ones, ascending."""

    parallelism: int
    max_parallelism: int
    finished: _Finished
    alive: tuple[int, ...] = ()
    subtasks: dict[int, OperatorSubtaskState] = field(default_factory=dict)

    @property
    def handles(self) -> list[KeyedHandle]:
        return [handle for index in sorted(self.subtasks) for handle in self.subtasks[index].keyed]

    @property
    def is_empty(self) -> bool:
        return not self.handles and not any(entry.items for state in self.subtasks.values() for entry in state.lists)


def assign_states(
    checkpoint: CompletedCheckpoint,
    graph: JobGraph,
    allow_non_restored_state: bool = False,
    fresh: frozenset[str] = frozenset(),
) -> StateAssignment:
    """Spreads the state of ``checkpoint`` over the subtasks of ``graph``, without that of operators in ``fresh``.

    Every subtask gets the whole keyed handles that overlap its key groups; the reader clips them. Raises a
    :class:`StateAssignmentError` when the checkpoint does not fit.
    """
    checkpoint = _without(checkpoint, fresh)
    operators = _with_known_watermarks(_states_by_uid(checkpoint), graph)
    _check_parallelism(operators, graph)
    known = {node.uid for vertex in graph.vertices for node in vertex.operators}
    known.update(uid for uid in operators if FILTERED in uid)  # filters may be removed
    lost = sorted(uid for uid, state in operators.items() if uid not in known and not state.is_empty)
    if lost and not allow_non_restored_state:
        raise NonRestoredStateError(lost)
    finished = _finished_vertices(operators, graph)
    subtasks: dict[SubtaskKey, dict[str, OperatorSubtaskState]] = {
        (vertex.id, index): {} for vertex in graph.vertices for index in range(vertex.parallelism)
    }
    for vertex in graph.vertices:
        for node in vertex.operators:
            state = operators.get(node.uid)
            # The operators of a finished vertex do not run and would not read their state.
            if state is None or vertex.id in finished:
                continue
            for index, assigned in enumerate(_spread(state, vertex)):
                if assigned.keyed or assigned.lists:
                    subtasks[vertex.id, index][node.uid] = assigned
    return StateAssignment(subtasks, finished, assign_channel_state(checkpoint, graph))


def restored_max_parallelism(checkpoint: CompletedCheckpoint) -> dict[str, int]:
    """Max parallelism of keyed state or in-flight data, by uid; a job that does not set one should take it over."""
    found = {uid: state.max_parallelism for uid, state in _states_by_uid(checkpoint).items() if state.handles}
    for vertex in keyed_channel_targets(checkpoint):
        found.update(dict.fromkeys(vertex.operator_uids, vertex.max_parallelism))
    return found


def _without(checkpoint: CompletedCheckpoint, uids: frozenset[str]) -> CompletedCheckpoint:
    """Returns the checkpoint without these operators; a vertex without operators is removed."""
    if not uids:
        return checkpoint
    gone = {vertex.id for vertex in checkpoint.vertices if uids.issuperset(vertex.operator_uids)}
    return replace(
        checkpoint,
        edges=tuple(edge for edge in checkpoint.edges if not gone & {edge.source, edge.target}),
        vertices=tuple(vertex for vertex in checkpoint.vertices if vertex.id not in gone),
        states={
            key: replace(state, operators={uid: own for uid, own in state.operators.items() if uid not in uids})
            for key, state in checkpoint.states.items()
            if key[0] not in gone
        },
        finished=frozenset(key for key in checkpoint.finished if key[0] not in gone),
    )


def _states_by_uid(checkpoint: CompletedCheckpoint) -> dict[str, _OperatorState]:
    operators: dict[str, _OperatorState] = {}
    for vertex in checkpoint.vertices:
        ended = sum((vertex.id, index) in checkpoint.finished for index in range(vertex.parallelism))
        finished = _Finished.NONE if ended == 0 else _Finished.PARTLY
        finished = _Finished.FULLY if ended == vertex.parallelism else finished
        alive = tuple(index for index in range(vertex.parallelism) if (vertex.id, index) in checkpoint.states)
        for uid in vertex.operator_uids:
            operators[uid] = _OperatorState(vertex.parallelism, vertex.max_parallelism, finished, alive)
        for index in range(vertex.parallelism):
            state = checkpoint.states.get((vertex.id, index))
            for uid, operator_state in (state.operators if state is not None else {}).items():
                operators[uid].subtasks[index] = operator_state
    return operators


def _with_known_watermarks(operators: Mapping[str, _OperatorState], graph: JobGraph) -> Mapping[str, _OperatorState]:
    """Returns the states, with the states of watermarks without given uids moved to their present uids.

    Earlier versions derived them from the positions in the program, which are in the same order as the present numbers.
    A watermark behind filters that the snapshot lacks starts with the time of the watermark in front of these filters.
    """
    nodes = [node for vertex in graph.vertices for node in vertex.operators if node.kind == WATERMARK]
    behind = [node.uid for node in nodes if FILTERED in node.uid]
    wanted = sorted((node.uid for node in nodes if not node.uid_given and node.uid not in behind), key=_number)
    found = sorted((uid for uid in operators if re.fullmatch(rf"{WATERMARK}-[0-9]+", uid)), key=_number)
    renamed = dict(zip(found, wanted, strict=True)) if len(wanted) == len(found) else {}
    states = {renamed.get(uid, uid): state for uid, state in operators.items()}
    fronts = {uid: uid.partition(FILTERED)[0] for uid in behind if uid not in states}
    return {**states, **{uid: states[front] for uid, front in fronts.items() if front in states}}


def _number(uid: str) -> int:
    return int(re.findall("[0-9]+", uid)[0])


def _check_parallelism(operators: Mapping[str, _OperatorState], graph: JobGraph) -> None:
    for vertex in graph.vertices:
        if vertex.parallelism > vertex.max_parallelism:
            raise ParallelismError(vertex)
        for node in vertex.operators:
            state = operators.get(node.uid)
            if state is not None and state.handles and state.max_parallelism != vertex.max_parallelism:
                raise MaxParallelismMismatchError(node.uid, state.max_parallelism, vertex.max_parallelism)


def _spread(state: _OperatorState, vertex: JobVertex) -> list[OperatorSubtaskState]:
    """One state per subtask of ``vertex``."""
    lists = _spread_lists(state, vertex.parallelism)
    spread = []
    for index in range(vertex.parallelism):
        own = key_group_range(vertex.max_parallelism, vertex.parallelism, index)
        # Handles stay whole: only the reader of a file knows which of its rows belong to a key group.
        keyed = tuple(handle for handle in state.handles if len(handle.key_groups.intersection(own)) > 0)
        spread.append(OperatorSubtaskState(keyed, tuple(lists[index])))
    return spread


def _spread_lists(state: _OperatorState, parallelism: int) -> list[list[OperatorListState]]:
    names: dict[str, OperatorStateMode] = {}
    for index in sorted(state.subtasks):
        for entry in state.subtasks[index].lists:
            names.setdefault(entry.name, entry.mode)
    result: list[list[OperatorListState]] = [[] for _ in range(parallelism)]
    start = 0
    for name, mode in sorted(names.items()):
        copies = {
            index: entry.items
            for index, subtask in sorted(state.subtasks.items())
            for entry in subtask.lists
            if entry.name == name
        }
        if mode is OperatorStateMode.UNION:
            everything = tuple(item for items in copies.values() for item in items)
            parts = [everything] * parallelism
        elif mode is OperatorStateMode.BROADCAST:
            origins = [broadcast_origin(i, parallelism, state.parallelism, state.alive) for i in range(parallelism)]
            parts = [copies.get(origin, ()) for origin in origins]
        # At equal parallelism each subtask gets its own items back: a source its splits, a sink its prepared items.
        elif parallelism == state.parallelism:
            parts = [copies.get(index, ()) for index in range(parallelism)]
        else:
            items = [item for copy in copies.values() for item in copy]
            parts = [tuple(items[(index - start) % parallelism :: parallelism]) for index in range(parallelism)]
            # The next name continues where this one ended; otherwise the first subtasks would get all short lists.
            start = (start + len(items)) % parallelism
        for index, part in enumerate(parts):
            if part:
                result[index].append(OperatorListState(name, mode, part))
    return result


def _finished_vertices(operators: Mapping[str, _OperatorState], graph: JobGraph) -> frozenset[str]:
    """The vertices that had fully finished; raises FinishedStateError if they do not fit the topology."""
    status = {vertex.id: _vertex_status(operators, vertex) for vertex in graph.vertices}
    for edge in graph.edges:
        upstream, downstream = status[edge.source], status[edge.target]
        pointwise = edge.partitioning is Partitioning.FORWARD
        if downstream is _Finished.FULLY:
            fits = upstream is _Finished.FULLY
        elif downstream is _Finished.PARTLY:
            fits = upstream is not _Finished.NONE if pointwise else upstream is _Finished.FULLY
        else:
            fits = True
        if not fits:
            target, source = graph.vertex(edge.target).name, graph.vertex(edge.source).name
            raise FinishedStateError(
                f"vertex {target!r} had {downstream.value} finished in the snapshot, but its input {source!r} had "
                f"{upstream.value} finished and would send more data"
            )
    return frozenset(vertex_id for vertex_id, finished in status.items() if finished is _Finished.FULLY)


def _vertex_status(operators: Mapping[str, _OperatorState], vertex: JobVertex) -> _Finished:
    # Operators without state and without a given uid may be new or have the derived uid of another operator. No row
    # reaches them if the other operators of their chain had finished.
    decisive = [node for node in vertex.operators if node.stateful or node.uid_given] or vertex.operators
    found = {node.uid: operators[node.uid].finished if node.uid in operators else _Finished.NONE for node in decisive}
    statuses = set(found.values())
    if len(statuses) > 1:
        detail = ", ".join(f"{uid}: {status.value}" for uid, status in found.items())
        raise FinishedStateError(
            f"vertex {vertex.name!r} chains operators that had finished to different extents in the snapshot ({detail})"
        )
    return statuses.pop()
