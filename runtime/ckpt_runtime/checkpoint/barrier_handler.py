"""Collects the checkpoint barriers of one subtask's inputs. Pure: no channel, no clock, no thread.

Source: FLIP-76 and Flink's SingleCheckpointBarrierHandler, for several checkpoints at once. A checkpoint begins when
its barrier is first announced or received, and is then ALIGNING: a channel whose barrier was consumed is blocked. When
every channel has delivered its barrier, the checkpoint triggers aligned. If its options allow it, it can turn unaligned
instead: the snapshot is taken at once, the blocked channels resume, and the data ahead of the outstanding barriers is
recorded (COLLECTING) until the last of these barriers arrives.

A checkpoint that is not exactly once blocks no channel: its barriers are counted. Data that follows one of them before
the last one has arrived is in the snapshot, too, and is read again after a restore (Flink's CheckpointBarrierTracker).
Only channels that carry counted work block even then.

This relies on one guarantee of the senders: **barriers never overtake barriers**. In each channel, barriers arrive
(announced or polled) in the order of their ids, with gaps where a checkpoint was aborted upstream. A newer barrier in a
channel therefore means that the older one will never arrive there, and checkpoints trigger in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions

Channel = tuple[int, int]
"""(input gate, channel in it)"""


class BarrierProtocolError(RuntimeError):
    """The sender violated the protocol: an element arrived on a blocked channel or after a channel's end."""


# --- events


@dataclass(frozen=True, slots=True)
class BarrierAnnounced:
    """A barrier that may overtake data is in the channel's queue; it is polled later, at its position."""

    channel: Channel
    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """A barrier was polled. Its channel delivers nothing until the effects are carried out, longer if they block it."""

    channel: Channel
    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class CancelBarrierReceived:
    """The checkpoint was aborted upstream. This event does not block the channel."""

    channel: Channel
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfPartitionAnnounced:
    """The end of the channel is in its queue; no further barrier will arrive there."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class EndOfPartitionReceived:
    """The channel ended."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class TriggeredByCoordinator:
    """A trigger message reached a subtask with inputs, because all its predecessors have finished.

    The checkpoint begins without a barrier. The end-of-partition markers, which have been sent, act as the barriers:
    the data ahead of them belongs to this checkpoint.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """``BarrierHandler.next_deadline_ms`` may have been reached: the handler checks the time."""


@dataclass(frozen=True, slots=True)
class InFlightMeasured:
    """The bytes that ``BarrierHandler.pending_checkpoint`` would record if it turned unaligned now."""

    bytes: int


@dataclass(frozen=True, slots=True)
class AbortedByCoordinator:
    """The checkpoint is aborted; the coordinator notifies every subtask."""

    checkpoint_id: int


BarrierEvent = (
    BarrierAnnounced
    | BarrierReceived
    | CancelBarrierReceived
    | EndOfPartitionAnnounced
    | EndOfPartitionReceived
    | TriggeredByCoordinator
    | DeadlinePassed
    | InFlightMeasured
    | AbortedByCoordinator
)


# --- effects


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Take nothing from this channel until a ResumeChannels names it."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class ResumeChannels:
    """Resume reading these channels, each of which was blocked."""

    channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the snapshot now, before any other input.

    ``alignment_duration`` is the time in milliseconds since the barrier was first announced or received. Aligned: all
    barriers are consumed and the inputs have no in-flight data. Unaligned: in ``captured`` channels, record what is
    queued ahead of the barrier (or the end); in ``recording`` channels, record the rest being processed and everything
    polled until StopRecording. The other channels have nothing to record for this checkpoint.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    alignment_duration: int
    unaligned: bool = False
    recording: tuple[Channel, ...] = ()
    captured: tuple[Channel, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRecording:
    """The barrier (or end) of a recorded channel has arrived: record only the data that is queued before it."""

    checkpoint_id: int
    channel: Channel


@dataclass(frozen=True, slots=True)
class AllBarriersReceived:
    """Recording is over: the inputs' in-flight data is complete. The duration is as in TakeSnapshot, in ms."""

    checkpoint_id: int
    alignment_duration: int


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Decline to the coordinator. Broadcast a cancel barrier downstream unless the snapshot was taken already."""

    checkpoint_id: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class MeasureInFlight:
    """Answer with InFlightMeasured, and after each processed buffer while ``BarrierHandler.waits_for_room``."""


BarrierEffect = (
    BlockChannel
    | ResumeChannels
    | TakeSnapshot
    | StopRecording
    | AllBarriersReceived
    | AbortCheckpoint
    | MeasureInFlight
)


@dataclass(slots=True)
class _Pending:
    """A checkpoint whose barriers have not all arrived.

    Of the channels that were open when it began, the ``unseen`` ones have neither announced nor delivered a barrier
    (while collecting, these are recorded), the ``announced`` ones have the barrier or their end in the queue, and the
    others have delivered it. ``overdue``: the aligned timeout has passed. ``measuring``: only the limit on in-flight
    data keeps the checkpoint from turning unaligned.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    started_at: int
    unseen: set[Channel]
    announced: set[Channel]
    collecting: bool = False
    overdue: bool = False
    measuring: bool = False

    @property
    def may_switch_to_unaligned(self) -> bool:
        """Whether the checkpoint may turn unaligned. A limit of 0 bytes means full alignment, because no data fits into
        it."""
        return self.options.unaligned and not self.collecting and self.options.max_inflight_data_bytes != 0

    @property
    def deadline_ms(self) -> int:
        return self.timestamp + self.options.aligned_timeout_ms

    def duration(self, now: Instant) -> int:
        return max(0, now.rel_ms - self.started_at)


