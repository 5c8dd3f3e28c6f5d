"""Aligns the checkpoint barriers of one subtask's inputs. Pure: no channel, no clock, no thread.

Source: Flink's SingleCheckpointBarrierHandler with aligned checkpoints. An aligned barrier blocks its channel at the
sender, so every barrier that comes in ends in exactly one resume of its channel, whether its checkpoint is taken,
aborted or obsolete. Which checkpoint is current, what is obsolete, cancellation and end of partition are the same for
every policy; the aligned policy itself is :meth:`AlignedBarrierHandler._align` and what it calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions

Channel = tuple[int, int]
"""(input gate, channel in it)"""


class BarrierProtocolError(RuntimeError):
    """Something arrived that the sender may not send: a second barrier on a blocked channel, data after the end."""


# --- events


@dataclass(frozen=True, slots=True)
class BarrierReceived:
    """An aligned barrier arrived; its channel delivers nothing more until it is resumed."""

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
class EndOfPartitionReceived:
    """The channel ended."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class TriggeredByCoordinator:
    """A trigger message reached a subtask with inputs, because all its predecessors have finished.

    Behaves like a barrier on every channel that has not ended, without blocking it.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions


BarrierEvent = BarrierReceived | CancelBarrierReceived | EndOfPartitionReceived | TriggeredByCoordinator


# --- effects


@dataclass(frozen=True, slots=True)
class BlockChannel:
    """Take nothing from this channel until a ResumeChannels names it."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class ResumeChannels:
    """Go on with these channels, which a barrier had blocked."""

    channels: tuple[Channel, ...]


@dataclass(frozen=True, slots=True)
class TriggerCheckpoint:
    """All barriers are here: take the snapshot now, before any other input.

    ``alignment_started_at`` is the monotonic millisecond of the first barrier, ``alignment_duration`` until the last.
    """

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    alignment_started_at: int
    alignment_duration: int


@dataclass(frozen=True, slots=True)
class AbortCheckpoint:
    """Decline to the coordinator and broadcast a cancel barrier downstream."""

    checkpoint_id: int
    reason: Reason


BarrierEffect = BlockChannel | ResumeChannels | TriggerCheckpoint | AbortCheckpoint


@dataclass(slots=True)
class _Current:
    """The checkpoint being aligned. ``target`` is the number of channels that were open when it began."""

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    target: int
    started_at: int
    aligned: set[Channel] = field(default_factory=set)
    blocked: list[Channel] = field(default_factory=list)


class AlignedBarrierHandler:
    """One subtask. ``now`` is monotonic milliseconds and only measures the alignment."""

    def __init__(self, channels: Iterable[Channel]) -> None:
        self._open = set(channels)
        self._current: _Current | None = None
        self._latest = -1
        self._effects: list[BarrierEffect] = []

    @property
    def pending_checkpoint(self) -> int | None:
        """The checkpoint whose barriers are being collected."""
        return None if self._current is None else self._current.checkpoint_id

    @property
    def blocked_channels(self) -> tuple[Channel, ...]:
        return () if self._current is None else tuple(self._current.blocked)

    @property
    def latest_checkpoint(self) -> int:
        """The greatest id seen in a barrier or cancellation; -1 before the first."""
        return self._latest

    def handle(self, event: BarrierEvent, now: int) -> list[BarrierEffect]:
        """Takes one event; returns what to do, in order. Raises :class:`BarrierProtocolError`, nothing changed then."""
        match event:
            case BarrierReceived():
                self._check_open(event.channel)
                self._on_barrier(event, now)
            case CancelBarrierReceived():
                self._check_open(event.channel)
                self._on_cancel(event.checkpoint_id)
            case EndOfPartitionReceived():
                self._check_open(event.channel)
                self._on_end_of_partition(event.channel, now)
            case TriggeredByCoordinator():
                self._on_trigger(event, now)
        effects, self._effects = self._effects, []
        return effects

    def _check_open(self, channel: Channel) -> None:
        if channel not in self._open:
            raise BarrierProtocolError(f"channel {channel} has ended or is unknown")
        if self._current is not None and channel in self._current.blocked:
            raise BarrierProtocolError(f"channel {channel} is blocked by checkpoint {self._current.checkpoint_id}")

    # --- which checkpoint

    def _on_barrier(self, event: BarrierReceived, now: int) -> None:
        if not self._make_current(event, now):
            self._effects.append(ResumeChannels((event.channel,)))
            return
        self._effects.append(BlockChannel(event.channel))
        self._align(event.channel, blocked=True, now=now)

    def _on_trigger(self, event: TriggeredByCoordinator, now: int) -> None:
        if not self._make_current(event, now):
            return
        for channel in sorted(self._open):
            if self._current is not None and channel not in self._current.aligned:
                self._align(channel, blocked=False, now=now)
        if self._current is not None and self._current.target == 0:
            self._trigger(self._current, now)

    def _make_current(self, event: BarrierReceived | TriggeredByCoordinator, now: int) -> bool:
        """Whether the checkpoint is, or now becomes, the one being collected. An older one is given up for it."""
        if event.checkpoint_id > self._latest:
            if self._current is not None:
                self._abort(self._current, Reason.CHECKPOINT_DECLINED_SUBSUMED)
            self._latest = event.checkpoint_id
            self._current = _Current(
                event.checkpoint_id, event.timestamp, event.options, len(self._open), started_at=now
            )
            return True
        return self._current is not None and self._current.checkpoint_id == event.checkpoint_id

    def _on_cancel(self, checkpoint_id: int) -> None:
        """Cancels the pending checkpoint, or one whose barriers have yet to come; those are then obsolete."""
        current = self._current
        if current is not None and checkpoint_id == current.checkpoint_id:
            self._abort(current, Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER)
        elif checkpoint_id > self._latest:
            if current is not None:
                self._abort(current, Reason.CHECKPOINT_DECLINED_SUBSUMED)
            self._latest = checkpoint_id
            self._effects.append(AbortCheckpoint(checkpoint_id, Reason.CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER))

    def _on_end_of_partition(self, channel: Channel, now: int) -> None:
        """An ended channel counts as aligned: everything that it sent lies before the barrier (FLIP-147)."""
        self._open.discard(channel)
        if self._current is not None:
            self._align(channel, blocked=False, now=now)

    # --- aligned policy

    def _align(self, channel: Channel, blocked: bool, now: int) -> None:
        current = self._current
        assert current is not None
        current.aligned.add(channel)
        if blocked:
            current.blocked.append(channel)
        if len(current.aligned) == current.target:
            self._trigger(current, now)

    def _trigger(self, current: _Current, now: int) -> None:
        self._current = None
        self._effects.append(
            TriggerCheckpoint(
                current.checkpoint_id,
                current.timestamp,
                current.options,
                current.started_at,
                max(0, now - current.started_at),
            )
        )
        self._resume(current)

    def _abort(self, current: _Current, reason: Reason) -> None:
        self._current = None
        self._resume(current)
        self._effects.append(AbortCheckpoint(current.checkpoint_id, reason))

    def _resume(self, current: _Current) -> None:
        if current.blocked:
            self._effects.append(ResumeChannels(tuple(current.blocked)))
