"""What one deployment did, seen from outside: rows sent and processed by channel, and where each barrier cut them.

When a checkpoint is complete, every channel must add up: what the receiver had processed, and what the checkpoint
recorded of the channel, is what the sender had sent in front of the barrier, in that order (invariants 6 and 7).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import ChannelStateStream, CompletedCheckpoint
from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph
from ckpt_runtime.network.elements import CheckpointBarrier, ControlElement, Watermark
from ckpt_runtime.network.output_queue import InFlightData
from ckpt_runtime.state.hashing import hash_columns, key_groups_of
from ckpt_runtime.storage.channel_state import ChannelStateReader, InFlightWatermark
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task.output import Subpartition
from tests.simulation.jobs.operators import Probe
from tests.simulation.jobs.rows import integers_of
from tests.simulation.schedules.violation import Violation

Item = tuple[int, int]
"""(row id, key) of a row; (-1, ms) of a watermark."""

_WATERMARK = -1
_MOST = 8
"""More subtasks than any simulated vertex has."""


@dataclass(slots=True)
class ChannelLog:
    """One channel: all rows and watermarks sent so far, and how many of them were in front of each barrier."""

    sent: list[Item] = field(default_factory=list)
    barriers: dict[int, int] = field(default_factory=dict)


class ObservedSubpartition:
    """A sending end that notes what goes into it. It changes the schema now and then, to another order of columns."""

    def __init__(self, inner: Subpartition, log: ChannelLog) -> None:
        self._inner = inner
        self._log = log

    @property
    def has_room(self) -> bool:
        return self._inner.has_room

    @property
    def is_empty(self) -> bool:
        return self._inner.is_empty

    @property
    def is_drained(self) -> bool:
        return self._inner.is_drained

    @property
    def held(self) -> bool:
        return self._inner.held

    @held.setter
    def held(self, held: bool) -> None:
        self._inner.held = held

    @property
    def error(self) -> BaseException | None:
        return self._inner.error

    def send_batch(self, batch: pa.RecordBatch) -> None:
        self._log.sent += items_of(batch)
        self._inner.send_batch(batch.select(batch.schema.names[::-1]) if batch.num_rows % 2 else batch)

    def send_control(self, element: ControlElement) -> None:
        if isinstance(element, Watermark):
            self._log.sent.append((_WATERMARK, element.timestamp_ms))
        elif isinstance(element, CheckpointBarrier):
            self._note(element)
        self._inner.send_control(element)

    def overtake(self, barrier: CheckpointBarrier, limit: int | None) -> list[InFlightData]:
        self._note(barrier)
        return self._inner.overtake(barrier, limit)

    def switch_to_unaligned(self, checkpoint_id: int, limit: int | None) -> list[InFlightData]:
        return self._inner.switch_to_unaligned(checkpoint_id, limit)

    def holds_barrier(self, checkpoint_id: int) -> bool:
        return self._inner.holds_barrier(checkpoint_id)

    def _note(self, barrier: CheckpointBarrier) -> None:
        if barrier.checkpoint_id in self._log.barriers:
            raise Violation(f"barrier {barrier.checkpoint_id} is sent twice on one channel")
        self._log.barriers[barrier.checkpoint_id] = len(self._log.sent)


def items_of(batch: pa.RecordBatch) -> list[Item]:
    """The rows of a batch."""
    return list(zip(integers_of(batch.column("id")), integers_of(batch.column("key")), strict=True))


class Observation:
    """One deployment of ``graph``. ``restored`` is what each subtask was given of in-flight data, as (gate, item)."""

    def __init__(self, graph: JobGraph) -> None:
        self.graph = graph
        self.probes: dict[SubtaskKey, Probe] = {}
        self.restored: dict[SubtaskKey, list[tuple[int, Item]]] = {}
        self._channels: dict[tuple[int, int, int], ChannelLog] = {}
        self._gates = [
            (number, edge, sum(other.target == edge.target for other in graph.edges[:number]))
            for number, edge in enumerate(graph.edges)
        ]

    def log(self, edge: JobEdge, sender: int, receiver: int) -> ChannelLog:
        number = self.graph.edges.index(edge)
        return self._channels.setdefault((number, sender, receiver), ChannelLog())

    def give(self, key: SubtaskKey, streams: Sequence[ChannelStateStream], directory: str) -> None:
        """In-flight data that a subtask is deployed with."""
        vertex = self.graph.vertex(key[0])
        gates = self.graph.inputs(vertex.id)
        self.restored[key] = [
            (stream.edge, item)
            for stream in streams
            for item in _read(stream, directory, gates[stream.edge].keys, vertex.max_parallelism)
            if item[0] != _WATERMARK
        ]

    def check(self, checkpoint: CompletedCheckpoint, options: CheckpointOptions | None) -> None:
        """A completed checkpoint of this deployment. Raises Violation."""
        recorded: dict[tuple[str, int, int], list[tuple[int, list[Item]]]] = {}
        for (vertex_id, index), state in sorted(checkpoint.states.items()):
            for stream in state.inputs:
                keys = self.graph.inputs(vertex_id)[stream.edge].keys
                most = self.graph.vertex(vertex_id).max_parallelism
                items = list(_read(stream, checkpoint.directory, keys, most))
                recorded.setdefault((vertex_id, index, stream.edge), []).append((stream.peer, items))
        for (vertex_id, index), state in sorted(checkpoint.states.items()):
            for stream in state.outputs:
                edge = self.graph.outputs(vertex_id)[stream.edge]
                gate = next(gate for _, known, gate in self._gates if known is edge)
                items = list(_read(stream, checkpoint.directory, edge.keys, 1))
                recorded.setdefault((edge.target, stream.peer, gate), []).append((index, items))
        for number, edge, gate in self._gates:
            if not self.graph.overtakes(edge) and any((edge.target, n, gate) in recorded for n in range(_MOST)):
                raise Violation(f"checkpoint {checkpoint.id} keeps data of an input on which barriers stay in order")
            for receiver in range(self.graph.vertex(edge.target).parallelism):
                key = (edge.target, receiver)
                if key in checkpoint.states and checkpoint.id in self.probes[key].cuts:
                    self._check_gate(checkpoint.id, number, edge, gate, key, recorded.get((*key, gate), []))
        if options is not None:
            _check_bound(checkpoint, options)

    def _check_gate(
        self,
        checkpoint_id: int,
        number: int,
        edge: JobEdge,
        gate: int,
        key: SubtaskKey,
        recorded: list[tuple[int, list[Item]]],
    ) -> None:
        probe = self.probes[key]
        processed = [(identity, k) for g, identity, k in probe.processed[: probe.cuts[checkpoint_id]] if g == gate]
        where = f"checkpoint {checkpoint_id} at {probe.name}, input {gate}"
        live: set[Item] = set()
        for sender in range(self.graph.vertex(edge.source).parallelism):
            log = self._channels.get((number, sender, key[1]))
            if log is None:
                continue
            sent = log.sent[: log.barriers.get(checkpoint_id, len(log.sent))]
            rows = {item for item in log.sent if item[0] != _WATERMARK}
            live |= rows
            done = [item for item in processed if item in rows]
            kept = [
                item
                for peer, items in recorded
                if peer == sender
                for item in items
                if item[0] == _WATERMARK or item in rows
            ]
            _compare(sent, done, kept, f"{where}, sender {sender}")
        given = [item for known, item in self.restored.get(key, ()) if known == gate]
        old = [item for item in processed if item not in live]
        left = [item for _, items in recorded for item in items if item[0] != _WATERMARK and item not in live]
        if old + left != given:
            raise Violation(f"{where}: of {len(given)} restored rows {len(old)} are processed and {len(left)} are kept")


def _compare(sent: list[Item], done: list[Item], kept: list[Item], where: str) -> None:
    """``sent`` is ``done`` and then ``kept``; which watermarks at the border were processed is not known."""
    rows = [item for item in sent if item[0] != _WATERMARK]
    if rows[: len(done)] != done:
        raise Violation(f"{where}: processed {done[-3:]}, which is not what was sent first")
    kept_rows = [item for item in kept if item[0] != _WATERMARK]
    rest = rows[len(done) :]
    if kept_rows != rest:
        kind = "lacks rows" if len(kept_rows) < len(rest) else "has rows too many or in another order"
        raise Violation(f"{where}: the checkpoint {kind}: {len(kept_rows)} kept, {len(rest)} expected")
    if rest and kept[kept.index(rest[0]) :] != sent[sent.index(rest[0]) :]:
        raise Violation(f"{where}: watermarks are not kept in their places")


def _check_bound(checkpoint: CompletedCheckpoint, options: CheckpointOptions) -> None:
    """No subtask keeps more in-flight data than it may."""
    limit = options.max_inflight_data_bytes
    if limit is None or not options.unaligned:
        return
    for key, state in sorted(checkpoint.states.items()):
        size = sum(_message_bytes(stream, checkpoint.directory) for stream in (*state.inputs, *state.outputs))
        if size > limit:
            raise Violation(f"checkpoint {checkpoint.id}: subtask {key[1]} keeps {size} bytes of {limit} in flight")


def _message_bytes(stream: ChannelStateStream, directory: str) -> int:
    """Of the rows, without what frames them."""
    size = 0
    with closing(ChannelStateReader(resolve(directory), stream)) as reader:
        while (element := reader.read()) is not None:
            size += element.content.size if isinstance(element.content, pa.Buffer) else 0
    return size


def _read(stream: ChannelStateStream, directory: str, keys: Sequence[str], max_parallelism: int) -> Iterator[Item]:
    """Rows that are meant, and watermarks."""
    with closing(ChannelStateReader(resolve(directory), stream)) as reader:
        while (element := reader.read()) is not None:
            content: Any = element.content
            if isinstance(content, InFlightWatermark):
                yield _WATERMARK, content.timestamp_ms
                continue
            batch = pa.ipc.read_record_batch(content, reader.schema)
            own = element.place.key_groups
            if own is not None:
                groups = key_groups_of(hash_columns(batch, keys), max_parallelism)
                batch = batch.filter(pa.array((groups >= own.first) & (groups <= own.last)))
            yield from items_of(batch)
