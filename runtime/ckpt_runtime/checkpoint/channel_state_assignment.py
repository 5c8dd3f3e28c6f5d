"""Assigns the in-flight data of an unaligned checkpoint to the subtasks of a new deployment. Pure; reads no file.

The receiver of a channel processes the in-flight data before any new data: first the data that had reached the old
receiver, then the data that was queued at the old senders. These streams of one old receiver and edge form a *bundle*,
which moves as a whole to the new receivers that own its rows. Sources: FLIP-76, Flink's SubtaskStateMapper;
unlike the latter, key groups are computed with the actual max parallelism, so that no owner is missed, and broadcast
data moves together with the broadcast state that has seen the data before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_runtime.checkpoint.completed_checkpoint import (
    NO_PEER,
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    EdgeDescriptor,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.graph.job_graph import FILTERED, JobEdge, JobGraph, JobVertex, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range, owner_of_key_group

_SPREAD = frozenset({Partitioning.FORWARD, Partitioning.REBALANCE})
"""Any subtask may take these rows. A change of parallelism turns one partitioning into the other."""


class StateAssignmentError(ValueError):
    """A checkpoint does not fit a job graph; nothing may be deployed from it."""


class UnalignedUpgradeError(StateAssignmentError):
    """The job has changed at a place where the checkpoint has in-flight data, which only fits the old job."""

    def __init__(self, uid: str, change: str) -> None:
        super().__init__(
            f"operator {uid!r}: the unaligned checkpoint holds in-flight data for it, but {change}; start the "
            "unchanged job, take a savepoint, and start the changed job from that"
        )
        self.uid = uid


class ChannelStateHandleError(StateAssignmentError):
    """The metadata's handles of in-flight data are inconsistent. Names the vertex by its id and operators."""

    def __init__(self, checkpoint: CompletedCheckpoint, key: SubtaskKey, reason: str) -> None:
        operators = next((vertex.operator_uids for vertex in checkpoint.vertices if vertex.id == key[0]), ())
        super().__init__(
            f"the snapshot's in-flight data of vertex {key[0]} (operators {list(operators)}), subtask {key[1]}, is "
            f"damaged: {reason}"
        )


def broadcast_origin(index: int, parallelism: int, before: int, alive: Sequence[int]) -> int:
    """The old subtask whose broadcast state and in-flight broadcast data a new subtask takes over.

    ``alive`` are the old subtasks that have not finished, ascending, at least one. A subtask without state counts as
    alive: it has received nothing yet. At equal parallelism, a subtask takes its own copy if it is alive.
    """
    return index if parallelism == before and index in alive else alive[index % len(alive)]


def assign_channel_state(
    checkpoint: CompletedCheckpoint, graph: JobGraph
) -> Mapping[SubtaskKey, tuple[ChannelStateStream, ...]]:
    """The streams that each subtask of ``graph`` reads before its channels, in order; subtasks without any are absent.

    ``edge`` of a stream is the input gate in ``graph``. ``peer`` is :data:`NO_PEER` unless both ends of the edge keep
    their parallelism, because otherwise the checkpoint's channel does not exist in the job. Raises
    :class:`UnalignedUpgradeError` or :class:`ChannelStateHandleError`.
    """
    if not any(state.has_channel_state for state in checkpoint.states.values()):
        return {}
    bundles = _bundles(checkpoint)
    assigned: dict[SubtaskKey, list[ChannelStateStream]] = {}
    for position, edge, gate in _matched(checkpoint, graph, bundles.keys()):
        target = graph.vertex(edge.target)
        before = _vertex(checkpoint, edge.target)
        origins = [index for index in range(before.parallelism) if (before.id, index) in checkpoint.states]
        sources = graph.vertex(edge.source).parallelism, _vertex(checkpoint, edge.source).parallelism
        same = target.parallelism == before.parallelism and sources[0] == sources[1]
        for index in range(target.parallelism):
            streams = assigned.setdefault((target.id, index), [])
            for old in _origins(edge.partitioning, target, before, index, origins):
                for stream in bundles[position].get(old, ()):
                    moved = replace(stream, edge=gate, peer=stream.peer if same else NO_PEER)
                    streams.extend(_clipped(moved, edge.partitioning, target, before.parallelism, old, index))
    return {key: tuple(streams) for key, streams in assigned.items() if streams}


