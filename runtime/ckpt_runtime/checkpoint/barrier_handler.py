"""Collects the checkpoint barriers of one subtask's inputs. Pure: no channel, no clock, no thread.

Source: FLIP-76 and Flink's SingleCheckpointBarrierHandler, for several checkpoints at once. A checkpoint begins with
the first sign of its barrier and is ALIGNING: a channel whose barrier was consumed is blocked. It ends in an aligned
trigger when every channel has delivered its barrier; or, if its options allow that, it turns unaligned: the snapshot is
taken at once, the blocked channels go on, and the data that lies before the barriers that are still under way is
recorded (COLLECTING) until the last of them shows.

All of it rests on one rule of the senders: **barriers never overtake barriers**. In each channel they arrive in the
order of their ids, announced or polled, with gaps where a checkpoint was given up upstream. So a newer barrier in a
channel says that the older one will never come there, and checkpoints trigger in the order of their ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointOptions

Channel = tuple[int, int]
"""(input gate, channel in it)"""


class BarrierProtocolError(RuntimeError):
    """Something arrived that the sender may not send: an element on a blocked channel, anything after the end."""


# --- events


@dataclass(frozen=True, slots=True)
class BarrierAnnounced:
    """A barrier that may overtake stands in the channel's queue; it is polled later, in its place."""

    channel: Channel
    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """A barrier was polled in its place. The channel delivers nothing more until the effects are carried out: then it
    goes on, unless it was blocked and not resumed."""

    channel: Channel
    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class CancelBarrierReceived:
    """Upstream gave the checkpoint up. The channel is not blocked by this."""

    channel: Channel
    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfPartitionAnnounced:
    """The channel's end stands in its queue; no barrier will arrive there any more."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class EndOfPartitionReceived:
    """The channel ended."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class TriggeredByCoordinator:
    """A trigger message reached a subtask with inputs, because all its predecessors have finished.

    The checkpoint begins without a barrier. The ends of the channels, which have been sent, stand for the barriers:
    what still lies before them belongs to this checkpoint.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """``BarrierHandler.next_deadline_ms`` may have been reached: look at the time."""


@dataclass(frozen=True, slots=True)
class InFlightMeasured:
    """Bytes that ``BarrierHandler.pending_checkpoint`` would record if it turned unaligned now."""

    bytes: int


@dataclass(frozen=True, slots=True)
class AbortedByCoordinator:
    """The checkpoint is given up; everybody hears of it from the coordinator."""

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
    """Go on with these channels, each of which had been blocked."""

    channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the snapshot now, before any other input.

    ``alignment_duration`` are the milliseconds since the first sign of the barrier. Aligned: all barriers are consumed
    and there is no in-flight data of the inputs. Unaligned: in ``captured`` channels record what is queued before the
    barrier (or the end); in ``recording`` ones the rest in work and all that is polled until StopRecording. The other
    channels have nothing for this checkpoint.
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
    """The barrier, or the end, of a recorded channel is here: record what is queued before it, and nothing more."""

    checkpoint_id: int
    channel: Channel


@dataclass(frozen=True, slots=True)
class AllBarriersReceived:
    """Nothing more is recorded: the in-flight data of the inputs is known. Milliseconds since the first sign."""

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
    """A checkpoint whose barriers are under way.

    Of the channels that were open when it began: ``unseen`` have shown nothing (while collecting these are recorded),
    ``announced`` have the barrier or their end in the queue, the others have delivered it. ``overdue``: its time of
    staying aligned is over. ``measuring``: only the bound of in-flight data keeps it from turning unaligned.
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
    def may_turn(self) -> bool:
        """Nothing fits into a bound of 0: that is full alignment."""
        return self.options.unaligned and not self.collecting and self.options.max_inflight_data_bytes != 0

    @property
    def deadline_ms(self) -> int:
        return self.timestamp + self.options.aligned_timeout_ms

    def duration(self, now: Instant) -> int:
        return max(0, now.rel_ms - self.started_at)


