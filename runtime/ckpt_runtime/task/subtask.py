"""One subtask: a mailbox, its inputs, the operator chain and its outputs, advanced step by step by a task thread.

A step never waits: it does one piece of work (a mail, a due timer, one input element or one poll of the source) and
returns whether it did. The pure barrier handler contains the checkpointing protocol; this shell executes its decisions.

:class:`InputTime` combines the watermarks of its inputs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint.barrier_handler import (
    CancelBarrierReceived,
    EndOfPartitionReceived,
    TriggeredByCoordinator,
)
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.measures import Interval
from ckpt_runtime.failure_report import log_failure
from ckpt_runtime.network.elements import (
    CancelCheckpoint,
    CheckpointBarrier,
    EndOfData,
    EndOfPartition,
    EndOfRange,
    Watermark,
)
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.network.output_queue import EncodedRows
from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK, SourceOperator, SourceStatus
from ckpt_runtime.operators.slice_size import SliceSize
from ckpt_runtime.scheduler.watermark_alignment import Progress
from ckpt_runtime.task.chain import OperatorChain
from ckpt_runtime.task.in_flight import CapturedChannel
from ckpt_runtime.task.input_debloating import InputDebloating
from ckpt_runtime.task.metrics import Activity, SubtaskMetrics
from ckpt_runtime.task.output import BatchSizer, CurrentBuffer
from ckpt_runtime.task.restored_input import RestoredInput, RestoredRows, RestoredWatermark
from ckpt_runtime.task.subtask_checkpoints import SubtaskCheckpoints, SubtaskSnapshot
from ckpt_runtime.task.watermark_valve import InputTime

logger = logging.getLogger(__name__)

_OPERATOR_ASKED_EVERY_MS = 20.0
"""The interval at which an operator that takes no input or still commits is polled."""


class SubtaskHost(Protocol):
    """The services that a subtask needs from its worker. Calls are made by the subtask's thread and return at once."""

    def now_ms(self) -> int:
        """Wall clock, ms since epoch."""

    def monotonic_ms(self) -> float: ...

    def state_changed(self, subtask: Subtask, error: BaseException | None = None) -> None: ...

    def end_of_data(self, subtask: Subtask, waits: bool) -> None:
        """The subtask has no more data. It ends after its inputs and, if it ``waits``, after its final checkpoint."""

    def write_snapshot(self, subtask: Subtask, snapshot: SubtaskSnapshot) -> None:
        """Runs the asynchronous part, which ends with an acknowledgement or a decline.

        It then mails :meth:`Subtask.snapshot_written`.
        """

    def decline(self, subtask: Subtask, checkpoint_id: int, reason: str, message: str) -> None: ...

    def source_progress(self, subtask: Subtask, progress: Progress) -> None:
        """Sends the event time of an aligned source to the driver."""


class _Timer(NamedTuple):
    """A request of an operator for a call at ``at_ms`` of the wall clock.

    The call comes no later than when the time that was left at the request has passed, at ``due_ms`` of the monotonic
    clock. Otherwise all sources would stop for an hour when the wall clock is set back by one hour.
    """

    at_ms: int
    due_ms: float

    def left_ms(self, host: SubtaskHost) -> float:
        return min(self.at_ms - host.now_ms(), self.due_ms - host.monotonic_ms())

    def or_earlier(self, other: _Timer | None) -> _Timer:
        if other is None:
            return self
        return _Timer(min(self.at_ms, other.at_ms), min(self.due_ms, other.due_ms))


