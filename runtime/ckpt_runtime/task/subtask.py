"""One subtask: a mailbox, its inputs, the operator chain and its outputs, advanced step by step by a task thread.

A step never waits: it does one piece of work (a mail, a due timer, one input element or one poll of the source) and
says whether it did. The checkpointing protocol is in the pure barrier handler; this shell executes what that decides.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint.barrier_handler import (
    AbortCheckpoint,
    AlignedBarrierHandler,
    BarrierEvent,
    BarrierReceived,
    BlockChannel,
    CancelBarrierReceived,
    EndOfPartitionReceived,
    ResumeChannels,
    TriggerCheckpoint,
    TriggeredByCoordinator,
)
from ckpt_runtime.checkpoint.state_handles import OperatorListState
from ckpt_runtime.network.elements import (
    CancelCheckpoint,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    Watermark,
)
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.operators.operator import MAX_WATERMARK, SourceOperator, SourceStatus
from ckpt_runtime.state.backend import KeyedSnapshot
from ckpt_runtime.task.batch_size import BatchSizer
from ckpt_runtime.task.chain import OperatorChain
from ckpt_runtime.task.metrics import SubtaskMetrics
from ckpt_runtime.task.watermark_valve import WatermarkValve

logger = logging.getLogger(__name__)


class TaskState(StrEnum):
    """Life of a subtask, in Flink's words."""

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class OperatorSnapshot:
    """The synchronous part of one operator's snapshot: its list states, and its keyed state still to be written."""

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


class SubtaskHost(Protocol):
    """What a subtask needs of its worker. All calls come from the subtask's thread and return at once."""

    def now_ms(self) -> int:
        """Wall clock, ms since epoch."""

    def monotonic_ms(self) -> float: ...

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None: ...

    def end_of_data(self, subtask: Subtask) -> None:
        """The subtask has no more data and waits for its final checkpoint."""

    def write_snapshot(
        self,
        subtask: Subtask,
        barrier: CheckpointBarrier,
        operators: list[OperatorSnapshot],
        measures: SnapshotMeasures,
    ) -> None:
        """Takes over the asynchronous part, which ends in an acknowledgement or a decline."""

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None: ...