class BarrierHandler:
    """One subtask. ``aligned_only`` are the channels in which no barrier may overtake data.

    ``now.rel_ms`` only measures alignment. ``now.abs_ms`` is compared with the trigger's time, which another machine
    took: a clock that is behind makes a checkpoint stay aligned for longer, never wrong.
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
        """Those that have turned unaligned and record channels."""
        return tuple(sorted(known for known, pending in self._pending.items() if pending.collecting))

    @property
    def blocked_channels(self) -> tuple[Channel, ...]:
        return tuple(self._blocked)

    @property
    def next_deadline_ms(self) -> int | None:
        """Wall clock: when DeadlinePassed is due."""
        if not self._pending:
            return None
        deadlines = [p.deadline_ms for p in self._pending.values() if p.may_turn and not p.overdue]
        return min(deadlines, default=None)

    @property
    def waits_for_room(self) -> bool:
        """Whether the oldest checkpoint turns unaligned as soon as its in-flight data fits the bound."""
        return any(pending.measuring for pending in self._pending.values())

    def handle(self, event: BarrierEvent, now: Instant) -> list[BarrierEffect]:
        """Takes one event; returns what to do, in order. Raises :class:`BarrierProtocolError`, nothing changed then."""
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
        # Announcements are taken when data arrives, so that they come from blocked channels too; polling does not.
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
            self._consume(pending, event.channel, now, block=not pending.collecting)
        else:
            self._announce(pending, event.channel, now)

    def _on_end(self, event: EndOfPartitionAnnounced | EndOfPartitionReceived, now: Instant) -> None:
        """An ended channel counts as aligned: everything that it sent lies before the barrier (FLIP-147)."""
        channel = event.channel
        if isinstance(event, EndOfPartitionAnnounced):
            # Kept for checkpoints that begin before the end is polled: this channel will show them no barrier.
            self._ending.add(channel)
            for pending in self._in_order():
                self._announce(pending, channel, now)
        else:
            self._ending.discard(channel)
            self._open.discard(channel)
            for pending in self._in_order():
                self._consume(pending, channel, now, block=False)

    # --- which checkpoints there are

    def _in_order(self) -> list[_Pending]:
        return [self._pending[known] for known in sorted(self._pending)]

    def _pass(self, channel: Channel, checkpoint_id: int, in_order: bool) -> None:
        """The channel has gone past the older checkpoints: one whose barrier it never showed has been given up there.

        A barrier that is only announced may be followed by the announcement of the next; but what is polled comes
        behind all that was announced before.
        """
        for pending in self._in_order():
            if pending.checkpoint_id >= checkpoint_id:
                break
            missed = in_order and not pending.collecting and channel in pending.announced
            if missed or channel in pending.unseen:
                self._give_up(pending.checkpoint_id, Reason.CHECKPOINT_DECLINED_SUBSUMED)

    def _begin_by_sign(self, event: BarrierAnnounced | BarrierReceived, now: Instant) -> _Pending | None:
        """The checkpoint of a barrier; None if that is obsolete: done, given up, or older than what has been seen."""
        if event.checkpoint_id > self._latest:
            aborted = event.checkpoint_id in self._aborted
            self._see(event.checkpoint_id)
            if not aborted and event.checkpoint_id not in self._pending:
                self._begin(event, now)
        return self._pending.get(event.checkpoint_id)

    def _begin(self, event: BarrierAnnounced | BarrierReceived | TriggeredByCoordinator, now: Instant) -> None:
        """What the coordinator triggers does not count as seen: older barriers may still come before the ends."""
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
            # Barriers of older ones are obsolete from now on, so that nobody asks for them again.
            self._aborted = {known for known in self._aborted if known > checkpoint_id}

    def _cancel(self, checkpoint_id: int) -> None:
        """Cancels a pending checkpoint, or one whose barriers have yet to come; those are then obsolete."""
        reason = Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER
        if checkpoint_id in self._pending:
            self._give_up(checkpoint_id, reason)
        elif checkpoint_id > self._latest and checkpoint_id not in self._aborted:
            self._given_up[checkpoint_id] = reason
        self._see(checkpoint_id)

    def _give_up(self, checkpoint_id: int, reason: Reason) -> None:
        """Downstream hears of it in the order of the ids (see :meth:`_advance`); the channels go on at once."""
        del self._pending[checkpoint_id]
        self._resume(checkpoint_id)
        self._given_up[checkpoint_id] = reason

    def _abort_silently(self, checkpoint_id: int) -> None:
        """Remembers one that has not begun, so that its barriers block nothing when they come."""
        if self._pending.pop(checkpoint_id, None) is not None:
            self._resume(checkpoint_id)
        self._given_up.pop(checkpoint_id, None)
        if checkpoint_id > self._latest:
            self._aborted.add(checkpoint_id)

    # --- what the channels have shown

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

    # --- what follows

    def _advance(self, now: Instant, measured: int | None) -> None:
        """Does all that has become possible, in the order of the ids, up to the first that has to go on aligning.

        A cancel barrier waits for the older ones too: downstream it would say that their barriers will not come.
        """
        for pending in self._pending.values():
            # 0 means at once, whatever the difference between two machines' clocks.
            if pending.options.aligned_timeout_ms == 0 or now.abs_ms >= pending.deadline_ms:
                pending.overdue = True
        # A list of its own: triggering takes entries out of `_pending` inside of the loop.
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
            # It was measured for the oldest one, and says nothing about the next.
            measured = None
            self._trigger(pending, now, unaligned=not aligned)

    def _turns(self, pending: _Pending, measured: int | None) -> bool:
        """Whether the oldest aligning checkpoint turns unaligned now."""
        if not pending.may_turn or not pending.overdue:
            return False
        # What is on its way there is counted work (a range, all committables of a checkpoint), not to be overtaken.
        if not self._aligned_only.isdisjoint(pending.unseen | pending.announced):
            return False
        limit = pending.options.max_inflight_data_bytes
        if limit is None:
            return True
        # What such a channel will deliver before its barrier cannot be measured yet.
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
        # Channels go on last of all: nothing of theirs may be processed before the snapshot is taken.
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