class Subtask:
    """One subtask of a deployed vertex.

    ``finished_on_restore``: its operators had finished before the restored checkpoint; it only ends its outputs.
    ``restored`` is the in-flight data of that checkpoint, which is processed before data from the channels.
    A subtask in step reports to the driver which batch all inputs have ended. ``debloating``, once set, adapts the size
    of the channels' buffers. With ``fills_buffers``, rows wait for further rows until its thread has no other work.
    """

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
        restored: RestoredInput | None = None,
    ) -> None:
        self.vertex_id = vertex_id
        self.index = index
        self.name = name
        self.state = TaskState.INITIALIZING
        self.last_intervals: tuple[Interval, ...] = ()
        self.metrics = SubtaskMetrics()
        self.gate = gate
        self.chain = chain
        self.backpressured = False
        self.debloating: InputDebloating | None = None
        self.fills_buffers = False
        self.checkpoints = SubtaskCheckpoints(self)
        self._host = host
        self._finished_on_restore = finished_on_restore
        self._mails: deque[Callable[[], None]] = deque()
        self._source = chain.head if isinstance(chain.head, SourceOperator) else None
        self._source_idle_until: float | None = None
        self._poll_size = SliceSize() if self._source is not None and len(chain.operators) > 1 else None
        self._timers: list[_Timer | None] = [None] * len(chain.operators)
        self._next_timer: _Timer | None = None
        self.event_time = InputTime([channel.input_index for channel in gate.channels])
        self._sizers = [BatchSizer() for _ in range(1 + max((c.input_index for c in gate.channels), default=-1))]
        self._work = CurrentBuffer(host.monotonic_ms)
        self._restored = restored
        self._open_data = len(gate.channels)
        self._open_partitions = len(gate.channels)
        self._drain = True
        self._data_ended = False
        self._end_is_due = False
        self._stops = False
        self._may_end = False
        self._flushes = False
        self._finishing = False
        self._waits_for_operator = False
        self._behind_the_end: list[CheckpointBarrier] = []
        self._held_back: list[CheckpointBarrier] = []

    # Any thread.

    def mail(self, action: Callable[[], None]) -> None:
        """Puts an action into the mailbox; the caller must wake the task thread."""
        self._mails.append(action)

    @property
    def work_waits(self) -> bool:
        """Whether rows wait for this subtask or inside it, or one of its operators is running.

        When this stays true for long while no row moves, the subtask is stuck.
        """
        if self.state is not TaskState.RUNNING or self._data_ended:
            return False
        return (
            self.backpressured
            or self.metrics.timer.activity is Activity.BUSY
            or not self._work.is_empty
            or self._restored is not None
            or any(channel.queue for channel in self.gate.channels)
        )

    @property
    def input_watermark(self) -> int | None:
        """The event time that all inputs have reached; None before that, and for a source."""
        return self.event_time.current

    # The task thread, from here on.

    def open(self) -> None:
        """Opens the operators and changes to RUNNING, or directly to FINISHED if the subtask finished before."""
        if self._finished_on_restore:
            # Receivers expect all three elements, as from a subtask that runs.
            self.chain.end.emit_watermark(MAX_WATERMARK)
            self.chain.end.send_control(EndOfData(True))
            self.chain.end.send_control(EndOfPartition())
            self._change(TaskState.FINISHED)
            return
        self.chain.open()
        self._change(TaskState.RUNNING)

    def step(self) -> bool:
        """Does one piece of work; False when there is none. Raises the errors of operators: the subtask has failed."""
        # Mails are processed first: triggers and cancellations must not wait for rows.
        if self._mails:
            self._mails.popleft()()
            return True
        if self.checkpoints.work():
            return True
        end = self.chain.end
        # Done even if a channel has no room: due rows must not wait for another channel.
        end.flush_due(self._host.monotonic_ms(), early=not self.fills_buffers)
        if self._finishing:
            return self._finish_when_sent()
        if self._held_back and not self.chain.head.holds_checkpoints_back:
            self.trigger_checkpoint(self._held_back.pop(0))
            return True
        self._waits_for_operator = self.chain.is_full
        if self._waits_for_operator or not end.has_room:
            # A lost channel never has room again; its error is raised here.
            end.check()
            self.backpressured = True
            return False
        self.backpressured = False
        if self.debloating is not None:
            now = self._host.monotonic_ms()
            if now >= self.debloating.next_ms:
                rest = self._work.rest
                rest_bytes = 0 if rest is None else self._sizers[self._work.input_index].of(rest)
                waits = rest is not None or self.gate.has_arrivals
                self.debloating.measure(now, self.metrics, rest_bytes=rest_bytes, input_waits=waits)
        return self._work_on_rows()

    def _work_on_rows(self) -> bool:
        """Does one piece of work that may emit rows: timers, the end of data, the source or the inputs."""
        if self._next_timer is not None and self._next_timer.left_ms(self._host) <= 0:
            self._fire_timers()
        elif self._end_is_due and not self.chain.has_work_left:
            self._end_data(drain=True)
        elif self._source is not None:
            return not self._data_ended and self._poll_source(self._source)
        elif not self._work.is_empty:
            self._process_slice()
        elif self._restored is not None:
            self._read_back(self._restored)
        else:
            arrived = self.gate.poll()
            if arrived is None:
                return False
            self._process(*arrived)
        return True

    def flush(self) -> bool:
        """Sends rows that wait for more of them; False when there are none. Raises like :meth:`step`."""
        return self.chain.end.flush_due(self._host.monotonic_ms())

    @property
    def has_work(self) -> bool:
        """Whether a step might do something now; checked again before the thread sleeps."""
        if self._mails or self.gate.has_announcements or self.checkpoints.has_settled_outputs:
            return True
        if self._finishing:
            end = self.chain.end
            waits = self._waits_for_writes or self._waits_for_operator
            return (end.is_empty and not waits) or end.error is not None
        if self._waits_for_operator:
            return self.chain.end.error is not None
        if not self.chain.end.has_room:
            return self.chain.end.error is not None
        if self._source is not None:
            return not self._data_ended and self._source_idle_until is None
        return not self._work.is_empty or self._restored is not None or self.gate.has_arrivals

    @property
    def data_ended(self) -> bool:
        """Whether the operators have seen the end of their data."""
        return self._data_ended

    def wait_ms(self) -> float | None:
        """How long the thread of this subtask may sleep, in ms; None means until it is woken."""
        monotonic = self._host.monotonic_ms()
        waits: list[float] = []
        if self._next_timer is not None and not self.backpressured:
            waits.append(self._next_timer.left_ms(self._host))
        if self.chain.end.next_flush_ms is not None:
            waits.append(self.chain.end.next_flush_ms - monotonic)
        if self.checkpoints.deadline_ms is not None:
            waits.append(self.checkpoints.deadline_ms - self._host.now_ms())
        if self._source_idle_until is not None and not self._data_ended and not self.backpressured:
            waits.append(self._source_idle_until - monotonic)
        if self._waits_for_operator:
            waits.append(_OPERATOR_ASKED_EVERY_MS)
        return max(0.0, min(waits)) if waits else None

    def set_timer(self, operator: int, at_ms: int) -> None:
        """``OperatorContext.set_timer`` of the operator at that position; no timer fires after the end of data."""
        if self._data_ended:
            return
        timer = _Timer(at_ms, self._host.monotonic_ms() + at_ms - self._host.now_ms())
        self._timers[operator] = timer.or_earlier(self._timers[operator])
        self._next_timer = timer.or_earlier(self._next_timer)

    def trigger_checkpoint(self, barrier: CheckpointBarrier) -> None:
        """The coordinator's trigger, for sources and for subtasks whose predecessors have all finished.

        It is delayed while the head operator is in the middle of work from which it could not be restored.
        """
        if self.state is not TaskState.RUNNING:
            self._host.decline(self, barrier.checkpoint_id, "CHECKPOINT_DECLINED_TASK_NOT_READY", str(self.state))
            return
        if self.chain.head.holds_checkpoints_back:
            self._held_back.append(barrier)
            return
        if barrier.options.properties.is_synchronous and not self._data_ended and not self._open_data:
            self._stops = True
            self._end_data(barrier.options.properties.drain)
            if not self._data_ended:
                self._behind_the_end.append(barrier)
                return
        # The predecessors have finished, but their end events may still be queued after rows.
        if self._open_partitions:
            trigger = TriggeredByCoordinator(barrier.checkpoint_id, barrier.timestamp_ms, barrier.options)
            self.checkpoints.handle(trigger)
            return
        self.checkpoints.trigger(barrier)

    def notify_complete(self, checkpoint_id: int) -> None:
        """Commits the output that the checkpoint covers; ends the subtask if it waited for this checkpoint."""
        if self.state is not TaskState.RUNNING:
            return
        self.checkpoints.completed(checkpoint_id)
        self.chain.notify_complete(checkpoint_id)
        final = self.checkpoints.final_checkpoint
        if final is not None and checkpoint_id >= final:
            self._may_end, self._flushes = True, False
        self._finish_behind_inputs()

    def align(self, minimum: int) -> None:
        """Takes the event time of the source's group, computed by the driver."""
        if self.state is TaskState.RUNNING:
            self.chain.head.align(minimum)

    def limit(self, rates: Mapping[str, float]) -> None:
        """Takes new rate limits of sources."""
        if self.state is TaskState.RUNNING:
            self.chain.head.limit(rates)

    def snapshot_written(self, checkpoint_id: int) -> None:
        """The host has reported a snapshot, or has failed to write it."""
        self.checkpoints.written(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int, latest_completed: int | None) -> None:
        """Makes up for a lost completion first, then forgets the aborted checkpoint."""
        if self.state is not TaskState.RUNNING:
            return
        if latest_completed is not None:
            self.notify_complete(latest_completed)
        if self.state is TaskState.RUNNING:
            # Otherwise the aborted checkpoint would be triggered as soon as the head operator allows checkpoints again.
            self._held_back = [barrier for barrier in self._held_back if barrier.checkpoint_id != checkpoint_id]
            self.checkpoints.aborted(checkpoint_id)
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
        match source.poll() if self._poll_size is None else self._poll_slice(source, self._poll_size):
            case SourceStatus.NOTHING_AVAILABLE:
                source.looks += 1
                self._source_idle_until = monotonic + source.idle_ms()
                return False
            case SourceStatus.END_OF_INPUT:
                self._end_data(drain=True)
        return True

    def _poll_slice(self, source: SourceOperator, size: SliceSize) -> SourceStatus:
        """Polls only as many rows as the operators after the source process quickly, like rows of a channel."""
        before, start = self.chain.head_rows, self._host.monotonic_ms()
        source.most_rows = size.rows
        status = source.poll()
        rows = self.chain.head_rows - before
        if rows:
            size.took(rows, self._host.monotonic_ms() - start)
        return status

    def _process(self, channel: InputChannel, element: object) -> None:
        # Recorded before processing: it is in-flight data of checkpoints whose barrier has not arrived on this channel.
        if self.checkpoints.records and isinstance(element, pa.RecordBatch | EncodedRows | Watermark):
            self.checkpoints.record(channel, element)
        match element:
            case pa.RecordBatch():
                size = self._sizers[channel.input_index].of(element)
                self._take_rows(element, size, channel.input_index, channel)
            case EncodedRows(schema, message):
                batch = pa.ipc.read_record_batch(message, schema)
                self._take_rows(batch, message.size, channel.input_index, channel)
            case CheckpointBarrier():
                self.checkpoints.barrier(channel, element)
            case Watermark():
                self._advance_event_time(channel.index, element)
            case EndOfRange(batch, upto):
                self.chain.end.time.batch, self.chain.end.time.upto = batch, upto
                self.chain.head.process_end_of_range()
            case CancelCheckpoint(checkpoint_id):
                self.checkpoints.handle(CancelBarrierReceived((channel.input_index, channel.index), checkpoint_id))
            case EndOfData(drain):
                self._drain = self._drain and drain
                self._open_data -= 1
                if self._open_data == 0:
                    self._end_data(self._drain)
            case EndOfPartition():
                self._open_partitions -= 1
                self.checkpoints.handle(EndOfPartitionReceived((channel.input_index, channel.index)))
                self._finish_behind_inputs()
            # The error of a lost channel arrives as an element, after the rows received before.
            case BaseException():
                raise element

    def _take_rows(self, batch: pa.RecordBatch, size: int, input_index: int, channel: InputChannel | None) -> None:
        """Takes rows; those without a ``channel`` are from the restored checkpoint."""
        self.metrics.rows_in += batch.num_rows
        self.metrics.bytes_in += size
        if self.debloating is not None:
            self.debloating.taken_bytes += self._sizers[input_index].of(batch)
        together = self.chain.head.together(batch)
        batch, ends = (batch, None) if together is None else together
        self._work.put(batch, input_index, channel, ends)
        self._process_slice()

    def _process_slice(self) -> None:
        """Processes a slice of the current buffer, or all of it for a range reader, whose rows mean hours of work."""
        channel = self._work.channel
        done = self._work.process(self.chain.head.process_batch, whole=channel is not None and not channel.overtakes)
        self.metrics.slices += 1
        # Credit is returned only for processed buffers, which bounds the rows in memory.
        if done and channel is not None:
            channel.buffer_consumed()
        self.checkpoints.rows_processed()

    def _read_back(self, restored: RestoredInput) -> None:
        """Processes one element of the restored checkpoint's in-flight data."""
        match restored.poll():
            case RestoredRows(edge, batch):
                self._take_rows(batch, batch.nbytes, edge, None)
            case RestoredWatermark(edge, peer, watermark):
                for channel in self.gate.channels:
                    if (channel.input_index, channel.peer) == (edge, peer):
                        self._advance_event_time(channel.index, watermark)
            case None:
                if restored.is_empty:
                    self._restored = None

    def _advance_event_time(self, channel: int, watermark: Watermark) -> None:
        for moved in self.event_time.advance(channel, watermark):
            time_ms, batch = moved.timestamp_ms, moved.batch
            if batch is not None:
                self.chain.head.process_coming_watermark(time_ms, batch)
                if self.event_time.in_step:
                    self._host.source_progress(self, Progress(batch))
            elif time_ms == IDLE_WATERMARK:
                self.chain.end.emit_watermark(time_ms)
            else:
                self.chain.head.process_watermark(time_ms)

    # The services that the checkpoints need from this subtask.

    def now(self) -> Instant:
        return Instant(int(self._host.monotonic_ms()), self._host.now_ms())

    def monotonic_ms(self) -> float:
        return self._host.monotonic_ms()

    def rest_of_buffer(self) -> tuple[InputChannel, pa.RecordBatch] | None:
        rest = self._work.rest
        return None if rest is None or self._work.channel is None else (self._work.channel, rest)

    def unread_restored(self) -> list[CapturedChannel]:
        if self._restored is None:
            return []
        return self._restored.unread(self._work.input_index, self._work.rest)

    def write(self, snapshot: SubtaskSnapshot) -> None:
        self._host.write_snapshot(self, snapshot)

    def decline(self, checkpoint_id: int, reason: str, message: str) -> None:
        self._host.decline(self, checkpoint_id, reason, message)

    def _end_data(self, drain: bool) -> None:
        """Ends the data. With ``drain`` event time reaches its end and operators finish (FLIP-147).

        Operators first process remaining work, step by step, while checkpoints continue; then this is called again.
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
        # In a stop the savepoint is the final checkpoint, for all operators.
        waits = not drain or self._stops or self.checkpoints.end_with_all or self.chain.requires_final_checkpoint
        self._host.end_of_data(self, waits)
        waiting, self._behind_the_end = self._behind_the_end, []
        for barrier in waiting:
            self.trigger_checkpoint(barrier)
        self._may_end = self._flushes = self._may_end or not waits
        self._finish_behind_inputs()

    def _finish_behind_inputs(self) -> None:
        """Finishes after all predecessors: a checkpoint in which only it had finished could not be restored."""
        if self._may_end and not self._open_partitions and self.state is TaskState.RUNNING:
            self._finishing = True
            self._finish_when_sent()

    def _finish_when_sent(self) -> bool:
        """Finishes once the output queues are empty, because checkpoints in progress may still need their content."""
        self.chain.end.check()
        if not self.chain.end.is_empty:
            self.backpressured = True
            return False
        self.checkpoints.settle_outputs()
        self._waits_for_operator = self.chain.has_commits_left
        if self._waits_for_writes or self._waits_for_operator:
            return False
        self._finishing = False
        self.chain.end.send_control(EndOfPartition())
        self._close(TaskState.FINISHED)
        return True

    @property
    def _waits_for_writes(self) -> bool:
        """Whether a checkpoint in progress needs this subtask's snapshot; none does once the end is committed."""
        return self._flushes and self.checkpoints.is_writing

    def _fire_timers(self) -> None:
        now = self._host.now_ms()
        due = [
            position
            for position, timer in enumerate(self._timers)
            if timer is not None and timer.left_ms(self._host) <= 0
        ]
        for position in due:
            # All are cleared before the first call, because operators set their next timer during it.
            self._timers[position] = None
        for position in due:
            self.chain.operators[position].on_processing_time(now)
        self._next_timer = None
        for timer in self._timers:
            self._next_timer = timer.or_earlier(self._next_timer) if timer is not None else self._next_timer

    def _close(self, state: TaskState, error: BaseException | None = None) -> None:
        self.checkpoints.close()
        if self._restored is not None:
            self._restored.close()
        self.last_intervals = self.checkpoints.last_intervals() if state is TaskState.FINISHED else ()
        for failure in self.chain.close():
            log_failure(logger, logging.ERROR, f"closing {self.name} failed", failure)
            # An operator that failed to close may not have written its last rows.
            if state is TaskState.FINISHED:
                state, error = TaskState.FAILED, failure
        self._change(state, error)

    def _change(self, state: TaskState, error: BaseException | None = None) -> None:
        self.state = state
        self._host.state_changed(self, error)
