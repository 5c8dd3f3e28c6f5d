"""The checkpoints of one subtask: executes the pure barrier handler's decisions and gathers snapshots.

A snapshot is open from its trigger until its in-flight data is complete: until all recorded input channels have
delivered their barrier and, if the barrier was sent in order and may still turn unaligned, until it has left the output
queues. Then the worker writes it. Source: Flink's SubtaskCheckpointCoordinatorImpl; FLIP-76.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint import barrier_handler as barriers
from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.measures import Interval, OpenIntervals
from ckpt_runtime.network.elements import CancelCheckpoint, CheckpointBarrier, EndOfPartition
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.output_queue import InFlightData
from ckpt_runtime.state.backend import KeyedSnapshot
from ckpt_runtime.task.chain import OperatorChain
from ckpt_runtime.task.in_flight import CapturedChannel, InFlight, PersistedBuffers, size_of
from ckpt_runtime.task.metrics import SubtaskMetrics


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The synchronous part of one operator's snapshot: its list states, and its keyed state, not yet written."""

    uid: str
    lists: tuple[OperatorListState, ...]
    keyed: KeyedSnapshot | None


@dataclass(frozen=True, slots=True)
class SnapshotMeasures:
    """Times in ms, sizes in bytes, as Flink's checkpoint statistics name them."""

    start_delay_ms: int
    alignment_ms: int
    processed_bytes: int
    sync_ms: float
    unaligned: bool = False


@dataclass(frozen=True, slots=True)
class SubtaskSnapshot:
    """The data that the asynchronous part of a subtask's snapshot writes and reports."""

    barrier: CheckpointBarrier
    operators: tuple[OperatorSnapshot, ...]
    in_flight: InFlight
    measures: SnapshotMeasures
    intervals: tuple[Interval, ...] = ()

    def release(self) -> None:
        """Releases the frozen state of a snapshot that will not be written."""
        for operator in self.operators:
            if operator.keyed is not None:
                operator.keyed.release()


class CheckpointedSubtask(Protocol):
    """The services that the checkpoints need from their subtask. All calls come from the subtask's thread."""

    gate: InputGate
    chain: OperatorChain
    metrics: SubtaskMetrics

    @property
    def data_ended(self) -> bool: ...

    def now(self) -> Instant: ...

    def monotonic_ms(self) -> float: ...

    def rest_of_buffer(self) -> tuple[InputChannel, pa.RecordBatch] | None:
        """The rows of a channel's buffer that have not been processed yet."""

    def unread_restored(self) -> list[CapturedChannel]:
        """In-flight data of the restored checkpoint that has not been processed yet."""

    def write(self, snapshot: SubtaskSnapshot) -> None: ...

    def decline(self, checkpoint_id: int, reason: str, message: str) -> None: ...


@dataclass(slots=True)
class _OpenSnapshot:
    """A snapshot whose in-flight data is incomplete. ``recording``: the channels whose barrier has not arrived."""

    snapshot: SubtaskSnapshot
    restored: list[CapturedChannel]
    outputs: list[CapturedChannel]
    inputs: dict[int, CapturedChannel] = field(default_factory=dict)
    recording: set[int] = field(default_factory=set)
    all_barriers: bool = False
    waits_for_outputs: bool = False
    alignment_ms: int = 0
    processed_bytes: int = 0