class BarrierHandler:
    """Handles the barriers of one subtask.

    ``aligned_only`` channels always align: neither barriers nor data overtake each other in them.

    ``now.rel_ms`` is only used to measure alignment. ``now.abs_ms`` is compared with the trigger timestamp, which was
    taken on another machine: a clock that is behind keeps a checkpoint aligned for longer, but never makes it wrong.
    """

    def __init__(self, channels: Iterable[Channel], aligned_only: Iterable[Channel] = ()) -> None:
        self._open = set(channels)
        self._aligned_only = frozenset(aligned_only)
        self._ending: set[Channel] = set()
        self._blocked: dict[Channel, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._given_up: dict[int, Reason] = {}
        self._aborted: set[int] = set()
        self._latest = -1
        self._effects: list[BarrierEffect] = []

    @property
    def pending_checkpoint(self) -> int | None:
        """The oldest checkpoint whose snapshot is not taken yet; it is the next to trigger."""
        aligning = [pending.checkpoint_id for pending in self._pending.values() if not pending.collecting]
        return min(aligning, default=None)

    @property
    def collecting_checkpoints(self) -> tuple[int, ...]:
        """The checkpoints that have turned unaligned and are recording channels."""
        return tuple(sorted(known for known, pending in self._pending.items() if pending.collecting))

    @property
    def blocked_channels(self) -> tuple[Channel, ...]:
        return tuple(self._blocked)

    @property
    def next_deadline_ms(self) -> int | None:
        """The wall-clock time at which DeadlinePassed is due."""
        if not self._pending:
            return None
        deadlines = [p.deadline_ms for p in self._pending.values() if p.may_switch_to_unaligned and not p.overdue]
        return min(deadlines, default=None)

    @property
    def waits_for_room(self) -> bool:
        """Whether the oldest checkpoint turns unaligned as soon as its in-flight data fits the limit."""
        return any(pending.measuring for pending in self._pending.values())

    def handle(self, event: BarrierEvent, now: Instant) -> list[BarrierEffect]:
        """Takes one event; returns the ordered effects. Changes nothing if it raises :class:`BarrierProtocolError`."""
        self._check(event)
        match event:
            case BarrierAnnounced() | BarrierReceived():
                self._on_barrier(event, now)
            case CancelBarrierReceived(channel, checkpoint_id):
                self._pass(channel, checkpoint_id, in_order=True)
                self._cancel(checkpoint_id)
            case EndOfPartitionAnnounced() | EndOfPartitionReceived():
                self._on_end(event, now)
            case TriggeredByCoordinator(checkpoint_id):
                if checkpoint_id > self._latest and checkpoint_id not in self._aborted:
                    self._begin(event, now)
            case AbortedByCoordinator(checkpoint_id):
                self._abort_silently(checkpoint_id)
            case DeadlinePassed() | InFlightMeasured():
                pass
        self._advance(now, event.bytes if isinstance(event, InFlightMeasured) else None)
        effects, self._effects = self._effects, []
        return effects

    def _check(self, event: BarrierEvent) -> None:
        if isinstance(event, TriggeredByCoordinator | DeadlinePassed | InFlightMeasured | AbortedByCoordinator):
            return
        if event.channel not in self._open:
            raise BarrierProtocolError(f"channel {event.channel} has ended or is unknown")
        announcement = isinstance(event, BarrierAnnounced | EndOfPartitionAnnounced)
        # Announcements are read when data arrives, so blocked channels send them too; a blocked channel is not polled.
        if event.channel in self._blocked and not announcement:
            raise BarrierProtocolError(
                f"channel {event.channel} is blocked by checkpoint {self._blocked[event.channel]}"
            )

    def _on_barrier(self, event: BarrierAnnounced | BarrierReceived, now: Instant) -> None:
        received = isinstance(event, BarrierReceived)
        self._pass(event.channel, event.checkpoint_id, in_order=received)
        pending = self._begin_by_sign(event, now)
        if pending is None:
            return
        if received:
            aligns = pending.options.exactly_once or event.channel in self._aligned_only
            self._consume(pending, event.channel, now, block=aligns and not pending.collecting)
        else:
            self._announce(pending, event.channel, now)

    def _on_end(self, event: EndOfPartitionAnnounced | EndOfPartitionReceived, now: Instant) -> None:
        """An ended channel counts as aligned: everything it sent precedes the barrier (FLIP-147)."""
        channel = event.channel
        if isinstance(event, EndOfPartitionAnnounced):
            # Kept for checkpoints that begin before the end is polled: this channel will send no barrier for them.
            self._ending.add(channel)
            for pending in self._in_order():
                self._announce(pending, channel, now)
        else:
            self._ending.discard(channel)
            self._open.discard(channel)
            for pending in self._in_order():
                self._consume(pending, channel, now, block=False)

    # --- beginning and end of checkpoints

    def _in_order(self) -> list[_Pending]:
        return [self._pending[known] for known in sorted(self._pending)]

    def _pass(self, channel: Channel, checkpoint_id: int, in_order: bool) -> None:
        """The channel has passed the older checkpoints: those whose barrier it never sent were aborted upstream.

        A barrier that is only announced may be followed by the announcement of the next one, but a polled element comes
        after everything that was announced before it.
        """
        for pending in self._in_order():
            if pending.checkpoint_id >= checkpoint_id:
                break
            missed = in_order and not pending.collecting and channel in pending.announced
            if missed or channel in pending.unseen:
                self._give_up(pending.checkpoint_id, Reason.CHECKPOINT_DECLINED_SUBSUMED)

    def _begin_by_sign(self, event: BarrierAnnounced | BarrierReceived, now: Instant) -> _Pending | None:
        """The checkpoint of a barrier; None if the checkpoint is done, aborted, or older than the latest seen one."""
        if event.checkpoint_id > self._latest:
            aborted = event.checkpoint_id in self._aborted
            self._see(event.checkpoint_id)
            if not aborted and event.checkpoint_id not in self._pending:
                self._begin(event, now)
        return self._pending.get(event.checkpoint_id)

    def _begin(self, event: BarrierAnnounced | BarrierReceived | TriggeredByCoordinator, now: Instant) -> None:
        """A coordinator trigger does not count as seen: older barriers may still arrive before the channels end."""
        if event.checkpoint_id not in self._pending:
            self._pending[event.checkpoint_id] = _Pending(
                event.checkpoint_id,
                event.timestamp,
                event.options,
                started_at=now.rel_ms,
                unseen=self._open - self._ending,
                announced=self._open & self._ending,
            )

    def _see(self, checkpoint_id: int) -> None:
        if checkpoint_id > self._latest:
            self._latest = checkpoint_id
            # Barriers of older checkpoints are obsolete from now on, so their ids need not be kept.
            self._aborted = {known for known in self._aborted if known > checkpoint_id}

    def _cancel(self, checkpoint_id: int) -> None:
        """Cancels a pending checkpoint, or one whose barriers have not arrived yet; these barriers are then ignored."""
        reason = Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
        if checkpoint_id in self._pending:
            self._give_up(checkpoint_id, reason)
        elif checkpoint_id > self._latest and checkpoint_id not in self._aborted:
            self._given_up[checkpoint_id] = reason
        self._see(checkpoint_id)

    def _give_up(self, checkpoint_id: int, reason: Reason) -> None:
        """Downstream is notified in the order of the ids (see :meth:`_advance`); the channels resume at once."""
        del self._pending[checkpoint_id]
        self._resume(checkpoint_id)
        self._given_up[checkpoint_id] = reason

    def _abort_silently(self, checkpoint_id: int) -> None:
        """A checkpoint that has not begun is remembered, so that its barriers block nothing when they arrive."""
        if self._pending.pop(checkpoint_id, None) is not None:
            self._resume(checkpoint_id)
        self._given_up.pop(checkpoint_id, None)
        if checkpoint_id > self._latest:
            self._aborted.add(checkpoint_id)

    # --- what the channels have delivered

    def _announce(self, pending: _Pending, channel: Channel, now: Instant) -> None:
        if channel in pending.unseen:
            pending.unseen.discard(channel)
            pending.announced.add(channel)
            self._collected(pending, channel, now)

    def _consume(self, pending: _Pending, channel: Channel, now: Instant, block: bool) -> None:
        awaited = channel in pending.unseen or channel in pending.announced
        if awaited and block:
            self._blocked[channel] = pending.checkpoint_id
            self._effects.append(BlockChannel(channel))
        pending.announced.discard(channel)
        if channel in pending.unseen:
            pending.unseen.discard(channel)
            self._collected(pending, channel, now)

    def _collected(self, pending: _Pending, channel: Channel, now: Instant) -> None:
        if pending.collecting:
            self._effects.append(StopRecording(pending.checkpoint_id, channel))
            self._end_collecting(pending, now)

    # --- triggering

    def _advance(self, now: Instant, measured: int | None) -> None:
        """Triggers or aborts checkpoints in the order of the ids, up to the first that has to continue aligning.

        A cancel barrier also waits for the older checkpoints: downstream, it would mean that their barriers will not
        come.
        """
        for pending in self._pending.values():
            # 0 means at once, regardless of the difference between two machines' clocks.
            if pending.options.aligned_timeout_ms == 0 or now.abs_ms >= pending.deadline_ms:
                pending.overdue = True
        # Iterates over a copy, because triggering removes entries from `_pending` inside the loop.
        for checkpoint_id in sorted({*self._pending, *self._given_up}):
            if checkpoint_id in self._given_up:
                self._effects.append(AbortCheckpoint(checkpoint_id, self._given_up.pop(checkpoint_id)))
                continue
            pending = self._pending[checkpoint_id]
            if pending.collecting:
                continue
            aligned = not pending.unseen and not pending.announced
            if not aligned and not self._turns(pending, measured):
                break
            # The measurement was for the oldest checkpoint and does not apply to the next.
            measured = None
            self._trigger(pending, now, unaligned=not aligned)

    def _turns(self, pending: _Pending, measured: int | None) -> bool:
        """Whether this checkpoint, the oldest aligning one, turns unaligned now."""
        if not pending.may_switch_to_unaligned or not pending.overdue:
            return False
        # In-flight data there is counted work (a range, all committables of a checkpoint) and must not be overtaken.
        if not self._aligned_only.isdisjoint(pending.unseen | pending.announced):
            return False
        limit = pending.options.max_inflight_data_bytes
        if limit is None:
            return True
        # The data that an unseen channel will deliver before its barrier cannot be measured yet.
        if pending.unseen:
            return False
        if not pending.measuring:
            pending.measuring = True
            self._effects.append(MeasureInFlight())
            return False
        return measured is not None and measured <= limit

    def _trigger(self, pending: _Pending, now: Instant, unaligned: bool) -> None:
        checkpoint_id = pending.checkpoint_id
        pending.collecting, pending.measuring = True, False
        self._see(checkpoint_id)
        self._effects.append(
            TakeSnapshot(
                checkpoint_id,
                pending.timestamp,
                pending.options,
                pending.duration(now),
                unaligned,
                tuple(sorted(pending.unseen)),
                tuple(sorted(pending.announced)),
            )
        )
        # Channels are resumed last: none of their data may be processed before the snapshot is taken.
        self._end_collecting(pending, now)
        self._resume(checkpoint_id)

    def _end_collecting(self, pending: _Pending, now: Instant) -> None:
        if not pending.unseen:
            del self._pending[pending.checkpoint_id]
            self._effects.append(AllBarriersReceived(pending.checkpoint_id, pending.duration(now)))

    def _resume(self, checkpoint_id: int) -> None:
        channels = tuple(channel for channel, blocker in self._blocked.items() if blocker == checkpoint_id)
        if channels:
            for channel in channels:
                del self._blocked[channel]
            self._effects.append(ResumeChannels(channels))