class Subtask:
    """``finished_on_restore``: its operators had finished before the restored checkpoint; it only ends its outputs."""

    def __init__(
        self,
        vertex_id: str,
        index: int,
        name: str,
        host: SubtaskHost,
        gate: InputGate,
        chain: OperatorChain,
        *,
        finished_on_restore: bool = False,
    ) -> None:
        self.vertex_id = vertex_id
        self.index = index
        self.name = name
        self.state = TaskState.INITIALIZING
        self.metrics = SubtaskMetrics()
        self.gate = gate
        self.chain = chain
        self.backpressured = False
        self._host = host
        self._finished_on_restore = finished_on_restore
        self._mails: deque[Callable[[], None]] = deque()
        self._source = chain.head if isinstance(chain.head, SourceOperator) else None
        self._source_idle_until: float | None = None
        self._timers: list[int | None] = [None] * len(chain.operators)
        self._next_timer: int | None = None
        self._handler = AlignedBarrierHandler((channel.input_index, channel.index) for channel in gate.channels)
        self._valve = WatermarkValve(len(gate.channels))
        self._sizers = [BatchSizer() for _ in range(1 + max((c.input_index for c in gate.channels), default=-1))]
        self._open_data = len(gate.channels)
        self._open_partitions = len(gate.channels)
        self._drain = True
        self._data_ended = False
        self._end_is_due = False
        self._behind_the_end: list[CheckpointBarrier] = []
        self._final_checkpoint: int | None = None
        self._last_checkpoint = -1
        self._aborted: set[int] = set()
        self._alignment: tuple[int, int] | None = None

    # Any thread.

    def mail(self, action: Callable[[], None]) -> None:
        """Puts an action into the mailbox; the task thread must be woken by the caller."""
        self._mails.append(action)

    # The task thread, from here on.

    def open(self) -> None:
        """Opens the operators and goes to RUNNING, or straight to FINISHED for one that finished before."""
        if self._finished_on_restore:
            self.chain.end.emit_watermark(MAX_WATERMARK)
            self.chain.end.send_control(EndOfData(True))
            self.chain.end.send_control(EndOfPartition())
            self._change(TaskState.FINISHED)
            return
        self.chain.open()
        self._change(TaskState.RUNNING)

    def step(self) -> bool:
        """Does one piece of work; False when there is none. Raises what an operator raises: the subtask has failed."""
        if self._mails:
            self._mails.popleft()()
            return True
        end = self.chain.end
        if end.next_flush_ms is not None:
            end.flush_due(self._host.monotonic_ms())
        if not end.has_room:
            end.check()
            self.backpressured = True
            return False
        self.backpressured = False
        if self._next_timer is not None and self._next_timer <= self._host.now_ms():
            self._fire_timers()
            return True
        if self._end_is_due and not self.chain.has_work_left:
            self._end_data(drain=True)
            return True
        if self._source is not None:
            return not self._data_ended and self._poll_source(self._source)
        arrived = self.gate.poll()
        if arrived is None:
            return False
        self._process(*arrived)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step might do something now; asked once more before the thread goes to sleep."""
        if self._mails:
            return True
        if not self.chain.end.has_room:
            return False
        if self._source is not None:
            return not self._data_ended and self._source_idle_until is None
        return self.gate.has_arrivals

    @property
    def data_ended(self) -> bool:
        """Whether the operators have seen the end of their data."""
        return self._data_ended

    def wait_ms(self) -> float | None:
        """How long the thread may sleep as far as this subtask is concerned; None = until woken."""
        monotonic = self._host.monotonic_ms()
        waits: list[float] = []
        if self._next_timer is not None and not self.backpressured:
            waits.append(self._next_timer - self._host.now_ms())
        if self.chain.end.next_flush_ms is not None:
            waits.append(self.chain.end.next_flush_ms - monotonic)
        if self._source_idle_until is not None and not self._data_ended and not self.backpressured:
            waits.append(self._source_idle_until - monotonic)
        return max(0.0, min(waits)) if waits else None

    def set_timer(self, operator: int, at_ms: int) -> None:
        """``OperatorContext.set_timer`` of the operator at that position; none fires after the end of data."""
        if self._data_ended:
            return
        known = self._timers[operator]
        if known is None or at_ms < known:
            self._timers[operator] = at_ms
            if self._next_timer is None or at_ms < self._next_timer:
                self._next_timer = at_ms

    def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
        """The coordinator's trigger: for sources, and for subtasks all of whose predecessors have finished."""
        if self.state is not TaskState.RUNNING:
            self._host.decline(self, barrier.checkpoint_id, "CHECKPOINT_DECLINED_TASK_NOT_READY", str(self.state))
            return
        if barrier.options.properties.is_synchronous and not self._data_ended and not self._open_data:
            self._end_data(barrier.options.properties.drain)
            if not self._data_ended:
                self._behind_the_end.append(barrier)
                return
        if self._open_partitions:
            self._align(TriggeredByCoordinator(barrier.checkpoint_id, barrier.timestamp_ms, barrier.options))
            return
        self._snapshot(barrier, alignment_ms=0, processed_bytes=0)

    def notify_complete(self, checkpoint_id: int) -> None:
        """Commits what the checkpoint covers; ends the subtask when it waited for this one."""
        if self.state is not TaskState.RUNNING:
            return
        self._aborted = {known for known in self._aborted if known > checkpoint_id}
        self.chain.notify_complete(checkpoint_id)
        if self._final_checkpoint is not None and checkpoint_id >= self._final_checkpoint:
            self._finish()

    def notify_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """Heals a lost completion first, then forgets the aborted checkpoint."""
        if self.state is not TaskState.RUNNING:
            return
        if latest_completed is not None:
            self.notify_complete(latest_completed)
        if self.state is TaskState.RUNNING:
            if checkpoint_id > self._last_checkpoint:
                self._aborted.add(checkpoint_id)
            self.chain.notify_aborted(checkpoint_id)

    def cancel(self) -> None:
        if self.state in (TaskState.INITIALIZING, TaskState.RUNNING):
            self._close(TaskState.CANCELED)

    def fail(self, error: BaseException) -> None:
        if self.state in (TaskState.INITIALIZING, TaskState.RUNNING):
            self._close(TaskState.FAILED, error)

    def _poll_source(self, source: SourceOperator) -> bool:
        monotonic = self._host.monotonic_ms()
        if self._source_idle_until is not None and monotonic < self._source_idle_until:
            return False
        self._source_idle_until = None
        match source.poll():
            case SourceStatus.NOTHING_AVAILABLE:
                self._source_idle_until = monotonic + source.idle_ms()
                return False
            case SourceStatus.END_OF_INPUT:
                self._end_data(drain=True)
        return True

    def _process(self, channel: InputChannel, element: object) -> None:
        match element:
            case pa.RecordBatch():
                self._process_batch(channel, element, self._sizers[channel.input_index].of(element))
            case pa.Buffer():
                assert channel.schema is not None
                self._process_batch(channel, pa.ipc.read_record_batch(element, channel.schema), element.size)
            case CheckpointBarrier(checkpoint_id, timestamp_ms, options):
                self._note_alignment(checkpoint_id)
                self._align(BarrierReceived(_key(channel), checkpoint_id, timestamp_ms, options))
            case Watermark(timestamp_ms):
                combined = self._valve.advance(channel.index, timestamp_ms)
                if combined is not None:
                    self.chain.head.process_watermark(combined)
            case CancelCheckpoint(checkpoint_id):
                self._align(CancelBarrierReceived(_key(channel), checkpoint_id))
            case EndOfData(drain):
                self._drain = self._drain and drain
                self._open_data -= 1
                if self._open_data == 0:
                    self._end_data(self._drain)
            case EndOfPartition():
                self._open_partitions -= 1
                self._align(EndOfPartitionReceived(_key(channel)))
            case BaseException():
                raise element

    def _process_batch(self, channel: InputChannel, batch: pa.RecordBatch, size: int) -> None:
        self.metrics.rows_in += batch.num_rows
        self.metrics.bytes_in += size
        self.chain.head.process_batch(batch, channel.input_index)
        channel.buffer_consumed()

    def _note_alignment(self, checkpoint_id: int) -> None:
        """Remembers how much had been processed when the first barrier of a checkpoint came."""
        if self._alignment is None or self._alignment[0] < checkpoint_id:
            self._alignment = (checkpoint_id, self.metrics.bytes_in)

    def _align(self, event: BarrierEvent) -> None:
        for effect in self._handler.handle(event, int(self._host.monotonic_ms())):
            match effect:
                case BlockChannel((_, index)):
                    self.gate.block(index)
                case ResumeChannels(channels):
                    for _, index in channels:
                        if self.gate.channels[index].blocked:
                            self.gate.resume(index)
                case TriggerCheckpoint(checkpoint_id, timestamp, options, _, alignment_ms):
                    aligned = self._alignment is not None and self._alignment[0] == checkpoint_id
                    processed = self.metrics.bytes_in - self._alignment[1] if aligned and self._alignment else 0
                    self._snapshot(CheckpointBarrier(checkpoint_id, timestamp, options), alignment_ms, processed)
                case AbortCheckpoint(checkpoint_id, reason):
                    self._host.decline(self, checkpoint_id, reason.name, reason.message)
                    self.chain.end.send_control(CancelCheckpoint(checkpoint_id))

    def _snapshot(self, barrier: CheckpointBarrier, alignment_ms: int, processed_bytes: int) -> None:
        """The synchronous part: barrier out, then state, tail to head."""
        checkpoint_id = barrier.checkpoint_id
        if checkpoint_id <= self._last_checkpoint:
            return
        self._last_checkpoint = checkpoint_id
        if checkpoint_id in self._aborted:
            self._aborted.discard(checkpoint_id)
            self.chain.end.send_control(CancelCheckpoint(checkpoint_id))
            return
        if self._data_ended and self._final_checkpoint is None:
            self._final_checkpoint = checkpoint_id
        start = self._host.monotonic_ms()
        start_delay_ms = max(0, self._host.now_ms() - barrier.timestamp_ms - alignment_ms)
        self.chain.prepare_snapshot(checkpoint_id)
        self.chain.end.send_control(barrier)
        snapshots: list[OperatorSnapshot] = []
        for operator, context in reversed(list(zip(self.chain.operators, self.chain.contexts, strict=True))):
            operator.snapshot(checkpoint_id)
            keyed = None if context.keyed_state is None else context.keyed_state.snapshot(checkpoint_id)
            snapshots.append(OperatorSnapshot(context.uid, context.operator_state.snapshot(), keyed))
        measures = SnapshotMeasures(start_delay_ms, alignment_ms, processed_bytes, self._host.monotonic_ms() - start)
        self._host.write_snapshot(self, barrier, snapshots, measures)

    def _end_data(self, drain: bool) -> None:
        """No more rows. With ``drain`` event time reaches its end and operators finish (FLIP-147).

        What they still have to work off comes first, step by step; checkpoints go on. Then this is called again.
        """
        self._end_is_due = drain and self.chain.has_work_left
        if self._end_is_due:
            return
        if drain:
            if self._source is not None:
                self._source.process_watermark(MAX_WATERMARK)
            self.chain.finish()
        self.chain.end.send_control(EndOfData(drain))
        self._data_ended = True
        self._next_timer = None
        self._host.end_of_data(self)
        waiting, self._behind_the_end = self._behind_the_end, []
        for barrier in waiting:
            self.trigger_checkpoint(barrier)

    def _finish(self) -> None:
        """The final checkpoint is committed."""
        self.chain.end.send_control(EndOfPartition())
        self._close(TaskState.FINISHED)

    def _fire_timers(self) -> None:
        now = self._host.now_ms()
        due = [position for position, at in enumerate(self._timers) if at is not None and at <= now]
        for position in due:
            self._timers[position] = None
        for position in due:
            self.chain.operators[position].on_processing_time(now)
        waiting = [at for at in self._timers if at is not None]
        self._next_timer = min(waiting) if waiting else None

    def _close(self, state: TaskState, error: BaseException | None = None) -> None:
        for failure in self.chain.close():
            logger.error("closing %s failed", self.name, exc_info=failure)
            if state is TaskState.FINISHED:
                state, error = TaskState.FAILED, failure
        self._change(state, error)

    def _change(self, state: TaskState, error: BaseException | None = None) -> None:
        self.state = state
        self._host.state_changed(self, error)


def _key(channel: InputChannel) -> tuple[int, int]:
    return channel.input_index, channel.index