class SubtaskCheckpoints:
    """The checkpoints of one subtask. ``persisted`` records which queued buffers earlier checkpoints already contain.

    ``final_checkpoint`` is the first one whose completion may end the subtask. With ``end_with_all`` no checkpoint is
    taken once a subtask has ended, so it is the job's last one, which covers the end of all subtasks.
    """

    end_with_all = False

    def __init__(self, subtask: CheckpointedSubtask) -> None:
        channels = [(channel, _key(channel)) for channel in subtask.gate.channels]
        self._subtask = subtask
        self._handler = barriers.BarrierHandler(
            (key for _, key in channels), (key for channel, key in channels if not channel.overtakes)
        )
        self._open: dict[int, _OpenSnapshot] = {}
        self._latest = -1
        self._aborted: set[int] = set()
        self._alignments: dict[int, int] = {}
        self._writing: set[int] = set()
        self.final_checkpoint: int | None = None
        self.persisted = PersistedBuffers()
        self._intervals = OpenIntervals(subtask.chain.combined)
        self.records = False

    def work(self) -> bool:
        """Handles one announcement, or an expired deadline; False when there is nothing to do."""
        gate = self._subtask.gate
        if gate.has_announcements:
            announced = gate.next_announcement()
            if announced is not None:
                channel, element = announced
                if isinstance(element, EndOfPartition):
                    self.handle(barriers.EndOfPartitionAnnounced(_key(channel)))
                else:
                    self._note_alignment(element.checkpoint_id)
                    self.handle(
                        barriers.BarrierAnnounced(
                            _key(channel), element.checkpoint_id, element.timestamp_ms, element.options
                        )
                    )
                return True
        due = self._handler.next_deadline_ms
        if due is not None and due <= self._subtask.now().abs_ms:
            self.handle(barriers.DeadlinePassed())
            return True
        return self.settle_outputs()

    @property
    def has_settled_outputs(self) -> bool:
        """Whether a barrier that a snapshot waits for has left the output queues, which :meth:`work` has to handle."""
        end = self._subtask.chain.end
        return bool(self._open) and any(
            snapshot.waits_for_outputs and not end.holds_barrier(checkpoint_id)
            for checkpoint_id, snapshot in self._open.items()
        )

    @property
    def deadline_ms(self) -> int | None:
        """Wall clock time of the next deadline that :meth:`work` handles."""
        due = self._handler.next_deadline_ms
        for snapshot in self._open.values():
            if snapshot.waits_for_outputs:
                turns = _deadline(snapshot.snapshot.barrier)
                due = turns if due is None else min(due, turns)
        return due

    def barrier(self, channel: InputChannel, barrier: CheckpointBarrier) -> None:
        """Handles a barrier that arrived in order."""
        self._subtask.gate.barrier_polled(channel)
        self._note_alignment(barrier.checkpoint_id)
        self.handle(
            barriers.BarrierReceived(_key(channel), barrier.checkpoint_id, barrier.timestamp_ms, barrier.options)
        )

    def handle(self, event: barriers.BarrierEvent) -> None:
        """Passes an event to the handler and executes its decisions."""
        measure = False
        for effect in self._handler.handle(event, self._subtask.now()):
            if isinstance(effect, barriers.MeasureInFlight):
                measure = True
            else:
                self._carry_out(effect, ended=isinstance(event, barriers.EndOfPartitionAnnounced))
        # Measured after all effects, which may have blocked channels or taken the snapshot of an older checkpoint.
        if measure:
            self.handle(barriers.InFlightMeasured(self._in_flight_bytes()))

    def _carry_out(self, effect: barriers.BarrierEffect, *, ended: bool) -> None:
        gate = self._subtask.gate
        match effect:
            case barriers.BlockChannel((_, index)):
                gate.block(index)
            case barriers.ResumeChannels(channels):
                for _, index in channels:
                    if gate.channels[index].blocked:
                        gate.resume(index)
            case barriers.TakeSnapshot():
                self._trigger(effect)
            case barriers.StopRecording(checkpoint_id, (_, index)):
                self._stop_recording(checkpoint_id, index, ended)
            case barriers.AllBarriersReceived(checkpoint_id, alignment_ms):
                self._all_barriers(checkpoint_id, alignment_ms)
            case barriers.AbortCheckpoint(checkpoint_id, reason):
                if not self._discard(checkpoint_id) and checkpoint_id > self._latest:
                    self._subtask.chain.end.send_control(CancelCheckpoint(checkpoint_id))
                self._subtask.decline(checkpoint_id, reason.name, reason.message)

    def rows_processed(self) -> None:
        """Checks whether the in-flight data of a checkpoint that waits for its limit now fits."""
        if self._handler.waits_for_room:
            self.handle(barriers.InFlightMeasured(self._in_flight_bytes()))

    def record(self, channel: InputChannel, element: InFlightData) -> None:
        """Adds delivered rows or a watermark to every open snapshot that waits for the channel's barrier."""
        for snapshot in self._open.values():
            if channel.index in snapshot.recording:
                snapshot.inputs[channel.index].elements.append(element)

    def trigger(self, barrier: CheckpointBarrier) -> None:
        """Takes a checkpoint of a subtask without open inputs, triggered by the coordinator."""
        self._take(barrier, 0, {}, set(), unaligned=False)
        self._all_barriers(barrier.checkpoint_id, 0)

    @property
    def is_writing(self) -> bool:
        """Whether a snapshot lacks in-flight data, or was handed over and is not reported yet."""
        return bool(self._writing or self._open)

    def written(self, checkpoint_id: int) -> None:
        self._writing.discard(checkpoint_id)

    def completed(self, checkpoint_id: int) -> None:
        self._aborted = {known for known in self._aborted if known > checkpoint_id}
        self._writing = {known for known in self._writing if known > checkpoint_id}
        self.persisted.completed(checkpoint_id)
        self._intervals.completed(checkpoint_id)

    def aborted(self, checkpoint_id: int) -> None:
        """The coordinator aborted the checkpoint. If its barriers have not arrived yet, downstream is notified when
        they do.
        """
        if checkpoint_id > self._latest:
            self._aborted.add(checkpoint_id)
        self.persisted.aborted(checkpoint_id)
        self._intervals.aborted(checkpoint_id)
        self._writing.discard(checkpoint_id)
        self._discard(checkpoint_id)
        self.handle(barriers.AbortedByCoordinator(checkpoint_id))

    def last_intervals(self) -> tuple[Interval, ...]:
        """The measures of a finished subtask that no completed checkpoint has reported."""
        chain = self._subtask.chain
        if not chain.is_open:  # it had finished before the checkpoint that it was restored from
            return ()
        return self._intervals.add(Interval(self._latest + 1, chain.measured(self._subtask.metrics.rows_in)))

    def close(self) -> None:
        """Discards the snapshots that are still open."""
        for checkpoint_id in list(self._open):
            self._discard(checkpoint_id)

    def _trigger(self, effect: barriers.TakeSnapshot) -> None:
        barrier = CheckpointBarrier(effect.checkpoint_id, effect.timestamp, effect.options)
        inputs = []
        if effect.unaligned:
            for _, index in effect.captured:
                captured = self._rest_of(index)
                queued = self._subtask.gate.channels[index].queued_before(effect.checkpoint_id, or_all=True)
                captured.elements.extend(queued)
                inputs.append((index, captured))
            inputs.extend((index, self._rest_of(index)) for _, index in effect.recording)
        recording = {index for _, index in effect.recording}
        self._take(barrier, effect.alignment_duration, dict(inputs), recording, unaligned=effect.unaligned)

    def _take(
        self,
        barrier: CheckpointBarrier,
        alignment_ms: int,
        inputs: dict[int, CapturedChannel],
        recording: set[int],
        *,
        unaligned: bool,
    ) -> None:
        """The synchronous part: sends the barrier, then snapshots the state from tail to head."""
        checkpoint_id = barrier.checkpoint_id
        if checkpoint_id <= self._latest:
            return
        self._latest = checkpoint_id
        self._alignments = {
            known: begun for known, begun in self._alignments.items() if known >= checkpoint_id or known in self._open
        }
        chain = self._subtask.chain
        # Receivers may be waiting for this barrier: a cancellation is sent in its place.
        if checkpoint_id in self._aborted:
            self._aborted.discard(checkpoint_id)
            chain.end.send_control(CancelCheckpoint(checkpoint_id))
            return
        if self._subtask.data_ended and self.final_checkpoint is None and self._covers_the_end(barrier):
            self.final_checkpoint = checkpoint_id
        now, start = self._subtask.now(), self._subtask.monotonic_ms()
        # Rows that operators emit here precede the barrier.
        chain.prepare_snapshot(checkpoint_id)
        restored = self._subtask.unread_restored()
        outputs: list[CapturedChannel] = []
        overtaking = _may_overtake(barrier) and _is_overdue(barrier, now.abs_ms)
        if overtaking:
            outputs = chain.end.overtake(barrier, _left(barrier, (*restored, *inputs.values())))
        else:
            chain.end.send_control(barrier)
        # State is frozen after the barrier is sent, so that downstream already aligns during this.
        operators, properties = [], barrier.options.properties
        for operator, context in reversed(list(zip(chain.operators, chain.contexts, strict=True))):
            operator.snapshot(checkpoint_id)
            keyed = None if context.keyed_state is None else context.keyed_state.snapshot(checkpoint_id, properties)
            operators.append(OperatorSnapshot(context.uid, context.operator_state.snapshot(), keyed))
        intervals = self._intervals.add(Interval(checkpoint_id, chain.measured(self._subtask.metrics.rows_in)))
        measures = SnapshotMeasures(
            start_delay_ms=max(0, now.abs_ms - barrier.timestamp_ms - alignment_ms),
            alignment_ms=alignment_ms,
            processed_bytes=0,
            sync_ms=self._subtask.monotonic_ms() - start,
            unaligned=unaligned,
        )
        # The barrier was sent in order but is still queued: at its deadline it overtakes the elements before it.
        turnable = _may_overtake(barrier) and not overtaking and chain.end.holds_barrier(checkpoint_id)
        self._open[checkpoint_id] = _OpenSnapshot(
            SubtaskSnapshot(barrier, tuple(operators), InFlight(), measures, intervals),
            restored,
            outputs,
            inputs,
            recording,
            waits_for_outputs=turnable,
        )
        self.records = self.records or bool(recording)

    def _covers_the_end(self, barrier: CheckpointBarrier) -> bool:
        return not self.end_with_all or barrier.options.final or barrier.options.properties.is_synchronous

    def _rest_of(self, index: int) -> CapturedChannel:
        """A channel's capture, which begins with the unprocessed rest of its current buffer."""
        channel = self._subtask.gate.channels[index]
        captured = CapturedChannel(channel.peer, edge=channel.input_index)
        rest = self._subtask.rest_of_buffer()
        if rest is not None and rest[0] is channel:
            captured.elements.append(rest[1])
        return captured

    def _stop_recording(self, checkpoint_id: int, index: int, ended: bool) -> None:
        """The barrier or the channel's end was announced: adds the elements queued before it, the last part."""
        snapshot = self._open.get(checkpoint_id)
        if snapshot is None:
            return
        channel = self._subtask.gate.channels[index]
        captured = snapshot.inputs[index]
        captured.elements.extend(channel.queued_before(checkpoint_id, or_all=ended))
        snapshot.recording.discard(index)
        self.records = any(known.recording for known in self._open.values())

    def _all_barriers(self, checkpoint_id: int, alignment_ms: int) -> None:
        snapshot = self._open.get(checkpoint_id)
        if snapshot is None:
            return
        processed = self._subtask.metrics.bytes_in
        snapshot.all_barriers = True
        snapshot.alignment_ms = alignment_ms
        snapshot.processed_bytes = processed - self._alignments.get(checkpoint_id, processed)
        self._write_if_complete(checkpoint_id, snapshot)

    def settle_outputs(self) -> bool:
        """Advances snapshots that wait for their barrier to leave the output queues; returns whether any advanced."""
        if not self._open:
            return False
        settled = False
        now = self._subtask.now().abs_ms
        end = self._subtask.chain.end
        # A copy: complete snapshots leave the dictionary.
        for checkpoint_id, snapshot in list(self._open.items()):
            if not snapshot.waits_for_outputs:
                continue
            barrier = snapshot.snapshot.barrier
            if not end.holds_barrier(checkpoint_id):
                snapshot.waits_for_outputs = False
            elif _is_overdue(barrier, now):
                captured = (*snapshot.restored, *snapshot.inputs.values())
                snapshot.outputs.extend(end.switch_to_unaligned(checkpoint_id, _left(barrier, captured)))
                snapshot.waits_for_outputs = False
            if not snapshot.waits_for_outputs:
                self._write_if_complete(checkpoint_id, snapshot)
                settled = True
        return settled

    def _write_if_complete(self, checkpoint_id: int, snapshot: _OpenSnapshot) -> None:
        if snapshot.all_barriers and not snapshot.waits_for_outputs:
            del self._open[checkpoint_id]
            in_flight = InFlight((*snapshot.restored, *snapshot.inputs.values()), tuple(snapshot.outputs))
            measures = replace(
                snapshot.snapshot.measures,
                alignment_ms=snapshot.alignment_ms,
                processed_bytes=snapshot.processed_bytes,
                unaligned=snapshot.snapshot.measures.unaligned or not in_flight.is_empty,
            )
            if not in_flight.is_empty:
                # Noted before the handover, because the writing thread may finish before this one continues.
                self.persisted.begun(checkpoint_id)
            self._writing.add(checkpoint_id)
            metrics = self._subtask.metrics
            metrics.alignment_ms, metrics.start_delay_ms = measures.alignment_ms, measures.start_delay_ms
            self._subtask.write(replace(snapshot.snapshot, in_flight=in_flight, measures=measures))

    def _discard(self, checkpoint_id: int) -> bool:
        snapshot = self._open.pop(checkpoint_id, None)
        if snapshot is None:
            return False
        snapshot.snapshot.release()
        self.records = any(known.recording for known in self._open.values())
        return True

    def _in_flight_bytes(self) -> int:
        """Bytes of input that the pending checkpoint would store if it turned unaligned now."""
        checkpoint_id = self._handler.pending_checkpoint
        assert checkpoint_id is not None
        size = sum(captured.bytes for captured in self._subtask.unread_restored())
        for channel in self._subtask.gate.channels:
            if not channel.blocked:
                size += self._rest_of(channel.index).bytes
                size += sum(map(size_of, channel.queued_before(checkpoint_id, or_all=True)))
        return size

    def _note_alignment(self, checkpoint_id: int) -> None:
        """Remembers how much had been processed when the first barrier of a checkpoint arrived."""
        if checkpoint_id > self._latest:
            self._alignments.setdefault(checkpoint_id, self._subtask.metrics.bytes_in)


def _key(channel: InputChannel) -> tuple[int, int]:
    return channel.input_index, channel.index


def _deadline(barrier: CheckpointBarrier) -> int:
    """Wall clock time at which a barrier that may be unaligned becomes unaligned."""
    return barrier.timestamp_ms + barrier.options.aligned_timeout_ms


def _is_overdue(barrier: CheckpointBarrier, now_ms: int) -> bool:
    """Whether the aligned timeout has passed; 0 means at once, even if the trigger's clock differs."""
    return not barrier.options.aligned_timeout_ms or now_ms >= _deadline(barrier)


def _may_overtake(barrier: CheckpointBarrier) -> bool:
    """Whether the barrier may be unaligned; a limit of 0 bytes means full alignment."""
    return barrier.options.unaligned and barrier.options.max_inflight_data_bytes != 0


def _left(barrier: CheckpointBarrier, inputs: Iterable[CapturedChannel]) -> int | None:
    """How many bytes of output a subtask may still add to the checkpoint; None without a limit."""
    limit = barrier.options.max_inflight_data_bytes
    return None if limit is None else max(0, limit - sum(captured.bytes for captured in inputs))