def keyed_channel_targets(checkpoint: CompletedCheckpoint) -> Iterator[VertexDescriptor]:
    """The vertices with in-flight data on a hash edge; their number of key groups therefore must not change."""
    if any(state.has_channel_state for state in checkpoint.states.values()):
        for position in sorted(_bundles(checkpoint)):
            edge = checkpoint.edges[position]
            if edge.partitioning is Partitioning.HASH:
                yield _vertex(checkpoint, edge.target)


def _bundles(checkpoint: CompletedCheckpoint) -> dict[int, dict[int, list[ChannelStateStream]]]:
    """All streams in processing order, by the edge's position in the checkpoint and the old receiver."""
    bundles: dict[int, dict[int, list[ChannelStateStream]]] = {}
    gates: dict[str, list[int]] = {}
    exits: dict[str, list[int]] = {}
    for position, edge in enumerate(checkpoint.edges):
        gates.setdefault(edge.target, []).append(position)
        exits.setdefault(edge.source, []).append(position)
    for key in sorted(checkpoint.states):
        for stream in checkpoint.states[key].inputs:
            position = _position(checkpoint, gates.get(key[0], []), key, stream)
            bundles.setdefault(position, {}).setdefault(key[1], []).append(stream)
    for key in sorted(checkpoint.states):
        for stream in checkpoint.states[key].outputs:
            position = _position(checkpoint, exits.get(key[0], []), key, stream)
            target = _vertex(checkpoint, checkpoint.edges[position].target)
            if not 0 <= stream.peer < target.parallelism:
                raise ChannelStateHandleError(checkpoint, key, f"{target.name!r} has no subtask {stream.peer}")
            bundles.setdefault(position, {}).setdefault(stream.peer, []).append(replace(stream, peer=key[1]))
    return bundles


def _position(
    checkpoint: CompletedCheckpoint, positions: Sequence[int], key: SubtaskKey, stream: ChannelStateStream
) -> int:
    """The stream's edge in the checkpoint. Also validates its handles, because later code calculates with them."""
    if not _is_size(stream.edge) or not (_is_size(stream.peer) or stream.peer == NO_PEER):
        raise ChannelStateHandleError(checkpoint, key, f"edge {stream.edge!r:.40}, peer {stream.peer!r:.40}")
    if stream.edge >= len(positions):
        raise ChannelStateHandleError(checkpoint, key, f"edge {stream.edge} does not exist")
    for segment in stream.segments:
        offset, length, size = segment.offset, segment.length, segment.file.length
        if not (_is_size(offset) and _is_size(length) and _is_size(size) and offset + length <= size):
            path = segment.file.path or "inline content"
            raise ChannelStateHandleError(
                checkpoint, key, f"{length!r:.40} bytes at {offset!r:.40} of {path} with {size!r:.40}"
            )
    return positions[stream.edge]


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 0


def _matched(
    checkpoint: CompletedCheckpoint, graph: JobGraph, positions: Iterable[int]
) -> Iterator[tuple[int, JobEdge, int]]:
    """Yields (position in the checkpoint, edge of the job, its gate) for the edges with data, in the job's order."""
    wanted = {_identity(checkpoint.edges, position): position for position in positions}
    found = []
    for number, edge in enumerate(graph.edges):
        position = wanted.pop(_identity(graph.edges, number), None)
        if position is not None:
            _check_unchanged(checkpoint, graph, checkpoint.edges[position], edge)
            gate = sum(earlier.target == edge.target for earlier in graph.edges[:number])
            found.append((position, edge, gate))
    for position in sorted(wanted.values()):
        old = checkpoint.edges[position]
        _check_vertices(checkpoint, graph, old)
        source = _vertex(checkpoint, old.source)
        raise UnalignedUpgradeError(_uid(checkpoint, old), f"its input from {source.name!r} no longer exists")
    yield from found


def _identity(edges: Sequence[EdgeDescriptor] | Sequence[JobEdge], number: int) -> tuple[str, str, int]:
    """Both ends of the edge, and its number among the edges between them."""
    ends = edges[number].source, edges[number].target
    return *ends, sum((earlier.source, earlier.target) == ends for earlier in edges[:number])


def _check_unchanged(checkpoint: CompletedCheckpoint, graph: JobGraph, old: EdgeDescriptor, new: JobEdge) -> None:
    uid = _uid(checkpoint, old)
    _check_vertices(checkpoint, graph, old)
    if old.partitioning is not new.partitioning and not {old.partitioning, new.partitioning} <= _SPREAD:
        change = f"its input is partitioned by {new.partitioning.value}, before by {old.partitioning.value}"
        raise UnalignedUpgradeError(uid, change)
    if old.keys != new.keys:
        raise UnalignedUpgradeError(uid, f"its input has the keys {list(new.keys)}, before {list(old.keys)}")
    before, after = _vertex(checkpoint, old.target).max_parallelism, graph.vertex(new.target).max_parallelism
    if old.partitioning is Partitioning.HASH and before != after:
        raise UnalignedUpgradeError(uid, f"its max parallelism is {after}, before {before}")
    if old.target in checkpoint.fully_finished_vertices:
        raise ChannelStateHandleError(checkpoint, (old.target, 0), "the vertex had finished")


def _without_filters(uids: tuple[str, ...]) -> tuple[str, ...]:
    """The operators of a chain without moved filters, which rows in flight may have passed or not."""
    return tuple(uid for uid in uids if FILTERED not in uid)


def _check_vertices(checkpoint: CompletedCheckpoint, graph: JobGraph, old: EdgeDescriptor) -> None:
    """Refuses a changed chain at either end: the rows have passed the source's old chain, and the target's old chain
    expects them.

    Raises :class:`UnalignedUpgradeError`.
    """
    chains = {vertex.id: tuple(operator.uid for operator in vertex.operators) for vertex in graph.vertices}
    for end in (old.target, old.source):
        before = _vertex(checkpoint, end).operator_uids
        after = chains.get(end)
        if after is None:
            change = f"no vertex of the job begins with operator {before[0]!r}"
            raise UnalignedUpgradeError(_uid(checkpoint, old), change)
        if _without_filters(after) != _without_filters(before):
            change = f"operators {list(before)} were one chain, which is now {list(after)}"
            raise UnalignedUpgradeError(_uid(checkpoint, old), change)


def _vertex(checkpoint: CompletedCheckpoint, vertex_id: str) -> VertexDescriptor:
    for vertex in checkpoint.vertices:
        if vertex.id == vertex_id:
            return vertex
    raise ChannelStateHandleError(checkpoint, (vertex_id, 0), "the snapshot does not describe the vertex")


def _uid(checkpoint: CompletedCheckpoint, edge: EdgeDescriptor) -> str:
    return _vertex(checkpoint, edge.target).operator_uids[0]


def _origins(
    partitioning: Partitioning, target: JobVertex, before: VertexDescriptor, index: int, alive: Sequence[int]
) -> Iterable[int]:
    """The old subtasks whose bundles, or parts of them, the new subtask ``index`` takes, ascending."""
    old, new = before.parallelism, target.parallelism
    match partitioning:
        case Partitioning.BROADCAST:
            return (broadcast_origin(index, new, old, alive),) if alive else ()
        case Partitioning.HASH:
            own = key_group_range(target.max_parallelism, new, index)
            first = owner_of_key_group(own.first, target.max_parallelism, old)
            return range(first, owner_of_key_group(own.last, target.max_parallelism, old) + 1)
        case Partitioning.REBALANCE:
            return range(index, old, new)
        case Partitioning.FORWARD:
            # The old subtasks whose index, scaled to the new parallelism and rounded down, is `index`. Both divisions
            # round up.
            return range(-(-index * old // new), -(-(index + 1) * old // new))


def _clipped(
    stream: ChannelStateStream,
    partitioning: Partitioning,
    target: JobVertex,
    old_parallelism: int,
    old: int,
    index: int,
) -> Iterator[ChannelStateStream]:
    """The stream as the new subtask ``index`` gets it; nothing if no part of it belongs to that subtask."""
    segments = stream.segments
    if partitioning is Partitioning.HASH:
        of_old = key_group_range(target.max_parallelism, old_parallelism, old)
        of_new = key_group_range(target.max_parallelism, target.parallelism, index)
        common = of_old.intersection(of_new)
        if common != of_old:
            segments = tuple(_clip(segments, common))
    if segments:
        yield replace(stream, segments=segments)


def _clip(segments: Iterable[ChannelStateSegment], own: KeyGroupRange) -> Iterator[ChannelStateSegment]:
    for segment in segments:
        left = own if segment.key_groups is None else segment.key_groups.intersection(own)
        if len(left) > 0:
            yield replace(segment, key_groups=left)
